package alone

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// Options say what runs.
type Options struct {
	// Dir is an empty directory on the disk that is to be measured.
	Dir string
	// Groups is the number of groups, which the hosts lead in turn.
	Groups int
	// Depth is how many proposals of each group are under way.
	Depth int
	// Carrier is what the hosts talk over: QUIC, or TLS on TCP.
	Carrier transport.Carrier
	// Observer, if set, is told of every proposal.
	Observer Observer
}

// An Observer is told what becomes of proposals. Its methods are called often and must
// not wait. For one group each method is called by one goroutine at a time, and the two
// beside each other.
type Observer interface {
	// Proposed says that a proposal of the group is about to be made.
	Proposed(keyspace.GroupID)
	// Applied says that the group's leader has applied the next n of its proposals.
	Applied(g keyspace.GroupID, n int)
}

// transferPause is the time between two tries to move a leader. The first ones may come
// before the other replica follows.
const transferPause = 10 * time.Millisecond

// Load keeps proposals under way in many groups. Each entry applied at its leader makes
// room for a new proposal. A new leader starts with all of its group's room.
type Load struct {
	o      Options
	hosts  []*host
	groups []*group
	wake   chan struct{} // capacity 1
	// leaders are the newest of each group.
	leaders []atomic.Pointer[leadership]
	// settled says that every group has had its leader: from now on leaders get room.
	settled atomic.Bool
	// applied counts what leaders have applied, and refused the rejected proposals.
	applied, refused atomic.Int64

	mu    sync.Mutex // guards the fields below
	dirty []*leadership
}

// group is the replicas of one group.
type group struct {
	id       keyspace.GroupID
	want     int // the host that shall lead
	machines [hosts]*machine
	told     chan struct{} // capacity 1: a machine was told of a leader
	term     uint64        // of the leader at the start
}

// leadership is one term in which a group is led.
type leadership struct {
	l      *Load
	host   *raftgroup.Host
	id     keyspace.GroupID
	term   uint64
	filled atomic.Bool // it was given its room
	room   atomic.Int64
}

// fill makes the leadership the one to propose to, and gives it all of its room, once.
func (g *leadership) fill() {
	if !g.filled.Swap(true) {
		g.l.leaders[g.id-1].Store(g)
		g.free(g.l.o.Depth)
	}
}

func (g *leadership) free(n int) {
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

// Start makes the hosts and the groups, and returns when every group is led by the host
// whose turn it is, which all replicas know. The caller closes the load.
func Start(ctx context.Context, o Options) (_ *Load, err error) {
	l := &Load{o: o, wake: make(chan struct{}, 1), leaders: make([]atomic.Pointer[leadership], o.Groups)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	for i := range hosts {
		h, err := newHost(filepath.Join(o.Dir, fmt.Sprintf("host-%d", i+1)), keyspace.NodeID(i+1), o.Carrier)
		l.hosts = append(l.hosts, h)
		if err != nil {
			return nil, err
		}
		if err := h.bootstrap(ctx, o.Groups); err != nil {
			return nil, err
		}
	}
	if err := connect(ctx, l.hosts); err != nil {
		return nil, err
	}
	return l, l.lead(ctx)
}

// lead opens the groups and waits until the hosts lead them in turn.
//
// No replica is made to campaign. The replicas of a group choose one that campaigns once
// they are open. A second candidate may get pre-votes for the next term from a replica that
// has not yet heard of the first one's victory. Then it ends that leadership, after the
// first entries perhaps. So a leader is waited for, and then moved.
func (l *Load) lead(ctx context.Context) error {
	for i := range l.o.Groups {
		g := &group{id: keyspace.GroupID(i + 1), want: i % hosts, told: make(chan struct{}, 1)}
		l.groups = append(l.groups, g)
		for j, h := range l.hosts {
			a, _, err := h.eng.Applied(g.id)
			if err != nil {
				return err
			}
			g.machines[j] = &machine{l: l, host: h.host, id: g.id, told: g.told}
			at := raftgroup.Position{Index: a.Index, Term: a.Term}
			if _, err := h.host.Open(g.id, keyspace.ReplicaID(j+1), at, g.machines[j]); err != nil {
				return err
			}
		}
	}
	ctx, cancel := clock.WithTimeout(ctx, clock.System(), startLimit)
	defer cancel()
	all, ctx := errgroup.WithContext(ctx)
	for _, g := range l.groups {
		all.Go(func() error { return g.settle(ctx) })
	}
	if err := all.Wait(); err != nil {
		return err
	}
	l.settled.Store(true)
	for _, g := range l.groups {
		// A leader that is new since then has filled its room itself, or does so here.
		for _, m := range g.machines {
			if led := m.leader.Load(); led != nil {
				led.fill()
			}
		}
	}
	return nil
}

// settle waits until the wanted host leads the group and all replicas know. Nobody
// campaigns any more then, unless the leader falls silent.
func (g *group) settle(ctx context.Context) error {
	for {
		leader, term := g.leader()
		if leader == g.want {
			g.term = term
			return nil
		}
		var err error
		if leader < 0 {
			_, err = clock.Await(ctx, g.told)
		} else if g.machines[leader].host.Group(g.id).Transfer(ctx, keyspace.ReplicaID(g.want+1)) != nil {
			err = clock.Sleep(ctx, clock.System(), transferPause)
		}
		if err != nil {
			return fmt.Errorf("host %d does not lead group %s: %w", g.want+1, g.id, err)
		}
	}
}

// leader returns the host that leads, and its term, once it is ready and all machines were
// told of it; otherwise -1. A machine is told in the order of terms. So none will be told
// of an earlier leader any more.
func (g *group) leader() (host int, term uint64) {
	host = -1
	for i, m := range g.machines {
		s := m.state.Load()
		if s == nil || s.Leader == 0 || i > 0 && s.Term != term {
			return -1, 0
		}
		if term = s.Term; s.IsLeader && s.Ready {
			host = i
		}
	}
	return host, term
}

// Propose fills the free room with proposals until more returns false. payload makes the
// data of each one, which must not be changed any more. One goroutine at a time may
// propose.
func (l *Load) Propose(payload func() []byte, more func() bool) {
	var visit []*leadership
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
				if l.o.Observer != nil {
					l.o.Observer.Proposed(g.id)
				}
				if group.Propose(g.term, payload(), l.dropped) != nil {
					l.refused.Add(1)
				}
			}
		}
	}
}

// Proposer returns a function that makes one proposal at the present leader of a group,
// whatever its room. Its data must not be changed any more. It is for callers that know
// themselves how many are under way, and not to be mixed with Propose. One goroutine at a
// time may propose in a group.
func (l *Load) Proposer(id keyspace.GroupID) func(data []byte) error {
	g := l.leaders[id-1].Load()
	group := g.host.Group(id)
	return func(data []byte) error {
		if l.o.Observer != nil {
			l.o.Observer.Proposed(id)
		}
		return group.Propose(g.term, data, l.dropped)
	}
}

func (l *Load) dropped(error) { l.refused.Add(1) }

// Applied returns how many proposals the groups' leaders have applied so far.
func (l *Load) Applied() int64 { return l.applied.Load() }

// Check returns an error if leaders were lost or proposals refused since Start returned. A
// measurement with such a load is worth nothing.
func (l *Load) Check() error {
	moves, refused := 0, l.refused.Load()
	for _, g := range l.groups {
		// A leader that is lost does not lead again in the same term.
		if led := g.machines[g.want].leader.Load(); led == nil || led.term != g.term {
			moves++
		}
	}
	if moves > 0 || refused > 0 {
		return fmt.Errorf("%d groups have lost their leader, %d proposals were refused: the run is worth nothing", moves, refused)
	}
	return nil
}

// Syncs returns how many fsyncs of their wals all hosts have done together.
func (l *Load) Syncs() (n uint64) {
	for _, h := range l.hosts {
		done, _ := h.wal.Progress()
		n += done
	}
	return n
}

// Hosts returns how many hosts there are: each appends every proposal to its wal.
func (l *Load) Hosts() int { return len(l.hosts) }

// Close stops the hosts. Proposals under way have no certain fate.
func (l *Load) Close() error {
	var all []error
	for _, h := range l.hosts {
		all = append(all, h.close())
	}
	return errors.Join(all...)
}

// machine is a state machine that counts what it applies.
type machine struct {
	l      *Load
	host   *raftgroup.Host
	id     keyspace.GroupID
	leader atomic.Pointer[leadership]
	state  atomic.Pointer[raftgroup.LeaderState] // what it was told last
	told   chan struct{}                         // the group's
	count  int                                   // entries in the batch being applied
}

func (m *machine) Apply(_ *engine.Batch, ents []raftgroup.Entry) error {
	for _, e := range ents {
		if len(e.Data) > 0 {
			m.count++
		}
	}
	return nil
}

func (m *machine) Applied(raftgroup.Position) {
	if g := m.leader.Load(); g != nil && m.count > 0 {
		m.l.applied.Add(int64(m.count))
		if o := m.l.o.Observer; o != nil {
			o.Applied(m.id, m.count)
		}
		g.free(m.count)
	}
	m.count = 0
}

func (m *machine) LeaderChanged(s raftgroup.LeaderState) {
	old := m.leader.Load()
	switch {
	case s.IsLeader && s.Ready && (old == nil || old.term != s.Term):
		g := &leadership{l: m.l, host: m.host, id: m.id, term: s.Term}
		m.leader.Store(g)
		if m.l.settled.Load() {
			g.fill()
		}
	case !s.IsLeader && old != nil:
		m.leader.Store(nil)
	}
	m.state.Store(&s)
	select {
	case m.told <- struct{}{}:
	default:
	}
}
