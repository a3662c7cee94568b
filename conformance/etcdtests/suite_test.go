package etcdtests

import (
	"context"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const (
	module = "go.etcd.io/etcd/tests/v3"
	// document has the tests that may fail, with the reasons.
	document = "../../docs/CONFORMANCE.md"
	// testTimeout bounds one of etcd's tests.
	testTimeout = 5 * time.Minute
	// attempts is how often a test may run: etcd's tests have limits of seconds, and start processes.
	attempts = 3
)

// suites are the wanted tests by package: those of users, roles, tokens and what they may do.
var suites = map[string]string{
	"common": `Auth([A-Z_]|$)|^TestUser|^TestRole`,
	"e2e":    `^Test(Ctl|Curl)V3.*Auth|^TestAuth`,
}

var onlyFlag = flag.String("suite.run", "", "run only those tests that match")

func TestUsersOfEtcd(t *testing.T) {
	bin := t.TempDir()
	run(t, "../..", "go", "build", "-tags", "invariants", "-o", filepath.Join(bin, "etcd"), "./cmd/skein")
	run(t, ".", "go", "build", "-o", bin, "go.etcd.io/etcd/etcdctl/v3", "go.etcd.io/etcd/etcdutl/v3")
	source := strings.TrimSpace(run(t, ".", "go", "list", "-m", "-f", "{{.Dir}}", module))
	listed, seen := documented(t), map[string]bool{}
	for _, pkg := range slices.Sorted(maps.Keys(suites)) {
		binary := filepath.Join(bin, pkg+".test")
		run(t, ".", "go", "test", "-c", "-tags", "e2e", "-o", binary, module+"/"+pkg)
		dir := filepath.Join(source, pkg) // the tests find their certificates from there
		for name := range strings.Lines(run(t, dir, binary, "-test.list", suites[pkg])) {
			name = strings.TrimSpace(name)
			if !strings.HasPrefix(name, "Test") || !matches(*onlyFlag, name) {
				continue
			}
			t.Run(pkg+"/"+name, func(t *testing.T) {
				full := pkg + "/" + name
				seen[full] = true
				out, ok := repeated(t, dir, binary, bin, name)
				switch why, excused := listed[full]; {
				case !ok && !excused:
					t.Errorf("%s failed:\n%s", full, out)
				case ok && excused && !strings.HasPrefix(why, atTimes):
					t.Errorf("%s passed: it does not belong into %s", full, document)
				}
			})
		}
	}
	for name := range listed {
		if !seen[name] && *onlyFlag == "" {
			t.Errorf("%s has the test %s, which there is not", document, name)
		}
	}
}

// repeated runs a test in a process of its own, because what one has left behind fails the next one in the same process.
func repeated(t *testing.T, dir, binary, bin, name string) (out string, ok bool) {
	t.Helper()
	for n := range attempts {
		ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
		c := exec.CommandContext(ctx, binary, "-bin-dir", bin, "-test.v", "-test.run", "^"+name+"$")
		// One node without certificates, and three with.
		c.Dir, c.Env = dir, append(os.Environ(), "E2E_TEST_MINIMAL=true")
		raw, err := c.CombinedOutput()
		cancel()
		killLeft(t, bin)
		if err == nil {
			if n > 0 {
				t.Logf("%s failed %d times before:\n%s", name, n, out)
			}
			return "", true
		}
		out = err.Error() + "\n" + string(raw)
	}
	return out, false
}

// killLeft ends what a test that ran out of its time has left behind: processes of our binaries, each in a session of its
// own, on the ports of the next test.
func killLeft(t *testing.T, bin string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range all {
		// Others end meanwhile.
		exe, err := os.Readlink(link)
		pid, notANumber := strconv.Atoi(filepath.Base(filepath.Dir(link)))
		if err != nil || notANumber != nil || filepath.Dir(exe) != bin {
			continue
		}
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill()
			awaitEnd(link)
		}
	}
}

// awaitEnd waits until a process is gone. It has no ports then.
func awaitEnd(link string) {
	for range 500 {
		if _, err := os.Readlink(link); err != nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func matches(pattern, name string) bool { return regexp.MustCompile(pattern).MatchString(name) }

// run runs a command and returns its output.
func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	c := exec.CommandContext(t.Context(), name, args...)
	c.Dir = dir
	var problems strings.Builder
	c.Stderr = &problems
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", c, err, out, problems.String())
	}
	return string(out)
}

// atTimes begins the reason of a test that may pass too.
const atTimes = "at times: "

// documented returns the tests that may fail, with their reasons, by the table in the docs.
func documented(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]string{}
	for line := range strings.Lines(string(text)) {
		test, ok := strings.CutPrefix(line, "| `etcd/tests/")
		if name, why, closed := strings.Cut(test, "` | "); ok && closed {
			tests[name] = why
		}
	}
	return tests
}
