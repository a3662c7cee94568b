package raftgroup

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"go.etcd.io/raft/v3/quorum"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// leaseState is the leader's side of the lease. It belongs to the worker.
type leaseState struct {
	// ready says that an entry of this leader's term is applied here.
	ready bool
	// givenUp says that the lease is given up for the rest of the term.
	givenUp bool
	// answers holds, of each replica, until when it keeps the promise that it gave
	// with its newest answer of this term, seen from the heartbeat's sending.
	answers map[uint64]clock.Time
	// dirty says that the lease has to be computed anew.
	dirty bool
}

// AckedIndex implements quorum.AckedIndexer: the lease is the "index" that a
// quorum has promised. A leader needs no promise of its own: it gives the lease up
// in memory before anything that it says in a newer term leaves the host.
func (g *Group) AckedIndex(id uint64) (quorum.Index, bool) {
	if id == uint64(g.self) {
		return math.MaxInt64, true
	}
	t, ok := g.lease.answers[id]
	return quorum.Index(t), ok
}

// margin is what a lease is shorter than the promises behind it.
func (c *Config) margin(promise time.Duration) time.Duration {
	return c.TickInterval + time.Duration(math.Ceil(float64(promise)*c.MaxClockDrift))
}

// stampHeartbeat writes the host's number in front of raft's own context, in a
// slice of its own: raft gives all peers' heartbeats one. The number is the
// clock reading of this pass, which was taken before raft emitted the heartbeat,
// so that an echo says by itself when it was asked for and needs no table; it means
// nothing to anybody but this run of this host.
func (g *Group) stampHeartbeat(m *pb.Message) {
	ctx := make([]byte, numberBytes, numberBytes+raftContextBytes)
	binary.LittleEndian.PutUint64(ctx, uint64(g.w.now))
	m.Context = append(ctx, m.GetContext()...)
	m.Index = ptr(g.trunc.need)
}

// takeAnswer strips the host's number off a heartbeat's answer and counts the
// promise that it carries. An answer of another term than the one this replica
// leads in is none: raft drops it too.
func (g *Group) takeAnswer(m *message) {
	ctx := m.raft.GetContext()
	sent := clock.Time(binary.LittleEndian.Uint64(ctx))
	if m.raft.Context = ctx[numberBytes:]; len(m.raft.Context) == 0 {
		m.raft.Context = nil
	}
	if !g.isLeader || m.term != g.term {
		return
	}
	if sent <= 0 || sent > g.w.now {
		// No heartbeat of this term can have borne it.
		g.h.m.malformed.Inc()
		return
	}
	// The voter may have been configured with another election timeout.
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

// publishLease computes the lease anew where something it depends on has changed. A leader
// which sleeps has none: it forgets its followers' answers when it falls asleep, and a sole
// voter, which has no use for any, is looked at here.
func (g *Group) publishLease() {
	if !g.lease.dirty {
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

// revokeLease takes the lease from readers at once.
func (g *Group) revokeLease() {
	if g.public.leaseUntil.Swap(0) != 0 && g.isLeader && !g.sleep.asleep {
		g.h.m.leaseLost.Inc()
	}
}

// resetLease forgets everything: at a change of term or leader.
func (g *Group) resetLease() {
	g.public.leaseUntil.Store(0)
	g.lease = leaseState{dirty: true}
}

// giveUpLease revokes the lease for the rest of the term.
func (g *Group) giveUpLease() {
	g.lease.givenUp = true
	g.revokeLease()
}

// promiseState is the voter's side. It is the host's own and owes nothing to
// raft's idea of terms and leaders, which may change under it.
type promiseState struct {
	// until is until when this replica grants no vote and does not campaign. It only
	// grows.
	until clock.Time
	// ticks counts raft's ticks since until last grew. Raft begins its own count
	// anew at the same moment, or later, so that it cannot campaign while this is
	// below the election timeout.
	ticks int
	// answered is the highest number of a heartbeat of answeredTerm that was answered.
	// Numbers of other terms are another node's clock.
	answered, answeredTerm uint64
}

// makePromise is called for each heartbeat before it is given to raft, which may
// answer it. now was read after the heartbeat arrived, so the promise is kept at
// least as long as the leader counts on it.
func (g *Group) makePromise(m *message) {
	if m.term < g.term {
		return // raft answers with its higher term and no MsgHeartbeatResp
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

// checkPromise asserts that an answer which is about to leave is covered.
func (g *Group) checkPromise() {
	if want := g.w.now.Add(g.h.cfg.ElectionTimeout); g.promise.until < want {
		panic(fmt.Sprintf("raftgroup: group %s: heartbeat answered at %d with a promise until %d, want %d",
			g.id, g.w.now, g.promise.until, want))
	}
}

// promised says whether a promise, or the embargo after a start, holds.
func (g *Group) promised() bool { return g.w.now < g.promise.until || g.embargoed() }

// embargoed says whether a promise that a previous run of the node may have given
// binds this replica. A sole voter has nobody to promise anything to.
func (g *Group) embargoed() bool { return g.w.now < g.h.embargo && !g.sleep.alone }

// refusesVote says whether a vote or pre-vote must not reach raft. One that a
// transfer asks for is free of the promise, since that leader has given its lease
// up for good; after a start nothing is.
func (g *Group) refusesVote(m *message) bool {
	transfer := string(m.raft.GetContext()) == transferVoteBytes
	if g.embargoed() || !transfer && g.w.now < g.promise.until {
		g.h.m.voteRefused.Inc()
		return true
	}
	return false
}

// mayTick says whether raft may be ticked without campaigning against a promise, or beside
// a replica that was chosen to: raft's shortest timeout ends with the promise, at the tick
// at which the chosen one campaigns.
func (g *Group) mayTick() bool {
	if g.promise.ticks+1 < g.h.cfg.electionTicks() {
		return true
	}
	start := g.promise.until.Add(headStartTicks * g.h.cfg.TickInterval)
	return !g.promised() && !(g.sleep.yields && g.w.now < start)
}

// mayCampaign says whether the replica has applied enough of what is committed. As a
// leader it could not serve before either.
func (g *Group) mayCampaign() bool { return g.commit-g.applied <= campaignLagMax }

// campaignWhenFree campaigns now, or at the first tick at which no promise
// forbids it.
func (g *Group) campaignWhenFree() {
	if g.closed || g.isLeader || !g.conf.votes(g.self) {
		return
	}
	g.wake()
	g.sleep.campaign = true
	g.campaignIfFree()
}

func (g *Group) campaignIfFree() {
	if !g.sleep.campaign || g.promised() || g.isLeader || !g.mayCampaign() {
		return
	}
	if margin := g.h.cfg.TickInterval / 4; g.w.now < g.promise.until.Add(margin) {
		return // the others answered the same heartbeat, some of them a moment later
	}
	g.sleep.campaign = false
	g.h.m.elections.Inc()
	_ = g.rn.ForgetLeader()
	_ = g.rn.Campaign()
}

// rememberPromise keeps the promise of a group that is closed.
func (h *Host) rememberPromise(id keyspace.GroupID, until clock.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if until > h.mu.promises[id] {
		h.mu.promises[id] = until
	}
}
