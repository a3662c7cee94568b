package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
)

// merging is pretended ranges that are split and merged too.
type merging struct {
	*pretended
	// Guarded by pretended's mu: what each left range is bound to, when right ones were
	// frozen, and whether that is refused.
	bound   map[keyspace.RangeID]keyspace.MergeOrder
	frozen  []time.Time
	refuses bool
}

// newMerging bootstraps a cluster whose ranges are merged after so long, with a range more than
// borders.
func newMerging(t *testing.T, seed uint64, after time.Duration, borders ...string) *merging {
	t.Helper()
	m := mergingRig(t, seed, after, borders...)
	m.startAll()
	return m
}

// mergingRig is newMerging where nothing runs yet.
func mergingRig(t *testing.T, seed uint64, after time.Duration, borders ...string) *merging {
	t.Helper()
	m := &merging{pretended: pretendedRig(t, seed, 3, borders...), bound: map[keyspace.RangeID]keyspace.MergeOrder{}}
	m.mergeAfter = after
	m.mover = func() driver.Mover { return m }
	for id := range m.bytes {
		m.bytes[id] = 1 << 20
	}
	return m
}

// Merge implements driver.Merger.
func (m *merging) Merge(_ context.Context, _ keyspace.NodeID, o keyspace.MergeOrder) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch o.Step {
	case keyspace.MergeBind:
		m.bound[o.Range] = o
	case keyspace.MergeFreeze:
		m.frozen = append(m.frozen, time.Now())
		if m.refuses {
			return kverror.Busy
		}
	case keyspace.MergeAbsorb:
		b, left := m.bound[o.Range], m.all[o.Range]
		right := m.all[b.Other]
		if b.ID != o.ID || right == nil {
			break // once more
		}
		left.mu.Lock()
		left.d.Span, left.d.Generation = b.Hull, max(left.d.Generation, right.d.Generation)+1
		left.mu.Unlock()
		m.bytes[o.Range] += m.bytes[b.Other]
		m.load[o.Range] += m.load[b.Other]
		delete(m.all, b.Other)
	case keyspace.MergeStore, keyspace.MergeSettle, keyspace.MergeHold, keyspace.MergeRelease:
	}
	return nil
}

// split has a range split at a key, by itself, and returns the child.
func (m *merging) split(id keyspace.RangeID, key string) keyspace.RangeID {
	m.t.Helper()
	ids, err := m.leader().client.RangeIDs(m.t.Context(), 1)
	if err != nil {
		m.t.Fatal(err)
	}
	m.mu.Lock()
	p := m.all[id]
	p.mu.Lock()
	child := p.d
	child.Range, child.Span.Start, child.Replicas = ids[0], []byte(key), slices.Clone(p.d.Replicas)
	p.d.Span.End = []byte(key)
	p.d.Generation++
	child.Generation = p.d.Generation
	left := p.d
	c := newPretend(m.t, rand.New(rand.NewPCG(1, uint64(child.Range))), child)
	c.leader, c.report = p.leader, p.report
	p.mu.Unlock()
	m.all[child.Range], m.bytes[child.Range] = c, 1<<20
	m.mu.Unlock()
	if err := m.leader().service.propose(m.t.Context(), m.leader().service.machine.leaderState().Term, fsm.Report{Descriptors: []keyspace.Descriptor{left, child}}).Err; err != nil {
		m.t.Fatal(err)
	}
	return child.Range
}

// set gives a range a size and a load.
func (m *merging) set(id keyspace.RangeID, bytes, load int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes[id], m.load[id] = bytes, load
}

// borders returns where the ranges of the map begin, but for the first.
func (m *merging) borders() (keys []string) {
	m.t.Helper()
	for _, d := range m.leader().service.View().Descriptors()[1:] {
		keys = append(keys, string(d.Span.Start))
	}
	return keys
}

// want fails where the borders are not these.
func (m *merging) want(when string, keys ...string) {
	m.t.Helper()
	if got := m.borders(); !slices.Equal(got, keys) {
		m.t.Fatalf("%s: the borders are %q, want %q", when, got, keys)
	}
}

// Neighbours become one when they have been small and cold for as long as they have to be old,
// and not before. Ranges stay that are large or warm, or whose border the bootstrap or
// an operator keeps. A merge that somebody asks for happens all the same.
func TestSmallColdNeighboursMerge(t *testing.T) {
	virtually(t, func(t *testing.T) {
		const after = time.Minute
		m := newMerging(t, 81, after, "m")
		time.Sleep(10 * time.Second)
		d := m.split(1, "d")
		h := m.split(d, "h")
		p := m.split(2, "p")
		v := m.split(p, "v")
		ctx, c := t.Context(), m.nodes[1].client
		if err := c.KeepBorder(ctx, []byte("h")); err != nil {
			t.Fatal(err)
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		if err := c.KeepBorder(short, []byte("hh")); err == nil {
			t.Error("a border that is not there is kept")
		}
		cancel()
		m.set(p, 64<<20, 0)
		m.set(v, 5<<20, 3000)
		time.Sleep(after - 20*time.Second)
		m.want("young", "d", "h", "m", "p", "v")
		time.Sleep(40 * time.Second)
		m.want("old enough", "h", "m", "p", "v")
		time.Sleep(2 * after)
		m.want("much later", "h", "m", "p", "v")
		// Cold, and yet too large for the one and warm a moment ago for the other.
		m.set(v, 5<<20, 0)
		time.Sleep(after - 20*time.Second)
		m.want("cold not long ago", "h", "m", "p", "v")
		m.set(p, 50<<20, 0)
		time.Sleep(after - 20*time.Second)
		m.want("small not long ago", "h", "m", "p", "v")
		time.Sleep(after)
		if got := m.borders(); len(got) != 3 {
			t.Fatalf("small and cold for long: the borders are %q", got)
		}
		time.Sleep(2 * after)
		m.want("what was merged is merged again", "h", "m")
		time.Sleep(2 * after)
		m.want("in the end", "h", "m")
		op := m.beginOn(ctx, c, 1)
		m.await(time.Minute, "the merge that was asked for", func() error {
			if got := m.borders(); !slices.Equal(got, []string{"m"}) {
				return fmt.Errorf("merge %d with range %s of %s: the borders are %q", op.ID, op.Right, h, got)
			}
			return nil
		})
		m.split(1, "h")
		time.Sleep(2 * after)
		m.want("the border is kept no more", "m")
	})
}

func (m *merging) beginOn(ctx context.Context, c *Client, left keyspace.RangeID) fsm.Operation {
	m.t.Helper()
	op, err := c.BeginOperation(ctx, fsm.Operation{Range: left, Kind: fsm.OperationMerge, Why: "asked for"})
	if err != nil {
		m.t.Fatal(err)
	}
	return op
}

// A merge that fails is tried again, each time twice as late, and not for ever. It is tried
// again when one of the two ranges has changed. Paused and switched off, nothing is merged.
func TestFailingMergeBacksOff(t *testing.T) {
	virtually(t, func(t *testing.T) {
		const after = 30 * time.Second
		m := newMerging(t, 82, after)
		m.refuses = true
		time.Sleep(10 * time.Second)
		m.split(1, "m")
		time.Sleep(36 * after)
		m.mu.Lock()
		tries := slices.Clone(m.frozen)
		m.refuses = false
		m.mu.Unlock()
		if len(tries) != 5 {
			t.Fatalf("it was tried at %v", tries)
		}
		for i := 1; i < len(tries); i++ {
			if gap, want := tries[i].Sub(tries[i-1]), after<<(i-1); gap < want-want/100 || gap > want+10*time.Second {
				t.Errorf("try %d came %v after the one before, want %v", i, gap, want)
			}
		}
		m.want("given up", "m")
		m.split(1, "c")
		time.Sleep(after + 20*time.Second)
		if got := m.borders(); len(got) != 1 {
			t.Errorf("a change of a range: the borders are %q", got)
		}
		time.Sleep(2 * after)
		m.want("merged after all")
	})
}

// Nothing is merged by itself where that is switched off, or decisions are paused.
func TestMergesAreSwitchedOff(t *testing.T) {
	for _, off := range []bool{true, false} {
		virtually(t, func(t *testing.T) {
			after := time.Minute
			if off {
				after = -1
			}
			m := newMerging(t, 83, after)
			time.Sleep(10 * time.Second)
			if err := m.leader().client.SetPaused(t.Context(), !off); err != nil {
				t.Fatal(err)
			}
			m.split(1, "m")
			time.Sleep(4 * time.Minute)
			m.want("switched off", "m")
			if off {
				return
			}
			if err := m.leader().client.SetPaused(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Second)
			m.want("resumed")
		})
	}
}

// However small the bounds of splits are, neighbours are merged by what they have now, not by
// what they had when it was reported. Nothing is merged that would soon be split again, and
// small cold neighbours are merged. A split range is not merged before it is old enough.
func TestSmallBoundsAreMergedByWhatRangesHave(t *testing.T) {
	for _, c := range []struct{ bytes, load int64 }{{bytes: 1 << 20}, {bytes: 3 << 20}, {load: 32}} { // 0 is the default
		virtually(t, func(t *testing.T) {
			const after = 40 * time.Second
			m := mergingRig(t, 85, after)
			m.rangeMaxBytes, m.rangeSplitLoad = c.bytes, c.load
			m.startAll()
			time.Sleep(10 * time.Second)
			d := m.split(1, "d")
			ids := []keyspace.RangeID{1, d, m.split(d, "h")}
			have := func(part int64) {
				for _, id := range ids {
					m.set(id, c.bytes/part, c.load/part)
				}
			}
			have(64)
			time.Sleep(15 * time.Second) // which is told
			have(3)
			time.Sleep(2 * after)
			m.want("all three are just below the bound", "d", "h")
			have(24)
			time.Sleep(after - 20*time.Second)
			m.want("small and cold not long ago", "d", "h")
			time.Sleep(2 * after)
			m.want("small and cold")
			m.split(1, "m")
			time.Sleep(after - 10*time.Second)
			m.want("split not long ago", "m")
		})
	}
}

// Merges by themselves are switched off and on while the cluster runs, whatever its nodes were
// started with; all other decisions go on.
func TestMergeAfterIsSet(t *testing.T) {
	virtually(t, func(t *testing.T) {
		m := newMerging(t, 86, time.Minute)
		ctx, c := t.Context(), m.nodes[1].client
		for _, v := range []string{"0s", "-1h", "1m", "4m59s", "x", "Off"} {
			if err := c.PutSetting(ctx, fsm.SettingMergeAfter, []byte(v)); err == nil || kverror.Of(err).Kind != kverror.BadRequest {
				t.Errorf("merging after %q: %v", v, err)
			}
		}
		told := func(want time.Duration, wantSet bool) {
			t.Helper()
			settings, _, err := c.Settings(ctx)
			if after, set := MergeAfter(settings); err != nil || after != want || set != wantSet {
				t.Errorf("ranges are merged after %v (set %t), %v; want %v (set %t)", after, set, err, want, wantSet)
			}
		}
		told(0, false)
		time.Sleep(10 * time.Second)
		if err := c.SetMergeAfter(ctx, 0); err != nil {
			t.Fatal(err)
		}
		told(0, true)
		m.split(1, "m")
		time.Sleep(5 * time.Minute)
		m.want("off", "m")
		// They are small and cold for that long already.
		if err := c.SetMergeAfter(ctx, 6*time.Minute); err != nil {
			t.Fatal(err)
		}
		told(6*time.Minute, true)
		time.Sleep(30 * time.Second)
		m.want("set, and not over", "m")
		time.Sleep(time.Minute)
		m.want("set, and over")
		m.split(1, "p")
		time.Sleep(80 * time.Second)
		m.want("set", "p")
		if err := c.UnsetMergeAfter(ctx); err != nil {
			t.Fatal(err)
		}
		told(0, false)
		time.Sleep(10 * time.Second)
		m.want("as the nodes were started")
	})
}

// A new leader of placement does not know how long ranges have been what they are: it lets them
// be for as long as if they were new. It completes what its predecessor has begun, and decides
// nothing for either range meanwhile.
func TestMergesOutliveTheDecider(t *testing.T) {
	virtually(t, func(t *testing.T) {
		const after = time.Minute
		m := newMerging(t, 84, after)
		time.Sleep(10 * time.Second)
		m.split(1, "m")
		for range 3 {
			time.Sleep(after - 10*time.Second)
			m.want("its leader is new", "m")
			n := m.leader()
			n.crash()
			time.Sleep(2 * time.Second)
			n.start()
		}
		time.Sleep(after + 30*time.Second)
		m.want("led by one for long")
	})
}
