package apiserver

import (
	"flag"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/skeindb/skein/conformance/apiserver/testserver"
)

var (
	onlyFlag = flag.String("suite.run", "", "run only those tests of the suite that match")
	verbose  = flag.Bool("nodelog", false, "show the nodes' warnings")
)

// minTests is how many tests the suite has at least: with fewer, some were not found.
const minTests = 1100

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
	s, err := newSupply(t.TempDir(), logger)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s)
	var args []string
	if *onlyFlag != "" {
		args = append(args, "-run="+*onlyFlag)
	}
	r, err := b.run(t.Context(), testserver.Variable+"="+server.URL, args...)
	server.Close()
	if cerr := s.close(); cerr != nil {
		t.Error(cerr)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d tests passed, %d were skipped by themselves, %d failed; clusters by ranges with keys: %v", r.passed, r.skipped, len(r.failed), s.spread)
	r.judge(t)
}

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
	if *onlyFlag != "" {
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
