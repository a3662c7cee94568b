package helm

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
)

// domain is that of the pods of the release skein in the namespace default.
const domain = "skein-headless.default.svc.cluster.local"

// run starts the pods of a rendered StatefulSet, all at once, and waits until they are ready.
func (k *kubernetes) run(all objects) {
	k.t.Helper()
	k.services = []string{"skein.default.svc.cluster.local"}
	set := all.nodes(k.t)
	for i := len(k.pods); i < int(*set.Spec.Replicas); i++ {
		k.pod(fmt.Sprintf("skein-%d", i), &set.Spec.Template.Spec, nil)
	}
	k.names(domain)
	for _, p := range k.pods {
		if p.process == nil {
			p.start()
		}
	}
	for _, p := range k.pods {
		p.ready()
	}
	k.names(domain)
}

// A cluster without certificates, as a try: three nodes found it, a fourth joins when the number is raised, and all of
// them keep what is put.
func TestRun(t *testing.T) {
	k := newKubernetes(t)
	k.run(render(t))
	k.pods[0].exec("etcdctl", "put", "a", "1")
	k.run(render(t, "--set", "replicas=4"))
	if got := k.pods[3].exec("etcdctl", "get", "a", "--print-value-only"); got != "1\n" {
		t.Errorf("the fourth node has %q", got)
	}
	serving(t, k.pods[0], 4)
	k.pods[1].stop()
	k.pods[1].start()
	k.pods[1].ready()
	if got := k.pods[1].exec("etcdctl", "get", "a", "--print-value-only"); got != "1\n" {
		t.Errorf("after a restart: %q", got)
	}
}

// serving waits until so many nodes serve.
func serving(t *testing.T, p *pod, want int) {
	t.Helper()
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		list := p.exec("skein", "node", "list")
		if strings.Count(list, " serving ") == want {
			return
		}
		if time.Since(began) > deadline {
			t.Fatalf("want %d nodes that serve:\n%s", want, list)
		}
	}
}

// Certificates of skein cert, made by the commands of docs/KUBERNETES.md. Nodes join and run with them, and clients need one. The
// CronJob makes backups. A node is decommissioned. A founder that has lost its volume comes back.
func TestRunWithSecrets(t *testing.T) {
	k := newKubernetes(t)
	k.documentedSecrets()
	values := []string{"--set", "tls.mode=secret,tls.clientSecret=skein-client,backup.enabled=true,backup.url=file:///backup,backup.existingClaim=backups"}
	all := render(t, values...)
	k.run(all)
	k.pods[0].exec("etcdctl", "put", "a", "1")
	k.refusesStrangers()
	all = render(t, append(values, "--set", "replicas=4")...)
	k.run(all)
	serving(t, k.pods[0], 4)
	k.backup(all)

	last := k.pods[3]
	last.end(func() { t.Log(k.pods[0].exec("skein", "node", "decommission", "skein-3")) })
	k.pods = k.pods[:3]
	k.founderLosesVolume(values)
}

// refusesStrangers asks without a certificate.
func (k *kubernetes) refusesStrangers() {
	k.t.Helper()
	c := k.pods[0].command(&core.Container{}, "etcdctl", "--endpoints", "https://"+"skein-0."+domain+":2379", "--insecure-skip-tls-verify", "--insecure-transport=false", "--command-timeout=5s", "get", "a")
	if out, err := c.CombinedOutput(); err == nil {
		k.t.Errorf("somebody without a certificate is answered:\n%s", out)
	}
}

// backup runs the containers of the CronJob one after the other.
func (k *kubernetes) backup(all objects) {
	t := k.t
	t.Helper()
	spec := get[*batch.CronJob](t, all, "CronJob/skein-backup").Spec.JobTemplate.Spec.Template.Spec
	p := k.pod("backup", &spec, k.pods[0])
	b, err := os.ReadFile(filepath.Join(k.pods[0].root, "etc/hosts"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.root, "etc/hosts"), b, 0o644); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		k.pods[0].exec("etcdctl", "put", "b", "2") // a chain is named after its second and its revision
		for _, c := range append(spec.InitContainers, spec.Containers...) {
			out, err := p.command(&c, "skein", c.Args...).CombinedOutput()
			if err != nil {
				t.Fatalf("%q: %v\n%s", c.Args, err, out)
			}
			t.Logf("%q:\n%s", c.Args, out)
		}
	}
	if list := output(t, program("skein"), "backup", "list", "file://"+filepath.Join(p.root, "backup")); strings.Count(list, " full ") != 2 {
		t.Errorf("backups:\n%s", list)
	}
}

// founderLosesVolume does what docs/KUBERNETES.md says: the member is removed, and with founders=0 the pod joins anew.
func (k *kubernetes) founderLosesVolume(values []string) {
	t := k.t
	t.Helper()
	lost := k.pods[2]
	lost.stop()
	if err := os.RemoveAll(filepath.Join(lost.root, "data/skein")); err != nil {
		t.Fatal(err)
	}
	id := ""
	for line := range strings.Lines(k.pods[0].exec("etcdctl", "member", "list")) {
		if fields := strings.Split(line, ", "); len(fields) > 2 && fields[2] == "skein-2" {
			id = fields[0]
		}
	}
	k.pods[0].exec("etcdctl", "member", "remove", id)
	lost.spec = &render(t, append(values, "--set", "founders=0")...).nodes(t).Spec.Template.Spec
	lost.start()
	lost.ready()
	serving(t, k.pods[0], 3)
	if got := lost.exec("etcdctl", "get", "a", "--print-value-only"); got != "1\n" {
		t.Errorf("the node that came back has %q", got)
	}
}

// documentedSecrets runs the commands of docs/KUBERNETES.md that make certificates and secrets.
func (k *kubernetes) documentedSecrets() {
	t := k.t
	t.Helper()
	i := 0
	var script string
	for _, block := range blocks(t) {
		if strings.Contains(block, "skein cert create-ca") {
			script, i = block, i+1
		}
	}
	if i != 1 {
		t.Fatalf("%d blocks make certificates", i)
	}
	dir := filepath.Join(k.dir, "work")
	bin, made := filepath.Join(dir, "bin"), filepath.Join(dir, "secrets")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	// It keeps the files of the one command that it knows.
	const kubectl = `#!/bin/sh
set -e
test "$1 $2 $3" = "create secret generic"
into=$SECRETS/$4
mkdir -p "$into"
shift 4
for flag; do
	case $flag in
	--from-file=*=*) flag=${flag#--from-file=}; cp "${flag#*=}" "$into/${flag%%=*}" ;;
	--from-file=*) cp "${flag#--from-file=}"/* "$into" ;;
	*) exit 1 ;;
	esac
done
`
	if err := os.WriteFile(filepath.Join(bin, "kubectl"), []byte(kubectl), 0o755); err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "sh", "-e", "-c", script)
	c.Dir = dir
	c.Env = []string{"PATH=" + bin + ":" + os.Getenv(inside) + ":" + os.Getenv("PATH"), "SECRETS=" + made}
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	paths, err := filepath.Glob(filepath.Join(made, "*", "*"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("the commands make no secret: %v", err)
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		k.keep(filepath.Base(filepath.Dir(path)), filepath.Base(path), b)
	}
}

func (k *kubernetes) keep(secret, key string, b []byte) {
	if k.secrets[secret] == nil {
		k.secrets[secret] = map[string][]byte{}
	}
	k.secrets[secret][key] = b
}

// Certificates as cert-manager makes them of the chart's requests: nodes found a cluster and join it with them.
func TestRunWithCertManager(t *testing.T) {
	k := newKubernetes(t)
	values := []string{"--set", "tls.mode=certManager,tls.issuerRef.name=ca"}
	all := render(t, values...)
	k.issue(all)
	k.run(all)
	k.pods[0].exec("etcdctl", "put", "a", "1")
	k.refusesStrangers()
	k.run(render(t, append(values, "--set", "replicas=4")...))
	serving(t, k.pods[0], 4)
	if got := k.pods[3].exec("etcdctl", "get", "a", "--print-value-only"); got != "1\n" {
		t.Errorf("the fourth node has %q", got)
	}
}

// issue makes the secrets of all Certificates.
func (k *kubernetes) issue(all objects) {
	t := k.t
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	authority, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	serial := int64(1)
	for name, o := range all {
		request, ok := o.(*certmanager.Certificate)
		if !ok {
			continue
		}
		serial++
		cert := &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: request.Spec.CommonName}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
			DNSNames: request.Spec.DNSNames,
		}
		for _, text := range request.Spec.URIs {
			u, err := url.Parse(text)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			cert.URIs = append(cert.URIs, u)
		}
		for _, text := range request.Spec.IPAddresses {
			cert.IPAddresses = append(cert.IPAddresses, net.ParseIP(text))
		}
		for _, usage := range request.Spec.Usages {
			switch usage {
			case certmanager.UsageDigitalSignature:
				cert.KeyUsage |= x509.KeyUsageDigitalSignature
			case certmanager.UsageServerAuth:
				cert.ExtKeyUsage = append(cert.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
			case certmanager.UsageClientAuth:
				cert.ExtKeyUsage = append(cert.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
			default:
				t.Fatalf("%s: usage %s", name, usage)
			}
		}
		own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		signed, err := x509.CreateCertificate(rand.Reader, cert, ca, &own.PublicKey, key)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		private, err := x509.MarshalECPrivateKey(own)
		if err != nil {
			t.Fatal(err)
		}
		k.keep(request.Spec.SecretName, "ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authority}))
		k.keep(request.Spec.SecretName, "tls.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: signed}))
		k.keep(request.Spec.SecretName, "tls.key", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}))
	}
}
