package helm

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
)

// deadline bounds each wait. It is far beyond what is waited for on a slow machine.
const deadline = 3 * time.Minute

// host is the address of the test in the network of the pods.
const host = "10.99.0.1"

// kubernetes stands for what starts pods. It gives each one a network, a root and the files of its volumes. It starts their
// programs with the rendered arguments and variables, as the rendered user.
type kubernetes struct {
	t   *testing.T
	dir string
	// secrets are the files of secrets, by name and key.
	secrets map[string]map[string][]byte
	// addresses are those of pods by name. A service has those of all pods.
	addresses map[string]string
	services  []string
	pods      []*pod
}

// pod is one that has been started.
type pod struct {
	k    *kubernetes
	name string
	root string
	spec *core.PodSpec
	// process is its container, nil while it does not run. ended has its end, and then nothing more.
	process *exec.Cmd
	ended   chan error
	log     string
}

// newKubernetes makes the network, or leaves the test out where that cannot be.
func newKubernetes(t *testing.T) *kubernetes {
	t.Helper()
	if os.Getuid() != 0 {
		leaveOut(t, "only root may make networks and change the root of a process")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		leaveOut(t, "%v (Debian: apt-get install iproute2)", err)
	}
	k := &kubernetes{t: t, dir: t.TempDir(), secrets: map[string]map[string][]byte{}, addresses: map[string]string{}}
	for dir := k.dir; dir != "/" && dir != os.TempDir(); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// ip keeps names of networks there: they are this process's alone.
	if err := os.MkdirAll("/run/netns", 0o755); err != nil {
		t.Fatal(err)
	}
	output(t, "mount", "-t", "tmpfs", "none", "/run/netns")
	t.Cleanup(func() { _ = exec.Command("umount", "/run/netns").Run() })
	output(t, "ip", "link", "add", "pods", "type", "bridge")
	t.Cleanup(func() { _ = exec.Command("ip", "link", "del", "pods").Run() })
	output(t, "ip", "address", "add", host+"/24", "dev", "pods")
	output(t, "ip", "link", "set", "pods", "up")
	return k
}

// network gives a pod an address, the first time.
func (k *kubernetes) network(name string) {
	k.t.Helper()
	if k.addresses[name] != "" {
		return
	}
	n := len(k.addresses)
	k.addresses[name] = fmt.Sprintf("10.99.0.%d", 10+n)
	outer := fmt.Sprintf("pod%d", n)
	output(k.t, "ip", "netns", "add", name)
	k.t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
	output(k.t, "ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
	output(k.t, "ip", "link", "set", outer, "master", "pods", "up")
	for _, args := range []string{"address add " + k.addresses[name] + "/24 dev eth0", "link set eth0 up", "link set lo up"} {
		output(k.t, "ip", append([]string{"-n", name}, strings.Fields(args)...)...)
	}
}

// names writes what pods get from the DNS of a cluster: each pod has its name below the headless service from when it is
// made, and services lead to those that run.
func (k *kubernetes) names(domain string) {
	k.t.Helper()
	text := "127.0.0.1 localhost\n"
	for _, p := range k.pods {
		text += k.addresses[p.name] + " " + p.name + "." + domain
		if p.process != nil {
			text += " " + strings.Join(k.services, " ")
		}
		text += "\n"
	}
	for _, p := range k.pods {
		if err := os.WriteFile(filepath.Join(p.root, "etc/hosts"), []byte(text), 0o644); err != nil {
			k.t.Fatal(err)
		}
	}
}

// pod makes a pod that does not run yet. share is the pod whose network it has, nil for one of its own.
func (k *kubernetes) pod(name string, spec *core.PodSpec, share *pod) *pod {
	k.t.Helper()
	p := &pod{k: k, name: name, spec: spec, root: filepath.Join(k.dir, name)}
	if share == nil {
		k.network(name)
	} else {
		p.name = share.name
	}
	for _, dir := range []string{"usr/local/bin", "etc", "tmp", "data", "backup"} {
		if err := os.MkdirAll(filepath.Join(p.root, dir), 0o755); err != nil {
			k.t.Fatal(err)
		}
	}
	for _, dir := range []string{"tmp", "data", "backup"} { // volumes belong to the group of the pod
		if err := os.Chown(filepath.Join(p.root, dir), int(*spec.SecurityContext.RunAsUser), int(*spec.SecurityContext.FSGroup)); err != nil {
			k.t.Fatal(err)
		}
	}
	// As in the image.
	bin := filepath.Join(p.root, "usr/local/bin")
	if err := errors.Join(os.Link(program("skein"), filepath.Join(bin, "skein")), os.Symlink("skein", filepath.Join(bin, "etcdctl"))); err != nil {
		k.t.Fatal(err)
	}
	p.mount()
	if share == nil {
		k.pods = append(k.pods, p)
	}
	return p
}

// mount writes the files of secrets.
func (p *pod) mount() {
	t := p.k.t
	t.Helper()
	for _, v := range p.spec.Volumes {
		i := slices.IndexFunc(p.spec.Containers[0].VolumeMounts, func(m core.VolumeMount) bool { return m.Name == v.Name })
		if i < 0 {
			t.Fatalf("%s: volume %s is not mounted", p.name, v.Name)
		}
		at := filepath.Join(p.root, p.spec.Containers[0].VolumeMounts[i].MountPath)
		write := func(path string, b []byte) {
			path = filepath.Join(at, path)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, b, 0o440); err != nil {
				t.Fatal(err)
			}
			if err := os.Chown(path, 0, int(*p.spec.SecurityContext.FSGroup)); err != nil {
				t.Fatal(err)
			}
		}
		if v.Secret != nil {
			for key, b := range p.k.secrets[v.Secret.SecretName] {
				write(key, b)
			}
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			files, ok := p.k.secrets[s.Secret.Name]
			if !ok && !*s.Secret.Optional {
				t.Fatalf("there is no secret %s", s.Secret.Name)
			}
			for _, item := range s.Secret.Items {
				if b, ok := files[item.Key]; ok {
					write(item.Path, b)
				}
			}
		}
	}
}

var reference = regexp.MustCompile(`\$\(([A-Za-z_][A-Za-z0-9_]*)\)`)

// expand replaces the references to variables that are known, as Kubernetes does.
func expand(text string, vars []string) string {
	return reference.ReplaceAllStringFunc(text, func(ref string) string {
		for _, v := range vars {
			if name, value, _ := strings.Cut(v, "="); "$("+name+")" == ref {
				return value
			}
		}
		return ref
	})
}

// variables are those of the image, and of a container.
func (p *pod) variables(c *core.Container) []string {
	vars := []string{"PATH=/usr/local/bin"}
	for _, e := range c.Env {
		value := expand(e.Value, vars)
		if e.ValueFrom != nil {
			if e.ValueFrom.FieldRef.FieldPath != "metadata.name" {
				p.k.t.Fatalf("variable %+v", e)
			}
			value = p.name
		}
		vars = append(vars, e.Name+"="+value)
	}
	return vars
}

// command runs a program of the image in the pod, with its user, its network, its files and the variables of a container.
func (p *pod) command(c *core.Container, name string, args ...string) *exec.Cmd {
	s := p.spec.SecurityContext
	all := []string{"netns", "exec", p.name, "chroot", fmt.Sprintf("--userspec=%d:%d", *s.RunAsUser, *s.RunAsGroup), "--groups=" + strconv.FormatInt(*s.FSGroup, 10), p.root, "/usr/local/bin/" + name}
	cmd := exec.Command("ip", append(all, args...)...)
	ip, err := exec.LookPath("ip")
	if err != nil {
		p.k.t.Fatal(err)
	}
	// ip and chroot are looked for in the path of the test, and the program runs by its own.
	cmd.Path = ip
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, p.variables(c)[1:]...)
	return cmd
}

// start starts the pod's container.
func (p *pod) start() {
	t := p.k.t
	t.Helper()
	c := &p.spec.Containers[0]
	vars := p.variables(c)
	var args []string
	for _, a := range c.Args {
		if a = expand(a, vars); strings.Contains(a, "$(") {
			t.Fatalf("%s: nothing is known of the variable in %s", p.name, a)
		}
		args = append(args, a)
	}
	log, err := os.CreateTemp(p.k.dir, "log")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p.log = log.Name()
	p.process = p.command(c, "skein", args...)
	p.process.Stdout, p.process.Stderr = log, log
	p.ended = make(chan error, 1)
	if err := p.process.Start(); err != nil {
		t.Fatal(err)
	}
	process, ended, path := p.process, p.ended, p.log
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended <- process.Wait()
	}()
	t.Cleanup(func() {
		_ = process.Process.Kill()
		<-done
		if b, _ := os.ReadFile(path); t.Failed() {
			t.Logf("%s:\n%s", p.name, b[max(0, len(b)-6<<10):])
		}
	})
}

// end waits for the end of the pod's process after do.
func (p *pod) end(do func()) {
	p.k.t.Helper()
	do()
	select {
	case err := <-p.ended:
		if err != nil {
			p.k.t.Errorf("%s ended with %v", p.name, err)
		}
	case <-time.After(deadline):
		p.k.t.Fatalf("%s does not end", p.name)
	}
}

// stop stops the pod as Kubernetes does.
func (p *pod) stop() {
	p.k.t.Helper()
	p.end(func() {
		if err := p.process.Process.Signal(syscall.SIGTERM); err != nil {
			p.k.t.Error(err)
		}
	})
}

// passes waits until a probe of the pod's container has succeeded.
func (p *pod) passes(probe *core.Probe) {
	t := p.k.t
	t.Helper()
	c := &p.spec.Containers[0]
	i := slices.IndexFunc(c.Ports, func(port core.ContainerPort) bool { return port.Name == probe.HTTPGet.Port.StrVal })
	if i < 0 {
		t.Fatalf("a probe asks for the port %v", &probe.HTTPGet.Port)
	}
	url := fmt.Sprintf("http://%s:%d%s", p.k.addresses[p.name], c.Ports[i].ContainerPort, probe.HTTPGet.Path)
	client := http.Client{Timeout: 10 * time.Second}
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		answer, err := client.Get(url)
		if err == nil {
			answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return
			}
			err = fmt.Errorf("status %s", answer.Status)
		}
		select {
		case end := <-p.ended:
			t.Fatalf("%s has ended: %v", p.name, end)
		default:
		}
		if time.Since(began) > deadline {
			t.Fatalf("%s: %v", url, err)
		}
	}
}

// ready waits until all probes have succeeded.
func (p *pod) ready() {
	p.k.t.Helper()
	c := &p.spec.Containers[0]
	for _, probe := range []*core.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
		p.passes(probe)
	}
}

// exec is kubectl exec: it returns what the program prints, once it succeeds.
func (p *pod) exec(name string, args ...string) string {
	p.k.t.Helper()
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		out, err := p.command(&p.spec.Containers[0], name, args...).CombinedOutput()
		if err == nil {
			return string(out)
		}
		if time.Since(began) > deadline {
			p.k.t.Fatalf("%s: %s %q: %v\n%s", p.name, name, args, err, out)
		}
	}
}
