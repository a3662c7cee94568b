package raftgroup

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"go.etcd.io/raft/v3/quorum"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// leaseState is the leader's side of the lease. The worker owns it.
type leaseState struct {
	// ready says that an entry of this leader's term is applied here.
	ready bool
	// givenUp says that the lease is given up for the rest of the term.
	givenUp bool
	// answers holds, for each replica, when the promise of its newest response in this
	// term ends. It is computed from the time at which the heartbeat was sent.
	answers map[uint64]clock.Time
	// dirty says that the lease must be recomputed.
	dirty bool
	// from is Host.leasesFrom as the worker knows it: older heartbeats do not count.
	from int64
}

// AckedIndex implements quorum.AckedIndexer: the lease is the "index" that a quorum has promised. A leader needs no promise of
// its own: it revokes the lease in memory before any message of a newer term leaves the host.
func (g *Group) AckedIndex(id uint64) (quorum.Index, bool) {
	if id == uint64(g.self) {
		return math.MaxInt64, true
	}
	t, ok := g.lease.answers[id]
	return quorum.Index(t), ok
}

// margin is by how much a lease is shorter than the promises behind it.
func (c *Config) margin(promise time.Duration) time.Duration {
	return c.TickInterval + time.Duration(math.Ceil(float64(promise)*c.MaxClockDrift))
}

// stampHeartbeat writes the host's number in front of raft's own context, in a new slice: raft shares one context between all
// peers' heartbeats. The number is the clock reading of this pass, taken before raft emitted the heartbeat. So an echo tells when
// it was requested without a table of requests. It means nothing outside this run of this host.
func (g *Group) stampHeartbeat(m *pb.Message) {
	ctx := make([]byte, numberBytes, numberBytes+raftContextBytes)
	binary.LittleEndian.PutUint64(ctx, uint64(g.w.now))
	m.Context = append(ctx, m.GetContext()...)
	m.Index, g.trunc.told = ptr(g.trunc.need), g.trunc.need
}

// sparesHeartbeat reports whether a heartbeat of an idle system group, which never sleeps, is left out:
// each second one, while the lease is long and nobody waits for a read. Five still fit into the election timeout.
func (g *Group) sparesHeartbeat(m *pb.Message) bool {
	return g.id.IsSystem() && g.sleep.idle > 1 && g.sleep.idle%2 == 1 && len(m.GetContext()) == 0 &&
		g.h.cfg.electionTicks() >= 10 && g.public.leaseUntil.Load()-int64(g.w.now) > int64(g.h.cfg.ElectionTimeout/2)
}

// onHeartbeatResp strips the host's number off a heartbeat response and counts the promise that the response carries. It ignores
// a response from a term in which this replica does not lead; raft drops it too.
func (g *Group) onHeartbeatResp(m *message) {
	ctx := m.raft.GetContext()
	sent := clock.Time(binary.LittleEndian.Uint64(ctx))
	if m.raft.Context = ctx[numberBytes:]; len(m.raft.Context) == 0 {
		m.raft.Context = nil
	}
	if !g.isLeader || m.term != g.term {
		return
	}
	if sent <= 0 || sent > g.w.now {
		// No heartbeat of this term can have carried it.
		g.h.m.malformed.Inc()
		return
	}
	if g.noteDrop(); int64(sent) <= g.lease.from {
		return
	}
	// The voter may be configured with another election timeout.
	promise := min(m.promise, g.h.cfg.ElectionTimeout)
	until := sent.Add(promise - g.h.cfg.margin(promise))
	if until > g.lease.answers[uint64(m.from)] {
		if g.lease.answers == nil {
			g.lease.answers = make(map[uint64]clock.Time)
		}
		g.lease.answers[uint64(m.from)] = until
		g.lease.dirty = true
	}
}

// publishLease recomputes the lease if something that it depends on has changed. A sleeping leader has none. It drops its
// followers' responses when it falls asleep; a sole voter needs no responses and is covered by the check here.
func (g *Group) publishLease() {
	if g.noteDrop(); !g.lease.dirty {
		return
	}
	g.lease.dirty = false
	if g.h.cfg.NoLeaseReads || !g.isLeader || g.lease.givenUp || !g.lease.ready || g.sleep.asleep ||
		!g.conf.votes(g.self) {
		g.revokeLease()
		return
	}
	until := clock.Time(g.conf.voters.CommittedIndex(g))
	if until == 0 {
		g.revokeLease()
		return
	}
	if t := g.public.leaseTerm.Load(); t != g.term {
		if t > g.term {
			panic(fmt.Sprintf("raftgroup: group %s: lease of term %d after one of term %d", g.id, g.term, t))
		}
		g.public.leaseUntil.Store(0)
		g.public.leaseTerm.Store(g.term)
	}
	g.public.leaseUntil.Store(int64(until))
}

// noteDrop forgets what followers promised before leases were dropped.
func (g *Group) noteDrop() {
	from := g.h.leasesFrom.Load()
	if g.lease.from == from {
		return
	}
	g.revokeLease()
	g.public.leaseFrom.Store(from) // only now: what was published before belongs to the old one
	clear(g.lease.answers)
	g.lease.from, g.lease.dirty = from, true
}

// revokeLease takes the lease from readers at once.
func (g *Group) revokeLease() {
	if g.public.leaseUntil.Swap(0) != 0 && g.isLeader && !g.sleep.asleep {
		g.h.m.leaseLost.Inc()
	}
}

// resetLease forgets everything when the term or the leader changes.
func (g *Group) resetLease() {
	g.public.leaseUntil.Store(0)
	g.lease = leaseState{dirty: true, from: g.lease.from}
}

// giveUpLease revokes the lease for the rest of the term.
func (g *Group) giveUpLease() {
	g.lease.givenUp = true
	g.revokeLease()
}

// promiseState is the voter's side of the lease. It belongs to the host and is
// independent of raft's terms and leaders, which may change under it.
type promiseState struct {
	// until is the time before which this replica grants no vote and does not campaign. It never decreases.
	until clock.Time
	// ticks counts raft's ticks since until last grew. Raft restarts its own count at the same moment or later, so raft cannot
	// campaign while ticks is below the election timeout.
	ticks int
	// answered is the highest number of an answered heartbeat of answeredTerm. Numbers of
	// other terms stem from another node's clock.
	answered, answeredTerm uint64
}

// makePromise is called for each heartbeat before raft gets it and may answer it. The pass reads its clock after the heartbeat has
// arrived. So the promise lasts at least as long as the leader relies on it.
func (g *Group) makePromise(m *message) {
	if m.term < g.term {
		return // raft answers with its higher term, without a MsgHeartbeatResp
	}
	g.promise.ticks = 0
	if until := g.w.now.Add(g.h.cfg.ElectionTimeout); until > g.promise.until {
		g.promise.until = until
	}
	n := binary.LittleEndian.Uint64(m.raft.GetContext())
	if g.promise.answeredTerm != m.term {
		g.promise.answered, g.promise.answeredTerm = 0, m.term
	}
	g.promise.answered = max(g.promise.answered, n)
}

// checkPromise asserts that a promise covers the response that is about to leave.
func (g *Group) checkPromise() {
	if want := g.w.now.Add(g.h.cfg.ElectionTimeout); g.promise.until < want {
		panic(fmt.Sprintf("raftgroup: group %s: heartbeat answered at %d with a promise until %d, want %d",
			g.id, g.w.now, g.promise.until, want))
	}
}

// promised reports whether a promise, or the embargo after a start, holds.
func (g *Group) promised() bool { return g.w.now < g.promise.until || g.embargoed() }

// embargoed reports whether a promise of a previous run of the node may bind this
// replica. A sole voter has promised nothing to anybody.
func (g *Group) embargoed() bool { return g.w.now < g.h.embargo && !g.sleep.soleVoter }

// refusesVote reports whether a vote request must not reach raft. A request from a transfer is exempt from the promise, since
// that leader has given its lease up for the term. The embargo after a start exempts nothing.
func (g *Group) refusesVote(m *message) bool {
	transfer := string(m.raft.GetContext()) == transferVoteBytes
	if g.embargoed() || !transfer && g.w.now < g.promise.until {
		g.h.m.voteRefused.Inc()
		return true
	}
	return false
}

// mayTick reports whether raft may be ticked. Raft must not campaign against a promise or compete with the chosen candidate.
// Raft's shortest timeout ends with the promise, at the tick at which that candidate campaigns.
func (g *Group) mayTick() bool {
	if g.promise.ticks+1 < g.h.cfg.electionTicks() {
		return true
	}
	start := g.promise.until.Add(headStartTicks * g.h.cfg.TickInterval)
	return !g.promised() && !(g.sleep.yields && g.w.now < start)
}

// suspects notices that the monotonic clock stood still while the world's time went on: the
// virtual machine was paused, or runs on from a snapshot. Something sets the wall clock then,
// sooner or later. So this detects late, and proves nothing where it detects nothing.
type suspects struct {
	// ahead is by how much the wall clock was ahead of the monotonic one at the last tick.
	ahead time.Duration
	known bool
}

// tick returns by how much the wall clock has run ahead since the last tick, if that is more than
// the margin of a lease: a lease outlives the promises behind it then. A wall clock that is set
// back says nothing. One that is set ahead again and again costs a round trip each time.
func (s *suspects) tick(c clock.Clock, margin time.Duration) time.Duration {
	now := c.Now()
	wall := c.Wall()
	if c.Now().Sub(now) > margin/2 {
		return 0 // this goroutine did not run between the two: they cannot be compared
	}
	before, first := s.ahead, !s.known
	s.ahead, s.known = time.Duration(wall.UnixNano()-int64(now)), true
	if by := s.ahead - before; !first && by > margin {
		return by
	}
	return 0
}

// DropLeases ends all leases of this host: its clock may have stood still while the world's time went on. Each leader has a lease
// again as soon as a quorum has answered heartbeats that it sends from now on. Until then readers use ReadIndex.
func (h *Host) DropLeases(why string) {
	if mutation.Is(mutation.LeasesKept) {
		return
	}
	now := h.cfg.Clock.Now()
	h.log.Warn("leases are dropped until followers confirm them again", zap.String("why", why))
	h.m.leasesDropped.Inc()
	if f := h.cfg.LeasesDropped; f != nil {
		f()
	}
	for {
		from := h.leasesFrom.Load()
		if int64(now) <= from || h.leasesFrom.CompareAndSwap(from, int64(now)) {
			return
		}
	}
}

// rememberPromise keeps the promise of a closed group.
func (h *Host) rememberPromise(id keyspace.GroupID, until clock.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if until > h.mu.promises[id] {
		h.mu.promises[id] = until
	}
}

func (h *Host) forgetPromises(now clock.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, until := range h.mu.promises {
		if until <= now {
			delete(h.mu.promises, id)
		}
	}
}
