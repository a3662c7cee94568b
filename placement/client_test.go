package placement

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/sequencer"
)

// TestSequenceWithoutQuorum checks that requests without an answer fail in time with a fate of
// NotApplied, and that full queues refuse.
func TestSequenceWithoutQuorum(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 11, 3, quiet)
		r.startAll()
		if a := r.nodes[0].sequence(1); a.Err != nil {
			t.Fatal(a.Err)
		}
		r.nodes[1].crash()
		r.nodes[2].crash()
		time.Sleep(2 * time.Second)
		begin := time.Now()
		a := r.nodes[0].sequence(1)
		if e := kverror.Of(a.Err); e == nil || e.Kind != kverror.NoLeader || e.Fate() != kverror.NotApplied {
			t.Fatalf("answer %+v", a)
		}
		if took := time.Since(begin); took < 4*time.Second || took > 6*time.Second {
			t.Fatalf("the answer took %v", took)
		}
		c := r.nodes[0].client
		c.o.MaxQueued = 10
		errs := make(chan error, 31)
		for i := range 31 {
			c.Sequence(keyspace.SequenceRequest{Range: 1, Count: 1}, func(a keyspace.SequenceAnswer) { errs <- a.Err })
			if i == 0 {
				// From here on this one is under way, and what comes waits behind it.
				synctest.Wait()
			}
		}
		c.Sequence(keyspace.SequenceRequest{Range: 1, Count: sequencer.MaxBatchRevisions + 1}, func(a keyspace.SequenceAnswer) {
			if !errors.Is(a.Err, kverror.BadRequest) {
				t.Errorf("too many revisions: %+v", a)
			}
		})
		full := 0
		for range 31 {
			err := <-errs
			if errors.Is(err, kverror.TooManyRequests) {
				full++
			} else if !errors.Is(err, kverror.NoLeader) {
				t.Errorf("answer %v", err)
			}
		}
		if full != 20 {
			t.Errorf("%d of 30 requests were refused by a queue of 10", full)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		if _, err := c.Compact(ctx, 1); kverror.Of(err).Fate() != kverror.Unknown {
			t.Errorf("compact without a quorum: %v", err)
		}
		r.nodes[0].stop()
		c.Sequence(keyspace.SequenceRequest{Range: 1}, func(a keyspace.SequenceAnswer) {
			if !errors.Is(a.Err, kverror.Stopped) {
				t.Errorf("after Stop: %+v", a)
			}
		})
	})
}

// TestStateSurvivesCrashes crashes all nodes at once, again and again, and finds
// everything that was answered (invariant 1).
func TestStateSurvivesCrashes(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 12, 3, quiet, "m")
		last, compacted := keyspace.Revision(1), keyspace.Revision(-1)
		next := keyspace.RangeID(3)
		for round := range 5 {
			r.startAll()
			n := r.nodes[r.rng.IntN(3)]
			a := n.sequence(3)
			if a.Err != nil || a.First <= last || a.First > last+sequencer.CeilingBlock+1 || a.Compacted != compacted {
				t.Fatalf("round %d: %+v after revision %d, compacted %d", round, a, last, compacted)
			}
			last = a.Current
			if _, err := n.client.Compact(t.Context(), last-1); err != nil {
				t.Fatal(err)
			}
			compacted = last - 1
			ids, err := n.client.RangeIDs(t.Context(), 2)
			if err != nil || ids[0] < next {
				t.Fatalf("round %d: range ids %v, %v, the next was %s", round, ids, err, next)
			}
			next = ids[1] + 1
			for _, n := range r.nodes {
				n.crash()
			}
		}
	})
}

// TestSnapshot cuts a node off for so long that it gets the state as a snapshot.
func TestSnapshot(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 13, 3, quiet)
		r.maxLag = 32 << 10
		r.startAll()
		var away *rigNode
		for _, n := range r.nodes {
			if n != r.leader() {
				away = n
			}
		}
		before := away.service.View().Index
		away.stop()
		time.Sleep(2 * time.Second)
		value := make([]byte, 16<<10)
		for i := range 40 {
			value[0] = byte(i)
			if err := r.leader().client.PutSetting(t.Context(), "large", value); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range r.nodes {
			if n.up() {
				n.must(n.engine.Flush(t.Context()))
			}
		}
		time.Sleep(3 * time.Second)
		away.start()
		for range 200 {
			v := away.service.View()
			if v.SettingsRevision() == 40 {
				if got := v.Settings(); len(got) != 1 || got[0].Value[0] != 39 {
					t.Fatalf("settings after the snapshot: %d", len(got))
				}
				// The log begins anew behind a snapshot.
				if base, _ := away.log.Group(keyspace.PlacementGroup).Base(); base <= before {
					t.Fatalf("the log begins behind %d: no snapshot was needed", base)
				}
				r.stopAllAtOnce()
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Fatalf("the node that was away has %d changes of settings", away.service.View().SettingsRevision())
	})
}
