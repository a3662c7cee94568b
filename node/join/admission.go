package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

const (
	// checkTimeout is how long a node with an empty directory waits for the answers of all
	// others before it goes by those that it has. Where these do not admit it, it asks
	// everybody again.
	checkTimeout = time.Second
	// aloneTimeout is how long the only founder listens: longer than the pause between two
	// attempts to reach a node that was down.
	aloneTimeout = 3 * time.Second
	// checkPause lies between two attempts to reach a peer that is not up yet.
	checkPause = 20 * time.Millisecond
	// judgeTimeout is how long a peer asks placement before it says that it cannot tell: well
	// within checkTimeout, since a late answer is lost.
	judgeTimeout = checkTimeout / 4
	// announcePause lies between two attempts to publish the node.
	announcePause = time.Second
)

// Options are what an Admission is made of. All of them are required.
type Options struct {
	Cluster keyspace.ClusterID
	Self    keyspace.NodeID
	// Instance is that of the node's directory.
	Instance uint64
	// DataDir and WALDir are named in errors.
	DataDir, WALDir string
	// Founders is the number of founders of a new cluster, 0 for a node that joins.
	Founders int
	// Nodes is the node table as this node knew it when it was opened; Others are its nodes
	// without this one and those that were removed.
	Nodes  []fsm.Node
	Others []keyspace.NodeID
	Clock  clock.Clock
	Logger *zap.Logger

	// Ask sends a question to a peer, which answers it by Admission.Answer.
	Ask func(ctx context.Context, peer keyspace.NodeID, question []byte) ([]byte, error)
	// Placement is the access to the placement group, View this node's replica of it.
	Placement Placement
	View      func() *fsm.View
	// UndoBootstrap deletes this node's bootstrap state once the placement group has other members.
	// holds is the node's replica of the group by now, 0 for none.
	UndoBootstrap func(ctx context.Context, holds keyspace.ReplicaID) error
	// LogsEmpty reports that no group on this node ever had a leader that it heard of.
	LogsEmpty func() bool
}

// Placement is the access to the placement group; *placement.Client implements it.
type Placement interface {
	// WatchMap returns this node's copy of the map, nil before there is one.
	WatchMap() (*fsm.Map, <-chan struct{})
	// NodeTable returns all nodes, removed ones included. With linearizable a quorum answers.
	NodeTable(ctx context.Context, linearizable bool) ([]fsm.Node, error)
	// PlacementGroup returns who holds the placement group, as a quorum has it.
	PlacementGroup(ctx context.Context) (placement.Status, error)
	// ClaimNode gives a node's row to the directory of that instance. kverror.NodeExists says
	// that another directory has it.
	ClaimNode(ctx context.Context, node keyspace.NodeID, instance uint64) error
	// Publish writes the node's own row. kverror.NodeRemoved and kverror.NodeExists say that it
	// was removed, or is another directory's.
	Publish(ctx context.Context, n fsm.Node) error
}

// Admission has a node with an empty directory admitted by its peers, and answers the peers that
// ask for the same.
type Admission struct {
	o Options
	// admitted says that the peers, now or in an earlier run, have admitted this node's directory.
	admitted atomic.Bool
	// hasRun says of a node that is not admitted yet that the cluster has run before.
	hasRun atomic.Bool
}

// New returns an Admission.
func New(o Options) *Admission { return &Admission{o: o} }

// SetAdmitted notes that the peers have admitted this node.
func (a *Admission) SetAdmitted() { a.admitted.Store(true) }

// Admitted reports whether the peers have admitted this node.
func (a *Admission) Admitted() bool { return a.admitted.Load() }

// peerAnswers is what the others have answered in one round of questions.
type peerAnswers struct {
	// by has settled it, by the answer check; 0 where nobody has.
	by    keyspace.NodeID
	check Check
	// The peers in nothing know nothing against the node. Those in unsure only know that the
	// cluster has run. Those in silent have not answered.
	nothing, unsure, silent []keyspace.NodeID
}

// Request asks every peer to check this node, whose directory is empty, until the node is
// admitted or refused. A node that lost its disk has forgotten its votes and what it
// acknowledged; under its old id it could make the others lose both (trap 47).
func (a *Admission) Request(ctx context.Context) error {
	switch {
	case len(a.o.Others) == 0 && a.o.Founders == 0:
		return fmt.Errorf("node %s is to join cluster %s, and knows none of its nodes", a.o.Self, a.o.Cluster)
	case len(a.o.Others) == 0:
		return a.bootstrapAlone(ctx)
	}
	for round := 1; ; round++ {
		p := a.askAll(ctx)
		switch {
		case p.by != 0:
			return a.settle(ctx, &p)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if len(p.unsure) > 0 && !a.hasRun.Swap(true) {
			round = 1 // what it waits for is something else now
		}
		if a.mayBootstrap(&p) {
			return nil
		}
		if round&(round-1) == 0 || round%logRounds == 0 {
			a.logWaiting(&p)
		}
	}
}

// logRounds is how many rounds at most lie between two log lines about what a node waits for.
const logRounds = 60

// bootstrapAlone is Request of the only founder, which has nobody to ask. If it has lost its
// disk, nodes that have joined since speak to it: it listens for them before it bootstraps
// anything.
func (a *Admission) bootstrapAlone(ctx context.Context) error {
	if err := clock.Sleep(ctx, a.o.Clock, aloneTimeout); err != nil {
		return err
	}
	if a.hasRun.Load() {
		return fmt.Errorf("the data directory %s is empty, but nodes that have joined cluster %s speak to node %s: it has run before: "+
			"restore its directory, or have the member removed and let it join anew (--join); to bootstrap the cluster anew, stop its other nodes first, or empty the directory again and give another --initial-cluster-token",
			a.o.DataDir, a.o.Cluster, a.o.Self)
	}
	return nil
}

// mayBootstrap reports whether this founder may go by its configuration. A majority of the
// founders, itself included, must know nothing against it, and nobody may know of an earlier run. A founder that hears nobody cannot tell a new cluster from one in which it has lost its
// disk.
func (a *Admission) mayBootstrap(p *peerAnswers) bool {
	return a.o.Founders > 0 && !a.hasRun.Load() && 1+len(p.nothing) > a.o.Founders/2
}

// UnknownCame takes note of a node of the cluster that this one does not know. Until this node is
// admitted it knows only the founders: the cluster has run since.
func (a *Admission) UnknownCame(id keyspace.NodeID) {
	if !a.admitted.Load() && a.o.Founders > 0 && !a.hasRun.Swap(true) {
		a.o.Logger.Warn("a node that is no founder has connected: the cluster has run before", zap.Stringer("peer", id))
	}
}

// settle acts by the answer that settles it.
func (a *Admission) settle(ctx context.Context, p *peerAnswers) error {
	switch check := &p.check; {
	case check.Removed:
		return a.RemovedError()
	case check.Known:
		return fmt.Errorf("the data directory %s is empty, but node %s says that node %s is a member of cluster %s that has run before: "+
			"restore its directory, or remove the member and let it join anew (--join, or etcdctl member add): a member that was removed does not come back",
			a.o.DataDir, p.by, a.o.Self, a.o.Cluster)
	case check.Other:
		return fmt.Errorf("node %s refuses this node; empty %s and %s: %w", p.by, a.o.DataDir, a.o.WALDir, otherDirectory(&fsm.Node{ID: a.o.Self}))
	case check.Absent:
		return fmt.Errorf("node %s says that cluster %s has no node %s: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
			p.by, a.o.Cluster, a.o.Self, a.o.DataDir, a.o.WALDir)
	case check.Moved:
		return errors.Join(ctx.Err(), a.o.UndoBootstrap(ctx, check.Holds))
	}
	return ctx.Err()
}

// logWaiting tells the operator what the node waits for.
func (a *Admission) logWaiting(p *peerAnswers) {
	heard := []zap.Field{zap.Stringers("nothing known", p.nothing), zap.Stringers("unsure", p.unsure), zap.Stringers("silent", p.silent)}
	switch {
	case a.hasRun.Load():
		a.o.Logger.Warn("this node's directory is empty and the cluster has run before: it waits until a quorum of the others tells whether it was a member; if nothing is left of the cluster, stop all its nodes at the same time, and empty all directories", heard...)
	case a.o.Founders > 0:
		a.o.Logger.Warn("this node's directory is empty: it waits until a majority of the founders runs, none of which knows that the cluster has run before",
			append(heard, zap.Int("founders", a.o.Founders))...)
	default:
		a.o.Logger.Warn("this node's directory is empty: it waits until one of the cluster's nodes admits it", heard...)
	}
}

// askAll asks all others until one of them settles it, each founder has said all that it
// knows, or checkTimeout is over.
func (a *Admission) askAll(ctx context.Context) (p peerAnswers) {
	asking, cancel := clock.WithTimeout(ctx, a.o.Clock, checkTimeout)
	defer cancel()
	var mu sync.Mutex // guards p
	var wg sync.WaitGroup
	for _, peer := range a.o.Others {
		wg.Go(func() {
			check, answered := a.ask(asking, peer)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !answered:
				p.silent = append(p.silent, peer)
			case check.Unsure:
				p.unsure = append(p.unsure, peer)
			case !check.decides():
				p.nothing = append(p.nothing, peer)
			case p.by == 0:
				p.by, p.check = peer, check
				cancel()
			}
		})
	}
	wg.Wait()
	for _, ids := range [][]keyspace.NodeID{p.nothing, p.unsure, p.silent} {
		slices.Sort(ids)
	}
	return p
}

// ask asks one peer until it says all that it will say, or ctx ends, and returns the last
// answer. A node that joins needs an answer that settles it.
func (a *Admission) ask(ctx context.Context, peer keyspace.NodeID) (last Check, answered bool) {
	q, err := json.Marshal(Check{Node: a.o.Self, Instance: a.o.Instance})
	if err != nil {
		panic(fmt.Sprintf("join: encode a check: %v", err)) // numbers always encode
	}
	for {
		b, err := a.o.Ask(ctx, peer, q)
		var check Check
		if err == nil && json.Unmarshal(b, &check) == nil {
			if last, answered = check, true; check.decides() || !check.Unsure && a.o.Founders > 0 {
				return last, true
			}
		}
		if clock.Sleep(ctx, a.o.Clock, checkPause) != nil {
			return last, answered
		}
	}
}

// ErrRemoved says that this node was removed from its cluster.
var ErrRemoved = errors.New("the node was removed from its cluster")

// RemovedError is ErrRemoved with what the operator can do.
func (a *Admission) RemovedError() error {
	return fmt.Errorf("%w: node %s of cluster %s is never admitted again: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
		ErrRemoved, a.o.Self, a.o.Cluster, a.o.DataDir, a.o.WALDir)
}

// Announce publishes the node's row of the node table until it is there or ctx ends. Its error
// says that the node cannot go on: it was removed from the cluster, or the row is another
// directory's.
func (a *Admission) Announce(ctx context.Context, row fsm.Node) error {
	for {
		err := a.o.Placement.Publish(ctx, row)
		switch {
		case err == nil || ctx.Err() != nil:
			return nil
		case errors.Is(err, kverror.NodeRemoved):
			return a.RemovedError()
		case errors.Is(err, kverror.NodeExists):
			return fmt.Errorf("this directory is none of the cluster: %w", otherDirectory(&fsm.Node{ID: a.o.Self}))
		}
		a.o.Logger.Info("publish this node", zap.Error(err))
		if clock.Sleep(ctx, a.o.Clock, announcePause) != nil {
			return nil
		}
	}
}
