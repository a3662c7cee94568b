package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// SetLeaderHint tells the Client who leads the placement group, as of a term; 0 is
// that nobody does. An older term is ignored. On nodes with a replica raft says so.
func (c *Client) SetLeaderHint(leader keyspace.NodeID, term uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if term < c.term {
		return
	}
	if leader != c.leader && leader != 0 {
		// The former leader is lost and may be out of reach: nobody waits for it.
		for a := range c.running {
			if a.node != leader {
				a.cancel()
			}
		}
	}
	c.term = term
	c.setLeaderLocked(leader)
}

func (c *Client) raftLeader(ls raftgroup.LeaderState) {
	if ls.Term > 0 {
		c.SetLeaderHint(ls.LeaderNode, ls.Term)
	}
}

func (c *Client) setLeaderLocked(leader keyspace.NodeID) {
	if leader == c.leader {
		return
	}
	c.leader = leader
	if c.moved != nil {
		close(c.moved)
		c.moved = nil
	}
	if leader == 0 {
		c.o.Metrics.HasLeader.Set(0)
		return
	}
	c.o.Metrics.HasLeader.Set(1)
	c.o.Metrics.LeaderChanges.Inc()
}

// Leader returns the node that is taken for the placement leader; 0 if none is
// known. To etcd clients it is the leader.
func (c *Client) Leader() keyspace.NodeID {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leader
}

// leaderNow returns the node that is taken for the leader, 0 if none is, and a channel
// that is closed when another one is.
func (c *Client) leaderNow() (keyspace.NodeID, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.moved == nil {
		c.moved = make(chan struct{})
	}
	return c.leader, c.moved
}

// heard notes whom a refusing node named as the leader. A refuser that was taken for the
// leader is forgotten.
func (c *Client) heard(refuser, hint keyspace.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if hint != 0 && hint != refuser {
		c.setLeaderLocked(hint)
	} else if c.leader == refuser {
		c.setLeaderLocked(0)
	}
}

// leadsByNow notes that a node has ended a stream since it leads, unlike when the stream began. One that was taken for the leader and
// has ended it all the same is forgotten.
func (c *Client) leadsByNow(node keyspace.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader == node {
		node = 0
	}
	c.setLeaderLocked(node)
}

// answered takes a node for the leader that answered as only the leader does, if no leader is
// known. Raft tells of a new leader only once, and it may have been asked an instant before it
// knew itself.
func (c *Client) answered(node keyspace.NodeID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader == 0 {
		c.setLeaderLocked(node)
	}
}

// target returns the node to ask: the leader if one is known. Else known members of the
// placement group and all other nodes take turns, this one included: the known members may
// have left the group since.
func (c *Client) target() keyspace.NodeID {
	if l := c.Leader(); l != 0 {
		return l
	}
	candidates := append([]keyspace.NodeID{c.o.Self}, c.o.Peers...)
	var members []keyspace.Replica
	if m := c.maps.load(); m != nil {
		for _, n := range m.Nodes() {
			if !slices.Contains(candidates, n.ID) {
				candidates = append(candidates, n.ID)
			}
		}
		members = m.PlacementGroup().Replicas
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.turn++
	if len(members) > 0 && c.turn%2 == 0 {
		return members[c.turn/2%len(members)].Node
	}
	return candidates[(c.turn+1)/2%len(candidates)]
}

// begin notes an attempt that ends as soon as another node is known to lead, if it may be
// made again. end forgets it.
func (c *Client) begin(node keyspace.NodeID, repeat bool, cancel context.CancelFunc) (end func()) {
	if !repeat || node == c.o.Self {
		return cancel
	}
	a := &attempt{node, cancel}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader != 0 && c.leader != node {
		cancel() // it became known since the node was chosen
	}
	c.running[a] = struct{}{}
	return func() {
		c.mu.Lock()
		delete(c.running, a)
		c.mu.Unlock()
		cancel()
	}
}

// attempts repeats f with nodes to ask until it succeeds, fails for good or ctx ends. f is
// repeated only if its error certainly means no effect, or if repeat is set because repeating
// is harmless. If an earlier attempt may have had an effect, AccessChanged of a later one becomes Timeout: it says
// nothing of the first.
func (c *Client) attempts(ctx context.Context, repeat bool, f func(ctx context.Context, node keyspace.NodeID) error) error {
	pause, hops, unknown := attemptPauseMin, 0, false
	for {
		var node keyspace.NodeID
		var err error
		if repeat {
			node = c.target()
		} else if node, err = c.awaitLeader(ctx); err != nil {
			return err
		}
		attempt, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.AttemptTimeout)
		end := c.begin(node, repeat, cancel)
		err = f(attempt, node)
		late := attempt.Err() != nil
		end()
		again, hint := c.judge(node, err, late, repeat)
		if unknown && kverror.IsAccessChanged(err) {
			return kverror.New(kverror.Timeout, "an earlier attempt may have taken effect: %v", err)
		}
		if !again {
			return err
		}
		unknown = unknown || !certainlyNot(err)
		if ctx.Err() != nil {
			return ctxError(ctx, err)
		}
		if hint && hops < maxHops {
			hops++
			continue
		}
		if clock.Sleep(ctx, c.o.Clock, pause) != nil {
			return ctxError(ctx, err)
		}
		pause, hops = min(2*pause, attemptPauseMax), 0
	}
}

// awaitLeader returns the leader, once one is known. A request that must not be repeated does not go to a node that may not lead.
// If that node were out of reach, nobody could say whether the request was carried out.
func (c *Client) awaitLeader(ctx context.Context) (keyspace.NodeID, error) {
	for {
		if l := c.Leader(); l != 0 {
			return l, nil
		}
		// Who answers this leads.
		if _, err := c.ask(ctx, &request{Kind: requestStatus, Linearizable: true}, true); err != nil {
			return 0, err
		}
	}
}

// ctxError is the end of a caller's patience; last is why it needed any.
func ctxError(ctx context.Context, last error) error {
	return fmt.Errorf("%w (last: %w)", context.Cause(ctx), last)
}

// judge says whether to ask again after an error of node, and whether at once: a
// node that does not lead has named another.
func (c *Client) judge(node keyspace.NodeID, err error, late, repeat bool) (again, hint bool) {
	if err == nil {
		return false, false
	}
	var e *kverror.Error
	switch {
	case errors.As(err, &e) && e.Kind == kverror.NotLeader:
		c.heard(node, e.Leader)
		return true, e.Leader != 0 && e.Leader != node
	case errors.As(err, &e) && e.Kind == kverror.AccessChanged:
		return false, false // the same request is never permitted again
	case errors.As(err, &e):
		// An overloaded or confused leader is asked again, anything else is an answer.
		again = e.Fate() == kverror.NotApplied && e.Retry() == kverror.RetryRouter ||
			repeat && e.Fate() == kverror.Unknown
		return again, false
	case late || transport.NotDelivered(err) || isCallError(err):
		c.heard(node, 0)
		return repeat || transport.NotDelivered(err), false
	}
	return false, false
}

// certainlyNot says of the error of an attempt that it had no effect and never will.
func certainlyNot(err error) bool {
	var e *kverror.Error
	if errors.As(err, &e) {
		return e.Fate() == kverror.NotApplied
	}
	return transport.NotDelivered(err)
}

func isCallError(err error) bool {
	var ce *transport.CallError
	return errors.As(err, &ce)
}

// ask sends a request to the leader, wherever it is. repeat says that a request
// whose fate is unknown may be sent again.
//
// Before users and roles there are no rights that could be taken, and no permits in what is sent.
func (c *Client) ask(ctx context.Context, q *request, repeat bool) (response, error) {
	if m := c.maps.load(); q.guarded() && m != nil && m.ClusterVersion >= keyspace.VersionAccess {
		q.Permit, _ = keyspace.PermitOf(ctx)
	}
	ctx, stop := c.joined(ctx)
	defer stop()
	var a response
	err := c.attempts(ctx, repeat, func(ctx context.Context, node keyspace.NodeID) (err error) {
		// Who has handed over leads no more.
		if a, err = c.askNode(ctx, node, q); err == nil && !q.maybeOld() && q.Kind != requestTransfer {
			c.answered(node)
		}
		return err
	})
	if err != nil {
		return response{}, unknownOutcome(err)
	}
	return a, nil
}

// joined returns a context that also ends with the Client.
func (c *Client) joined(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// askNode sends a request to one node: this one by a function call.
func (c *Client) askNode(ctx context.Context, node keyspace.NodeID, q *request) (response, error) {
	if node == c.o.Self {
		return c.o.Service.serve(ctx, c.o.Self, q)
	}
	p, err := c.o.Bus.Call(ctx, node, transport.MethodPlacementRequest, q.encode())
	if err != nil {
		return response{}, fmt.Errorf("ask node %s: %w", node, err)
	}
	return decodeResponse(q.Kind, p)
}

// unknownOutcome gives an error that says nothing of the fate etcd's kind for it.
func unknownOutcome(err error) error {
	var e *kverror.Error
	var k kverror.Kind
	if (errors.As(err, &e) || errors.As(err, &k)) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return kverror.Of(err)
	}
	return kverror.New(kverror.Timeout, "placement: %v", err)
}

// last asks a replica of the placement group for its applied state: this node's own, else the
// leader's, or any if none leads.
func (c *Client) last(ctx context.Context, kind requestKind) (response, error) {
	if a, err := c.o.Service.serveLast(kind); err == nil {
		return a, nil
	}
	return c.ask(ctx, &request{Kind: kind}, true)
}

// Term returns the placement group's raft term as this node knows it: from raft if the node
// has a replica, else from the last word about a leader. 0 means that nothing was heard yet.
func (c *Client) Term() uint64 {
	own := c.o.Service.machine.leaderState().Term
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(own, c.term)
}
