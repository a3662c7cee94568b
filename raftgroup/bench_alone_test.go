package raftgroup

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// realHost is a host as a node has it: QUIC on loopback, and a disk.
type realHost struct {
	wal  *wal.Log
	eng  *engine.Engine
	bus  *transport.QUIC
	host *Host
}

func newRealHost(b *testing.B, id keyspace.NodeID) *realHost {
	b.Helper()
	h := &realHost{}
	dir, clk := b.TempDir(), clock.System()
	var err error
	must := func() {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	h.wal, err = wal.Open(wal.Options{FS: vfs.Default, Dir: dir + "/wal", Clock: clk})
	must()
	h.eng, err = engine.Open(engine.Options{
		FS: vfs.Default, Dir: dir + "/engine", Clock: clk, CacheBytes: 64 << 20, MemTableBytes: 32 << 20, BallastBytes: -1, LowSpaceBytes: -1,
	})
	must()
	h.bus, err = transport.NewQUIC(transport.Options{
		Config:   transport.Config{Cluster: 1, Node: id, Boot: keyspace.BootID(id), Clock: clk, Logger: zap.NewNop()},
		Listen:   []string{"127.0.0.1:0"},
		Security: transport.Security{SelfMade: true},
	})
	must()
	h.host, err = NewHost(Config{
		// Elections are not measured: other load on the machine may cost time, but must
		// not spoil the run.
		Node: id, Boot: keyspace.BootID(id), Clock: clk, WAL: h.wal, Engine: h.eng, Bus: h.bus, ElectionTimeout: 5 * time.Second,
	})
	must()
	h.host.RegisterHandlers(h.bus)
	return h
}

func (h *realHost) close(b *testing.B) {
	b.Helper()
	if err := errors.Join(h.host.Stop(context.Background()), h.bus.Close(), h.wal.Close(), h.eng.Close()); err != nil {
		b.Error(err)
	}
}

// load keeps proposals in flight in many groups. Each entry applied at its leader makes
// room for a new proposal; a new leader starts with all of its group's room.
type load struct {
	depth int
	wake  chan struct{} // capacity 1
	// applied counts what leaders have applied. moves counts lost leaderships and refused
	// the rejected proposals; both are 0 in a valid run.
	applied, moves, refused atomic.Int64

	mu    sync.Mutex // guards the fields below
	dirty []*loadGroup
}

// loadGroup is one leadership of a group.
type loadGroup struct {
	l    *load
	host *Host
	id   keyspace.GroupID
	term uint64
	room atomic.Int64
}

func (g *loadGroup) free(n int) {
	if g.room.Add(int64(n)) > int64(n) {
		return // already signalled
	}
	g.l.mu.Lock()
	g.l.dirty = append(g.l.dirty, g)
	g.l.mu.Unlock()
	select {
	case g.l.wake <- struct{}{}:
	default:
	}
}

// propose fills the free room with proposals until more returns false.
func (l *load) propose(data []byte, more func() bool) {
	var visit []*loadGroup
	dropped := func(error) { l.refused.Add(1) }
	for {
		l.mu.Lock()
		visit, l.dirty = l.dirty, visit[:0]
		l.mu.Unlock()
		if len(visit) == 0 {
			<-l.wake
		}
		for i, g := range visit {
			group := g.host.Group(g.id)
			for n := g.room.Swap(0); n > 0; n-- {
				if !more() {
					g.free(int(n))
					for _, g := range visit[i+1:] {
						g.free(int(g.room.Swap(0)))
					}
					return
				}
				if group.Propose(g.term, data, dropped) != nil {
					l.refused.Add(1)
				}
			}
		}
	}
}

// loadSM counts what it applies.
type loadSM struct {
	l      *load
	host   *Host
	id     keyspace.GroupID
	leader atomic.Pointer[loadGroup]
	led    chan struct{} // capacity 1, of all replicas: the group has a leader
	count  int           // entries in the batch being applied
}

func (s *loadSM) Apply(_ *engine.Batch, ents []Entry) error {
	for _, e := range ents {
		if len(e.Data) > 0 {
			s.count++
		}
	}
	return nil
}

func (s *loadSM) Applied(Position) {
	if g := s.leader.Load(); g != nil && s.count > 0 {
		s.l.applied.Add(int64(s.count))
		g.free(s.count)
	}
	s.count = 0
}

func (s *loadSM) LeaderChanged(l LeaderState) {
	old := s.leader.Load()
	switch {
	case l.IsLeader && l.Ready && (old == nil || old.term != l.Term):
		g := &loadGroup{l: s.l, host: s.host, id: s.id, term: l.Term}
		s.leader.Store(g)
		g.free(s.l.depth)
		select {
		case s.led <- struct{}{}:
		default:
		}
	case !l.IsLeader && old != nil:
		s.leader.Store(nil)
		s.l.moves.Add(1)
	}
}

// startLoad makes the groups on three hosts, which lead them in turn, with room for depth
// proposals each.
func startLoad(b *testing.B, hosts []*realHost, groups, depth int) *load {
	b.Helper()
	for i, h := range hosts {
		batch := h.eng.NewBatch()
		for g := range groups {
			if err := h.host.Bootstrap(batch, keyspace.GroupID(g+1), voters(len(hosts)), nil); err != nil {
				b.Fatal(err)
			}
		}
		if err := errors.Join(batch.Commit(), h.eng.Flush(b.Context())); err != nil {
			b.Fatal(err)
		}
		for j, peer := range hosts {
			if i != j {
				h.bus.SetPeer(keyspace.NodeID(j+1), peer.bus.Addrs())
			}
		}
	}
	for _, h := range hosts {
		if err := h.bus.Start(); err != nil {
			b.Fatal(err)
		}
		h.host.Start()
	}
	awaitPeers(b, hosts)
	l := &load{depth: depth, wake: make(chan struct{}, 1)}
	led := make([]chan struct{}, groups)
	for g := range groups {
		led[g] = make(chan struct{}, 1)
		id := keyspace.GroupID(g + 1)
		for i, h := range hosts {
			a, _, err := h.eng.Applied(id)
			if err != nil {
				b.Fatal(err)
			}
			sm := &loadSM{l: l, host: h.host, id: id, led: led[g]}
			if _, err := h.host.Open(id, keyspace.ReplicaID(i+1), Position{a.Index, a.Term}, sm); err != nil {
				b.Fatal(err)
			}
		}
		hosts[g%len(hosts)].host.Group(id).Campaign()
	}
	for g, ch := range led {
		select {
		case <-ch:
		case <-time.After(30 * time.Second):
			b.Fatalf("group %d has no leader", g+1)
		}
	}
	return l
}

// awaitPeers waits until every host reaches every other one. A replica that campaigns
// before that reaches nobody, and another one may lead in its place.
func awaitPeers(b *testing.B, hosts []*realHost) {
	b.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for i, h := range hosts {
		for j := range hosts {
			for peer := keyspace.NodeID(j + 1); i != j && !h.bus.Peer(peer).Up; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					b.Fatalf("node %d does not reach node %s", i+1, peer)
				}
			}
		}
	}
}

// BenchmarkAlone measures the cost of a proposal in raft groups and the layers below:
// three hosts in one process, the real bus on loopback, real disks, and a state machine
// that does nothing. CPU is that of all three hosts and of the proposer. The room that
// one batch of a group frees is refilled at once. So with many proposals in flight
// entries share most of their cost; with 8 in flight in each group they share little.
func BenchmarkAlone(b *testing.B) {
	for _, c := range []struct{ groups, depth, bytes int }{
		{48, 20000 / 48, 16}, {48, 20000 / 48, 256}, {48, 8, 256}, {1, 20000, 16}, {1, 20000, 256}, {1, 1, 256}, {1000, 1, 16}, {1000, 1, 256},
	} {
		b.Run(fmt.Sprintf("groups=%d/inflight=%d/bytes=%d", c.groups, c.groups*c.depth, c.bytes), func(b *testing.B) {
			var hosts []*realHost
			for i := range keyspace.NodeID(3) {
				hosts = append(hosts, newRealHost(b, i+1))
			}
			defer func() {
				for _, h := range hosts {
					h.close(b)
				}
			}()
			l := startLoad(b, hosts, c.groups, c.depth)
			data := make([]byte, c.bytes)
			// Warm up until everything is under way, and logs and memtables were touched.
			warm := 2 * c.groups * c.depth
			l.propose(data, func() bool { warm--; return warm >= 0 })
			syncs := func() (n uint64) {
				for _, h := range hosts {
					done, _ := h.wal.Progress()
					n += done
				}
				return n
			}
			applied, fsyncs, cpu := l.applied.Load(), syncs(), measure.CPU()
			b.ReportAllocs()
			l.propose(data, b.Loop)
			n, used := float64(l.applied.Load()-applied), measure.CPU()-cpu
			b.ReportMetric(n/b.Elapsed().Seconds(), "proposals/s")
			b.ReportMetric(float64(used.Nanoseconds())/1e3/n, "cpu-µs/proposal")
			if moves, refused := l.moves.Load(), l.refused.Load(); moves+refused > 0 {
				b.Errorf("%d leaders were lost, %d proposals refused: the run is worth nothing", moves, refused)
			}
			b.ReportMetric(n*float64(len(hosts))/float64(syncs()-fsyncs), "appends/fsync")
		})
	}
}
