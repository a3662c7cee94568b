package shard

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
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
			from:  pinFor, by: 2*pinFor + 2*time.Second, mostAsked: 60,
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newFakeWorld(t)
			p := &fakePusher{}
			w.node.cfg.Txns = p
			w.seq.auto, w.seq.last = true, 200
			w.serve(1, 5)
			defer w.stop()
			r := w.node.Replica(1)
			w.put(t.Context(), "a", "v")
			if g := w.step(t.Context(), &Prepare{Name: nameAged(1), Anchor: []byte("k"), Pin: true}); g.err != nil {
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
			w.node.observe(keyspace.SequenceAnswer{Current: 301, Compacted: 250})
			for r.Show().Compacted < 250 && time.Since(begun) < time.Minute {
				time.Sleep(10 * time.Millisecond)
				w.settle()
			}
			if took := time.Since(begun); took < c.from || took > c.by || asked > c.mostAsked {
				t.Errorf("%s: compacted after %v and %d questions", name, took, asked)
			}
			// What is pinned from now on counts again.
			if g := w.step(t.Context(), &Prepare{Name: nameAged(2), Anchor: []byte("k"), Pin: true, PinAt: 280}); g.err != nil {
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
