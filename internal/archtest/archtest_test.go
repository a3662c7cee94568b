package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the drawing into docs/ARCHITECTURE.md")

const (
	root     = "../.."
	document = "../../docs/ARCHITECTURE.md"
	begin    = "<!-- drawn by internal/archtest: begin -->\n"
	end      = "<!-- drawn by internal/archtest: end -->\n"
)

type listed struct {
	ImportPath string
	Dir        string
	Doc        string
	Imports    []string
	GoFiles    []string
}

// tree returns what go list says of the module's packages.
func tree(t *testing.T) []listed {
	t.Helper()
	if treeOnce == nil {
		treeOnce = list(t, nil)
	}
	return treeOnce
}

// treeOnce is what tree returns after its first call.
var treeOnce []listed

// list returns what go list says of the module's packages, with the files of the
// overlay in place (path below the root → content).
func list(t *testing.T, overlay map[string]string) []listed {
	t.Helper()
	args := []string{"list", "-e", "-json=ImportPath,Dir,Doc,Imports,GoFiles"}
	if len(overlay) > 0 {
		dir := t.TempDir()
		replace := map[string]string{}
		for name, content := range overlay {
			from, err := filepath.Abs(filepath.Join(root, name))
			if err != nil {
				t.Fatal(err)
			}
			to := filepath.Join(dir, strings.ReplaceAll(name, "/", "_"))
			if err := os.WriteFile(to, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
			replace[from] = to
		}
		text, err := json.Marshal(map[string]any{"Replace": replace})
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "overlay.json")
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, "-overlay", file)
	}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "./...")...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var all []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

func graph(packages []listed) Graph {
	g := Graph{}
	for _, p := range packages {
		g[p.ImportPath] = p.Imports
	}
	return g
}

// TestTree holds the tree to the rules.
func TestTree(t *testing.T) {
	packages := tree(t)
	if len(packages) < 3 {
		t.Fatalf("go list found only %d packages", len(packages))
	}
	for _, v := range Check(graph(packages)) {
		t.Error(v)
	}
}

// TestForbiddenImports proves that the check can fail. An overlay adds one mutation to the real
// tree for each kind of rule, a forbidden import. Each must be found and explained.
func TestForbiddenImports(t *testing.T) {
	mutations := []struct{ file, imports, why string }{
		{"keyspace/mutation.go", Module + "/clock", "depend on nobody"},
		{"clock/mutation.go", Module + "/keyspace", "time depends on nobody"},
		{"wal/mutation.go", Module + "/shard", "stands above"},
		{"wal/mutation_too.go", Module + "/engine", "on one line"},
		{"placement/mutation.go", Module + "/shard", "on one line"},
		{"mvcc/mutation.go", "go.etcd.io/raft/v3", "no consensus"},
		{"transport/mutation.go", "google.golang.org/grpc", "speak QUIC"},
		{"shard/load/mutation.go", Module + "/shard", "without a replica"},
		{"util/mutation.go", "fmt", "stands on no line"},
	}
	overlay := map[string]string{}
	for _, m := range mutations {
		overlay[m.file] = "package " + filepath.Base(filepath.Dir(m.file)) + "\n\nimport _ \"" + m.imports + "\"\n"
	}
	violations := Check(graph(list(t, overlay)))
	for _, m := range mutations {
		if !slices.ContainsFunc(violations, func(v Violation) bool {
			return v.From == Module+"/"+filepath.Dir(m.file) && strings.Contains(v.String(), m.why)
		}) {
			t.Errorf("%s imports %s: not found", m.file, m.imports)
		}
	}
}

// TestRules checks the table itself: a package stands on one line, and every rule
// has its reason.
func TestRules(t *testing.T) {
	seen := map[string]bool{}
	for _, l := range lines {
		if l.why == "" || l.duty == "" {
			t.Errorf("line %v has no reason or duty", l.packages)
		}
		for _, p := range l.packages {
			if seen[p] {
				t.Errorf("%s stands on two lines", p)
			}
			seen[p] = true
		}
	}
	for _, b := range bans {
		if b.why == "" {
			t.Errorf("ban %s → %s has no reason", b.from, b.to)
		}
		if !seen[top(Module+"/"+b.from)] {
			t.Errorf("ban of %s: no such package in the drawing", b.from)
		}
		if name := top(b.to); name != "" && !seen[name] {
			t.Errorf("ban of %s → %s: no such package in the drawing", b.from, b.to)
		}
	}
}

// TestPackageComments: every package says what it is.
func TestPackageComments(t *testing.T) {
	for _, p := range tree(t) {
		if len(p.GoFiles) > 0 && p.Doc == "" {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

// TestDependencies: every module that go.mod requires directly has its reason in
// docs/DEPENDENCIES.md, and nothing has one that go.mod no longer knows.
func TestDependencies(t *testing.T) {
	text, err := os.ReadFile("../../docs/DEPENDENCIES.md")
	if err != nil {
		t.Fatal(err)
	}
	reasons := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		reasons[row[1]] = true
	}
	cmd := exec.CommandContext(t.Context(), "go", "mod", "edit", "-json")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	if err := json.Unmarshal(out, &mod); err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, r := range mod.Require {
		known[r.Path] = true
		if !r.Indirect && !reasons[r.Path] {
			t.Errorf("%s has no reason in docs/DEPENDENCIES.md", r.Path)
		}
	}
	for path := range reasons {
		if !known[path] {
			t.Errorf("docs/DEPENDENCIES.md gives a reason for %s, which go.mod does not know", path)
		}
	}
}

// TestDrawing compares docs/ARCHITECTURE.md with the rules; -rewrite mends it.
func TestDrawing(t *testing.T) {
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok1 := strings.Cut(string(text), begin)
	drawn, tail, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("%s has no place for the drawing: %q … %q", document, begin, end)
	}
	want := "\n" + Drawing() + "\n"
	if drawn == want {
		return
	}
	if !*rewrite {
		t.Fatalf("%s does not show the rules; run go test ./internal/archtest -rewrite\ngot:\n%s\nwant:\n%s", document, drawn, want)
	}
	if err := os.WriteFile(document, []byte(head+begin+want+end+tail), 0o644); err != nil {
		t.Fatal(err)
	}
}
