package shard

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/removal"
)

// Pins hold a compaction back for as long as a transaction may read what it lets go, and
// no longer: the coordinators are asked. Where they cannot say, pins expire.
func TestPinsEndWithTheirTransactions(t *testing.T) {
	for name, c := range map[string]struct {
		// reads answers the asked-th question, after so much time.
		reads     func(asked int, after time.Duration) (bool, error)
		from, by  time.Duration
		mostAsked int
	}{
		"nobody reads": {
			reads: func(int, time.Duration) (bool, error) { return false, nil },
			by:    100 * time.Millisecond, mostAsked: 1,
		},
		"a transaction reads for 3 s": {
			reads: func(_ int, after time.Duration) (bool, error) { return after < 3*time.Second, nil },
			from:  3 * time.Second, by: 4 * time.Second, mostAsked: 15,
		},
		"a node does not answer": {
			reads: func(asked int, _ time.Duration) (bool, error) { return false, errors.New("no answer") },
			from:  removal.PinFor, by: 2*removal.PinFor + 2*time.Second, mostAsked: 60,
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newFakeWorld(t)
			p := &fakePusher{}
			w.store.cfg.Txns = p
			w.seq.auto, w.seq.last = true, 200
			w.serve(1, 5)
			defer w.stop()
			r := w.store.Replica(1)
			w.put(t.Context(), "a", "v")
			if g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Pin: true}); g.err != nil {
				t.Fatal(g.err)
			}
			w.seq.last = 300
			w.put(t.Context(), "a", "v")
			begun, asked := time.Now(), 0
			p.mu.Lock()
			p.reads = func(below keyspace.Revision) (bool, error) {
				if asked++; below != 250 {
					t.Errorf("%s: asked about reads below %d", name, below)
				}
				return c.reads(asked, time.Since(begun))
			}
			p.mu.Unlock()
			w.store.observe(keyspace.SequenceAnswer{Current: 301, Compacted: 250})
			for r.Show().Compacted < 250 && time.Since(begun) < time.Minute {
				time.Sleep(10 * time.Millisecond)
				w.settle()
			}
			if took := time.Since(begun); took < c.from || took > c.by || asked > c.mostAsked {
				t.Errorf("%s: compacted after %v and %d questions", name, took, asked)
			}
			// What is pinned from now on counts again.
			if g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(2), Anchor: []byte("k"), Pin: true, PinAt: 280}); g.err != nil {
				t.Fatal(g.err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if keep := r.keepLocked(1000); keep > 280 {
				t.Errorf("%s: a later pin lets the range compact up to %d", name, keep)
			}
		})
	}
}

// A range is not frozen while a compaction is on its way beyond the floor of a lock of the range
// that absorbs it: the lock's versions would come below the compacted revision.
func TestFreezeMeetsACompaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		w.seq.auto, w.seq.last = true, 50
		w.serve(1, 5)
		defer w.stop()
		w.put(t.Context(), "a", "v")
		if g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("a"), Writes: writeAt("a")}); g.err != nil {
			t.Fatal(g.err)
		}
		left := w.store.Replica(1)
		split := make(chan error, 1)
		go func() {
			_, err := left.Split(t.Context(), 0, []byte("m"))
			split <- err
		}()
		w.settle()
		if err := <-split; err != nil {
			t.Fatal(err)
		}
		w.settle()
		w.serve(2, 5)
		right, log := w.store.Replica(2), w.groups.group(2)
		compactions := func() (n int) {
			for range 10 {
				time.Sleep(10 * maintenancePace)
				w.settle()
			}
			log.mu.Lock()
			defer log.mu.Unlock()
			for _, e := range log.log {
				if h, _, err := command.DecodeHeader(e.data); err == nil && h.Kind == command.KindCompact {
					n++
				}
			}
			return n
		}
		order := func(o keyspace.MergeOrder) error {
			d := w.store.Replica(o.Range).Descriptor()
			o.ID, o.Generation, o.ConfIndex, o.Other = 9, d.Generation, d.ConfIndex, 3-o.Range
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			done := make(chan error, 1)
			go func() {
				_, err := w.store.merge(ctx, &o)
				done <- err
			}()
			w.settle()
			return <-done
		}
		if err := order(keyspace.MergeOrder{Step: keyspace.MergeBind, Range: 1}); err != nil {
			t.Fatal(err)
		}
		closing, cancel := context.WithCancel(t.Context())
		defer cancel()
		if err := right.closePipeline(closing); err != nil {
			t.Fatal(err)
		}
		w.store.observe(keyspace.SequenceAnswer{Current: 200, Compacted: 150})
		if n := compactions(); n != 0 {
			t.Errorf("%d compactions are proposed while nothing else is", n)
		}
		right.reopen()
		if n := compactions(); n != 1 {
			t.Fatalf("%d compactions are proposed", n)
		}
		for range 2 {
			if err := order(keyspace.MergeOrder{Step: keyspace.MergeFreeze, Range: 2}); !errors.Is(err, kverror.Busy) {
				t.Errorf("range 2, compacted up to %d, is to be frozen beside a lock: %v", right.Show().Compacted, err)
			}
			for len(log.log) > 0 {
				if err := log.apply(entryOf(log.take(0))); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
