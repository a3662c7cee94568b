package deploy

import (
	"compress/gzip"
	"debug/elf"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
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
	dir = filepath.Join(workDir, "first")
	return dir, makeIn(dir)
})

func makeIn(dir string) error {
	out, err := exec.Command("./release.sh", dir).CombinedOutput()
	if err != nil {
		return fmt.Errorf("release.sh: %w\n%s", err, out)
	}
	return nil
}

// output runs a tool and returns what it prints. Where there is no such tool, the test ends with the reason.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); errors.Is(err, exec.ErrNotFound) {
		t.Skipf("left out: there is no %s here", name)
	}
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// The same commit gives the same bytes.
func TestTwoBuildsAreEqual(t *testing.T) {
	first := made(t)
	second := filepath.Join(t.TempDir(), "second")
	if err := makeIn(second); err != nil {
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
	if string(a) != string(b) || strings.Count(string(a), "\n") != 2 {
		t.Errorf("the first build\n%sthe second\n%s", a, b)
	}
}

// maxImageBytes bounds what a pull of the image loads, compressed.
const maxImageBytes = 40 << 20

// The program needs nothing of its machine, and the image is small.
func TestProgram(t *testing.T) {
	dir := made(t)
	f, err := elf.Open(filepath.Join(dir, "skein"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("the program is not static: it has a segment %v", p.Type)
		}
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
