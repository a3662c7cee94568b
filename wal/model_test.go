package wal

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// modelGroup is the expected state of a group, in the simplest form.
type modelGroup struct {
	exists, removed, hasHard bool
	base                     position
	hard                     hardState
	// ents maps an index to its term and data.
	ents map[uint64]modelEntry
	last uint64
}

type modelEntry struct {
	term uint64
	data string
}

func (g modelGroup) clone() modelGroup {
	g.ents = maps.Clone(g.ents)
	return g
}

func (g modelGroup) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "exists=%t removed=%t hard=%t%v base=%v last=%d:", g.exists, g.removed, g.hasHard, g.hard, g.base, g.last)
	for _, i := range slices.Sorted(maps.Keys(g.ents)) {
		fmt.Fprintf(&b, " %d/%d/%.8q", i, g.ents[i].term, g.ents[i].data)
	}
	return b.String()
}

// model is the state of all groups after some number of batches.
type model map[keyspace.GroupID]modelGroup

func (m model) clone() model {
	c := make(model, len(m))
	for id, g := range m {
		c[id] = g.clone()
	}
	return c
}

func (m model) String() string {
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(m)) {
		if g := m[id]; g.exists || g.removed {
			fmt.Fprintf(&b, "group %s: %s\n", id, g)
		}
	}
	return b.String()
}

// observe reads the whole log into a model.
func observe(l *Log) (model, error) {
	m := model{}
	for _, id := range l.Removed() {
		m[id] = modelGroup{removed: true}
	}
	for _, id := range l.Groups() {
		v := l.Group(id)
		g := modelGroup{exists: true, ents: map[uint64]modelEntry{}, last: v.LastIndex()}
		g.base.index, g.base.term = v.Base()
		if hs := v.HardState(); hs != nil {
			g.hard, g.hasHard = hardStateOf(hs), true
		}
		ents, err := v.Entries(v.FirstIndex(), v.LastIndex()+1, 1<<40)
		if err != nil {
			return nil, err
		}
		for _, e := range ents {
			g.ents[e.GetIndex()] = modelEntry{e.GetTerm(), string(e.GetData())}
			if t, err := v.Term(e.GetIndex()); err != nil || t != e.GetTerm() {
				return nil, fmt.Errorf("group %s: term of %d is %d, entry says %d (%w)", id, e.GetIndex(), t, e.GetTerm(), err)
			}
		}
		if uint64(len(ents)) != g.last-g.base.index {
			return nil, fmt.Errorf("group %s: %d entries in (%d, %d]", id, len(ents), g.base.index, g.last)
		}
		m[id] = g
	}
	return m, nil
}

// driver makes random batches and applies them to log and model alike.
type driver struct {
	rng     *rand.Rand
	groups  int
	maxData int
	state   model
	// keep bounds what a compaction leaves, so that the log can be recycled.
	keep uint64
	// pinned is a group that is never compacted, 0 for none.
	pinned keyspace.GroupID
	// hot is how many groups, the first ones, get nine changes out of ten; 0 treats all
	// alike.
	hot int
}

func newDriver(seed uint64, groups int) *driver {
	return &driver{rng: rand.New(rand.NewPCG(seed, 1)), groups: groups, maxData: 200, state: model{}, keep: 8}
}

func testEntries(first, term uint64, data ...string) []*raftpb.Entry {
	var ents []*raftpb.Entry
	for i, d := range data {
		index, term, typ := first+uint64(i), term, raftpb.EntryNormal
		ents = append(ents, &raftpb.Entry{Index: &index, Term: &term, Type: &typ, Data: []byte(d)})
	}
	return ents
}

func testHard(h hardState) *raftpb.HardState {
	return &raftpb.HardState{Term: &h.term, Vote: &h.vote, Commit: &h.commit}
}

// fill puts one to four random changes into the batch.
func (d *driver) fill(b *Batch) {
	for range 1 + d.rng.IntN(4) {
		among := d.groups
		if d.hot > 0 && d.rng.IntN(10) > 0 {
			among = d.hot
		}
		d.change(b, keyspace.GroupID(1+d.rng.IntN(among)))
	}
}

func (d *driver) change(b *Batch, id keyspace.GroupID) {
	g := d.state[id]
	if g.ents == nil {
		g.ents = map[uint64]modelEntry{}
	}
	switch p := d.rng.IntN(100); {
	case p < 65 || id == d.pinned:
		d.append(b, id, &g)
	case p < 85:
		if !g.exists || g.last == g.base.index {
			return
		}
		to := g.last - min(g.last-g.base.index, uint64(d.rng.IntN(int(d.keep))))
		b.Compact(id, to)
		if to > g.base.index {
			g.base = position{to, g.ents[to].term}
			maps.DeleteFunc(g.ents, func(i uint64, _ modelEntry) bool { return i <= to })
		}
	case p < 90:
		at := position{g.last + uint64(d.rng.IntN(50)), g.hard.term + 1}
		g = modelGroup{exists: true, base: at, last: at.index, hard: g.hard, hasHard: g.hasHard, ents: map[uint64]modelEntry{}}
		if d.rng.IntN(2) == 0 {
			g.hard, g.hasHard = hardState{at.term, uint64(d.rng.IntN(3)), at.index}, true
			b.Reset(id, at.index, at.term, testHard(g.hard))
		} else {
			b.Reset(id, at.index, at.term, nil)
		}
	case p < 93:
		b.Remove(id)
		g = modelGroup{removed: true}
	case p < 95:
		b.Forget(id)
		if g.removed {
			g = modelGroup{}
		}
	default:
		if !g.exists {
			g = modelGroup{exists: true, ents: map[uint64]modelEntry{}}
		}
		g.hard, g.hasHard = hardState{g.hard.term + 1, uint64(d.rng.IntN(3)), g.hard.commit}, true
		b.Append(id, testHard(g.hard), nil)
	}
	d.state[id] = g
}

// append adds entries, one time in four over an uncommitted tail.
func (d *driver) append(b *Batch, id keyspace.GroupID, g *modelGroup) {
	if !g.exists {
		*g = modelGroup{exists: true, ents: map[uint64]modelEntry{}}
	}
	first := g.last + 1
	if floor := max(g.base.index, g.hard.commit); d.rng.IntN(4) == 0 && floor < g.last {
		first = floor + 1 + d.rng.Uint64N(g.last-floor)
	}
	term := max(g.hard.term, 1)
	if e, ok := g.ents[first-1]; ok {
		term = max(term, e.term)
	}
	if first <= g.last && d.rng.IntN(2) == 0 {
		term++ // else it is written anew in its term, as package offline does
	}
	var data []string
	for range 1 + d.rng.IntN(3) {
		data = append(data, strings.Repeat(string(rune('a'+d.rng.IntN(26))), d.rng.IntN(d.maxData)))
	}
	ents := testEntries(first, term, data...)
	if len(ents) > 1 && d.rng.IntN(3) == 0 {
		*ents[len(ents)-1].Term++
	}
	maps.DeleteFunc(g.ents, func(i uint64, _ modelEntry) bool { return i >= first })
	for _, e := range ents {
		g.ents[e.GetIndex()] = modelEntry{e.GetTerm(), string(e.GetData())}
		g.last = e.GetIndex()
	}
	var hs *raftpb.HardState
	if d.rng.IntN(2) == 0 {
		commit := max(g.hard.commit, g.base.index)
		commit += d.rng.Uint64N(g.last - commit + 1)
		g.hard, g.hasHard = hardState{max(g.hard.term, ents[len(ents)-1].GetTerm()), 1, commit}, true
		hs = testHard(g.hard)
	}
	b.Append(id, hs, ents)
}

func testOptions(fs vfs.FS) Options {
	return Options{
		FS: fs, Dir: "wal", Clock: clock.Virtual(), SegmentBytes: minSegmentBytes,
		EntryCacheBytes: 8 << 10, TargetBytes: 8 * minSegmentBytes, SmallTailBytes: 2 << 10,
	}
}

func mustOpen(t testing.TB, o Options) *Log {
	t.Helper()
	l, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func mustClose(t testing.TB, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func checkModel(t testing.TB, l *Log, want model) {
	t.Helper()
	got, err := observe(l)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := got.String(), want.String(); g != w {
		t.Fatalf("log differs from the model\ngot:\n%swant:\n%s", g, w)
	}
}

// TestModel runs random batches, with restarts in between, under several shapes of the
// log, and constantly compares the views with the model. The same operations give the
// same results, whatever the cache, segments and targets.
func TestModel(t *testing.T) {
	shapes := map[string]func(*Options){
		"small":          func(*Options) {},
		"no cache":       func(o *Options) { o.EntryCacheBytes = 1 },
		"big":            func(o *Options) { o.SegmentBytes, o.TargetBytes = 256<<10, 1<<20 },
		"rewrites":       func(o *Options) { o.TargetBytes = 4 * o.SegmentBytes },
		"moves":          func(o *Options) { o.TargetBytes = 4 * o.SegmentBytes },
		"one write each": func(o *Options) { o.MaxBatchBytes = 1; o.SpareSegments = 3 },
	}
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			for seed := range *seeds {
				testModel(t, seed, shape)
			}
		})
	}
}

func testModel(t *testing.T, seed uint64, shape func(*Options)) {
	o := testOptions(vfs.NewMem())
	shape(&o)
	d := newDriver(seed, 12)
	moves := strings.HasSuffix(t.Name(), "/moves")
	if moves {
		d.groups, d.keep = 4, 300
	} else if o.TargetBytes == 4*o.SegmentBytes {
		d.groups, d.hot, d.maxData = 40, 2, 60
	}
	l := mustOpen(t, o)
	for i := range 900 {
		b := l.NewBatch()
		d.fill(b)
		b.SetSync(d.rng.IntN(3) > 0)
		l.Submit(b, nil)
		switch {
		case i%40 == 7:
			checkModel(t, l, d.state)
			for _, id := range l.Groups() {
				if moves {
					l.Group(id).Move()
				}
			}
		case i%300 == 299:
			mustClose(t, l)
			l = mustOpen(t, o)
			checkModel(t, l, d.state)
		}
	}
	mustClose(t, l)
}
