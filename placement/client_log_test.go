package placement

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
)

// follower keeps what FollowLog brings.
type follower struct {
	mu sync.Mutex
	// Guarded by mu: the owner of each revision, up to where the log is known, and the
	// revisions of which nobody tells.
	owner map[keyspace.Revision]keyspace.RangeID
	last  keyspace.Revision
	gaps  []string
	err   error
}

func (f *follower) take(p *sequencer.LogPart) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.After < f.last {
		f.err = fmt.Errorf("part after %d follows %d", p.After, f.last)
	}
	if p.After > f.last {
		f.gaps = append(f.gaps, fmt.Sprintf("(%d, %d]", f.last, p.After))
	}
	at := p.After
	for _, h := range p.Records {
		if h.First != at+1 {
			f.err = fmt.Errorf("record from %d follows %d", h.First, at)
		}
		for ; at < h.Last(); at++ {
			f.owner[at+1] = h.Range
		}
	}
	if f.last = p.Last; at != p.Last {
		f.err = fmt.Errorf("records up to %d in a part up to %d", at, p.Last)
	}
}

// reached waits until the follower knows the log up to rev.
func (f *follower) reached(t *testing.T, rev keyspace.Revision) {
	t.Helper()
	for range 2000 {
		f.mu.Lock()
		last, err := f.last, f.err
		f.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if last >= rev {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("the log did not reach %d within 20 s, but %d", rev, f.last)
}

// allocate asks for count revisions for the range and notes who got them.
func (n *rigNode) allocate(t *testing.T, id keyspace.RangeID, count int, owner map[keyspace.Revision]keyspace.RangeID) keyspace.Revision {
	t.Helper()
	ch := make(chan keyspace.SequenceAnswer, 1)
	n.client.Sequence(keyspace.SequenceRequest{Range: id, Generation: 1, Count: count}, func(a keyspace.SequenceAnswer) { ch <- a })
	a := <-ch
	if a.Err != nil {
		t.Fatal(a.Err)
	}
	for i := range keyspace.Revision(count) {
		owner[a.First+i] = id
	}
	return a.Current
}

// TestFollowLog follows the log on every node over a planned and an unplanned change of the
// sequencer. The planned one leaves no gap. After the other one the log says which revisions
// nobody can tell of (trap 80).
func TestFollowLog(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 4, 3, quiet)
		r.startAll()
		r.leader()
		ctx, cancel := context.WithCancel(t.Context())
		owner := map[keyspace.Revision]keyspace.RangeID{}
		last := r.nodes[0].allocate(t, 5, 2, owner)
		clear(owner) // nobody followed then
		var wg sync.WaitGroup
		followers := make([]*follower, 3)
		for i, n := range r.nodes {
			f := &follower{owner: map[keyspace.Revision]keyspace.RangeID{}, last: last}
			followers[i] = f
			client := n.client
			known := sequencer.LogPosition{Last: last}
			wg.Go(func() { client.FollowLog(ctx, known, f.take) })
		}
		all := func() {
			t.Helper()
			for i := range 30 {
				last = r.nodes[i%3].allocate(t, keyspace.RangeID(1+i%4), 1+i%3, owner)
			}
			for _, f := range followers {
				f.reached(t, last)
			}
		}
		all()
		from := r.leader()
		to := r.nodes[int(from.id)%3]
		if err := from.client.TransferLeader(ctx, to.id); err != nil {
			t.Fatal(err)
		}
		all()
		for i, f := range followers {
			if len(f.gaps) != 0 {
				t.Errorf("node %d: a planned change left the gaps %v", i+1, f.gaps)
			}
		}
		term := r.leader().service.machine.leaderState().Term
		r.isolate(t)
		all()
		if now := r.leader().service.machine.leaderState().Term; now <= term {
			t.Fatalf("the sequencer of term %d was not lost", term)
		}
		for i, f := range followers {
			if len(f.gaps) != 1 {
				t.Errorf("node %d: the loss of the sequencer left the gaps %v", i+1, f.gaps)
			}
			for rev, id := range f.owner {
				if owner[rev] != id {
					t.Errorf("node %d: revision %d is said to be range %s's, it is range %s's", i+1, rev, id, owner[rev])
				}
			}
			if len(f.owner) != len(owner) {
				t.Errorf("node %d: owners of %d revisions, want %d", i+1, len(f.owner), len(owner))
			}
		}
		cancel()
		wg.Wait()
		for _, n := range r.nodes {
			n.stop()
		}
	})
}

// isolate cuts the sequencer's node off until another one leads, and joins it again.
func (r *rig) isolate(t *testing.T) {
	t.Helper()
	old := r.leader()
	r.net.Partition(old.id)
	for range 600 {
		time.Sleep(50 * time.Millisecond)
		if slices.ContainsFunc(r.nodes, func(n *rigNode) bool {
			return n != old && n.service.machine.leaderState().Ready
		}) {
			break
		}
	}
	r.net.HealAll()
}
