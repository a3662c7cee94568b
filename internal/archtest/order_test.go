package archtest

import (
	"bytes"
	"fmt"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestFileOrder holds the packages whose doc.go has a list "# Files" to it.
func TestFileOrder(t *testing.T) {
	ordered := orderedPackages(t)
	if len(ordered) == 0 {
		t.Fatal("no package lists its files")
	}
	imports := exportData(t, ordered)
	exceptions := 0
	for _, p := range ordered {
		files := make([]string, 0, len(p.GoFiles))
		for _, name := range p.GoFiles {
			files = append(files, filepath.Join(p.Dir, name))
		}
		arrows, err := Arrows(p.ImportPath, files, imports)
		if err != nil {
			t.Errorf("%s: %v", p.ImportPath, err)
			continue
		}
		name := strings.TrimPrefix(p.ImportPath, Module+"/")
		for _, w := range CheckOrder(p.order, sources(t, p.Dir), arrows, upward[name]) {
			t.Errorf("%s: %s", name, w)
		}
		exceptions += len(upward[name])
	}
	if exceptions > maxUpward {
		t.Errorf("%d upward arrows are allowed, more than %d", exceptions, maxUpward)
	}
	for name := range upward {
		if !slices.ContainsFunc(ordered, func(p orderedPackage) bool { return p.ImportPath == Module+"/"+name }) {
			t.Errorf("upward has exceptions for %s, which lists no files", name)
		}
	}
}

type orderedPackage struct {
	listed
	order []string
}

// orderedPackages returns the packages whose comment lists their files. It reads
// every doc.go itself, so that the test's cached result ends when one changes.
func orderedPackages(t *testing.T) []orderedPackage {
	t.Helper()
	var ordered []orderedPackage
	for _, p := range tree(t) {
		var order []string
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, "doc.go"), nil, parser.ParseComments|parser.PackageClauseOnly)
		switch {
		case err == nil:
			order = FileOrder(f.Doc.Text())
		case !os.IsNotExist(err):
			t.Fatal(err)
		}
		if order != nil {
			ordered = append(ordered, orderedPackage{p, order})
		} else if wrong := MissingList(strings.TrimPrefix(p.ImportPath, Module+"/"), len(p.GoFiles)); wrong != "" {
			t.Error(wrong)
		}
	}
	for name := range unlisted {
		if dir := filepath.Join(root, name); slices.ContainsFunc(ordered, func(p orderedPackage) bool { return p.ImportPath == Module+"/"+name }) {
			t.Errorf("the exception for %s is no longer needed: it lists its files", name)
		} else if _, err := os.Stat(dir); err != nil {
			t.Errorf("the exception for %s: %v", name, err)
		}
	}
	return ordered
}

// sources returns the names of a directory's Go files that are no tests, whatever
// their build tags.
func sources(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".go") && !strings.HasSuffix(e.Name(), "_test.go") {
			names = append(names, e.Name())
		}
	}
	return names
}

// exportData returns an importer for all that the packages import. It reads the
// compiler's export data; go list builds what the build cache lacks. With the tag the linter
// has built it already.
func exportData(t *testing.T, packages []orderedPackage) types.Importer {
	t.Helper()
	args := []string{"list", "-tags", "invariants", "-export", "-deps", "-f", "{{.ImportPath}}\t{{.Export}}"}
	for _, p := range packages {
		args = append(args, p.ImportPath)
	}
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list -export: %v\n%s", err, &stderr)
	}
	exports := map[string]string{}
	for l := range strings.Lines(string(out)) {
		pkg, file, _ := strings.Cut(strings.TrimSpace(l), "\t")
		exports[pkg] = file
	}
	return importer.ForCompiler(token.NewFileSet(), "gc", func(pkg string) (io.ReadCloser, error) {
		file := exports[pkg]
		if file == "" {
			return nil, fmt.Errorf("no export data of %s", pkg)
		}
		return os.Open(file)
	})
}

// TestArrows proves on a small package that calls, method values and variables make
// arrows, and that types, constants, fields and interface methods make none.
func TestArrows(t *testing.T) {
	dir := t.TempDir()
	var files []string
	for name, source := range map[string]string{
		"doc.go": "package p\n",
		"top.go": "package p\n\nfunc Top() { m := middle{}; f := m.step; f(); m.s.serve(); _ = m.field + limit }\n",
		"middle.go": "package p\n\ntype middle struct{ s server; field int }\n\nfunc (middle) step() { count++ }\n\n" +
			"const limit = 1\n",
		"bottom.go": "package p\n\ntype server interface{ serve() }\n\nvar count int\n\nfunc up() { Top() }\n",
	} {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(source), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, name)
	}
	arrows, err := Arrows("p", files, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(arrows)
	if want := "[{bottom.go top.go [Top]} {middle.go bottom.go [count]} {top.go middle.go [step]}]"; got != want {
		t.Fatalf("arrows\n%s, want\n%s", got, want)
	}
	order := FileOrder("Package p.\n\n# Files, callers first\n\n\ttop.go     calls\n\tmiddle.go  steps\n\tgone.go    is gone\n\tmiddle.go  again\n\n# Locks\n\n\tno.go\n")
	if want := "[top.go middle.go gone.go middle.go]"; fmt.Sprint(order) != want {
		t.Fatalf("order %v, want %s", order, want)
	}
	if order := FileOrder("Package p.\n\n# Locks\n\n\ttop.go calls\n"); order != nil {
		t.Errorf("a list without its heading: %v", order)
	}
	for _, c := range []struct {
		name   string
		files  int
		allows bool
	}{
		{"p", minListed - 1, true}, {"p", minListed, false}, {"sim", minListed, true}, {"sim", minListed - 1, false},
	} {
		if wrong := MissingList(c.name, c.files); (wrong == "") != c.allows {
			t.Errorf("%s with %d files and no list: %q", c.name, c.files, wrong)
		}
	}
	names := []string{"bottom.go", "doc.go", "middle.go", "top.go"}
	wrong := strings.Join(CheckOrder(order, names, nil, nil), "\n")
	for _, want := range []string{"middle.go stands twice", "bottom.go is missing", "gone.go stands under"} {
		if !strings.Contains(wrong, want) {
			t.Errorf("not found: %s", want)
		}
	}
	order = []string{"top.go", "middle.go", "bottom.go"}
	for _, c := range []struct {
		allowed []call
		want    string
	}{
		{nil, "[bottom.go calls upwards into top.go: Top]"},
		{[]call{{"bottom.go", "top.go", "a test"}}, "[]"},
		{[]call{{"bottom.go", "top.go", ""}}, "[the exception bottom.go → top.go has no reason]"},
		{[]call{{"bottom.go", "top.go", "a test"}, {"bottom.go", "middle.go", "a test"}}, "[the exception bottom.go → middle.go is no longer needed]"},
	} {
		if got := fmt.Sprint(CheckOrder(order, names, arrows, c.allowed)); got != c.want {
			t.Errorf("with %v: %s, want %s", c.allowed, got, c.want)
		}
	}
}
