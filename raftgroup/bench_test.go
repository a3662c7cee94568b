package raftgroup

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// benchSM counts what it applies.
type benchSM struct {
	key     []byte
	applied *atomic.Int64
	leads   atomic.Bool
	term    atomic.Uint64
	perDone chan struct{}
}

func (s *benchSM) Apply(b *engine.Batch, ents []Entry) error {
	for _, e := range ents {
		if len(e.Data) > 0 {
			if err := b.Set(s.key, e.Data); err != nil {
				return err
			}
			if s.leads.Load() {
				s.applied.Add(1)
				s.perDone <- struct{}{}
			}
		}
	}
	return nil
}

func (s *benchSM) Applied(Position) {}
func (s *benchSM) LeaderChanged(l LeaderState) {
	s.term.Store(l.Term)
	s.leads.Store(l.IsLeader && l.Ready)
}

// benchHosts starts three hosts with groups, in memory and in real time.
func benchHosts(b *testing.B, groups int, tune func(*Config)) (r *rig, leaders []*Group, applied *atomic.Int64) {
	b.Helper()
	r = newRig(b, 3, tune)
	r.bus.raw = true
	r.clk = clock.System()
	r.memtab = 16 << 20
	r.walopt = func(o *wal.Options) {
		if o.SegmentBytes = 64 << 20; groups > 1000 {
			o.SegmentBytes = 1 << 20 // files are in memory and are not measured
		}
	}
	for _, n := range r.nodes {
		n.fs = simdisk.New()
	}
	r.startAll()
	applied = new(atomic.Int64)
	sms := make([][]*benchSM, 4)
	for _, id := range r.ids() {
		n := r.nodes[id]
		batch := n.eng.NewBatch()
		for g := range groups {
			r.must(n.host.Bootstrap(batch, keyspace.GroupID(g+1), voters(3), nil))
		}
		r.must(batch.Commit())
		for g := range groups {
			sm := &benchSM{
				key: engine.GroupLocalKey(keyspace.GroupID(g+1), nil), applied: applied, perDone: make(chan struct{}, 1<<16),
			}
			sms[id] = append(sms[id], sm)
			_, err := n.host.Open(keyspace.GroupID(g+1), keyspace.ReplicaID(id), n.position(keyspace.GroupID(g+1)), sm)
			r.must(err)
		}
	}
	deadline := time.Now().Add(60 * time.Second)
	for g := 0; g < groups; {
		found := false
		for _, id := range r.ids() {
			if sms[id][g].leads.Load() {
				leaders = append(leaders, r.nodes[id].host.Group(keyspace.GroupID(g+1)))
				found = true
				break
			}
		}
		if found {
			g++
			continue
		}
		if time.Now().After(deadline) {
			b.Fatalf("group %d has no leader", g+1)
		}
		time.Sleep(time.Millisecond)
	}
	return r, leaders, applied
}

// BenchmarkPropose keeps some proposals of 256 bytes in flight in each group and reports
// the CPU that one costs over all three hosts. Bus and disks are in memory: compared with
// BenchmarkAlone it shows the cost of raftgroup itself.
func BenchmarkPropose(b *testing.B) {
	for _, c := range []struct{ groups, depth int }{{1, 1}, {1, 128}, {48, 8}, {1000, 1}} {
		b.Run(fmt.Sprintf("groups=%d/depth=%d", c.groups, c.depth), func(b *testing.B) {
			r, leaders, applied := benchHosts(b, c.groups, nil)
			defer r.close()
			b.ReportAllocs()
			data := make([]byte, 256)
			start, cpu := applied.Load(), measure.CPU().Seconds()
			proposed := int64(0)
			propose := func(g *Group) bool {
				for {
					err := g.Propose(g.Status().Term, data, nil)
					if err == nil {
						proposed++
						return true
					}
					if !errors.Is(err, ErrFull) {
						return false
					}
					runtime.Gosched()
				}
			}
			for _, g := range leaders {
				for range c.depth {
					propose(g)
				}
			}
			for i := 0; b.Loop(); i++ {
				g := leaders[i%len(leaders)]
				<-g.sm.(*benchSM).perDone
				if !propose(g) {
					b.Fatal("leader lost")
				}
			}
			done := applied.Load() - start
			b.ReportMetric(float64(done)/b.Elapsed().Seconds(), "proposals/s")
			b.ReportMetric((measure.CPU().Seconds()-cpu)/float64(done)*1e6, "cpu-µs/proposal")
		})
	}
}

// BenchmarkSleeping measures the cost of sleeping groups: CPU per group and second over
// three replicas, and memory per replica.
func BenchmarkSleeping(b *testing.B) {
	const groups = 10000
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	r, _, _ := benchHosts(b, groups, func(c *Config) { c.WakesPerSecond = 20000 })
	defer r.close()
	for asleep := 0; asleep < 3*groups; {
		asleep = 0
		for _, n := range r.nodes {
			for _, g := range n.host.Groups() {
				asleep += boolInt(g.Status().Asleep)
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	for b.Loop() {
		cpu, start := measure.CPU().Seconds(), time.Now()
		time.Sleep(2 * time.Second)
		b.ReportMetric((measure.CPU().Seconds()-cpu)/time.Since(start).Seconds()/(3*groups)*1e9, "cpu-ns/replica/s")
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/(3*groups), "bytes/replica")
}

func BenchmarkCodec(b *testing.B) {
	frame := appendFrameHeader(nil, time.Second)
	for i := range 100 {
		frame = appendRaftMessage(frame, keyspace.GroupID(i+1), heartbeatFor(uint64(i+1)))
	}
	b.SetBytes(int64(len(frame)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := decodeMessages(1, frame[2:]); err != nil {
			b.Fatal(err)
		}
	}
}
