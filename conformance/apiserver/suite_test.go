package apiserver

import (
	"context"
	"flag"
	"io"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"

	"github.com/skeindb/skein/conformance/apiserver/testserver"
)

var (
	onlyFlag    = flag.String("suite.run", "", "run only those tests of the suite that match")
	packageFlag = flag.String("suite.package", "", "run only this package of the suite, as pkg/storage/etcd3")
	rawFlag     = flag.String("suite.raw", "", "a file that gets all lines of go test -json")
	verbose     = flag.Bool("nodelog", false, "show the nodes' warnings")
)

const (
	// minTests is the least number of tests in the suite: with fewer, some were not
	// found.
	minTests = 1100
	// minSpread is how many of a hundred clusters with two keys or more must have them
	// in several ranges. With fewer, the ranges' borders do not lie between the suite's
	// keys.
	minSpread = 50
)

func TestStorageSuite(t *testing.T) {
	logger := zap.NewNop()
	if *verbose {
		cfg := zap.NewDevelopmentConfig()
		cfg.Level.SetLevel(zap.WarnLevel)
		logger, _ = cfg.Build()
	}
	b, err := prepare(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := scratch()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s, err := newSupply(dir, logger)
	if err != nil {
		t.Fatal(err)
	}
	wanted, raw := packages, io.Discard
	if *packageFlag != "" {
		wanted = []string{*packageFlag}
	}
	if *rawFlag != "" {
		f, err := os.Create(*rawFlag)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		raw = f
	}
	watching, stop := context.WithCancel(t.Context())
	var still standstills
	var watched sync.WaitGroup
	watched.Go(func() { still.watch(watching) })
	server := httptest.NewServer(s)
	var args []string
	if *onlyFlag != "" {
		args = append(args, "-run="+*onlyFlag)
	}
	env := testserver.Variable + "=" + server.URL
	r, err := b.run(t.Context(), env, raw, wanted, args...)
	if err == nil {
		still.repeat(t, r, func(pkg, pattern string) (*results, error) {
			return b.run(t.Context(), env, raw, []string{pkg}, "-run="+pattern)
		})
	}
	server.Close()
	stop()
	watched.Wait()
	if cerr := s.close(); cerr != nil {
		t.Error(cerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d tests passed, %d were skipped by themselves, %d failed; the machine stood still %d times; clusters of several keys by ranges with keys: %v",
		r.passed, r.skipped, len(r.failed), len(still.when), s.spread)
	r.judge(t)
	if spread := s.several - s.spread[1]; !partial() && spread*100 < s.several*minSpread {
		t.Errorf("only %d of %d clusters with several keys had them in several ranges", spread, s.several)
	}
}

// partial says that only some of the suite is run.
func partial() bool { return *onlyFlag != "" || *packageFlag != "" }

func (r *results) judge(t *testing.T) {
	t.Helper()
	listed, err := documented()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range r.failed {
		if !slices.Contains(listed, name) {
			t.Errorf("%s failed:\n%s", name, r.text[name])
		}
	}
	if partial() {
		return
	}
	for _, name := range listed {
		if !slices.Contains(r.failed, name) {
			t.Errorf("%s passed: it does not belong into %s", name, document)
		}
	}
	if r.passed < minTests {
		t.Errorf("only %d tests passed, of %d at least", r.passed, minTests)
	}
}

const document = "../../docs/CONFORMANCE.md"

// documented returns the tests that may fail, by the table in the docs.
func documented() (tests []string, err error) {
	text, err := os.ReadFile(document)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		if test, ok := strings.CutPrefix(line, "| `pkg/"); ok {
			name, _, _ := strings.Cut(test, "`")
			tests = append(tests, "pkg/"+name)
		}
	}
	return tests, nil
}
