package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// Check is a peer's check of a node that has an empty directory: the node's question, with Node
// and Instance alone, and the peer's answer. Nodes send it to one another as JSON. An answer
// without a flag says that the peer knows nothing against the node, and nothing of it.
type Check struct {
	Node keyspace.NodeID
	// Instance is that of the directory.
	Instance uint64
	// Known: the node table lists the node as one that has served. Member: it lists the node as
	// one that has not.
	Known, Member bool
	// Removed says that the node was removed from the cluster, Absent that the cluster has
	// run before and has no such node.
	Removed, Absent bool
	// Other says that the node was admitted with another directory.
	Other bool
	// Moved says that the placement group has had other members since the bootstrap, and
	// Holds which replica of it is on the node, 0 for none.
	Moved bool
	Holds keyspace.ReplicaID
	// Unsure: the cluster has run before, and the peer cannot read the node table now. It is to be
	// asked again.
	Unsure bool
}

// decides reports whether the answer settles the admission: it is the node table's, as a quorum
// has it, or speaks against the node.
func (q *Check) decides() bool { return q.Known || q.Member || q.Other || q.Removed || q.Absent }

// Answer answers the question of a peer that has an empty directory.
func (a *Admission) Answer(ctx context.Context, from keyspace.NodeID, question []byte) ([]byte, error) {
	var q Check
	if err := json.Unmarshal(question, &q); err != nil {
		return nil, fmt.Errorf("join: question of node %s: %w", from, err)
	}
	return json.Marshal(a.check(ctx, q))
}

// check judges a node that has an empty directory. The node table as it is now decides. This
// node's own copy may be old: it counts only if it speaks against the asker, or shows that
// nothing has happened since the bootstrap.
func (a *Admission) check(ctx context.Context, q Check) Check {
	q = Check{Node: q.Node, Instance: q.Instance}
	if !a.admitted.Load() {
		q.Unsure = a.hasRun.Load()
		return q
	}
	if mutation.Is(mutation.EmptyAdmitted) {
		q.Member = true
		return q
	}
	v := a.o.View()
	q.add(v.Node(q.Node))
	m, _ := a.o.Placement.WatchMap()
	if m != nil {
		q.add(m.Node(q.Node))
	}
	// Every founder writes the bootstrap map for itself: that map proves nothing. A node without a
	// replica of the group has no map at all when it starts again. But the node table of its store
	// shows an earlier run, and so do its logs, even if the store is behind them.
	young := v.Index <= raftgroup.InitIndex && (m == nil || m.Version <= raftgroup.InitIndex) && a.o.LogsEmpty()
	for i := range a.o.Nodes {
		n := &a.o.Nodes[i]
		q.add(*n, n.ID == q.Node)
		young = young && len(n.ClientURLs) == 0 && n.Since == 0
	}
	if q.Known || q.Removed || q.Other || young {
		return q
	}
	return a.checkByQuorum(ctx, q)
}

// checkByQuorum judges by the node table as it is now. The node is that of the directory that
// is admitted first: an entry of placement records it before the answer leaves.
func (a *Admission) checkByQuorum(ctx context.Context, q Check) Check {
	unsure := Check{Node: q.Node, Unsure: true}
	ctx, cancel := context.WithTimeout(ctx, judgeTimeout)
	defer cancel()
	nodes, err := a.o.Placement.NodeTable(ctx, true)
	if err != nil {
		return unsure
	}
	group, err := a.o.Placement.PlacementGroup(ctx)
	if err != nil {
		return unsure
	}
	own := keyspace.Descriptor{Replicas: group.Replicas}
	here, _ := own.ReplicaOn(q.Node)
	q.Moved, q.Holds = group.ConfIndex > raftgroup.InitIndex, here.ID
	i := slices.IndexFunc(nodes, func(n fsm.Node) bool { return n.ID == q.Node })
	if q.Absent = i < 0; q.Absent {
		return q
	}
	q.add(nodes[i], true)
	if q.Known || q.Removed || q.Other {
		return q
	}
	switch err := a.o.Placement.ClaimNode(ctx, q.Node, q.Instance); {
	case errors.Is(err, kverror.NodeExists):
		q.Other = true
	case err != nil:
		return unsure
	}
	q.Member = true
	return q
}

// add takes over what a row of the node table says against the node. A node publishes
// where it serves only after its admission.
func (q *Check) add(n fsm.Node, ok bool) {
	q.Removed = q.Removed || ok && n.State == fsm.NodeRemoved
	q.Known = q.Known || ok && len(n.ClientURLs) > 0
	q.Other = q.Other || ok && n.OtherThan(q.Instance)
}
