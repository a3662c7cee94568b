package placement

import (
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// instantRaft is a group of one whose entries are applied by the sequencer alone.
type instantRaft struct{ m *machine }

func (r instantRaft) Propose(_ uint64, data []byte, _ func(error)) error {
	c, err := fsm.DecodeCommand(data)
	if err != nil {
		return err
	}
	m := r.m
	m.mu.Lock()
	w := m.waiters[c.Number]
	delete(m.waiters, c.Number)
	m.mu.Unlock()
	w.done(fsm.Result{})
	return nil
}

func (r instantRaft) ReadIndex(done func(uint64, error)) { done(0, nil) }
func (r instantRaft) LeaseHeld(uint64) bool              { return true }

// benchClient returns a Client beside a sequencer that serves.
func benchClient(b *testing.B) *Client {
	b.Helper()
	e := memoryEngine(b)
	svc, err := NewService(ServiceOptions{Self: 1, Boot: 1, Clock: clock.System(), Engine: e, Alive: func(keyspace.NodeID) bool { return true }})
	if err != nil {
		b.Fatal(err)
	}
	svc.sequencer.SetGroup(instantRaft{svc.machine})
	svc.Start()
	ls := raftgroup.LeaderState{Term: 6, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true}
	svc.machine.mu.Lock()
	svc.machine.leader = ls
	svc.machine.mu.Unlock()
	svc.sequencer.LeaderChanged(ls)
	c := NewClient(ClientOptions{Self: 1, Boot: 1, Service: svc, Clock: clock.System()})
	c.wait.Go(c.sequenceLoop)
	b.Cleanup(func() {
		c.Stop()
		svc.Stop()
	})
	return c
}

// BenchmarkSequenceAlone is the latency of one request after the other, the
// sequencer a function call away.
func BenchmarkSequenceAlone(b *testing.B) {
	c := benchClient(b)
	ch := make(chan keyspace.SequenceAnswer, 1)
	b.ReportAllocs()
	for b.Loop() {
		c.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: 1}, func(a keyspace.SequenceAnswer) { ch <- a })
		if a := <-ch; a.Err != nil {
			b.Fatal(a.Err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "allocations/s")
}

// BenchmarkSequenceCoalesced has 256 requests under way at any time, as many ranges
// of one node have.
func BenchmarkSequenceCoalesced(b *testing.B) {
	c := benchClient(b)
	slots := make(chan struct{}, 256)
	var wg sync.WaitGroup
	done := func(a keyspace.SequenceAnswer) {
		if a.Err != nil {
			b.Error(a.Err)
		}
		<-slots
		wg.Done()
	}
	b.ReportAllocs()
	begin := time.Now()
	n := 0
	for b.Loop() {
		slots <- struct{}{}
		wg.Add(1)
		c.Sequence(keyspace.SequenceRequest{Range: keyspace.RangeID(n & 255), Generation: 1, Count: 1}, done)
		n++
	}
	wg.Wait()
	b.ReportMetric(float64(n)/time.Since(begin).Seconds(), "allocations/s")
}
