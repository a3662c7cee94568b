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
	"github.com/skeindb/skein/internal/wake"
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
	// aloneTimeout is how long the only founder listens for knocks: four times as long as the pause between two of them.
	aloneTimeout = 400 * time.Millisecond
	// knockedTimeout is how long it listens on behind a knock, or where nobody can knock: longer than the pause between two attempts to reach a node that
	// was down.
	knockedTimeout = 3 * time.Second
	// youngTime is for how long after it has bootstrapped a cluster alone a founder gives up for a node of an earlier one.
	youngTime = time.Minute
	// checkPause lies between two attempts to reach a peer that is not up yet.
	checkPause = 20 * time.Millisecond
	// judgeTimeout is how long a peer asks placement before it says that it cannot tell: well
	// within checkTimeout, since a late answer is lost.
	judgeTimeout = checkTimeout / 4
	// announcePause lies between two attempts to publish the node; at first it is announceFirst, and doubles: there may be no
	// leader yet.
	announcePause = time.Second
	announceFirst = 10 * time.Millisecond
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
	// SurelyNew says that nobody can have joined the cluster before.
	SurelyNew bool
	// NoKnocks says that nobody can knock: datagrams do not reach this node.
	NoKnocks bool
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
	// GiveUp ends the node and has its directory refused from now on, with that error.
	GiveUp func(error)
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
	// knocked is set when a node knocks that this one does not know.
	knocked wake.Signal
	// alone is when this node has bootstrapped the cluster as its only founder; 0 if it has not.
	alone atomic.Int64
	// strangers has a node that has come since, and that this one does not know.
	strangers chan keyspace.NodeID
}

// New returns an Admission.
func New(o Options) *Admission {
	return &Admission{o: o, knocked: wake.New(), strangers: make(chan keyspace.NodeID, 1)}
}

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
// disk, nodes that have joined since knock and dial: it listens for them before it bootstraps
// anything, and goes on listening while one knocks. One that comes later ends it (UnknownCame).
func (a *Admission) bootstrapAlone(ctx context.Context) error {
	patience := aloneTimeout
	if a.o.NoKnocks {
		patience = knockedTimeout
	}
	for told := false; !a.o.SurelyNew && !a.hasRun.Load(); {
		knocked, err := a.listen(ctx, patience)
		if err != nil {
			return err
		}
		if !knocked {
			break
		}
		if !told && !a.hasRun.Load() {
			told = true
			a.o.Logger.Warn("this node's directory is empty, and a node that says to be of its cluster looks for it: it waits until that one has proven it, or is silent")
		}
		patience = knockedTimeout
	}
	if a.hasRun.Load() {
		return fmt.Errorf("the data directory %s is empty, but nodes that have joined cluster %s speak to node %s: it has run before: "+
			"restore its directory, or have the member removed and let it join anew (--join); to bootstrap the cluster anew, stop its other nodes first, or empty the directory again and give another --initial-cluster-token",
			a.o.DataDir, a.o.Cluster, a.o.Self)
	}
	a.alone.Store(int64(a.o.Clock.Now()))
	return nil
}

// listen waits for that long, or until a node knocks or has come.
func (a *Admission) listen(ctx context.Context, patience time.Duration) (knocked bool, err error) {
	timer := a.o.Clock.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-a.knocked:
		return true, nil
	case <-timer.C():
		return false, nil
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// mayBootstrap reports whether this founder may go by its configuration. A majority of the
// founders, itself included, must know nothing against it, and nobody may know of an earlier run. A founder that hears nobody cannot tell a new cluster from one in which it has lost its
// disk.
func (a *Admission) mayBootstrap(p *peerAnswers) bool {
	return a.o.Founders > 0 && !a.hasRun.Load() && 1+len(p.nothing) > a.o.Founders/2
}

// Knocked takes note of a knock by a node that this one does not know. It returns whether it wants to hear of more.
func (a *Admission) Knocked(keyspace.NodeID) bool {
	a.knocked.Set()
	return !a.admitted.Load()
}

// UnknownCame takes note of a node of the cluster that this one does not know. Until this node is
// admitted it knows only the founders: the cluster has run since. Afterwards it may have been added a moment ago. It does not
// block.
func (a *Admission) UnknownCame(id keyspace.NodeID) {
	if !a.admitted.Load() {
		if a.o.Founders > 0 && !a.hasRun.Swap(true) {
			a.o.Logger.Warn("a node that is no founder has connected: the cluster has run before", zap.Stringer("peer", id))
		}
		a.knocked.Set()
		return
	}
	if a.Alone() {
		select {
		case a.strangers <- id:
		default: // another one is looked up, and this one dials again
		}
	}
}

// Alone reports whether this node has bootstrapped the cluster as its only founder, since it was opened.
func (a *Admission) Alone() bool { return a.alone.Load() != 0 }

// MindStrangers gives up if a node comes to a young cluster that never added it. Such a node belongs to a cluster that has run
// before, under the same ids, and this founder had lost its disk. A cluster that is no longer young is kept, since by now it may
// be the one with the data. MindStrangers returns when ctx ends, or nothing is left to do.
func (a *Admission) MindStrangers(ctx context.Context) {
	for {
		select {
		case id := <-a.strangers:
			// The node may have been added a moment ago, so a quorum has to say it. Without an answer it dials again.
			asked, cancel := context.WithTimeout(ctx, judgeTimeout)
			nodes, err := a.o.Placement.NodeTable(asked, true)
			cancel()
			if err == nil && !slices.ContainsFunc(nodes, func(n fsm.Node) bool { return n.ID == id }) {
				a.stranger(id)
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// stranger acts on a node of the cluster that this cluster never added.
func (a *Admission) stranger(id keyspace.NodeID) {
	age := a.o.Clock.Now().Sub(clock.Time(a.alone.Load()))
	if age >= youngTime {
		a.o.Logger.Error("a node that was never added to this cluster comes as one of it: this founder seems to have lost its disk before it bootstrapped the cluster; two clusters run under one id",
			zap.Stringer("peer", id), zap.Duration("age", age), zap.String("next", "stop one of the two, and let its nodes join the other one anew with empty directories"))
		return
	}
	a.o.GiveUp(fmt.Errorf("node %s has joined cluster %s, and was never added to this one, which node %s has bootstrapped %v ago with an empty directory: the cluster has run before: "+
		"what was written since is in %s alone: empty it and %s, and have the member removed and let it join anew (--join); to bootstrap the cluster anew, stop its other nodes first, or give another --initial-cluster-token",
		id, a.o.Cluster, a.o.Self, age.Round(time.Millisecond), a.o.DataDir, a.o.WALDir))
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
	for pause := announceFirst; ; pause = min(2*pause, announcePause) {
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
		if clock.Sleep(ctx, a.o.Clock, pause) != nil {
			return nil
		}
	}
}
