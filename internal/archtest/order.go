package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// The list "# Files" of a package's doc.go names the files of the package from the
// top down: callers stand above what they call. An arrow leads from file A to file
// B if A uses a function, a method or a package-level variable that B declares.
// Types, constants, fields and methods of interfaces make no arrow: they are words,
// and a call through an interface does not say whose code it reaches. An upward
// arrow needs an exception in upward. Arrows are those of the build that ships: mutations,
// which need a build tag, may call anything.

// An Arrow says that one file uses what another file of its package declares.
type Arrow struct {
	From, To string
	Names    []string // what is used, sorted
}

// A call is an upward arrow that is allowed, with the reason.
type call struct {
	from, to string
	why      string
}

// minListed is how many files, tests not counted, a package of this module has that must list
// them.
const minListed = 8

// unlisted are the packages that do not list their files.
var unlisted = map[string]string{
	"sim": "the simulator is test code: its faults, its clients and its machines know each other",
}

// maxUpward bounds the exceptions of all packages together.
const maxUpward = 39

// upward are the allowed upward arrows by package.
var upward = map[string][]call{
	"shard": {
		{"adminclient.go", "admin.go", "the client asks its own node by a function call"},
		{"maintenance.go", "pins.go", "maintenance asks what holds a range back, and pins that go have it look again"},
		{"maintenance.go", "store.go", "maintenance asks its store for the cluster's compaction, of which the store tells it"},
	},
	"transport": {
		{"loopback.go", "endpoint.go", "the Endpoint owns every goroutine, and the loopback is a field of it"},
		{"session.go", "endpoint.go", "the end of a session changes the PeerState that its Endpoint keeps"},
	},
}

// listedFile finds the name at the start of a line of the list "# Files".
var listedFile = regexp.MustCompile(`^(?:- )?([a-z0-9_]+\.go)\b`)

// filesHeading finds the heading of the list.
var filesHeading = regexp.MustCompile(`(?m)^# Files(,.*)?$`)

// MissingList says what is wrong with a package of so many files that lists none, or nothing.
func MissingList(name string, files int) string {
	switch _, allowed := unlisted[name]; {
	case files >= minListed && !allowed:
		return fmt.Sprintf("%s has %d files, and its doc.go has no list \"# Files\"", name, files)
	case files < minListed && allowed:
		return fmt.Sprintf("the exception for %s is no longer needed: it has %d files", name, files)
	}
	return ""
}

// FileOrder returns the files that a package comment lists under "# Files", in the
// order of the list, and nil for a comment without that heading. The heading may go on
// behind a comma.
func FileOrder(comment string) []string {
	at := filesHeading.FindStringIndex(comment)
	if at == nil {
		return nil
	}
	rest, _, _ := strings.Cut(comment[at[1]:], "\n# ")
	order := []string{}
	for l := range strings.Lines(rest) {
		if m := listedFile.FindStringSubmatch(strings.TrimSpace(l)); m != nil {
			order = append(order, m[1])
		}
	}
	return order
}

// Arrows type-checks the files of one package and returns the arrows between them,
// sorted. The importer resolves what the package imports.
func Arrows(pkg string, files []string, imports types.Importer) ([]Arrow, error) {
	fset := token.NewFileSet()
	var parsed []*ast.File
	for _, name := range files {
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		parsed = append(parsed, f)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	checked, err := (&types.Config{Importer: imports}).Check(pkg, fset, parsed, info)
	if err != nil {
		return nil, err
	}
	fileOf := func(p token.Pos) string { return filepath.Base(fset.Position(p).Filename) }
	found := map[[2]string]map[string]bool{}
	for id, used := range info.Uses {
		if used.Pkg() != checked || !isCode(used) {
			continue
		}
		ends := [2]string{fileOf(id.Pos()), fileOf(used.Pos())}
		if ends[0] == ends[1] {
			continue
		}
		if found[ends] == nil {
			found[ends] = map[string]bool{}
		}
		found[ends][used.Name()] = true
	}
	var out []Arrow
	for ends, names := range found {
		out = append(out, Arrow{ends[0], ends[1], slices.Sorted(maps.Keys(names))})
	}
	slices.SortFunc(out, func(a, b Arrow) int {
		return strings.Compare(a.From+" "+a.To, b.From+" "+b.To)
	})
	return out, nil
}

// isCode says whether a use of the object makes an arrow.
func isCode(o types.Object) bool {
	switch o := o.(type) {
	case *types.Func:
		recv := o.Signature().Recv()
		return recv == nil || !types.IsInterface(recv.Type())
	case *types.Var:
		return o.Parent() == o.Pkg().Scope()
	default:
		return false
	}
}

// CheckOrder compares the files and arrows of a package with the order in its
// doc.go and with the exceptions, and returns what is wrong, one line each.
func CheckOrder(order, files []string, arrows []Arrow, allowed []call) []string {
	var wrong []string
	at := map[string]int{}
	for i, name := range order {
		if _, twice := at[name]; twice {
			wrong = append(wrong, name+" stands twice under # Files")
		}
		at[name] = i
	}
	for _, name := range files {
		if _, ok := at[name]; !ok && name != "doc.go" {
			wrong = append(wrong, name+" is missing under # Files")
		}
	}
	for _, name := range order {
		if !slices.Contains(files, name) {
			wrong = append(wrong, name+" stands under # Files and does not exist")
		}
	}
	needed := map[[2]string]bool{}
	for _, a := range arrows {
		if at[a.From] < at[a.To] {
			continue
		}
		needed[[2]string{a.From, a.To}] = true
		if !slices.ContainsFunc(allowed, func(c call) bool { return c.from == a.From && c.to == a.To }) {
			wrong = append(wrong, fmt.Sprintf("%s calls upwards into %s: %s", a.From, a.To, strings.Join(a.Names, ", ")))
		}
	}
	for _, c := range allowed {
		if !needed[[2]string{c.from, c.to}] {
			wrong = append(wrong, fmt.Sprintf("the exception %s → %s is no longer needed", c.from, c.to))
		}
		if c.why == "" {
			wrong = append(wrong, fmt.Sprintf("the exception %s → %s has no reason", c.from, c.to))
		}
	}
	return wrong
}
