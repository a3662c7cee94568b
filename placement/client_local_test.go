package placement

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// turncoat is a group whose lease is asked for while this node still takes itself
// for the leader; f runs then.
type turncoat struct {
	heldRaft
	f func()
}

func (r *turncoat) LeaseHeld(uint64) bool {
	if r.f != nil {
		r.f()
	}
	return false
}

func (r *turncoat) Transfer(context.Context, keyspace.ReplicaID) error { return nil }
func (r *turncoat) Status() raftgroup.Status                           { return raftgroup.Status{} }

// otherSequencer answers every batch in term 7.
type otherSequencer struct{ last keyspace.Revision }

func (o *otherSequencer) Call(_ context.Context, to keyspace.NodeID, _ transport.Method, p []byte) ([]byte, error) {
	b, err := decodeBatch(p)
	if err != nil || to != 2 {
		return nil, fmt.Errorf("batch for node %s: %w", to, err)
	}
	g := grant{Number: b.Number, Term: 7, Before: o.last}
	o.last += keyspace.Revision(b.total())
	return g.encode(), nil
}

func (o *otherSequencer) OpenStream(context.Context, keyspace.NodeID, transport.Method, []byte) (transport.Stream, error) {
	return nil, transport.ErrNoRoute
}

// A batch that this node's own sequencer does not answer at once is taken back
// before another is asked: the own one must not hand out for it, least of all for
// what the next batch has put in its place.
func TestBatchIsTakenBackBeforeAnotherIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := NewService(ServiceOptions{Self: 1, Boot: 0xb1, Clock: clock.Virtual(), Engine: memoryEngine(t)})
		if err != nil {
			t.Fatal(err)
		}
		r := &turncoat{}
		s.attach(r)
		s.Start()
		defer s.Stop()
		other := &otherSequencer{last: 100}
		c := NewClient(ClientOptions{Self: 1, Boot: 0xb1, Service: s, Clock: clock.Virtual(), Bus: other})
		r.f = func() { c.SetLeaderHint(2, 7) }
		ls := raftgroup.LeaderState{Term: 6, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true}
		s.machine.LeaderChanged(ls)
		c.Start()
		defer c.Stop()
		for i := range 3 {
			done := make(chan keyspace.SequenceAnswer, 1)
			req := keyspace.SequenceRequest{Range: keyspace.RangeID(i + 1), Generation: 1, Count: i + 1}
			c.Sequence(req, func(a keyspace.SequenceAnswer) { done <- a })
			if a := <-done; a.Err != nil || a.First <= 100 {
				t.Fatalf("ask %d: %+v", i, a)
			}
			s.sequencer.mu.Lock()
			for _, a := range s.sequencer.c.waiting {
				t.Errorf("after ask %d batch %d waits at the own sequencer: %+v", i, a.Number, a.Items)
			}
			s.sequencer.mu.Unlock()
		}
	})
}
