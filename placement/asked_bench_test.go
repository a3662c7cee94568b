package placement

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
)

// BenchmarkAsked is what the sequencer spends on the batches of 100 other nodes, which ask by turns, without the bus and
// without raft: from a batch's bytes to those of its answer. Each put of a batch is of another range. Followers are
// gateways with watchers: the allocation log is read and encoded for each of them.
func BenchmarkAsked(b *testing.B) {
	for _, c := range []struct{ puts, followers int }{{1, 0}, {8, 0}, {64, 0}, {512, 0}, {8, 100}, {64, 100}, {512, 300}} {
		b.Run(fmt.Sprintf("puts=%d/followers=%d", c.puts, c.followers), func(b *testing.B) { asked(b, c.puts, c.followers) })
	}
}

func asked(b *testing.B, puts, followers int) {
	b.Helper()
	s := benchClient(b).o.Service
	sources := make([]askingNode, 100)
	for i := range sources {
		sources[i] = newAskingNode(keyspace.NodeID(i+2), puts)
	}
	if err := sources[0].ask(s); err != nil { // the first one waits for the first ceiling
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var following sync.WaitGroup
	defer following.Wait()
	defer cancel()
	sinks := make([]positionSink, followers)
	for i := range sinks {
		following.Go(func() { _ = sequencer.ServeLog(ctx, s.Log(), sequencer.LogPosition{}, &sinks[i]) })
	}
	cpu, n := measure.CPU(), 0
	b.ReportAllocs()
	for b.Loop() {
		if err := sources[n%len(sources)].ask(s); err != nil {
			b.Fatal(err)
		}
		if n++; n*puts%(1<<14) < puts {
			awaitSinks(s, sinks) // none of them loses a part
		}
	}
	awaitSinks(s, sinks)
	parts := int64(0)
	for i := range sinks {
		parts += sinks[i].parts.Load()
	}
	b.ReportMetric(float64(parts)/float64(n), "parts/batch")
	b.ReportMetric(float64((measure.CPU()-cpu).Nanoseconds())/float64(n*puts), "cpu-ns/put")
}

// askingNode is another node's side: its batch's bytes, in which only the number changes.
type askingNode struct {
	node    keyspace.NodeID
	number  uint64
	payload []byte
}

func newAskingNode(node keyspace.NodeID, puts int) askingNode {
	a := askingNode{node: node, number: 1 << 28} // as many bytes as the 2^35 numbers that follow
	batch := sequencer.Batch{Boot: 1, Number: a.number}
	for i := range puts {
		batch.Items = append(batch.Items, sequencer.Item{Range: keyspace.RangeID(int(node)*1000 + i), Generation: 7, Count: 1})
	}
	a.payload = batch.Encode()
	return a
}

func (a *askingNode) ask(s *Service) error {
	a.number++
	binary.PutUvarint(a.payload[9:], a.number) // behind version and boot
	answer, err := s.handleSequence(context.Background(), a.node, a.payload)
	if err == nil {
		_, err = sequencer.DecodeGrant(answer)
	}
	return err
}

// positionSink is a stream of the allocation log. Of its parts only the position is looked at.
type positionSink struct{ last, parts atomic.Int64 }

func (s *positionSink) Send(_ context.Context, part []byte) error {
	r := fsm.NewReader(part)
	r.Version()
	r.Uvarint()  // the term
	r.Revision() // where it begins
	s.last.Store(int64(r.Revision()))
	s.parts.Add(1)
	return nil
}

func (s *positionSink) Recv(ctx context.Context) ([]byte, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (s *positionSink) Close(error) {}

// awaitSinks returns when all followers know what is allocated.
func awaitSinks(s *Service, sinks []positionSink) {
	_, _, last := s.Log().Bounds()
	for i := range sinks {
		for sinks[i].last.Load() < int64(last) {
			time.Sleep(20 * time.Microsecond)
		}
	}
}
