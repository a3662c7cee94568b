package operate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/fsm"
)

// words puts the names of nodes in the place of their ids.
func (v *clusterView) words() *strings.Replacer { return nodeWords(v.nodes) }

// nodeWords puts the names of nodes in the place of their ids.
func nodeWords(nodes []fsm.Node) *strings.Replacer {
	named := slices.Clone(nodes)
	// The first pair that fits counts: longer names come first.
	slices.SortFunc(named, func(a, b fsm.Node) int {
		return cmp.Or(len(b.ID.String())-len(a.ID.String()), cmp.Compare(a.ID, b.ID))
	})
	var pairs []string
	for i := range named {
		// One that etcd's MemberAdd has added has no name before it starts.
		pairs = append(pairs, "node "+named[i].ID.String(), "node "+cmp.Or(named[i].Name, named[i].ID.String()))
	}
	return strings.NewReplacer(pairs...)
}

func rangeRow(d *keyspace.Descriptor, byName map[keyspace.NodeID]string, leader string, keys, bytes int64, state string) *adminpb.Range {
	r := &adminpb.Range{
		Id: uint64(d.Range), Generation: uint64(d.Generation), Start: d.Span.Start, End: d.Span.End,
		Leader: leader, Keys: keys, Bytes: bytes, State: state, ConfIndex: d.ConfIndex,
	}
	for _, rep := range d.Replicas {
		r.Replicas = append(r.Replicas, byName[rep.Node])
		r.Members = append(r.Members, &adminpb.Replica{Node: byName[rep.Node], ReplicaId: uint64(rep.ID), Role: roleName(rep.Role)})
	}
	return r
}

func roleName(r keyspace.Role) string {
	switch r {
	case keyspace.RoleVoter:
		return "voter"
	case keyspace.RoleLearner:
		return "learner"
	case keyspace.RoleVoterIncoming:
		return "incoming voter"
	case keyspace.RoleVoterOutgoing:
		return "outgoing voter"
	case keyspace.RoleVoterDemoting:
		return "demoting voter"
	}
	return fmt.Sprintf("role %d", r)
}

func names(nodes []fsm.Node) map[keyspace.NodeID]string {
	m := make(map[keyspace.NodeID]string, len(nodes))
	for _, n := range nodes {
		m[n.ID] = n.Name
	}
	return m
}

// nodeNamed returns the node of a name, or of an id in etcd's form.
func nodeNamed(nodes []fsm.Node, name string) (keyspace.NodeID, error) {
	var found keyspace.NodeID
	for _, n := range nodes {
		switch {
		case n.ID.String() == name:
			return n.ID, nil
		case n.Name == name && found != 0:
			return 0, &adminapi.Refusal{Reason: fmt.Sprintf("several nodes are named %s", name), NextStep: "give the node's id (skein node list)"}
		case n.Name == name:
			found = n.ID
		}
	}
	if found == 0 {
		return 0, &adminapi.Refusal{Reason: fmt.Sprintf("there is no node %q", name), NextStep: "skein node list shows the nodes"}
	}
	return found, nil
}

func operationRow(o *fsm.Operation, byName map[keyspace.NodeID]string) *adminpb.Operation {
	row := &adminpb.Operation{
		Id: o.ID, Range: uint64(o.Range), Kind: o.Kind.String(), From: byName[o.From], To: byName[o.To], Reason: o.ReasonWord(), Why: o.Why, Right: uint64(o.Right),
	}
	if o.Kind == fsm.OperationMerge {
		row.Phase = o.Phase.String()
	}
	return row
}

// half reports whether a replica bound to a merge has only its own half, while the range has been
// whole since the merge's commit. merge is 0 for a replica without one.
func half(d, has *keyspace.Descriptor, merge uint64) bool {
	return merge != 0 && d.Generation > has.Generation
}

// StateMerging is what a range is from the commit of its merge until it has absorbed the other
// half: its leader serves its own half, and who wants the other one waits.
const StateMerging = "merging"

// closedOf returns the replicas of a range that are in quarantine, by their nodes' word.
func closedOf(d *keyspace.Descriptor, reports map[keyspace.NodeID]Report) (closed []decide.Quarantined) {
	for _, m := range d.Replicas {
		for _, q := range reports[m.Node].Quarantined {
			if q.Range == d.Range && q.Replica == m.ID {
				closed = append(closed, decide.Quarantined{Replica: q.Replica, Reason: q.Reason})
			}
		}
	}
	return closed
}

// waitsFor names the nodes with voters that are not heard.
func waitsFor(d *keyspace.Descriptor, byName map[keyspace.NodeID]string, alive func(keyspace.NodeID) bool) (all []string) {
	for _, r := range d.Replicas {
		if r.Role != keyspace.RoleLearner && !alive(r.Node) {
			all = append(all, cmp.Or(byName[r.Node], r.Node.String()))
		}
	}
	slices.Sort(all)
	return all
}

// markQuarantined says in a row of the range which of its replicas are in quarantine.
func markQuarantined(row *adminpb.Range, closed []decide.Quarantined) {
	for _, q := range closed {
		for _, m := range row.GetMembers() {
			if m.GetReplicaId() == uint64(q.Replica) {
				m.Quarantine = q.Reason
			}
		}
	}
}
