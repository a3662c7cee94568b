package placement

import (
	"bytes"
	"context"
	"fmt"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// turncoat is a group whose lease is asked for while this node still takes itself
// for the leader; f runs then. Its proposals and rounds never end.
type turncoat struct{ f func() }

func (r *turncoat) Propose(uint64, []byte, func(error)) error { return nil }
func (r *turncoat) ReadIndex(func(uint64, error))             {}

func (r *turncoat) LeaseHeld(uint64) bool {
	if r.f != nil {
		r.f()
	}
	return false
}

func (r *turncoat) CanTransfer(context.Context, keyspace.ReplicaID) error { return nil }

func (r *turncoat) Transfer(context.Context, keyspace.ReplicaID) error { return nil }
func (r *turncoat) Status() raftgroup.Status                           { return raftgroup.Status{} }
func (r *turncoat) ChangeConf(context.Context, uint64, []raftgroup.ConfChange, []byte) error {
	return nil
}

// otherSequencer answers every batch in term 7.
type otherSequencer struct{ last keyspace.Revision }

func (o *otherSequencer) Call(_ context.Context, to keyspace.NodeID, _ transport.Method, p []byte) ([]byte, error) {
	b, err := sequencer.DecodeBatch(p)
	if err != nil || to != 2 {
		return nil, fmt.Errorf("batch for node %s: %w", to, err)
	}
	g := sequencer.Grant{Number: b.Number, Term: 7, Before: o.last}
	o.last += keyspace.Revision(b.Total())
	return g.Encode(), nil
}

func (o *otherSequencer) OpenStream(context.Context, keyspace.NodeID, transport.Method, []byte) (transport.Stream, error) {
	return nil, transport.ErrNoRoute
}

// A batch that this node's own sequencer does not answer at once is taken back before another
// sequencer is asked. The own one must not allocate for it, least of all for the next batch in
// its place.
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
			if n := s.sequencer.Waiting(); n > 0 {
				t.Errorf("after ask %d, %d batches wait at the own sequencer", i, n)
			}
		}
	})
}

// inCall says whether the goroutine that answers is the one that asked. The Client's own may answer so soon that the call has not
// returned yet.
func inCall() bool { return !bytes.Contains(debug.Stack(), []byte("sequenceLoop")) }

// TestDirect: where this node is the sequencer and holds the lease, a direct request is answered within the call. Without
// the lease it is answered later, and no revision is lost by the first attempt.
func TestDirect(t *testing.T) {
	for _, lease := range []bool{true, false} {
		virtually(t, func(t *testing.T) {
			r := newRig(t, 83, 3, quiet)
			r.noLease = !lease
			r.startAll()
			time.Sleep(10 * time.Second)
			n := r.leader()
			ask := func() (a keyspace.SequenceAnswer, within bool) {
				synctest.Wait() // the batch before has ended, not only answered
				got := make(chan keyspace.SequenceAnswer, 1)
				n.client.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: 1, Direct: true}, func(a keyspace.SequenceAnswer) {
					within = inCall()
					got <- a
				})
				a = <-got
				return a, within
			}
			last, _ := ask() // it has the ceiling raised
			for range 5 {
				a, within := ask()
				if a.Err != nil || within != lease || a.First != last.Current+1 {
					t.Errorf("lease %t: %+v, within the call: %t; revision %d before", lease, a, within, last.Current)
				}
				last = a
			}
			// A read that comes right after another one is answered with those that come meanwhile.
			read := func() (within bool) {
				synctest.Wait()
				got := make(chan keyspace.SequenceAnswer, 1)
				n.client.Sequence(keyspace.SequenceRequest{Range: 1, Direct: true}, func(a keyspace.SequenceAnswer) {
					within = inCall()
					got <- a
				})
				if a := <-got; a.Err != nil || a.Current != last.Current {
					t.Errorf("lease %t: a read got %+v, want revision %d", lease, a, last.Current)
				}
				return within
			}
			if read() != lease || lease && read() {
				t.Errorf("lease %t: of two reads at one time not the first alone is answered within the call", lease)
			}
			time.Sleep(directReadEvery)
			if read() != lease {
				t.Errorf("lease %t: a read after a while is not answered as the first one was", lease)
			}
		})
	}
}

// deafSequencer is a leader that is out of reach, and the one that comes after it.
type deafSequencer struct {
	otherSequencer
	asked chan struct{}
}

func (d *deafSequencer) Call(ctx context.Context, to keyspace.NodeID, m transport.Method, p []byte) ([]byte, error) {
	if to != 3 {
		return d.otherSequencer.Call(ctx, to, m, p)
	}
	close(d.asked)
	<-ctx.Done()
	return nil, ctx.Err()
}

// OpenStream waits: what the feed finds out of leaders is nothing of this test.
func (d *deafSequencer) OpenStream(ctx context.Context, _ keyspace.NodeID, _ transport.Method, _ []byte) (transport.Stream, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A caller that waits for a leader that nobody hears any more asks the next leader as soon as
// it is known. It does not wait for the end of the attempt.
func TestLostLeaderIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := clock.Virtual()
		s, err := NewService(ServiceOptions{Self: 1, Boot: 0xb1, Clock: world, Engine: memoryEngine(t)})
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		defer s.Stop()
		deaf := &deafSequencer{otherSequencer: otherSequencer{last: 100}, asked: make(chan struct{})}
		c := NewClient(ClientOptions{Self: 1, Boot: 0xb1, Service: s, Clock: world, Bus: deaf})
		c.SetLeaderHint(3, 6)
		c.Start()
		defer c.Stop()
		begin := world.Now()
		done := make(chan keyspace.SequenceAnswer, 1)
		c.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: 1}, func(a keyspace.SequenceAnswer) { done <- a })
		<-deaf.asked
		c.SetLeaderHint(3, 6) // nothing new
		c.SetLeaderHint(0, 7) // an election
		c.SetLeaderHint(2, 7)
		if a := <-done; a.Err != nil || a.First <= 100 {
			t.Fatalf("%+v", a)
		}
		if took := world.Now().Sub(begin); took > 2*attemptPauseMin {
			t.Errorf("the next sequencer was asked after %v", took)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.running) > 0 {
			t.Errorf("%d attempts under way", len(c.running))
		}
	})
}

// hastyLeader leads, and does not know it yet when it is first asked.
type hastyLeader struct {
	deafSequencer
	asked int
}

func (h *hastyLeader) Call(_ context.Context, to keyspace.NodeID, _ transport.Method, _ []byte) ([]byte, error) {
	if to != 2 {
		return nil, fmt.Errorf("node %s is asked", to)
	}
	if h.asked++; h.asked == 1 {
		return nil, kverror.New(kverror.NotLeader, "node 2 is told that it leads in a moment")
	}
	a := response{First: 5}
	return a.encode(requestAllocate), nil
}

// Raft tells of a leader once. It may be asked before it knows itself, and its refusal is then
// not the last that is known of it.
func TestLeaderThatRefusedIsKnownByItsAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := NewService(ServiceOptions{Self: 1, Boot: 0xb1, Clock: clock.Virtual(), Engine: memoryEngine(t)})
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		defer s.Stop()
		c := NewClient(ClientOptions{Self: 1, Boot: 0xb1, Service: s, Clock: clock.Virtual(), Bus: &hastyLeader{}, Peers: []keyspace.NodeID{2}})
		c.SetLeaderHint(2, 7)
		c.Start()
		defer c.Stop()
		if ids, err := c.RangeIDs(t.Context(), 1); err != nil || ids[0] != 5 {
			t.Fatal(ids, err)
		}
		if l := c.Leader(); l != 2 {
			t.Errorf("node %s is taken for the leader", l)
		}
	})
}

// refusals answers each call with the next error.
type refusals struct {
	deafSequencer
	errs []error
}

func (r *refusals) Call(context.Context, keyspace.NodeID, transport.Method, []byte) ([]byte, error) {
	err := r.errs[0]
	r.errs = r.errs[1:]
	return nil, err
}

// The first attempt of a command may have taken effect, and rights have changed before the second. The sender must not
// take the second one's answer for a refusal, because it would send another command.
func TestACommandOfUnknownFateIsNotRefused(t *testing.T) {
	lost, changed := &transport.CallError{Peer: 2, Err: context.DeadlineExceeded}, kverror.New(kverror.AccessChanged, "")
	for name, c := range map[string]struct {
		errs []error
		want kverror.Kind
	}{
		"at once":                 {[]error{changed}, kverror.AccessChanged},
		"not delivered before":    {[]error{transport.ErrNoRoute, changed}, kverror.AccessChanged},
		"not applied before":      {[]error{kverror.New(kverror.Busy, ""), kverror.New(kverror.NotLeader, ""), changed}, kverror.AccessChanged},
		"lost before":             {[]error{lost, changed}, kverror.Timeout},
		"perhaps proposed before": {[]error{kverror.New(kverror.LeaderChanged, ""), kverror.New(kverror.Busy, ""), changed}, kverror.Timeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, err := NewService(ServiceOptions{Self: 1, Boot: 0xb1, Clock: clock.Virtual(), Engine: memoryEngine(t)})
				if err != nil {
					t.Fatal(err)
				}
				s.Start()
				defer s.Stop()
				bus := &refusals{errs: c.errs}
				client := NewClient(ClientOptions{Self: 1, Boot: 0xb1, Service: s, Clock: clock.Virtual(), Bus: bus, Peers: []keyspace.NodeID{2}})
				for range len(c.errs) {
					client.SetLeaderHint(2, 7)
				}
				client.Start()
				defer client.Stop()
				if _, _, err := client.GrantLease(t.Context(), 7, 60, true); kverror.Of(err).Kind != c.want {
					t.Errorf("%v, want %v", err, c.want)
				}
				if len(bus.errs) > 0 {
					t.Errorf("not asked for %v", bus.errs)
				}
			})
		})
	}
}
