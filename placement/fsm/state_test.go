package fsm

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/internal/testkit"
)

// firstIndex is where the stories' groups begin, as in raftgroup.
const firstIndex = 10

// records is an engine of two lines.
type records map[string][]byte

func (r records) Set(k, v []byte) error {
	r[string(k)] = bytes.Clone(v)
	return nil
}

func (r records) Delete(k []byte) error {
	delete(r, string(k))
	return nil
}

// reload returns the state that the records hold.
func (r records) reload(t *testing.T) *State {
	t.Helper()
	s := NewState()
	for _, k := range slices.Sorted(maps.Keys(r)) {
		if err := s.Load([]byte(k), r[k]); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestState tells stories of the placement group's state. After each command the
// state is written, loaded again and compared, and its invariants are checked.
//
//	bootstrap nodes=(1,2,3) splits=(g,p)   the bootstrap state
//	raise to=R / lower to=R / compact at=R / allocate count=N
//	report                             each line: range generation start end nodes…; "-" is an open border
//	created ranges=(1,2)
//	node id=N [add|move] [name=S] [client=URL] [peer=URL] [attributes=K=V] [now=MS]
//	state id=N from=S to=S [now=MS] / remove id=N [now=MS]
//	members nodes=(1,2)                 who holds the placement group from now on
//	begin range=N to=N                  an operation that adds a replica there
//	nodes                              prints the node table
//	setting name=S value=V
//	grant id=N ttl=N / register id=N start=S end=S / revoke ids=(N,M) [incarnation=N] / forget id=N incarnation=N
//	keep key=S                          the range that begins there is to begin there
//	merge left=N [decided] [right=(G,C)] / align left=N op=N from=N to=N / end left=N op=N
//	bind left=N op=N / commit left=N op=N was=(G,C,G,C) / abort left=N op=N   was is generation and configuration of left and right
//	activate|deactivate|observe|pass type=N member=N   an alarm
//	alarms                             prints all alarms and the access index
//	leases                             prints all leases
//	map                                prints the whole map
//	records                            prints the records' bytes
func TestState(t *testing.T) {
	datadriven.Walk(t, "testdata/state", func(t *testing.T, path string) {
		h := &stateStory{records: records{}, index: 10}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return h.run(t, d) })
	})
}

type stateStory struct {
	s       *State
	records records
	index   uint64
}

func (h *stateStory) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "bootstrap":
		h.s = storyBootstrap(t, d).FirstState(firstIndex)
		h.settle(t)
		return h.printMap() + h.printMeta()
	case "map":
		return h.printMap()
	case "leases":
		return h.printLeases()
	case "nodes":
		return h.printNodes()
	case "alarms":
		return h.printAlarms()
	case "holds":
		return h.printHolds()
	case "members":
		h.s.members = nil
		for _, n := range testkit.Args(t, d, "nodes") {
			h.s.members = append(h.s.members, keyspace.Replica{ID: keyspace.ReplicaID(n), Node: keyspace.NodeID(n)})
		}
		return ""
	case "records":
		var b strings.Builder
		for _, k := range slices.Sorted(maps.Keys(h.records)) {
			fmt.Fprintf(&b, "%x: %x\n", k, h.records[k])
		}
		return b.String()
	}
	h.index++
	before := h.s.View(0, 0, nil)
	res := h.s.Apply(h.index, h.effect(t, d))
	h.settle(t)
	after := h.s.View(0, 0, before)
	checkDelta(t, before, after)
	var b strings.Builder
	if res.Err != nil {
		fmt.Fprintf(&b, "%v\n", res.Err)
	}
	if res.Lease != nil {
		fmt.Fprintln(&b, printLease(res.Lease))
	}
	if a := res.Alarm; a != nil {
		fmt.Fprintln(&b, printAlarm(*a))
	}
	if res.Hold != nil {
		fmt.Fprintln(&b, printHold(*res.Hold))
	}
	if o := &res.Operation; o.ID != 0 {
		fmt.Fprintf(&b, "operation %d of range %s: %s, replica %d for %d\n", o.ID, o.Range, o, o.Replica, o.Leaving)
	}
	for _, c := range h.s.leases.take() {
		stays := ""
		if c.Kept {
			stays = "it stays, "
		}
		fmt.Fprintf(&b, "told: %sgone %t, %s\n", stays, c.Gone, printLease(c.Lease))
	}
	if res.First != 0 {
		fmt.Fprintf(&b, "first %s\n", res.First)
	}
	for i := range res.Held {
		fmt.Fprintf(&b, "held %s\n", printDescriptor(&res.Held[i]))
	}
	for _, g := range after.RowsSince(h.index - 1) {
		fmt.Fprintln(&b, printRow(g))
	}
	return b.String() + h.printMeta()
}

// settle writes the state, loads it again and compares.
func (h *stateStory) settle(t *testing.T) {
	t.Helper()
	if err := h.s.Flush(h.records); err != nil {
		t.Fatal(err)
	}
	if err := h.s.Check(); err != nil {
		t.Fatal(err)
	}
	again := h.records.reload(t)
	if again.meta != h.s.meta || !reflect.DeepEqual(again.nodes, h.s.nodes) ||
		!maps.Equal(again.alarms, h.s.alarms) || !maps.EqualFunc(again.settings, h.s.settings, bytes.Equal) ||
		!reflect.DeepEqual(again.all(), h.s.all()) ||
		!reflect.DeepEqual(again.operations, h.s.operations) || !reflect.DeepEqual(again.absorbing, h.s.absorbing) ||
		printLeases(again) != printLeases(h.s) || again.leases.bytes != h.s.leases.bytes {
		t.Fatalf("loaded again:\n%+v\nwritten:\n%+v", again, h.s)
	}
}

// all returns the rows in key order.
func (r rows) all() (all []*Range) {
	r.tree.Ascend(func(g *Range) bool {
		all = append(all, g)
		return true
	})
	return all
}

// checkDelta checks that what changed, put over the old map, gives the new one.
func checkDelta(t *testing.T, before, after *View) {
	t.Helper()
	got := before.With(after.Version, after.RowsSince(before.Version), after.NodeTable(), keyspace.Descriptor{})
	if err := got.Check(); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got.Descriptors(), after.Descriptors()) || !reflect.DeepEqual(got.NodeTable(), after.NodeTable()) {
		t.Fatalf("the delta gives %v, the map is %v", got.Descriptors(), after.Descriptors())
	}
}

func (h *stateStory) effect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	var name, value string
	switch d.Cmd {
	case "raise":
		return RaiseCeiling{To: keyspace.Revision(testkit.Arg(t, d, "to"))}
	case "lower":
		return LowerCeiling{To: keyspace.Revision(testkit.Arg(t, d, "to"))}
	case "compact":
		return Compact{At: keyspace.Revision(testkit.Arg(t, d, "at"))}
	case "allocate":
		return AllocateRanges{Count: testkit.Arg(t, d, "count")}
	case "created":
		var o MarkCreated
		for _, id := range testkit.Args(t, d, "ranges") {
			o.Ranges = append(o.Ranges, keyspace.RangeID(id))
		}
		return o
	case "setting":
		d.ScanArgs(t, "name", &name)
		if d.HasArg("value") {
			d.ScanArgs(t, "value", &value)
		}
		return PutSetting{Name: name, Value: []byte(value)}
	case "keep":
		d.ScanArgs(t, "key", &name)
		return KeepBorder{Key: []byte(strings.Trim(name, "-"))}
	case "report":
		var o Report
		for line := range strings.Lines(d.Input) {
			o.Descriptors = append(o.Descriptors, storyDescriptor(t, line))
		}
		return o
	}
	if o := leaseEffect(t, d); o != nil {
		return o
	}
	if o := h.mergeEffect(t, d); o != nil {
		return o
	}
	if o := nodeEffect(t, d); o != nil {
		return o
	}
	if o := alarmEffect(t, d); o != nil {
		return o
	}
	if o := holdEffect(t, d); o != nil {
		return o
	}
	t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	return nil
}

func (h *stateStory) mergeEffect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	if !d.HasArg("left") {
		return nil
	}
	left := keyspace.RangeID(testkit.Arg(t, d, "left"))
	if d.Cmd == "merge" {
		row := h.s.row(left).Descriptor
		o := BeginOperation{Generation: row.Generation, ConfIndex: row.ConfIndex, Operation: Operation{Range: left, Kind: OperationMerge, Why: "story"}}
		if d.HasArg("decided") {
			o.Operation.Reason = decide.Cold
		}
		if n := testkit.Args(t, d, "right"); n != nil {
			o.Right = RangeVersion{keyspace.Generation(n[0]), n[1]}
		}
		return o
	}
	ref := MergeRef{left, testkit.Arg(t, d, "op")}
	switch d.Cmd {
	case "align":
		return AlignMerge{ref, keyspace.NodeID(testkit.Arg(t, d, "from")), keyspace.NodeID(testkit.Arg(t, d, "to"))}
	case "commit":
		n := testkit.Args(t, d, "was")
		return CommitMerge{ref, RangeVersion{keyspace.Generation(n[0]), n[1]}, RangeVersion{keyspace.Generation(n[2]), n[3]}}
	case "bind":
		return BindMerge{ref}
	case "abort":
		return AbortMerge{ref}
	case "end":
		return EndOperation(ref)
	}
	return nil
}

// spanArgs is the span from start to end, which may both be left out.
func spanArgs(t *testing.T, d *datadriven.TestData) (span keyspace.Span) {
	t.Helper()
	for name, border := range map[string]*[]byte{"start": &span.Start, "end": &span.End} {
		var s string
		if d.HasArg(name) {
			d.ScanArgs(t, name, &s)
			*border = []byte(s)
		}
	}
	return span
}

func leaseEffect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	switch d.Cmd {
	case "grant":
		id, ttl := keyspace.LeaseID(testkit.Arg(t, d, "id")), int64(testkit.Arg(t, d, "ttl"))
		if d.HasArg("start") || d.HasArg("end") {
			return GrantLeaseIn{ID: id, TTL: ttl, Span: spanArgs(t, d)}
		}
		return GrantLease{ID: id, TTL: ttl}
	case "register":
		return RegisterLease{ID: keyspace.LeaseID(testkit.Arg(t, d, "id")), Span: spanArgs(t, d)}
	case "revoke":
		var o RevokeLeases
		var inc uint64
		if d.HasArg("incarnation") {
			inc = testkit.Arg(t, d, "incarnation")
		}
		for _, id := range testkit.Args(t, d, "ids") {
			o.Leases = append(o.Leases, LeaseRef{keyspace.LeaseID(id), keyspace.LeaseIncarnation(inc)})
		}
		return o
	case "revoke-checked", "stay":
		o := RevokeChecked{LeaseRef{keyspace.LeaseID(testkit.Arg(t, d, "id")), keyspace.LeaseIncarnation(testkit.Arg(t, d, "incarnation"))}, keyspace.Revision(testkit.Arg(t, d, "at"))}
		if d.Cmd == "stay" {
			return KeepLease(o)
		}
		return o
	case "forget":
		return RemoveLeases{Leases: []LeaseRef{{keyspace.LeaseID(testkit.Arg(t, d, "id")), keyspace.LeaseIncarnation(testkit.Arg(t, d, "incarnation"))}}}
	}
	return nil
}

func printLease(l *Lease) string {
	checked := ""
	if l.Checked != 0 {
		checked = fmt.Sprintf(" checked at %d", l.Checked)
	}
	return fmt.Sprintf("lease %d incarnation %d ttl %d revoking %t%s in %v", l.ID, l.Incarnation, l.TTL, l.Revoking, checked, l.Spans)
}

func (h *stateStory) printLeases() string { return printLeases(h.s) + h.printMeta() }

func printLeases(s *State) string {
	var b strings.Builder
	s.leases.tree.Ascend(func(l *Lease) bool {
		fmt.Fprintln(&b, printLease(l))
		return true
	})
	return b.String()
}

func storyBootstrap(t *testing.T, d *datadriven.TestData) *Bootstrap {
	t.Helper()
	b := &Bootstrap{Cluster: 0xc1}
	for _, n := range testkit.Args(t, d, "nodes") {
		b.Nodes = append(b.Nodes, Node{ID: keyspace.NodeID(n), Name: fmt.Sprintf("n%d", n), PeerURLs: []string{fmt.Sprintf("http://n%d:2380", n)}})
	}
	for _, a := range d.CmdArgs {
		if a.Key == "splits" {
			for _, v := range a.Vals {
				b.SplitKeys = append(b.SplitKeys, []byte(v))
			}
		}
	}
	if err := b.Validate(); err != nil {
		t.Fatal(err)
	}
	return b
}

func storyDescriptor(t *testing.T, line string) keyspace.Descriptor {
	t.Helper()
	w := strings.Fields(line)
	var d keyspace.Descriptor
	if _, err := fmt.Sscan(w[0]+" "+w[1], (*uint64)(&d.Range), (*uint64)(&d.Generation)); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	if w[2] != "-" {
		d.Span.Start = []byte(w[2])
	}
	if w[3] != "-" {
		d.Span.End = []byte(w[3])
	}
	for i, n := range w[4:] {
		var node uint64
		if _, err := fmt.Sscan(n, &node); err != nil {
			t.Fatal(err)
		}
		d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: keyspace.NodeID(node)})
	}
	return d
}

func printDescriptor(d *keyspace.Descriptor) string {
	var nodes []string
	for _, r := range d.Replicas {
		nodes = append(nodes, r.Node.String())
	}
	return fmt.Sprintf("range %s generation %d %s on %s", d.Range, d.Generation, d.Span, strings.Join(nodes, " "))
}

func printRow(g *Range) string {
	s := printDescriptor(&g.Descriptor) + ", leader on " + g.Preferred.String()
	if !g.Created {
		s += ", not created"
	}
	if g.Kept {
		s += ", kept"
	}
	return fmt.Sprintf("%s, changed at %d", s, g.Changed)
}

func (h *stateStory) printMap() string {
	var b strings.Builder
	h.s.tree.Ascend(func(g *Range) bool {
		fmt.Fprintln(&b, printRow(g))
		return true
	})
	return b.String()
}

func (h *stateStory) printMeta() string {
	m := &h.s.meta
	return fmt.Sprintf("version %d ceiling %d compacted %d settings %d next range %s next replica %d\n",
		m.Changed, m.Ceiling, m.Compacted, m.Settings, m.NextRange, m.NextReplica)
}

// TestBootstrapIsDeterministic checks that founders that list everything in another
// order write the same records.
func TestBootstrapIsDeterministic(t *testing.T) {
	a := Bootstrap{Cluster: 9, SplitKeys: [][]byte{[]byte("m"), []byte("c"), []byte("m")}, Nodes: []Node{
		{ID: 30, Name: "c", PeerURLs: []string{"http://c:1"}}, {ID: 10, Name: "a"}, {ID: 20, Name: "b"},
	}}
	b := a
	b.Nodes, b.SplitKeys = slices.Clone(a.Nodes), slices.Clone(a.SplitKeys)
	slices.Reverse(b.Nodes)
	slices.Reverse(b.SplitKeys)
	ra, rb := records{}, records{}
	for _, e := range []struct {
		b *Bootstrap
		r records
	}{{&a, ra}, {&b, rb}} {
		if err := e.b.Validate(); err != nil {
			t.Fatal(err)
		}
		if err := e.b.FirstState(firstIndex).Flush(e.r); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(ra, rb) {
		t.Fatalf("two founders write\n%x\n%x", ra, rb)
	}
	if !reflect.DeepEqual(a.PlacementVoters(), b.PlacementVoters()) {
		t.Fatalf("voters %v and %v", a.PlacementVoters(), b.PlacementVoters())
	}
}

// TestBootstrapSpread checks that replicas and leaders are spread evenly.
func TestBootstrapSpread(t *testing.T) {
	for nodes := 1; nodes <= 9; nodes++ {
		b := Bootstrap{Cluster: 1}
		for n := range nodes {
			b.Nodes = append(b.Nodes, Node{ID: keyspace.NodeID(100 - n)})
		}
		for k := range 8*nodes - 1 {
			b.SplitKeys = append(b.SplitKeys, []byte{byte(k + 1)})
		}
		replicas, leaders := map[keyspace.NodeID]int{}, map[keyspace.NodeID]int{}
		for _, d := range b.Ranges() {
			leaders[d.Replicas[0].Node]++
			if len(d.Replicas) != min(3, nodes) {
				t.Fatalf("%d nodes: range %s has %d replicas", nodes, d.Range, len(d.Replicas))
			}
			for _, r := range d.Replicas {
				replicas[r.Node]++
			}
		}
		for _, n := range b.Nodes {
			if leaders[n.ID] != 8 || replicas[n.ID] != 8*min(3, nodes) {
				t.Errorf("%d nodes: node %s has %d leaders and %d replicas", nodes, n.ID, leaders[n.ID], replicas[n.ID])
			}
		}
		want := map[bool]int{true: 5, false: min(3, nodes)}[nodes >= 5]
		if got := len(b.PlacementVoters()); got != want {
			t.Errorf("%d nodes: %d placement replicas, want %d", nodes, got, want)
		}
	}
}

// TestReportsInAnyOrder splits a keyspace at random and reports the descriptors of
// every moment in random order, some lost, as they come from nodes that know
// nothing of each other. The map covers the keyspace exactly once after each
// report (check), and once the newest of all are reported it is the truth. An old
// word never wins over a newer one (trap 11, as far as there are no orders to move).
func TestReportsInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		f := Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1}, {ID: 2}, {ID: 3}}}
		s := f.FirstState(firstIndex)
		truth := map[keyspace.RangeID]keyspace.Descriptor{}
		for _, d := range f.Ranges() {
			truth[d.Range] = d
		}
		var reports [][]keyspace.Descriptor
		for range 12 {
			reports = append(reports, splitTruth(rng, s, truth))
		}
		rng.Shuffle(len(reports), func(i, j int) { reports[i], reports[j] = reports[j], reports[i] })
		for i, r := range reports {
			if rng.IntN(3) > 0 {
				s.Apply(uint64(20+i), Report{Descriptors: r})
				if err := s.Check(); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
			}
		}
		var newest []keyspace.Descriptor
		for _, d := range truth {
			newest = append(newest, d)
		}
		if res := s.Apply(100, Report{Descriptors: newest}); len(res.Held) > 0 {
			t.Fatalf("seed %d: held %v", seed, res.Held)
		}
		if err := s.Check(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for id, d := range truth {
			if got := s.row(id); got == nil || !reflect.DeepEqual(got.Descriptor, d) {
				t.Fatalf("seed %d: range %s is %+v, in truth %+v", seed, id, got, d)
			}
		}
	}
}

// splitTruth splits one range and returns what its leader reports.
func splitTruth(rng *rand.Rand, s *State, truth map[keyspace.RangeID]keyspace.Descriptor) []keyspace.Descriptor {
	for {
		key := []byte{byte(1 + rng.IntN(255)), byte(1 + rng.IntN(255))}
		for _, id := range slices.Sorted(maps.Keys(truth)) {
			parent := truth[id]
			if !parent.Span.Contains(key) || bytes.Equal(parent.Span.Start, key) {
				continue
			}
			child := parent
			child.Range = s.Apply(1, AllocateRanges{Count: 1}).First
			parent.Generation++
			child.Generation = parent.Generation
			child.Span.Start, parent.Span.End = key, key
			truth[parent.Range], truth[child.Range] = parent, child
			return []keyspace.Descriptor{parent, child}
		}
	}
}

// TestCompactErrors walks etcd's rule from the empty store on.
func TestCompactErrors(t *testing.T) {
	s := (&Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1}}}).FirstState(firstIndex)
	s.Apply(11, RaiseCeiling{To: 100})
	for _, c := range []struct {
		at   keyspace.Revision
		want error
	}{{0, nil}, {0, kverror.Compacted}, {5, nil}, {5, kverror.Compacted}, {4, kverror.Compacted}, {101, kverror.FutureRevision}, {100, nil}} {
		if got := s.Apply(12, Compact{At: c.at}).Err; !errors.Is(kindOf(got), c.want) {
			t.Errorf("compact at %d: %v, want %v", c.at, got, c.want)
		}
	}
}

func kindOf(err error) error {
	if err == nil {
		return nil
	}
	return kverror.Of(err).Kind
}

// TestMergeBesideTheEndOfALease: a committed merge sets the record of a lease that is being
// ended anew, whatever it lists. A live record that lists the whole span stays as it is.
func TestMergeBesideTheEndOfALease(t *testing.T) {
	s := (&Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1}}}).FirstState(firstIndex)
	span := func(start, end string) keyspace.Span { return keyspace.Span{Start: []byte(start), End: []byte(end)} }
	for id := keyspace.LeaseID(1); id <= 3; id++ {
		s.Apply(11, GrantLease{ID: id, TTL: 60})
		s.Apply(12, RegisterLease{ID: id, Span: span("c", "m")})
	}
	s.Apply(13, RegisterLease{ID: 3, Span: span("m", "s")})
	s.Apply(14, RevokeLeases{Leases: []LeaseRef{{ID: 2}, {ID: 3}}})
	before := [4]*Lease{}
	for id := range before {
		before[id], _ = s.leases.get(keyspace.LeaseID(id))
	}
	text := printLeases(s)
	s.leases.widen(span("s", "t"))
	s.leases.widen(span("d", "e"))
	for id := keyspace.LeaseID(1); id <= 3; id++ {
		if l, _ := s.leases.get(id); (l == before[id]) != (id == 1) {
			t.Errorf("lease %d: the same record: %t", id, l == before[id])
		}
	}
	if got := printLeases(s); got != text {
		t.Errorf("got %s, want %s", got, text)
	}
}

// TestLeaseBounds: what would take more than its share is refused, changes nothing, and
// finds room again.
func TestLeaseBounds(t *testing.T) {
	s := (&Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1}}}).FirstState(firstIndex)
	border := func(i int) []byte { return []byte{byte(i >> 8), byte(i), 1} }
	s.Apply(11, GrantLease{ID: 1, TTL: 60})
	for i := range maxLeaseSpans {
		if err := s.Apply(12, RegisterLease{ID: 1, Span: keyspace.Span{Start: border(i), End: border(i + 1)}}).Err; err != nil {
			t.Fatalf("span %d: %v", i, err)
		}
	}
	before := printLeases(s)
	far := RegisterLease{ID: 1, Span: keyspace.Span{Start: []byte{0xff}}}
	if got := kindOf(s.Apply(13, far).Err); !errors.Is(got, kverror.TooManyRanges) || printLeases(s) != before {
		t.Errorf("a span too many: %v", got)
	}
	if err := s.Apply(14, RegisterLease{ID: 1}).Err; err != nil {
		t.Errorf("the span that covers them all: %v", err)
	}
	wide := bytes.Repeat([]byte{1}, MaxLeaseSpanBytes/2)
	s.Apply(15, GrantLease{ID: 2, TTL: 60})
	if err := s.Apply(16, RegisterLease{ID: 2, Span: keyspace.Span{Start: wide, End: append([]byte{2}, wide[1:]...)}}).Err; err != nil {
		t.Error(err)
	}
	if got := kindOf(s.Apply(17, RegisterLease{ID: 2, Span: keyspace.Span{Start: []byte{3}}}).Err); !errors.Is(got, kverror.TooManyRanges) {
		t.Errorf("borders too long: %v", got)
	}
	id := keyspace.LeaseID(3)
	for ; s.leases.bytes+leaseOverheadBytes <= maxLeaseBytes; id++ {
		if err := s.Apply(18, GrantLease{ID: id, TTL: 60}).Err; err != nil {
			t.Fatal(err)
		}
	}
	if got := kindOf(s.Apply(19, GrantLease{ID: id, TTL: 60}).Err); !errors.Is(got, kverror.TooManyLeases) {
		t.Errorf("a lease too many: %v", got)
	}
	if got := kindOf(s.Apply(20, RegisterLease{ID: 3, Span: keyspace.Span{Start: wide}}).Err); !errors.Is(got, kverror.TooManyLeases) {
		t.Errorf("a span too many: %v", got)
	}
	s.Apply(21, RevokeLeases{Leases: []LeaseRef{{ID: 2}}})
	s.Apply(22, RemoveLeases{Leases: []LeaseRef{{ID: 2, Incarnation: 15}}})
	if err := s.Apply(23, GrantLease{ID: id, TTL: 60}).Err; err != nil {
		t.Errorf("where there is room again: %v", err)
	}
}
