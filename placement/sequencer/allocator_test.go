package sequencer

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/internal/testkit"
)

// TestAllocator tells the sequencer's stories: each file is one. Commands feed the
// allocator of one node; the output is what it wants done, then its state.
//
//	lead term=T ceiling=C           an entry of term T is applied, C is the old ceiling
//	follow [leader=N]               leadership is lost
//	ask node=N boot=B number=K      a batch arrives; each input line is "range count"
//	advance lease=true|false        allocate; the lease holds or not
//	round number=R ok=true|false    a ReadIndex round has ended
//	applied term=T ceiling=C        the proposed ceiling is applied
//	dropped term=T                  it was certainly not appended
//	retry                           the pause after that is over
//	withdraw node=N                 the caller of the node's batch has left
//	end next=N / resume             a planned end of the allocations, and its failure
//	observe compacted=C settings=S
//	load phase=P position=R ceiling=C  the load is in the phase, of 1 bulk, 2 follow, 3 finished
//	log term=T after=R              reads the allocation log
func TestAllocator(t *testing.T) {
	datadriven.Walk(t, "testdata/allocator", func(t *testing.T, path string) {
		h := &allocatorStory{c: newAllocator(newAllocationLog(4))}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			return h.run(t, d)
		})
	})
}

type allocatorStory struct {
	c    *allocator
	asks []*waitingBatch
}

func (h *allocatorStory) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var out output
	switch d.Cmd {
	case "lead":
		out = h.c.lead(testkit.Arg(t, d, "term"), keyspace.Revision(testkit.Arg(t, d, "ceiling")))
	case "follow":
		var leader uint64
		if d.HasArg("leader") {
			leader = testkit.Arg(t, d, "leader")
		}
		out = h.c.follow(keyspace.NodeID(leader))
	case "ask":
		a := h.ask(t, d)
		h.asks = append(h.asks, a)
		out = h.c.arrive(a)
	case "advance":
		out = h.c.advance(flag(t, d, "lease"))
	case "round":
		h.c.roundDone(testkit.Arg(t, d, "number"), flag(t, d, "ok"))
	case "applied":
		out = h.c.ceilingApplied(testkit.Arg(t, d, "term"), keyspace.Revision(testkit.Arg(t, d, "ceiling")))
	case "dropped":
		h.c.ceilingDropped(testkit.Arg(t, d, "term"))
	case "retry":
		out = h.c.retryCeiling()
	case "withdraw":
		for _, a := range h.asks {
			if a.from.Node == keyspace.NodeID(testkit.Arg(t, d, "node")) {
				h.c.withdraw(a)
			}
		}
	case "end":
		out = h.c.end(keyspace.NodeID(testkit.Arg(t, d, "next")))
	case "close":
		out = h.c.close()
	case "resume":
		out = h.c.resume()
	case "observe":
		h.c.observe(keyspace.Revision(testkit.Arg(t, d, "compacted")), keyspace.Revision(testkit.Arg(t, d, "settings")), keyspace.AccessIndex(optional(t, d, "access")))
	case "load":
		l := &fsm.Loading{Phase: fsm.LoadPhase(testkit.Arg(t, d, "phase")), Source: "a test", Position: keyspace.Revision(testkit.Arg(t, d, "position"))}
		h.c.observeLoad(l, keyspace.Revision(testkit.Arg(t, d, "ceiling")))
	case "log":
		return h.log(testkit.Arg(t, d, "term"), keyspace.Revision(testkit.Arg(t, d, "after")))
	default:
		t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
	return h.print(&out)
}

// optional is an argument that may be left out.
func optional(t *testing.T, d *datadriven.TestData, name string) uint64 {
	t.Helper()
	if !d.HasArg(name) {
		return 0
	}
	return testkit.Arg(t, d, name)
}

func flag(t *testing.T, d *datadriven.TestData, name string) bool {
	t.Helper()
	var b bool
	d.ScanArgs(t, name, &b)
	return b
}

func (h *allocatorStory) ask(t *testing.T, d *datadriven.TestData) *waitingBatch {
	t.Helper()
	boot := keyspace.BootID(testkit.Arg(t, d, "boot"))
	a := &waitingBatch{
		from:  Process{Node: keyspace.NodeID(testkit.Arg(t, d, "node")), Boot: boot},
		Batch: Batch{Boot: boot, Number: testkit.Arg(t, d, "number")},
	}
	for line := range strings.Lines(d.Input) {
		var r, n uint64
		if _, err := fmt.Sscanf(line, "%d %d", &r, &n); err != nil {
			t.Fatalf("%s: %q: %v", d.Pos, line, err)
		}
		it := Item{Range: keyspace.RangeID(r), Generation: 1, Count: uint32(n)}
		if _, seen, ok := strings.Cut(line, "seen="); ok {
			at, err := strconv.ParseUint(strings.TrimSpace(seen), 10, 64)
			if err != nil {
				t.Fatalf("%s: %q: %v", d.Pos, line, err)
			}
			it.Permit = keyspace.PermitAt(keyspace.AccessIndex(at))
		}
		a.Items = append(a.Items, it)
	}
	return a
}

func (h *allocatorStory) print(out *output) string {
	var b strings.Builder
	for _, a := range out.answers {
		fmt.Fprintf(&b, "answer node=%s boot=%s number=%d: ", a.batch.from.Node, a.batch.from.Boot, a.batch.Number)
		if a.err != nil {
			fmt.Fprintf(&b, "%v%s\n", a.err, hint(a.err))
			continue
		}
		fmt.Fprintf(&b, "term %d compacted %d settings %d:", a.grant.Term, a.grant.Compacted, a.grant.Settings)
		a.grant.Answers(a.batch.Items, func(i int, s keyspace.SequenceAnswer) {
			if s.Err != nil {
				fmt.Fprintf(&b, " r%s %v", a.batch.Items[i].Range, kverror.Of(s.Err).Kind)
				return
			}
			if s.First == 0 {
				fmt.Fprintf(&b, " read at %d", s.Current)
				return
			}
			fmt.Fprintf(&b, " r%s %d-%d", a.batch.Items[i].Range, s.First, s.Current)
		})
		fmt.Fprintln(&b)
	}
	if out.raise != 0 {
		fmt.Fprintf(&b, "propose ceiling %d\n", out.raise)
	}
	if out.lower != 0 {
		fmt.Fprintf(&b, "propose lowering to %d\n", out.lower)
	}
	if out.readIndex != 0 {
		fmt.Fprintf(&b, "begin ReadIndex round %d\n", out.readIndex)
	}
	var waiting []string
	for _, a := range h.c.waiting {
		waiting = append(waiting, fmt.Sprintf("%s/%d", a.from.Node, a.Number))
	}
	fmt.Fprintf(&b, "%s term=%d last=%d ceiling=%d waiting=%v\n", h.c.phase, h.c.term, h.c.last, h.c.ceiling, waiting)
	return b.String()
}

func hint(err error) string {
	if l := kverror.Of(err).Leader; l != 0 {
		return " (ask node " + l.String() + ")"
	}
	return ""
}

func (h *allocatorStory) log(term uint64, after keyspace.Revision) string {
	dst := make([]Allocation, 16)
	n, last, err := h.c.log.Read(term, after, dst)
	if err != nil {
		return err.Error() + "\n"
	}
	var b strings.Builder
	for _, e := range dst[:n] {
		fmt.Fprintf(&b, "%d-%d range %s generation %d\n", e.First, e.Last(), e.Range, e.Generation)
	}
	fmt.Fprintf(&b, "up to %d\n", last)
	return b.String()
}

// TestAllocationLogBounds fills a log beyond its bound and reads it in parts.
func TestAllocationLogBounds(t *testing.T) {
	l := newAllocationLog(3)
	l.restart(7, 100)
	for i := range keyspace.Revision(10) {
		l.append(Allocation{First: 101 + i, Count: 1, Range: keyspace.RangeID(1 + i), Generation: 1})
	}
	term, after, last := l.Bounds()
	if term != 7 || after != 107 || last != 110 {
		t.Fatalf("the log of three entries holds (%d, %d] of term %d", after, last, term)
	}
	dst := make([]Allocation, 2)
	var got []keyspace.Revision
	for at := after; at < last; {
		n, _, err := l.Read(7, at, dst)
		if err != nil || n == 0 {
			t.Fatalf("read after %d: %d entries, %v", at, n, err)
		}
		for _, e := range dst[:n] {
			got = append(got, e.First)
		}
		at = dst[n-1].Last()
	}
	if want := []keyspace.Revision{108, 109, 110}; !slices.Equal(got, want) {
		t.Fatalf("read %v, want %v", got, want)
	}
	if _, _, err := l.Read(7, 106, dst); err == nil {
		t.Fatal("a revision that was overwritten was read")
	}
	if _, _, err := l.Read(6, 108, dst); err == nil {
		t.Fatal("another term's log was read")
	}
}

// A revision of several ranges has an entry for each, and none of them ever grows: who
// reads up to it learns of all.
func TestAllocationLogOfSeveralRanges(t *testing.T) {
	l := newAllocationLog(16)
	l.restart(5, 10)
	l.append(Allocation{First: 11, Count: 2, Range: 1, Generation: 1})
	l.append(Allocation{First: 13, Count: 1, Range: 1, Generation: 1}, keyspace.RangeAt{Range: 2, Generation: 4}, keyspace.RangeAt{Range: 3, Generation: 4})
	l.append(Allocation{First: 14, Count: 1, Range: 3, Generation: 4})
	l.append(Allocation{First: 15, Count: 1, Range: 3, Generation: 4})
	got := make([]Allocation, 9)
	n, last, err := l.Read(5, 10, got)
	want := []Allocation{{11, 3, 1, 1}, {13, 1, 2, 4}, {13, 1, 3, 4}, {14, 2, 3, 4}}
	if err != nil || last != 15 || !slices.Equal(got[:n], want) {
		t.Fatalf("%v up to %d, %v", got[:n], last, err)
	}
}

// A reader of the log in parts gets all ranges of a revision at a time, and continues behind
// the last revision that it has read.
func TestAllocationLogIsReadByWholeRevisions(t *testing.T) {
	l := newAllocationLog(16)
	l.restart(5, 10)
	also := func(ids ...keyspace.RangeID) (rs []keyspace.RangeAt) {
		for _, id := range ids {
			rs = append(rs, keyspace.RangeAt{Range: id, Generation: 1})
		}
		return rs
	}
	l.append(Allocation{First: 11, Count: 2, Range: 1, Generation: 1})
	l.append(Allocation{First: 13, Count: 1, Range: 2, Generation: 1}, also(3, 4)...)
	l.append(Allocation{First: 14, Count: 1, Range: 4, Generation: 1}, also(5)...)
	l.append(Allocation{First: 15, Count: 1, Range: 5, Generation: 1})
	for size := 3; size <= 8; size++ {
		dst := make([]Allocation, size)
		var got []Allocation
		for at := keyspace.Revision(10); at < 15; {
			n, last, err := l.Read(5, at, dst)
			if err != nil || n == 0 || last <= at || last != dst[n-1].Last() {
				t.Fatalf("parts of %d: %v up to %d behind %d, %v", size, dst[:n], last, at, err)
			}
			got, at = append(got, dst[:n]...), last
		}
		want := []Allocation{{11, 2, 1, 1}, {13, 1, 2, 1}, {13, 1, 3, 1}, {13, 1, 4, 1}, {14, 1, 4, 1}, {14, 1, 5, 1}, {15, 1, 5, 1}}
		if !slices.Equal(got, want) {
			t.Fatalf("parts of %d: %v, want %v", size, got, want)
		}
	}
}

// The ceiling is as far ahead as eight of its commits need, at least CeilingBlock and at most MaxCeilingBlock. When the rate
// has risen, batches wait for the first few commits and not behind them. When it has fallen, so does the gap that a crash
// would leave, when the last large blocks are used up.
func TestCeilingFollowsTheRate(t *testing.T) {
	const commit = 4 // a batch each moment; a ceiling is committed so many of them later
	c := newAllocator(newAllocationLog(16))
	c.lead(6, 1)
	number, moment, raised, commits := uint64(0), 0, map[int]keyspace.Revision{}, 0
	for _, phase := range []struct {
		name     string
		each     uint32 // revisions of a batch
		moments  int
		settling int               // commits for which batches may wait
		most     keyspace.Revision // how far the ceiling may be ahead afterwards
	}{
		{"few", 10, 10_000, 1, CeilingBlock},
		{"many", 1000, 1000, 2, blockCommits * commit * 1000},
		{"as many as fit into a batch", CeilingBlock, 1000, 4, MaxCeilingBlock},
		{"few again", 10, 40_000, 0, CeilingBlock},
	} {
		begun, ahead := commits, keyspace.Revision(0)
		for i := range phase.moments {
			if to, ok := raised[moment]; ok {
				c.ceilingApplied(6, to)
				commits++
			}
			number++
			b := Batch{Boot: 1, Number: number, Items: []Item{{Range: 1, Generation: 1, Count: phase.each}}}
			c.arrive(&waitingBatch{from: Process{Node: keyspace.NodeID(number), Boot: 1}, Batch: b})
			if out := c.advance(true); out.raise != 0 {
				raised[moment+commit] = out.raise
			}
			moment++
			if len(c.waiting) > 0 && commits > begun+phase.settling {
				t.Fatalf("%s: %d batches wait for a ceiling behind %d commits", phase.name, len(c.waiting), commits-begun)
			}
			if ahead = c.ceiling - c.last; ahead > MaxCeilingBlock || i > phase.moments/2 && ahead > phase.most {
				t.Fatalf("%s: the ceiling is %d ahead, more than %d", phase.name, ahead, phase.most)
			}
		}
		t.Logf("%s: %d commits, %d ahead at the end", phase.name, commits-begun, ahead)
	}
}
