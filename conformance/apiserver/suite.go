// Package apiserver runs the storage suite of k8s.io/apiserver against Skein: the
// packages below pkg/storage whose tests reach etcd, unchanged from the module cache.
// `go test -overlay` replaces one file, that of package testserver: it starts an etcd
// there, and a Skein of three nodes and many ranges here. No test is copied, changed or
// skipped.
//
// The nodes run in the process of this package's test, so that their invariants are
// asserted; the suite's tests are processes of their own. They bound by the wall clock
// what a server may take, often by a hundred milliseconds. So do not run them under the
// race detector.
//
// It guarantees three things. The tests that fail are exactly those that
// docs/CONFORMANCE.md lists. No test was left out. Their keys lay in several ranges.
package apiserver

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const (
	module = "k8s.io/apiserver"
	// replaced is the file that is replaced, below the module's directory.
	replaced = "pkg/storage/etcd3/testserver/test_server.go"
	// packageTimeout is the bound of one package's tests: a test that hangs is ended and
	// shows the stacks of its goroutines.
	packageTimeout = 8 * time.Minute
)

// packages are those whose tests run, below the module's path: all below pkg/storage
// that import package testserver.
var packages = []string{"pkg/storage/etcd3", "pkg/storage/cacher", "pkg/storage/storagebackend/factory"}

// build is what go test needs to build the suite with the file replaced.
type build struct {
	// mod and overlay are the files for the flags of these names.
	mod, overlay string
}

// prepare writes the replacement files into dir. The go command refuses to replace
// files in the module cache, so the module gets another path: a link to the cache.
func prepare(ctx context.Context, dir string) (build, error) {
	b := build{mod: filepath.Join(dir, "go.mod"), overlay: filepath.Join(dir, "overlay.json")}
	from, err := output(ctx, "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return b, err
	}
	link := filepath.Join(dir, "apiserver")
	if err := os.Symlink(from, link); err != nil {
		return b, err
	}
	for _, name := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			return b, err
		}
	}
	if _, err := output(ctx, "mod", "edit", "-replace="+module+"="+link, b.mod); err != nil {
		return b, err
	}
	ours, err := filepath.Abs(filepath.Join("testserver", "testserver.go"))
	if err != nil {
		return b, err
	}
	if _, err := os.Stat(filepath.Join(link, replaced)); err != nil {
		return b, fmt.Errorf("the file to replace is gone: %w", err)
	}
	text, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(link, replaced): ours}})
	if err != nil {
		return b, err
	}
	return b, os.WriteFile(b.overlay, text, 0o600)
}

// output runs the go command and returns the line that it prints.
func output(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", args...)
	var wrong bytes.Buffer
	cmd.Stderr = &wrong
	text, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, wrong.Bytes())
	}
	return strings.TrimSpace(string(text)), nil
}

// results are the outcomes of the suite's tests, by package and name.
type results struct {
	passed, skipped int
	// failed are the failed tests without those of which only a part failed, and the
	// packages that failed outside any test.
	failed []string
	// text is the output of the failed ones.
	text map[string]*strings.Builder
	// running are the tests that have begun and not ended, with their begin.
	running map[string]time.Time
	// ran is when each of failed began and ended. again is how often it was run again.
	ran   map[string]span
	again map[string]int
}

func newResults() *results {
	return &results{
		text: map[string]*strings.Builder{}, running: map[string]time.Time{},
		ran: map[string]span{}, again: map[string]int{},
	}
}

// span is a time span on the wall clock, which go test's lines carry.
type span struct{ from, to time.Time }

// run runs these packages of the suite, and writes go test's output to raw. Its results
// are complete, or it returns an error. Packages run one at a time: their tests wait
// for an event no longer than 150 ms.
func (b build) run(ctx context.Context, env string, raw io.Writer, packages []string, args ...string) (*results, error) {
	list := []string{"test", "-json", "-vet=off", "-count=1", "-timeout=" + packageTimeout.String(), "-modfile=" + b.mod, "-overlay=" + b.overlay, "-p=1"}
	list = append(list, args...)
	for _, p := range packages {
		list = append(list, module+"/"+p)
	}
	cmd := exec.CommandContext(ctx, "go", list...)
	cmd.Env = append(os.Environ(), env)
	var wrong bytes.Buffer
	cmd.Stderr = &wrong
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("go test: %w", err)
	}
	r, rerr := read(io.TeeReader(out, raw))
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && (!errors.As(err, &exit) || len(r.failed) == 0) {
		rerr = errors.Join(rerr, fmt.Errorf("go test: %w\n%s", err, wrong.Bytes()))
	}
	return r, rerr
}

// event is a line of go test -json.
type event struct {
	Time       time.Time
	Action     string
	Package    string
	ImportPath string
	Test       string
	Output     string
}

// read reads the events of a run.
func read(from io.Reader) (*results, error) {
	r := newResults()
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if jerr := json.Unmarshal(line, &e); jerr != nil {
				return r, fmt.Errorf("go test printed %q: %w", line, jerr)
			}
			r.take(&e)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return r, fmt.Errorf("go test: %w", err)
		}
	}
	// The end of a package's process has ended them too.
	r.failed = leaves(slices.AppendSeq(r.failed, maps.Keys(r.running)))
	return r, nil
}

// take takes one event.
func (r *results) take(e *event) {
	name := strings.TrimPrefix(e.Package, module+"/")
	if e.Package == "" {
		name = e.ImportPath
	}
	if e.Test != "" {
		name += "." + e.Test
	}
	switch e.Action {
	case "run":
		r.running[name] = e.Time
	case "fail":
		r.ran[name] = span{r.running[name], e.Time}
		delete(r.running, name)
	case "pass", "skip":
		delete(r.running, name)
	}
	switch e.Action {
	case "output", "build-output":
		if r.text[name] == nil {
			r.text[name] = &strings.Builder{}
		}
		r.text[name].WriteString(e.Output)
	case "fail", "build-fail":
		r.failed = append(r.failed, name)
	case "skip":
		r.skipped++
		delete(r.text, name)
	case "pass":
		delete(r.text, name)
		if e.Test != "" {
			r.passed++
		}
	}
}

// leaves removes tests that failed only because a part of them did.
func leaves(failed []string) []string {
	return slices.DeleteFunc(slices.Clone(failed), func(whole string) bool {
		return slices.ContainsFunc(failed, func(part string) bool {
			return strings.HasPrefix(part, whole+"/") || strings.HasPrefix(part, whole+".")
		})
	})
}

// memory is where Linux keeps files in memory.
const memory = "/dev/shm"

// scratch makes a directory for the clusters, in memory if possible. Upstream's etcd
// does not wait for the disk either (UnsafeNoFsync).
func scratch() (dir string, err error) {
	if dir, err = os.MkdirTemp(memory, "skein-suite-"); err == nil {
		return dir, nil
	}
	return os.MkdirTemp("", "skein-suite-")
}
