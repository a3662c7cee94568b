package deploy

import (
	"cmp"
	"compress/gzip"
	"debug/elf"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/skeindb/skein/internal/leftout"
)

var release = flag.Bool("release", false, "make what is published, and test it")

var workDir string

func TestMain(m *testing.M) {
	m.Run()
	_ = os.RemoveAll(workDir)
}

// made makes what is published, once for all tests, and returns its directory.
func made(t *testing.T) string {
	t.Helper()
	if !*release {
		t.Skip("it compiles everything once more: make packages")
	}
	dir, err := makeOnce()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

var makeOnce = sync.OnceValues(func() (dir string, err error) {
	if workDir, err = os.MkdirTemp("", "skein-release-"); err != nil {
		return "", err
	}
	return makeAt(filepath.Join(workDir, "first"))
})

// makeAt clones this tree, with what is not committed yet, and makes what is published from the clone.
func makeAt(dir string, env ...string) (made string, err error) {
	tree := filepath.Join(dir, "tree")
	const clone = `git clone -q --shared .. "$1" && cd .. && git ls-files -z -co --exclude-standard | tar -c --null --ignore-failed-read -T - | tar -x -C "$1"`
	if out, err := exec.Command("sh", "-c", clone, "sh", tree).CombinedOutput(); err != nil {
		return "", fmt.Errorf("git clone: %w\n%s", err, out)
	}
	made = filepath.Join(dir, "made")
	c := exec.Command(filepath.Join(tree, "deploy/release.sh"), made)
	c.Env = append(os.Environ(), env...)
	out, err := c.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("release.sh: %w\n%s", err, out)
	}
	return made, nil
}

// debian is the package of a tool that is named otherwise.
var debian = map[string]string{"systemd-analyze": "systemd", "systemctl": "systemd", "dpkg-deb": "dpkg", "docker": "docker-cli"}

// output runs a tool and returns what it prints. Where there is no such tool, the test is left out.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	tool := leftout.Tool(t, name, cmp.Or(debian[name], name))
	out, err := exec.CommandContext(t.Context(), tool, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// The same commit gives the same bytes, in whatever directory it lies. Nothing of the first build is left to the second:
// it compiles everything, Go's own packages too.
func TestTwoBuildsAreEqual(t *testing.T) {
	first := made(t)
	dir := t.TempDir()
	second, err := makeAt(dir, "GOCACHE="+filepath.Join(dir, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	a, err := os.ReadFile(filepath.Join(first, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(second, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	if string(a) != string(b) || strings.Count(string(a), "\n") != 6 {
		t.Errorf("the first build\n%sthe second\n%s", a, b)
	}
}

// maxImageBytes bounds what a pull of the image loads, compressed.
const maxImageBytes = 40 << 20

// The programs need nothing of their machine, and the image is small.
func TestPrograms(t *testing.T) {
	dir := made(t)
	for _, name := range []string{"skein", "skein-grpc-proxy"} {
		f, err := elf.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
				t.Errorf("%s is not static: it has a segment %v", name, p.Type)
			}
		}
		f.Close()
	}
	root, err := os.Open(filepath.Join(dir, "root.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var size counter
	z := gzip.NewWriter(&size)
	plain, err := io.Copy(z, root)
	if err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	t.Logf("the image has %d bytes, compressed %d", plain, size)
	if size > maxImageBytes {
		t.Errorf("compressed it has %d bytes, more than %d", size, maxImageBytes)
	}
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}

// The SBOM names every module that is linked, with its version.
func TestSBOM(t *testing.T) {
	for _, name := range []string{"skein", "skein-grpc-proxy"} {
		testSBOM(t, filepath.Join(made(t), name))
	}
}

func testSBOM(t *testing.T, program string) {
	t.Helper()
	b, err := os.ReadFile(program + ".cdx.json")
	if err != nil {
		t.Fatal(err)
	}
	var sbom struct {
		BOMFormat  string `json:"bomFormat"`
		Components []struct{ Name, Version string }
	}
	if err := json.Unmarshal(b, &sbom); err != nil {
		t.Fatal(err)
	}
	named := map[string]string{}
	for _, c := range sbom.Components {
		named[c.Name] = c.Version
	}
	linked := 0
	for line := range strings.Lines(output(t, "go", "version", "-m", program)) {
		if f := strings.Fields(line); len(f) >= 3 && f[0] == "dep" {
			linked++
			if named[f[1]] != f[2] {
				t.Errorf("%s %s is linked, and the SBOM has %q", f[1], f[2], named[f[1]])
			}
		}
	}
	if sbom.BOMFormat != "CycloneDX" || linked < 20 {
		t.Errorf("format %q, %d modules linked", sbom.BOMFormat, linked)
	}
}

func debOf(t *testing.T) string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(made(t), "skein_*.deb"))
	if err != nil || len(all) != 1 {
		t.Fatalf("packages %v, %v", all, err)
	}
	return all[0]
}

// The Debian package has what it promises, and its names do not collide with those of Debian's etcd.
func TestDeb(t *testing.T) {
	deb := debOf(t)
	contents := output(t, "dpkg-deb", "--contents", deb)
	for _, want := range []string{
		" ./usr/bin/skein\n", " ./usr/bin/skein-grpc-proxy\n", " ./usr/lib/skein/etcd -> ../../bin/skein\n", " ./usr/lib/skein/etcdctl -> ../../bin/skein\n",
		"skein.service\n", " ./usr/lib/sysusers.d/skein.conf\n", " ./etc/default/skein\n", " ./usr/share/doc/skein/copyright\n",
	} {
		if !strings.Contains(contents, want) {
			t.Errorf("%q is missing:\n%s", want, contents)
		}
	}
	if strings.Contains(contents, "./usr/bin/etcd") {
		t.Errorf("it has a file of Debian's etcd:\n%s", contents)
	}
	if got := output(t, "dpkg-deb", "--info", deb, "conffiles"); got != "/etc/default/skein\n" {
		t.Errorf("conffiles %q", got)
	}
}

// It is installed, upgraded, removed and purged: the settings outlive an upgrade and a removal, and nothing but them does.
func TestDebInstalls(t *testing.T) {
	deb := debOf(t)
	if os.Getuid() != 0 {
		leftout.Because(t, "only root gives files to root")
	}
	dir := t.TempDir()
	admin, tools := filepath.Join(dir, "var/lib/dpkg"), t.TempDir()
	for _, d := range []string{"info", "updates", "triggers"} {
		if err := os.MkdirAll(filepath.Join(admin, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{filepath.Join(admin, "status"): "", filepath.Join(tools, "systemd-sysusers"): "#!/bin/sh\n"} {
		if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// The scripts make no user on this machine.
	t.Setenv("PATH", tools+":/usr/sbin:/sbin:"+os.Getenv("PATH"))
	dpkg := func(args ...string) {
		t.Helper()
		output(t, "dpkg", append([]string{"--root=" + dir, "--force-script-chrootless", "--force-confold"}, args...)...)
	}
	there := func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	}
	settings := filepath.Join(dir, "etc/default/skein")
	dpkg("-i", deb)
	if out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "usr/lib/skein/etcdctl"), "version").CombinedOutput(); err != nil || !strings.Contains(string(out), "etcdctl version:") {
		t.Errorf("the link etcdctl: %v\n%s", err, out)
	}
	if out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "usr/lib/skein/etcd"), "grpc-proxy", "start", "--help").CombinedOutput(); err != nil || !strings.Contains(string(out), "--namespace") {
		t.Errorf("the gRPC proxy by the link etcd: %v\n%s", err, out)
	}
	if err := os.WriteFile(settings, []byte("SKEIN_NAME=n1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	dpkg("-i", deb)
	if b, err := os.ReadFile(settings); err != nil || string(b) != "SKEIN_NAME=n1\n" {
		t.Errorf("the settings after an upgrade: %q, %v", b, err)
	}
	dpkg("-r", "skein")
	if there("usr/bin/skein") || there("lib/systemd/system/skein.service") || !there("etc/default/skein") {
		t.Error("a removal leaves the program, or takes the settings")
	}
	dpkg("-P", "skein")
	if there("etc/default/skein") {
		t.Error("a purge leaves the settings")
	}
}

func TestLintian(t *testing.T) {
	t.Logf("%s", output(t, "lintian", "--fail-on", "error", debOf(t)))
}
