package sim

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/placement/fsm"
)

// Join admits nodes that are no founders. Leave removes nodes for good, also after the
// loss of their disks, and others take their places. Both go on all the time if
// Config.Joins says so.
const (
	Join  Fault = "join"
	Leave Fault = "leave"
)

// Bounds of joinLoop, in virtual time.
const (
	// fewestMembers is how many members a range needs for its replicas.
	fewestMembers = 3
	// joinEvery is the least time between two changes of membership, and half of the
	// most.
	joinEvery = time.Second
	// joinStep is the longest time between the beginning of a join and the loss of power
	// that interrupts it. joinTries is how often one join is tried before the next
	// action.
	joinStep  = 400 * time.Millisecond
	joinTries = 6
	// loseWithin is how soon a newly admitted node may lose its disk: about as long as
	// it needs to publish itself.
	loseWithin = 3 * time.Millisecond
	// emptyWithin is how long a node that has lost its disk waits for the refusal of its
	// admission: if nobody can refuse it, it waits.
	emptyWithin = 5 * time.Second
	// leaveStep bounds one request of the operator's and leavePause lies between two.
	// leavePatience bounds the time for one node before the next action.
	leaveStep     = 5 * time.Second
	leavePause    = 500 * time.Millisecond
	leavePatience = 15 * time.Second
	// changedWithin: this long after healing, every node that was to join serves and
	// every node that was to leave has left.
	changedWithin = repairedWithin
)

// joinLoop changes the membership, one node after the other, until stop is closed.
func (n *nemesis) joinLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.Joins, least: joinEvery, spread: joinEvery, stream: 7}, func(rng *rand.Rand) {
		if n.leaving != nil {
			n.leave(rng, stop)
			return
		}
		in, out := n.c.standing(), n.c.outside()
		switch {
		case len(out) > 0 && (len(in) <= fewestMembers || rng.IntN(2) == 0):
			n.join(out[rng.IntN(len(out))], rng, stop)
		case len(in) > fewestMembers:
			n.part(in[rng.IntN(len(in))], rng, stop)
		}
	})
}

// outside returns the machines that are no members.
func (c *cluster) outside() (ms []*machine) {
	for _, m := range c.machines {
		if !m.is(stateMember) {
			ms = append(ms, m)
		}
	}
	return ms
}

// join has a machine's node join, in several attempts. The machine may lose its power
// in any step, and its disk as well.
func (n *nemesis) join(m *machine, rng *rand.Rand, stop <-chan struct{}) {
	if m.is(stateOut) && rng.IntN(2) == 0 {
		n.add(m, rng)
	}
	m.become(stateJoining)
	deaths := rng.IntN(3)
	for range joinTries {
		if closed(stop) || n.leaving != nil {
			return
		}
		e := entering{patience: leavePatience, lingers: time.Duration(max(0, rng.Int64N(int64(2*loseWithin))-int64(loseWithin)))}
		if deaths--; deaths >= 0 {
			e.patience = time.Duration(rng.Int64N(int64(joinStep)))
		}
		e.wipe = rng.IntN(2) == 0 && deaths >= 0
		if n.enter(m, e, stop) {
			return
		}
		n.c.sleep(leavePause)
	}
}

// add has an operator add the machine's node as in etcd. If the outcome is unknown, the
// node finds out when it joins.
func (n *nemesis) add(m *machine, rng *rand.Rand) {
	n.operate(m, rng, func(ctx context.Context, r *run) {
		u := m.peerURL()
		_, _, err := r.core.Members(1, true).MemberAdd(ctx, []string{u.String()}, false)
		m.mu.Lock()
		m.added = err == nil
		m.mu.Unlock()
		n.c.logf("nemesis: the member at %s is added: %v", u.String(), err)
	})
}

// entering is one attempt to join.
type entering struct {
	// patience is how long it may take; then the node loses its power.
	patience time.Duration
	// wipe makes it lose its disk as well, or, if it was admitted before, so long after
	// that.
	wipe    bool
	lingers time.Duration
}

// enter starts a node that is to join, and says whether it has become a member.
func (n *nemesis) enter(m *machine, e entering, stop <-chan struct{}) bool {
	wipe := func() {
		n.deaths.Add(1)
		m.wiped = true
		n.c.wipe(m, stateJoining)
	}
	err := n.attempt(m, e.patience, stop, func() {
		if e.wipe {
			wipe()
			return
		}
		n.deaths.Add(1)
		n.c.crash(50, m)
	})
	switch {
	case err == nil && e.wipe:
		n.c.sleep(e.lingers)
		n.c.logf("nemesis: node %s has joined, and loses its disk at once", m.id())
		wipe()
		return false
	case err == nil:
		m.become(stateMember)
		m.wiped = false
		n.joins.Add(1)
		n.c.logf("nemesis: node %s has joined", m.id())
		return true
	case errors.Is(err, errCut):
		return false
	}
	n.c.logf("nemesis: node %s is not admitted: %v", m.name, err)
	switch {
	case m.wasAdded(): // the nodes that it asked may not have heard of it
		m.mu.Lock()
		m.added = false
		m.mu.Unlock()
	case m.wiped: // the row belongs to a node that served before it lost its disk
		n.tell(&leaver{m: m, dead: true})
	default:
		n.found("membership: node %s may not join: %v", m.name, err)
	}
	return false
}

// attempt starts a node and cuts its power when its time is over or the run ends.
func (n *nemesis) attempt(m *machine, patience time.Duration, stop <-chan struct{}, cut func()) error {
	done := make(chan error, 1)
	go func() { done <- m.start() }()
	t := n.c.time.NewTimer(patience)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-stop:
	case <-t.C():
	}
	cut()
	if err := <-done; err != nil && !errors.Is(err, errCut) {
		n.c.logf("nemesis: the power of node %s went when it was over: %v", m.id(), err)
	}
	return errCut
}

// leaver is a node that leaves for good. An operator repeats the request until it has
// left.
type leaver struct {
	m *machine
	// dead says that its disk is lost and it must leave. begun says that an operator has
	// asked for its removal.
	dead, begun bool
}

// tell starts or ends the removal of a node.
func (n *nemesis) tell(l *leaver) {
	n.leaving = l
	l.m.leaves.Store(true)
}

func (n *nemesis) told() {
	n.leaving.m.leaves.Store(false)
	n.leaving = nil
}

// part removes a member. It may have lost its disk before; then it returns with an
// empty one, under its old id, and is refused.
func (n *nemesis) part(m *machine, rng *rand.Rand, stop <-chan struct{}) {
	n.tell(&leaver{m: m})
	if rng.IntN(2) == 0 && n.expendable(m, rng) {
		n.c.wipe(m, stateOut)
		n.leaving.dead = true
		n.deaths.Add(1)
		n.c.sleep(time.Duration(rng.Int64N(int64(2 * election))))
		n.comeBackBeside(m, rng, stop)
	}
	n.leave(rng, stop)
}

// expendable says whether the disk of a member may be lost: it has served, each of its
// ranges has two more replicas, and no operation reduces them.
func (n *nemesis) expendable(m *machine, rng *rand.Rand) (yes bool) {
	n.operate(m, rng, func(ctx context.Context, r *run) {
		row, err := rowOf(ctx, r, m)
		if err != nil || row == nil || !row.State.Started() {
			return
		}
		ops, err := r.core.Placement().Operations(ctx)
		if err != nil || len(ops) > 0 {
			return
		}
		pm, err := r.core.Placement().Map(ctx)
		if err != nil {
			return
		}
		yes = true
		for _, d := range append(pm.Descriptors(), pm.PlacementGroup()) {
			yes = yes && len(d.Replicas) >= fewestMembers
		}
	})
	return yes
}

// comeBackBeside starts a node that has lost its disk while another one joins, if one
// may join, at some moment of that join.
func (n *nemesis) comeBackBeside(m *machine, rng *rand.Rand, stop <-chan struct{}) {
	out := slices.DeleteFunc(n.c.outside(), func(o *machine) bool { return o == m || o.wiped }) // a wiped node may have to leave first
	if len(out) == 0 {
		n.comeBackEmpty(m, stop)
		return
	}
	joiner := out[rng.IntN(len(out))]
	if joiner.is(stateOut) && rng.IntN(2) == 0 {
		n.add(joiner, rng)
	}
	joiner.become(stateJoining)
	// The joining node needs some milliseconds; the other one is refused as fast.
	after := time.Duration(rng.Int64N(int64(4 * loseWithin)))
	var wg sync.WaitGroup
	wg.Go(func() {
		n.c.sleep(after)
		n.comeBackEmpty(m, stop)
	})
	n.c.sleep(loseWithin)
	n.enter(joiner, entering{patience: leavePatience}, stop)
	wg.Wait()
	n.besides.Add(1)
}

// comeBackEmpty starts a node that has lost its disk.
func (n *nemesis) comeBackEmpty(m *machine, stop <-chan struct{}) {
	id := m.id()
	n.c.logf("nemesis: node %s comes back with an empty disk", id)
	err := n.attempt(m, emptyWithin, stop, func() { n.c.crash(0, m) })
	switch {
	case err == nil && m.id() == id:
		n.found("membership: node %s has lost its disk and is admitted again", id)
	case err == nil:
		n.found("membership: node %s has lost its disk and is admitted as node %s, in place of an existing one", id, m.id())
	case !errors.Is(err, errCut):
		n.refusals.Add(1)
		n.c.logf("nemesis: it is not admitted: %v", err)
	}
	n.c.crash(0, m)
}

// leave has the operator ask for the node's removal until it has left, or for a while.
// A node that need not leave stays if it cannot leave.
func (n *nemesis) leave(rng *rand.Rand, stop <-chan struct{}) {
	l := n.leaving
	for begin := n.c.elapsed(); n.c.elapsed()-begin < leavePatience && !closed(stop); n.c.sleep(leavePause) {
		left := false
		n.operate(l.m, rng, func(ctx context.Context, r *run) { left = n.remove(ctx, r, l, rng) })
		if left {
			n.left(l)
			return
		}
	}
	if !l.begun && !l.dead {
		n.told()
	}
}

// remove is one request for a node's removal: that of Skein's operators or etcd's. It
// says whether the node is no member any more.
func (n *nemesis) remove(ctx context.Context, r *run, l *leaver, rng *rand.Rand) bool {
	row, err := rowOf(ctx, r, l.m)
	if err != nil || row == nil {
		return err == nil
	}
	change := adminapi.Decommission
	switch row.State {
	case fsm.NodeDecommissioned, fsm.NodeUnstarted, fsm.NodeUnstartedLearner:
		change = adminapi.Remove
	case fsm.NodeServing, fsm.NodeDraining, fsm.NodeLearner, fsm.NodeRemoved:
	}
	refused := (*adminapi.Refusal)(nil)
	if rng.IntN(3) == 0 {
		_, err = r.core.Members(1, true).MemberRemove(ctx, row.ID)
	} else {
		_, err = r.core.Admin().ChangeNode(ctx, change, row.ID.String())
	}
	l.begun = l.begun || !errors.As(err, &refused) // if only half of it is done, or that is unknown
	n.c.logf("nemesis: node %s, which is %s, must leave (%s): %v", row.ID, row.State, change, err)
	return false // repeated until the row says so
}

// left empties the machine of a removed node for another one.
func (n *nemesis) left(l *leaver) {
	m := l.m
	n.c.logf("nemesis: node %s has left", m.id())
	if r := m.current(); r != nil { // it is told so if it reaches anybody
		t := n.c.time.NewTimer(leavePause)
		defer t.Stop()
		select {
		case <-r.core.Fatal():
		case <-r.ctx.Done():
		case <-t.C():
		}
	}
	n.c.wipe(m, stateOut)
	n.deaths.Add(1)
	m.mu.Lock()
	m.founder, m.added = false, false
	m.mu.Unlock()
	m.wiped = false
	n.told()
	n.leaves.Add(1)
}

// operate has an operator send a request through a running node, if there is one, other
// than the machine's own.
func (n *nemesis) operate(m *machine, rng *rand.Rand, f func(ctx context.Context, r *run)) {
	ms := slices.DeleteFunc(n.c.standing(), func(o *machine) bool { return o == m })
	r := enterAny(ms, rng.Perm(len(ms)))
	if r == nil {
		return
	}
	defer r.leave()
	ctx, cancel := context.WithTimeout(r.ctx, leaveStep)
	defer cancel()
	f(ctx, r)
}

// rowOf returns the machine's row of the node table, nil if it has none or was removed.
func rowOf(ctx context.Context, r *run, m *machine) (*fsm.Node, error) {
	nodes, err := r.core.Placement().NodeTable(ctx, true)
	if err != nil {
		return nil, err
	}
	u := m.peerURL()
	for i := range nodes {
		if nodes[i].State != fsm.NodeRemoved && slices.Contains(nodes[i].PeerURLs, u.String()) {
			return &nodes[i], nil
		}
	}
	return nil, nil
}

// changed completes what joinLoop has begun, after healing.
func (n *nemesis) changed(rep *Report) bool {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 8))
	never := make(chan struct{})
	for begin := n.c.elapsed(); ; n.c.sleep(leavePause) {
		joining := n.c.outside()
		joining = slices.DeleteFunc(joining, func(m *machine) bool { return !m.is(stateJoining) })
		switch {
		case n.c.elapsed()-begin > changedWithin && n.leaving != nil:
			rep.Violate("membership: node %s has not left %v after healing", n.leaving.m.id(), n.c.elapsed()-begin)
			return false
		case n.c.elapsed()-begin > changedWithin && len(joining) > 0:
			rep.Violate("membership: node %s has not joined %v after healing", joining[0].name, n.c.elapsed()-begin)
			return false
		case n.leaving != nil:
			n.leave(rng, never)
		case len(joining) > 0:
			n.enter(joining[0], entering{patience: leavePatience}, never)
		default:
			return true
		}
	}
}
