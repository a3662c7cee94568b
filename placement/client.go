package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// ClientOptions are what a Client is made of. Zero values of the optional fields
// mean the default in the comment.
type ClientOptions struct {
	// Self and Boot are this node and its present run; Service is its own. All are
	// required, as are Clock and Bus.
	Self    keyspace.NodeID
	Boot    keyspace.BootID
	Service *Service
	Clock   clock.Clock
	Bus     Bus
	// Peers are the nodes that are asked while no leader and no node table is known:
	// the founders or the nodes to join. Required unless this node is alone.
	Peers []keyspace.NodeID

	// Measurer tells what placement decides by of this node. Without one the node says
	// nothing of itself, and nothing is decided for the ranges that it leads.
	Measurer driver.Measurer

	// AttemptTimeout is how long one attempt at one node may take before the node
	// counts as lost and others are asked. Default 1 s, an election timeout.
	AttemptTimeout time.Duration
	// SequenceTimeout bounds how long a request for revisions waits, from Sequence to
	// done. Default 5 s.
	SequenceTimeout time.Duration
	// MaxQueued bounds the requests for revisions that wait. Default 65536.
	MaxQueued int

	Logger  *zap.Logger
	Metrics *Metrics
}

// Client is a node's access to the placement group and to the sequencer, wherever
// they are. Its methods may be called from many goroutines.
type Client struct {
	o ClientOptions

	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	queue         sequenceQueue
	renewals      renewQueue
	reports       reportQueue
	reporter      nodeReporter
	maps          mapCache
	registrations registrations

	mu sync.Mutex
	// Guarded by mu: the leader as last heard, of which term; 0 is unknown. turn is
	// the next of the candidates to be asked where it is unknown.
	leader keyspace.NodeID
	term   uint64
	turn   int
	// running, guarded by mu, are the attempts under way that may be made again
	// elsewhere.
	running map[*attempt]struct{}
	// moved is closed and made anew when leader changes, for those who follow it; nil
	// until somebody does.
	moved chan struct{}
}

// attempt is one attempt at one node.
type attempt struct {
	node   keyspace.NodeID
	cancel context.CancelFunc
}

// NewClient returns a node's Client. Start follows.
func NewClient(o ClientOptions) *Client {
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = time.Second
	}
	if o.SequenceTimeout == 0 {
		o.SequenceTimeout = 5 * time.Second
	}
	if o.MaxQueued == 0 {
		o.MaxQueued = 1 << 16
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	c := &Client{o: o, running: make(map[*attempt]struct{})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.queue.init()
	c.renewals.init()
	c.reports.init()
	c.reporter.init()
	c.maps.init()
	o.Service.serveClient(c)
	return c
}

// Start starts the Client's goroutines. Stop ends them.
func (c *Client) Start() {
	c.wait.Go(c.sequenceLoop)
	c.wait.Go(c.refuseLoop)
	c.wait.Go(c.renewLoop)
	c.wait.Go(c.reportLoop)
	c.wait.Go(c.followReplica)
	c.wait.Go(c.feedLoop)
	if c.o.Measurer != nil {
		c.wait.Go(c.nodeReportLoop)
	}
}

// Stop ends the Client and waits for its goroutines. Requests for revisions that
// wait are answered with Stopped.
func (c *Client) Stop() {
	c.cancel()
	c.registrations.close()
	c.wait.Wait()
	c.drain()
}

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

// Pauses between attempts: at first short, since a new leader is usually there
// within milliseconds, then longer.
const (
	attemptPauseMin = 2 * time.Millisecond
	attemptPauseMax = 100 * time.Millisecond
	// maxHops is how many hints are followed without a pause: two nodes that name each
	// other must not be asked in a circle.
	maxHops = 2
)

// attempts repeats f with nodes to ask until it succeeds, fails for good or ctx ends. f is
// repeated only if its error certainly means no effect, or if repeat is set: repeating is
// harmless then.
func (c *Client) attempts(ctx context.Context, repeat bool, f func(ctx context.Context, node keyspace.NodeID) error) error {
	pause, hops := attemptPauseMin, 0
	for {
		node := c.target()
		attempt, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.AttemptTimeout)
		end := c.begin(node, repeat, cancel)
		err := f(attempt, node)
		late := attempt.Err() != nil
		end()
		again, hint := c.judge(node, err, late, repeat)
		if !again {
			return err
		}
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

func isCallError(err error) bool {
	var ce *transport.CallError
	return errors.As(err, &ce)
}

// ask sends a request to the leader, wherever it is. repeat says that a request
// whose fate is unknown may be sent again.
func (c *Client) ask(ctx context.Context, q *request, repeat bool) (response, error) {
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

// unknownOutcome gives an error that says nothing of the fate etcd's kind for it.
func unknownOutcome(err error) error {
	var e *kverror.Error
	var k kverror.Kind
	if (errors.As(err, &e) || errors.As(err, &k)) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return kverror.Of(err)
	}
	return kverror.New(kverror.Timeout, "placement: %v", err)
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

// RangeIDs returns n range ids (at most 4096) that nobody else has or gets.
func (c *Client) RangeIDs(ctx context.Context, n int) ([]keyspace.RangeID, error) {
	if n <= 0 || n > fsm.MaxRangeIDs {
		return nil, kverror.New(kverror.BadRequest, "%d range ids asked for, at most %d", n, fsm.MaxRangeIDs)
	}
	// Ids that an unknown attempt took are lost, which harms nobody.
	a, err := c.ask(ctx, &request{Kind: requestAllocate, Count: uint64(n)}, true)
	if err != nil {
		return nil, err
	}
	ids := make([]keyspace.RangeID, n)
	for i := range ids {
		ids[i] = a.First + keyspace.RangeID(i)
	}
	return ids, nil
}

// Compact raises the cluster's compacted revision and returns the current one. The
// errors are etcd's: Compacted at or below the compacted revision, FutureRevision
// above the current one. After it has returned nil, every answer of the sequencer
// tells of the new compacted revision. Timeout leaves the outcome open.
func (c *Client) Compact(ctx context.Context, at keyspace.Revision) (current keyspace.Revision, err error) {
	if at < 0 {
		return 0, kverror.New(kverror.Compacted, "compact at %d", at)
	}
	if at >= keyspace.MaxRevision {
		return 0, kverror.New(kverror.FutureRevision, "compact at %d", at)
	}
	a, err := c.ask(ctx, &request{Kind: requestCompact, Revision: at}, false)
	return a.Revision, err
}

// Status returns the placement group's state: that of this node's replica where it
// has one, else the leader's.
func (c *Client) Status(ctx context.Context) (Status, error) {
	a, err := c.last(ctx, requestStatus)
	return a.Status, err
}

// last asks a replica of the placement group for its applied state: this node's own, else the
// leader's, or any if none leads.
func (c *Client) last(ctx context.Context, kind requestKind) (response, error) {
	if a, err := c.o.Service.serveLast(kind); err == nil {
		return a, nil
	}
	return c.ask(ctx, &request{Kind: kind}, true)
}

// LastSettings returns all settings as a replica of the placement group has them, which may be
// older than the call: there need be no quorum.
func (c *Client) LastSettings(ctx context.Context) ([]fsm.Setting, error) {
	a, err := c.last(ctx, requestSettings)
	return a.Settings, err
}

// LastOperations returns the operations under way, oldest first, as LastSettings does.
func (c *Client) LastOperations(ctx context.Context) ([]fsm.Operation, error) {
	a, err := c.last(ctx, requestOperations)
	return a.Operations, err
}

// PlacementGroup returns who holds the placement group and who leads it, not older than
// the call. What each node knows of it by itself is in its Map.
func (c *Client) PlacementGroup(ctx context.Context) (Status, error) {
	a, err := c.ask(ctx, &request{Kind: requestStatus, Linearizable: true}, true)
	return a.Status, err
}

// TransferLeader moves the placement leadership, and with it the sequencer, to a
// node with a voting replica, without a gap between revisions.
func (c *Client) TransferLeader(ctx context.Context, to keyspace.NodeID) error {
	_, err := c.ask(ctx, &request{Kind: requestTransfer, To: to}, false)
	return err
}

// PutSetting writes one of the cluster's settings, or removes it where value is
// empty. Every later answer of the sequencer carries a higher settings revision.
func (c *Client) PutSetting(ctx context.Context, name string, value []byte) error {
	if len(name) > fsm.MaxNameBytes || len(value) > fsm.MaxSettingBytes {
		return kverror.New(kverror.BadRequest, "a setting has at most %d bytes of name and %d of value", fsm.MaxNameBytes, fsm.MaxSettingBytes)
	}
	_, err := c.ask(ctx, &request{Kind: requestPutSetting, Name: name, Value: value}, true)
	return err
}

// Settings returns all settings and their revision, not older than the call.
func (c *Client) Settings(ctx context.Context) ([]fsm.Setting, keyspace.Revision, error) {
	a, err := c.ask(ctx, &request{Kind: requestSettings, Linearizable: true}, true)
	return a.Settings, a.Revision, err
}

// BeginOperation has placement change the replicas of a range, or with OwnGroup for the
// range those of the placement group itself, and returns the operation once it has begun; Operations says when it is over. Only Range, Kind, From, To and Why
// of what is given count. BadRequest says why it cannot be done, as where the range
// has another one under way; Timeout leaves the outcome open.
func (c *Client) BeginOperation(ctx context.Context, o fsm.Operation) (fsm.Operation, error) {
	if len(o.Why) > fsm.MaxNameBytes {
		return fsm.Operation{}, kverror.New(kverror.BadRequest, "%d bytes say why, at most %d", len(o.Why), fsm.MaxNameBytes)
	}
	a, err := c.ask(ctx, &request{Kind: requestBegin, Operation: o}, false)
	if err != nil {
		return fsm.Operation{}, err
	}
	if len(a.Operations) != 1 {
		return fsm.Operation{}, fmt.Errorf("placement: %d operations have begun", len(a.Operations))
	}
	return a.Operations[0], nil
}

// Operations returns the operations under way, oldest first, not older than the call.
func (c *Client) Operations(ctx context.Context) ([]fsm.Operation, error) {
	a, err := c.ask(ctx, &request{Kind: requestOperations, Linearizable: true}, true)
	return a.Operations, err
}
