package deploy

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/ports"
)

// secured is a cluster of three nodes that asks for certificates, and etcd's gRPC proxy in front of it. The proxy's clients show
// certificates of another authority, and trust that one alone.
type secured struct {
	t *testing.T
	// dir has the programs and the certificates. cluster is the URL of each node, listen the proxy's address.
	dir, listen string
	cluster     []string
	// certs are the commands of OPERATIONS.md for the proxy's certificates, front its flags that name them.
	certs, front []string
}

// TestProxyWithCertificates: the proxy works with certificates on both sides, as OPERATIONS.md says. A client that shows none, or
// the cluster's, is not served. Keys of its clients begin with its namespace in the cluster, its clients' watches and renewals
// are one, and once users are checked, who comes through it is who gives a name and a password.
func TestProxyWithCertificates(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles etcd's server, and runs processes")
	}
	free, err := ports.Unused(7)
	if err != nil {
		t.Fatal(err)
	}
	s := &secured{t: t, dir: t.TempDir(), listen: fmt.Sprintf("127.0.0.1:%d", free[6])}
	s.build("skein", "..", "-tags", "invariants", "./cmd/skein")
	s.build("skein-grpc-proxy", "grpcproxy", ".")
	s.readPage()
	s.makeCertificates()
	s.startNodes(free[:3], free[3:6])
	direct, err := s.client("root", s.cluster[0])
	if err != nil {
		t.Fatal(err)
	}
	s.until("the cluster", func(ctx context.Context) error {
		_, err := direct.Put(ctx, "b", "outside")
		return err
	})
	s.refusesAUser()
	s.begin("proxy", append([]string{"grpc-proxy"}, s.proxyFlags("proxy")...)...)

	through, err := s.client("app", "https://"+s.listen)
	if err != nil {
		t.Fatal(err)
	}
	s.until("the proxy", func(ctx context.Context) error {
		_, err := through.Put(ctx, "b", "2")
		return err
	})
	s.namespaced(direct, through)
	for _, name := range []string{"", "root"} { // no certificate, and one of the cluster's authority
		s.isRefused(name)
	}
	coalesces(t, func() (*clientv3.Client, error) { return s.client("app", "https://"+s.listen) }, s.page)
	s.checksUsers(direct)
}

// build makes a program of the tree.
func (s *secured) build(name, at string, args ...string) {
	s.t.Helper()
	c := exec.CommandContext(s.t.Context(), "go", append([]string{"build", "-o", filepath.Join(s.dir, name)}, args...)...)
	c.Dir = at
	if out, err := c.CombinedOutput(); err != nil {
		s.t.Fatalf("build %s: %v\n%s", name, err, out)
	}
}

// readPage reads what OPERATIONS.md has for a proxy with certificates.
func (s *secured) readPage() {
	s.t.Helper()
	page, err := os.ReadFile("../docs/OPERATIONS.md")
	if err != nil {
		s.t.Fatal(err)
	}
	_, text, found := strings.Cut(string(page), "\nWith certificates `--cacert`")
	_, text, begun := strings.Cut(text, "```\n")
	text, _, ended := strings.Cut(text, "```")
	text = strings.ReplaceAll(text, "\\\n", "")
	for line := range strings.Lines(text) {
		if args, is := strings.CutPrefix(line, "bin/skein cert "); is {
			s.certs = append(s.certs, strings.ReplaceAll(args, "proxy.example.com", "127.0.0.1"))
		} else if _, flags, is := strings.Cut(line, " --cacert "); is {
			s.front = strings.Fields("--cacert " + flags)
		}
	}
	if !found || !begun || !ended || len(s.certs) < 4 || len(s.front) != 12 {
		s.t.Fatalf("OPERATIONS.md makes the certificates by %q and gives the proxy %q", s.certs, s.front)
	}
}

// makeCertificates makes two authorities: certs has the cluster's, and outer that of the proxy and its clients. Each certificate is in
// a directory of its name, but for the proxy's own, which is in front.
func (s *secured) makeCertificates() {
	s.t.Helper()
	for _, line := range append([]string{
		"create-ca --certs-dir certs",
		"create-node n1 --host 127.0.0.1 --certs-dir certs --out n1",
		"create-node n2 --host 127.0.0.1 --certs-dir certs --out n2",
		"create-node n3 --host 127.0.0.1 --certs-dir certs --out n3",
		"create-client root --certs-dir certs --out root",
	}, s.certs...) {
		c := exec.CommandContext(s.t.Context(), filepath.Join(s.dir, "skein"), append([]string{"cert"}, strings.Fields(line)...)...)
		c.Dir = s.dir
		if out, err := c.CombinedOutput(); err != nil {
			s.t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
}

func (s *secured) startNodes(clients, peers []int) {
	s.t.Helper()
	url := func(port int) string { return fmt.Sprintf("https://127.0.0.1:%d", port) }
	for i := range 3 {
		name := fmt.Sprint("n", i+1)
		s.cluster = append(s.cluster, url(clients[i]))
		s.begin(name, "--name", name, "--data-dir", "data-"+name, "--certs-dir", name, "--initial-ranges", "4",
			"--listen-client-urls", url(clients[i]), "--advertise-client-urls", url(clients[i]),
			"--listen-peer-urls", url(peers[i]), "--initial-advertise-peer-urls", url(peers[i]),
			"--initial-cluster", fmt.Sprintf("n1=%s,n2=%s,n3=%s", url(peers[0]), url(peers[1]), url(peers[2])))
	}
}

// proxyFlags are those of a proxy that shows the cluster a client's certificate, in the place of the client proxy's.
func (s *secured) proxyFlags(client string) []string {
	flags := []string{"start", "--listen-addr", s.listen, "--endpoints", strings.TrimPrefix(s.cluster[0], "https://"), "--namespace", "tenant/", "--data-dir", "proxied"}
	for _, f := range s.front {
		flags = append(flags, strings.ReplaceAll(f, "proxy", client))
	}
	return flags
}

// begin starts a program, which the end of the test kills.
func (s *secured) begin(what string, args ...string) {
	s.t.Helper()
	var log bytes.Buffer
	c := exec.Command(filepath.Join(s.dir, "skein"), args...)
	c.Dir, c.Stdout, c.Stderr = s.dir, &log, &log
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it says that the process was killed
		if s.t.Failed() {
			s.t.Logf("%s:\n%s", what, log.Bytes()[max(0, log.Len()-4<<10):])
		}
	})
}

// tls are the settings of a client with the certificate of a directory. Without a name it has none, and trusts the authority of the
// proxy.
func (s *secured) tls(name string) (*tls.Config, error) {
	dir := name
	if name == "" {
		dir = "app"
	}
	authority, err := os.ReadFile(filepath.Join(s.dir, dir, "ca.crt"))
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("no authority in %s", dir)
	}
	if name == "" {
		return config, nil
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(s.dir, name, "client."+name+".crt"), filepath.Join(s.dir, name, "client."+name+".key"))
	config.Certificates = []tls.Certificate{pair}
	return config, err
}

// client has the certificate of a directory. The test closes it.
func (s *secured) client(name, at string) (*clientv3.Client, error) {
	config, err := s.tls(name)
	if err != nil {
		return nil, err
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{at}, TLS: config, Logger: zap.NewNop()})
	if err == nil {
		s.t.Cleanup(func() { c.Close() })
	}
	return c, err
}

// until repeats a call until it succeeds.
func (s *secured) until(what string, f func(context.Context) error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	var last error
	for ctx.Err() == nil {
		once, end := context.WithTimeout(ctx, 5*time.Second)
		last = f(once)
		end()
		if last == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	s.t.Fatalf("%s: %v", what, last)
}

// refusesAUser: etcd's proxy does not start with a certificate that names a user. Its clients would all be that user.
func (s *secured) refusesAUser() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	c := exec.CommandContext(ctx, filepath.Join(s.dir, "skein"), append([]string{"grpc-proxy"}, s.proxyFlags("root")...)...)
	c.Dir = s.dir
	if out, err := c.CombinedOutput(); err == nil || !strings.Contains(string(out), "cert has non empty Common Name (root)") {
		s.t.Errorf("with the certificate of a user: %v\n%s", err, out)
	}
}

// namespaced: what goes through the proxy lies below its namespace.
func (s *secured) namespaced(direct, through *clientv3.Client) {
	s.t.Helper()
	for _, c := range []struct {
		at        *clientv3.Client
		key, want string
	}{{direct, "tenant/b", "2"}, {direct, "b", "outside"}, {through, "b", "2"}} {
		r, err := c.at.Get(s.t.Context(), c.key)
		if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != c.want {
			s.t.Errorf("%s: %v, %v, want %s", c.key, r, err, c.want)
		}
	}
}

// isRefused: the proxy does not serve a client with such a certificate.
func (s *secured) isRefused(name string) {
	s.t.Helper()
	config, err := s.tls(name)
	if err != nil {
		s.t.Fatal(err)
	}
	config.RootCAs, config.InsecureSkipVerify = nil, true // whom the client trusts does not matter here
	conn, err := tls.Dial("tcp", s.listen, config)
	if err == nil { // the server's answer to the certificate comes later
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	if err == nil || !strings.HasPrefix(err.Error(), "remote error: tls: ") { // the alert that the proxy sends
		s.t.Errorf("a client with the certificate %q: %v", name, err)
	}
}

// page reads a page of the first node.
func (s *secured) page(path string) (string, error) {
	config, err := s.tls("root")
	if err != nil {
		return "", err
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
	return get(client, s.cluster[0]+path)
}

func get(client *http.Client, url string) (string, error) {
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// checksUsers: the proxy's certificate and those of its clients give no right, and a user's password does.
func (s *secured) checksUsers(direct *clientv3.Client) {
	t := s.t
	t.Helper()
	ctx := t.Context()
	_, err1 := direct.UserAdd(ctx, "root", "secret")
	_, err2 := direct.RoleAdd(ctx, "tenant")
	_, err3 := direct.RoleGrantPermission(ctx, "tenant", "tenant/", "tenant0", clientv3.PermissionType(clientv3.PermReadWrite))
	_, err4 := direct.UserAdd(ctx, "app", "word")
	_, err5 := direct.UserGrantRole(ctx, "app", "tenant")
	_, err6 := direct.UserGrantRole(ctx, "root", "root")
	_, err7 := direct.AuthEnable(ctx)
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7); err != nil {
		t.Fatal(err)
	}
	config, err := s.tls("app")
	if err != nil {
		t.Fatal(err)
	}
	// The certificate app is of an authority that the cluster does not know, so it is not the user app.
	for password, want := range map[string]bool{"word": true, "": false} {
		c := clientv3.Config{Endpoints: []string{"https://" + s.listen}, TLS: config, Logger: zap.NewNop()}
		if want {
			c.Username, c.Password = "app", password
		}
		client, err := clientv3.New(c)
		if err != nil {
			t.Fatal(err)
		}
		once, cancel := context.WithTimeout(ctx, patience)
		_, err = client.Put(once, "b", "3")
		cancel()
		client.Close()
		if (err == nil) != want {
			t.Errorf("a put with the password %q: %v", password, err)
		}
	}
}
