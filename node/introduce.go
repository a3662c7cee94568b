package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

const (
	// introduceTimeout is how long a node with an empty directory waits for the answers of
	// all others before it goes by those that it has. Where these do not let it in it asks
	// everybody again.
	introduceTimeout = time.Second
	// aloneTimeout is how long the only founder listens: longer than the pause between two
	// attempts to reach a node that was down.
	aloneTimeout = 3 * time.Second
	// introducePause lies between two attempts to reach a peer that is not up yet.
	introducePause = 20 * time.Millisecond
	// judgeTimeout is how long a peer asks placement before it says that it cannot tell:
	// well within introduceTimeout, since a word that comes too late is none.
	judgeTimeout = introduceTimeout / 4
)

// introduction is the question of a node that has never been let in with its
// directory, and its answer. An answer without a flag says that nothing is known
// against the node, and nothing of it.
type introduction struct {
	Node keyspace.NodeID
	// Instance is that of the directory.
	Instance uint64
	// Known says that the node table has the node as one that has served before, Member
	// that it has it as one that has not.
	Known, Member bool
	// Removed says that the node was removed from the cluster, Absent that the cluster has
	// run before and has no such node.
	Removed, Absent bool
	// Other says that another directory has been let in as the node.
	Other bool
	// Moved says that the placement group has had other members since the founding, and
	// Holds which replica of it is on the node, 0 for none.
	Moved bool
	Holds keyspace.ReplicaID
	// Unsure says that the cluster has run before and the answerer cannot tell now
	// what its node table says: it is to be asked again.
	Unsure bool
}

// decides says whether the answer settles whether the node is let in: it is the node
// table's, as a quorum has it, or speaks against the node.
func (q *introduction) decides() bool { return q.Known || q.Member || q.Other || q.Removed || q.Absent }

// hearsay is what the others have said in one round of questions.
type hearsay struct {
	// by has settled it, by word; 0 where nobody has.
	by   keyspace.NodeID
	word introduction
	// Of the others nothing have nothing to say against the node, unsure know that the
	// cluster has run and no more, silent have not answered.
	nothing, unsure, silent []keyspace.NodeID
}

// introduce asks every peer whether the cluster knows this node, whose directory is empty,
// until it is let in or refused. A node that lost its disk has forgotten its votes and what
// it acknowledged; with its old id it could make the others lose both (trap 47).
func (c *Core) introduce(ctx context.Context) error {
	if len(c.o.Founders) == 0 && len(c.others()) == 0 {
		return fmt.Errorf("node %s is to join cluster %s, and knows none of its nodes", c.o.Self, c.o.Cluster)
	}
	if len(c.others()) == 0 {
		return c.foundAlone(ctx)
	}
	for round := 1; ; round++ {
		h := c.askAll(ctx)
		switch {
		case h.by != 0:
			return c.settle(ctx, &h)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if len(h.unsure) > 0 && !c.hasRun.Swap(true) {
			round = 1 // what it waits for is something else now
		}
		if c.mayFound(&h) {
			return nil
		}
		if round&(round-1) == 0 || round%sayRounds == 0 {
			c.sayWaiting(&h)
		}
	}
}

// foundAlone is introduce of the only founder, which has nobody to ask. If it has lost its disk
// those that have joined since speak to it: it listens for them before it founds anything.
func (c *Core) foundAlone(ctx context.Context) error {
	if err := clock.Sleep(ctx, c.o.Clock, aloneTimeout); err != nil {
		return err
	}
	if c.hasRun.Load() {
		return fmt.Errorf("the data directory %s is empty, but nodes that have joined cluster %s speak to node %s: it has run before: "+
			"restore its directory, or have the member removed and let it join anew (--join); where the cluster is to be founded anew, stop its other nodes first, or empty the directory again and give another --initial-cluster-token",
			c.o.DataDir, c.o.Cluster, c.o.Self)
	}
	return nil
}

// sayRounds is how many rounds at most lie between two words about what a node waits for.
const sayRounds = 60

// mayFound says whether a founder may go by its configuration: a majority of the founders,
// itself among them, has nothing to say against it, and nobody knows that the cluster has
// run. A founder that hears nobody cannot tell a new cluster from one that it has lost its
// disk in.
func (c *Core) mayFound(h *hearsay) bool {
	return !c.hasRun.Load() && 1+len(h.nothing) > len(c.o.Founders)/2
}

// unknownCame hears of a node of the cluster that this one does not know. While it waits to be
// let in it knows those alone that were there at the founding: the cluster has run since.
func (c *Core) unknownCame(id keyspace.NodeID) {
	if !c.letIn.Load() && len(c.o.Founders) > 0 && !c.hasRun.Swap(true) {
		c.log.Warn("a node has come that is no founder: the cluster has run before", zap.Stringer("peer", id))
	}
}

// settle acts by what settles it.
func (c *Core) settle(ctx context.Context, h *hearsay) error {
	switch word := &h.word; {
	case word.Removed:
		return c.removedError()
	case word.Known:
		return fmt.Errorf("the data directory %s is empty, but node %s says that node %s is a member of cluster %s that has run before: "+
			"restore its directory, or remove the member and let it join anew (--join, or etcdctl member add): a member that was removed does not come back",
			c.o.DataDir, h.by, c.o.Self, c.o.Cluster)
	case word.Other:
		return fmt.Errorf("node %s says, and %s and %s are to be emptied: %w", h.by, c.o.DataDir, c.o.WALDir, otherDirectory(&placement.Node{ID: c.o.Self}))
	case word.Absent:
		return fmt.Errorf("node %s says that cluster %s has no node %s: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
			h.by, c.o.Cluster, c.o.Self, c.o.DataDir, c.o.WALDir)
	case word.Moved:
		return errors.Join(ctx.Err(), c.service.Unfound(ctx, c.host, word.Holds))
	}
	return ctx.Err()
}

// sayWaiting tells the operator what the node waits for.
func (c *Core) sayWaiting(h *hearsay) {
	heard := []zap.Field{zap.Stringers("nothing known", h.nothing), zap.Stringers("unsure", h.unsure), zap.Stringers("silent", h.silent)}
	switch {
	case c.hasRun.Load():
		c.log.Warn("this node's directory is empty and the cluster has run before: it waits for a quorum of the others to tell whether it was a member; where nothing is left of the cluster, stop all its nodes at the same time, and empty all directories", heard...)
	case len(c.o.Founders) > 0:
		c.log.Warn("this node's directory is empty: it waits until a majority of the founders runs, none of which knows that the cluster has run before",
			append(heard, zap.Int("founders", len(c.o.Founders)))...)
	default:
		c.log.Warn("this node's directory is empty: it waits for one of the cluster's nodes to let it in", heard...)
	}
}

// askAll asks all others until one of them settles it, each founder has said all that it
// knows, or introduceTimeout is over.
func (c *Core) askAll(ctx context.Context) (h hearsay) {
	asking, cancel := clock.WithTimeout(ctx, c.o.Clock, introduceTimeout)
	defer cancel()
	var mu sync.Mutex // guards h
	var wg sync.WaitGroup
	for _, peer := range c.others() {
		wg.Go(func() {
			a, answered := c.wordOf(asking, peer)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !answered:
				h.silent = append(h.silent, peer)
			case a.Unsure:
				h.unsure = append(h.unsure, peer)
			case !a.decides():
				h.nothing = append(h.nothing, peer)
			case h.by == 0:
				h.by, h.word = peer, a
				cancel()
			}
		})
	}
	wg.Wait()
	for _, ids := range [][]keyspace.NodeID{h.nothing, h.unsure, h.silent} {
		slices.Sort(ids)
	}
	return h
}

// wordOf asks one peer until it says all that it will say, or ctx ends, and returns the
// last answer. Who joins needs one that settles it.
func (c *Core) wordOf(ctx context.Context, peer keyspace.NodeID) (last introduction, answered bool) {
	q, err := json.Marshal(introduction{Node: c.o.Self, Instance: c.dirs.Identity.Instance})
	if err != nil {
		panic(fmt.Sprintf("node: encode an introduction: %v", err)) // numbers always encode
	}
	for {
		b, err := c.bus.Call(ctx, peer, transport.MethodNodeAdmin, append([]byte{adminIntroduce}, q...))
		var a introduction
		if err == nil && json.Unmarshal(b, &a) == nil {
			if last, answered = a, true; a.decides() || !a.Unsure && len(c.o.Founders) > 0 {
				return last, true
			}
		}
		if clock.Sleep(ctx, c.o.Clock, introducePause) != nil {
			return last, answered
		}
	}
}

// judgeIntroduction answers a node that has an empty directory. The node table as
// it is now decides; this node's own copy may be old, so it counts only where it
// speaks against the asker, or where it shows that nothing has happened since the
// founding.
func (c *Core) judgeIntroduction(ctx context.Context, q introduction) introduction {
	q = introduction{Node: q.Node, Instance: q.Instance}
	if !c.letIn.Load() {
		q.Unsure = c.hasRun.Load()
		return q
	}
	if mutation.Is(mutation.EmptyLetIn) {
		q.Member = true
		return q
	}
	v := c.service.View()
	q.judge(v.Node(q.Node))
	m, _ := c.client.WatchMap()
	if m != nil {
		q.judge(m.Node(q.Node))
	}
	// The founding map is what every founder writes for itself: it tells nothing. A node
	// that holds no replica of the group has no map at all when it starts again, but the
	// node table of its store tells whether anything has happened, and so do its logs, also
	// where the store is behind them.
	young := v.Index <= raftgroup.InitIndex && (m == nil || m.Version <= raftgroup.InitIndex) && c.logsAreEmpty()
	for i := range c.nodes {
		n := &c.nodes[i]
		q.judge(*n, n.ID == q.Node)
		young = young && len(n.ClientURLs) == 0 && n.Since == 0
	}
	if q.Known || q.Removed || q.Other || young {
		return q
	}
	return c.judgeByQuorum(ctx, q)
}

// judgeByQuorum judges by the node table as it is now. The node is that of the directory that
// is let in first: an entry of placement says so before the answer does.
func (c *Core) judgeByQuorum(ctx context.Context, q introduction) introduction {
	unsure := introduction{Node: q.Node, Unsure: true}
	ctx, cancel := context.WithTimeout(ctx, judgeTimeout)
	defer cancel()
	nodes, err := c.client.NodeTable(ctx, true)
	if err != nil {
		return unsure
	}
	group, err := c.client.PlacementGroup(ctx)
	if err != nil {
		return unsure
	}
	own := keyspace.Descriptor{Replicas: group.Replicas}
	here, _ := own.ReplicaOn(q.Node)
	q.Moved, q.Holds = group.ConfIndex > raftgroup.InitIndex, here.ID
	i := slices.IndexFunc(nodes, func(n placement.Node) bool { return n.ID == q.Node })
	if q.Absent = i < 0; q.Absent {
		return q
	}
	q.judge(nodes[i], true)
	if q.Known || q.Removed || q.Other {
		return q
	}
	switch err := c.client.ClaimNode(ctx, q.Node, q.Instance); {
	case errors.Is(err, kverror.NodeExists):
		q.Other = true
	case err != nil:
		return unsure
	}
	q.Member = true
	return q
}

// logsAreEmpty says that no group on this node has ever had a leader that it heard of.
func (c *Core) logsAreEmpty() bool {
	return !slices.ContainsFunc(c.wal.Groups(), func(g keyspace.GroupID) bool { return c.wal.Group(g).LastIndex() > raftgroup.InitIndex })
}

// judge takes over what a row of the node table says against the node. A node publishes
// where it serves after it was let in, never before.
func (q *introduction) judge(n placement.Node, ok bool) {
	q.Removed = q.Removed || ok && n.State == placement.NodeRemoved
	q.Known = q.Known || ok && len(n.ClientURLs) > 0
	q.Other = q.Other || ok && n.OtherThan(q.Instance)
}
