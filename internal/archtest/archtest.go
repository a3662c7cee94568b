// Package archtest holds the rules of the tree's structure and checks them.
//
//   - Imports: packages stand on lines, and a line imports only lines below it.
//     Each ban has a reason, which a failing build prints. docs/ARCHITECTURE.md
//     shows them as this package draws them.
//   - Sizes: no package has more than 8,000 lines of Go without tests and generated
//     code. No interface declares more than five methods.
//   - Order: a package whose doc.go has a list "# Files" names each of its files
//     there once, from the top down. Calls between files go downwards.
//
// Exceptions stand in tables with their reasons, and a stale one fails the test. The
// tests also add violations, to prove that each check can fail. Nothing but the tests
// imports this package.
package archtest

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// Module is the path of the module whose packages the rules are about.
const Module = "github.com/skeindb/skein"

// A line is one row of the drawing. Its packages do not import one another, and
// none imports a line above.
type line struct {
	packages []string // paths inside the module; each stands for its subpackages too
	duty     string   // what the line is for: the right half of the drawing
	why      string   // why nothing above or beside may be imported here
}

// lines are the packages from top to bottom.
var lines = []line{
	{
		[]string{"cmd"},
		"flags to Config to Run(ctx)",
		"a command has no logic, so there is nothing in it to import",
	},
	{
		[]string{"sim", "chaos", "conformance", "deploy"},
		"test rigs around whole nodes; tests of what is published",
		"what ships must not depend on the rigs that test it",
	},
	{
		[]string{"demo", "embedtest"},
		"whole clusters, to be looked at | for tests of programs that use etcd",
		"a node does not know that there are others on its machine",
	},
	{
		[]string{"embed"},
		"a node within another program",
		"what runs within a program does not know which one",
	},
	{
		[]string{"node", "recovery", "transfer"},
		"wires one node; start and stop; joins; operators' commands | repairs directories of stopped nodes | data in and out",
		"node is the only place that knows all parts; a part that knew it would be a circle; " +
			"what repairs a directory reads formats and starts nothing",
	},
	{
		[]string{"config"},
		"flags, environment and file to one Config",
		"a configuration is plain data: who reads it must not need a running node",
	},
	{
		[]string{"etcdapi", "adminapi", "dataapi", "pipeapi", "console"},
		"the services clients call",
		"the faces check requests and choose words; two faces that share code would hide logic in one of them",
	},
	{
		[]string{"lease", "compactor"},
		"expiry of leases; automatic compaction",
		"expiry and what history is kept are decided once, below every face",
	},
	{
		[]string{"watch"},
		"events of many ranges in one order",
		"a watcher sees what ranges have applied; nothing that serves a request may depend on who watches",
	},
	{
		[]string{"router", "auth", "audit"},
		"a request to the ranges it touches | who sent it | its record",
		"the router serves every face alike and knows none; who a user is has nothing to do with ranges",
	},
	{
		[]string{"placement", "shard"},
		"range map and sequencer | a replica",
		"a range must work while placement is away, and placement decides from reports, not from replicas; " +
			"each declares the small interface it needs and node joins them",
	},
	{
		[]string{"rangeapi"},
		"requests to ranges, their forms on the bus, the client",
		"what asks a range and what serves it share these words, and neither needs the other",
	},
	{
		[]string{"backup", "etcdfile", "mirror"},
		"copies of a store outside of it | etcd's database files | follows a running etcd",
		"data outlives the cluster that it came from, so nothing that reads or writes it there knows a cluster",
	},
	{
		[]string{"raftgroup", "mvcc"},
		"many raft groups | versioned keys",
		"consensus knows no keys and storage knows no consensus, so that each is tested to the ground alone",
	},
	{
		[]string{"transport", "wal", "engine"},
		"bus | shared log | the one Pebble",
		"bytes to peers, bytes to the log, bytes to Pebble: none needs to know what they mean, or each other",
	},
	{
		[]string{"rights"},
		"users, roles, what they may do",
		"what a right means is the same on every replica and every gateway, so its package knows neither",
	},
	{
		[]string{"certs"},
		"certificates",
		"who makes a certificate and who asks for it must read the same name in it, so its words lie below both",
	},
	{
		[]string{"kverror"},
		"the one table of errors",
		"an error travels through every layer, so its package can sit on none of them",
	},
	{
		[]string{"loadtest"},
		"what runs outside a node",
		"a load generator that knew the server would measure something that etcd has not",
	},
	{
		[]string{"client"},
		"what other programs link",
		"a program that uses a cluster must not link a node",
	},
	{
		[]string{"keyspace", "clock", "api", "internal"},
		"ids, time, wire messages, checks of the tree",
		"the words that everybody speaks depend on nobody",
	},
}

// A ban forbids one import beyond what the lines forbid.
type ban struct {
	from string // a package inside the module, subpackages included
	to   string // an import path prefix
	why  string
}

// forbids says whether from must not import to. A ban of a whole line leaves alone what
// the packages of that line import from each other.
func (b ban) forbids(from, to string) bool {
	self := Module + "/" + b.from
	if !within(from, self) || !within(to, b.to) || within(to, self) {
		return false
	}
	return strings.Contains(b.from, "/") || !sameTop(from, to)
}

// bans are the imports that the lines allow and the design does not.
var bans = []ban{
	{"mvcc", "go.etcd.io/raft/v3", "versioned keys know no consensus"},
	{"mvcc", "google.golang.org/grpc", "versioned keys know no network"},
	{"mvcc", Module + "/transport", "versioned keys know no network"},
	{"mvcc", Module + "/wal", "versioned keys become durable through the engine's applied record, never by themselves"},
	{"raftgroup", "go.etcd.io/etcd/api", "a group carries opaque bytes; etcd's messages belong to shard"},
	{"engine", "go.etcd.io/raft/v3", "the engine stores an applied record and does not know who agreed on it"},
	{"engine", "go.etcd.io/etcd/api", "the engine stores bytes; etcd's messages belong to shard and mvcc"},
	{"transport", "go.etcd.io/raft/v3", "the bus carries opaque payloads"},
	{"transport", "go.etcd.io/etcd/api", "the bus carries opaque payloads"},
	{"transport", "google.golang.org/grpc", "nodes speak QUIC among themselves; gRPC is for clients"},
	{"wal", "go.etcd.io/etcd/api", "the log stores raft's entries and does not look into them"},
	{"shard", "go.etcd.io/raft/v3", "a replica sees raftgroup's StateMachine, not raft"},
	{"shard/load", Module + "/shard", "a range is measured without a replica, by three methods of its owner"},
	{"shard/rangefeed", Module + "/shard", "events are fed without a replica, from a source of three methods"},
	{"shard/pipeline", Module + "/engine", "operations are carried by an interface, without a store"},
	{"shard/pipeline", Module + "/transport", "operations are carried by an interface, without a bus"},
	{"shard/removal", Module + "/shard", "who waits for removal asks nodes, and needs no replica"},
	{"shard/replicas", Module + "/shard/pipeline", "replicas come and go by five methods of each, whatever they serve"},
	{"shard/eval", Module + "/raftgroup", "an evaluation is over before anything is proposed"},
	{"shard/locktable", Module + "/raftgroup", "a lock table hears of the log by what is applied"},
	{"shard/locktable", Module + "/mvcc", "locks lie in memory; what they leave behind is no affair of the table"},
	{"placement", "go.etcd.io/raft/v3", "the placement group sees raftgroup's StateMachine, not raft"},
	{"placement/fsm", Module + "/raftgroup", "what is replicated is a function of its entries, whoever agrees on them"},
	{"placement/fsm", Module + "/engine", "the state writes records to whoever stores them"},
	{"placement/fsm", Module + "/transport", "a command's effect knows no network"},
	{"placement/fsm", Module + "/clock", "a command's effect knows no clock: a time stands in the command"},
	{"placement/driver", Module + "/transport", "decisions reach nodes by interfaces, which node joins"},
	{"placement/driver", Module + "/engine", "decisions read a View, never a disk"},
	{"keyspace", Module, "the words that everybody speaks depend on nobody"},
	{"clock", Module, "time depends on nobody"},
	{"etcdapi", Module + "/shard", "a face speaks to the router; a replica behind its back would skip routing"},
	{"lease", Module + "/shard", "what asks a range does so by rangeapi and needs no replica"},
	{"watch", Module + "/shard", "what asks a range does so by rangeapi and needs no replica"},
	{"router", Module + "/shard", "what asks a range does so by rangeapi and needs no replica"},
	{"config", Module + "/shard", "the limits of a request are rangeapi's"},
	{"console", Module + "/keyspace", "the console calls the services with their own messages, and so can do no more than their clients"},
	{"console", Module + "/auth", "who may do what is checked by the services that the console calls"},
	{"console", Module + "/router", "the console calls the services, which check who may do what"},
	{"etcdapi", Module + "/raftgroup", "a face speaks to the router; it cannot know groups"},
	{"router", Module + "/raftgroup", "the router knows ranges and nodes, not groups"},
	{"node/operate", Module + "/raftgroup", "operators' commands go by what nodes say of themselves, not by their groups"},
	{"node/operate", Module + "/transport", "node asks the other nodes and hands on their answers"},
	{"node/join", Module + "/transport", "node asks the other nodes and hands on their answers"},
	{"node/join", Module + "/shard", "a node that comes in holds no range yet"},
	{"router", Module + "/wal", "only replicas and groups write to the log"},
}

// A Violation is an import that the rules forbid.
type Violation struct {
	From, To string
	Why      string
}

// String returns the violation in one sentence.
func (v Violation) String() string {
	return fmt.Sprintf("%s imports %s: %s", v.From, v.To, v.Why)
}

// Graph maps the import path of a package to the paths it imports, tests aside.
type Graph map[string][]string

// Check returns every import of the graph that the rules forbid, sorted. A package of
// the module without a line is a violation too: a new package first gets its place in
// the drawing.
func Check(g Graph) []Violation {
	var out []Violation
	for from, imports := range g {
		at, ok := lineOf(from)
		if !ok {
			out = append(out, Violation{from, "(nothing yet)", "the package stands on no line; give it one in internal/archtest"})
			continue
		}
		for _, to := range imports {
			if why, bad := forbidden(from, at, to); bad {
				out = append(out, Violation{from, to, why})
			}
		}
	}
	slices.SortFunc(out, func(a, b Violation) int { return strings.Compare(a.String(), b.String()) })
	return out
}

// forbidden says whether from, which stands on line at, must not import to.
func forbidden(from string, at int, to string) (why string, bad bool) {
	for _, b := range bans {
		if b.forbids(from, to) {
			return b.why, true
		}
	}
	below, ours := lineOf(to)
	switch {
	case !ours || sameTop(from, to) || below > at:
		return "", false
	case below == at:
		return "they stand on one line: " + lines[at].why, true
	default:
		// The reason is that of the upper line: it says why those below must do
		// without it.
		return fmt.Sprintf("%s stands above: %s", top(to), lines[below].why), true
	}
}

// lineOf returns the index of the line on which a package stands, and false for
// a package outside the module or on no line.
func lineOf(pkg string) (int, bool) {
	name := top(pkg)
	for i, l := range lines {
		if slices.Contains(l.packages, name) {
			return i, true
		}
	}
	return 0, false
}

// top returns the first element of a package's path inside the module, and "" for
// a package outside.
func top(pkg string) string {
	rest, ok := strings.CutPrefix(pkg, Module+"/")
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	return name
}

func sameTop(a, b string) bool { return top(a) != "" && top(a) == top(b) }

// within says whether pkg is dir or lies below it.
func within(pkg, dir string) bool {
	return pkg == dir || strings.HasPrefix(pkg, strings.TrimSuffix(dir, "/")+"/")
}

// Drawing returns the lines as docs/ARCHITECTURE.md shows them, then the reasons.
func Drawing() string {
	var b strings.Builder
	b.WriteString("```\n")
	for _, l := range lines {
		fmt.Fprintf(&b, "%-35s %s\n", strings.Join(l.packages, " | "), l.duty)
	}
	b.WriteString("```\n\n")
	b.WriteString("A line imports only lines below it, and a folder counts as its line. Packages separated by | never\n" +
		"import each other.\n\n")
	b.WriteString("| Package | also never imports |\n| --- | --- |\n")
	var from []string
	banned := map[string][]string{}
	for _, x := range bans {
		to := x.to
		if within(to, Module) {
			to = path.Base(to)
			if x.to == Module {
				to = "anything of Skein"
			}
		}
		if banned[x.from] == nil {
			from = append(from, x.from)
		}
		banned[x.from] = append(banned[x.from], to)
	}
	for _, f := range from {
		fmt.Fprintf(&b, "| %s | %s |\n", f, strings.Join(banned[f], ", "))
	}
	return b.String()
}
