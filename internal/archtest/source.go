package archtest

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// maxLines bounds the Go of one package, generated code and tests not counted.
const maxLines = 8000

// An exception is a package or an interface that may exceed a bound. Its own limit
// can only fall.
type exception struct {
	limit int
	why   string
}

// largePackages may have more than maxLines.
var largePackages = map[string]exception{
	"bench/against-etcd": {9600, "each measure is a file of its own, and scale came to know each node and who leads what; clusters and pairs can leave it"},
	"raftgroup":          {8400, "who made a quorum, passes of who brings work, notices that ride and sleep of crowded hosts came to it; what copies of ranges do can leave it"},
	"shard":              {8720, "loads, stages of requests and the feed of the heat map came to it; what maintenance does can leave it"},
}

// maxMethods bounds the methods that an interface declares itself. Embedded
// interfaces do not count: a larger need is composed of named roles.
const maxMethods = 5

// largeInterfaces may declare more than maxMethods.
var largeInterfaces = map[string]exception{
	"etcdapi.KV":                  {7, "etcd's KV service has six calls, and a Range of a span comes with the memory that it holds"},
	"node.Bus":                    {9, "node wires the whole bus, and a simulation gives it another one"},
	"transport.wire":              {8, "what differs between a QUIC and a TCP connection; nobody outside implements it"},
	"transport/transporttest.Bus": {12, "the suite tests all that a bus offers"},
}

// A Package is the Go of one directory, without tests and generated code.
type Package struct {
	Lines      int
	Interfaces map[string]int // name → methods that it declares itself
}

// generated begins the line that marks generated code.
var generated = []byte("// Code generated ")

// Packages reads the packages of all modules below a directory, by path.
func Packages(dir string) (map[string]Package, error) {
	packages := map[string]Package{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if name != dir && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || d.Name() == "bin") {
				return filepath.SkipDir
			}
			return nil
		case !strings.HasSuffix(name, ".go"), strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil || bytes.HasPrefix(text, generated) || bytes.Contains(text, append([]byte("\n"), generated...)) {
			return err
		}
		rel, err := filepath.Rel(dir, filepath.Dir(name))
		if err != nil {
			return err
		}
		p := packages[filepath.ToSlash(rel)]
		p.Lines += bytes.Count(text, []byte("\n"))
		if p.Interfaces == nil {
			p.Interfaces = map[string]int{}
		}
		packages[filepath.ToSlash(rel)] = p
		return countMethods(name, text, p.Interfaces)
	})
	return packages, err
}

// countMethods adds the interfaces of a file.
func countMethods(name string, text []byte, counts map[string]int) error {
	f, err := parser.ParseFile(token.NewFileSet(), name, text, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	ast.Inspect(f, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if i, ok := spec.Type.(*ast.InterfaceType); ok {
			counts[spec.Name.Name] = 0
			for _, m := range i.Methods.List {
				counts[spec.Name.Name] += len(m.Names)
			}
		}
		return true
	})
	return nil
}

// CheckSizes compares packages and their interfaces with the bounds, and returns
// what is wrong, one line each.
func CheckSizes(packages map[string]Package) []string {
	lines, methods := map[string]int{}, map[string]int{}
	for name, p := range packages {
		lines[name] = p.Lines
		for i, n := range p.Interfaces {
			methods[name+"."+i] = n
		}
	}
	return slices.Concat(
		tooLarge("lines", lines, maxLines, largePackages),
		tooLarge("methods", methods, maxMethods, largeInterfaces),
	)
}

// tooLarge compares sizes with a bound and its exceptions.
func tooLarge(unit string, sizes map[string]int, bound int, exceptions map[string]exception) []string {
	var wrong []string
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		limit := bound
		if e, ok := exceptions[name]; ok {
			limit = e.limit
		}
		if sizes[name] > limit {
			wrong = append(wrong, fmt.Sprintf("%s has %d %s, the limit is %d", name, sizes[name], unit, limit))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(exceptions)) {
		e := exceptions[name]
		switch {
		case sizes[name] <= bound:
			wrong = append(wrong, fmt.Sprintf("the exception for %s is no longer needed: it has %d %s", name, sizes[name], unit))
		case unit == "lines" && e.limit-sizes[name] >= 500:
			wrong = append(wrong, fmt.Sprintf("%s has %d %s: lower its limit from %d", name, sizes[name], unit, e.limit))
		case e.why == "":
			wrong = append(wrong, fmt.Sprintf("the exception for %s has no reason", name))
		}
	}
	return wrong
}
