package fsm

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// RaiseVersion raises the cluster version. Each node that has started must say that it reads the
// new one. A cluster begins without a version, and its first may be any that all read. Later ones
// go up by one: a node reads only two.
type RaiseVersion struct{ To keyspace.Version }

func (RaiseVersion) kind() opKind { return opRaiseVersion }

func (o RaiseVersion) append(dst []byte) []byte { return appendVersion(dst, o.To) }

// NextVersion is what the cluster version may be raised to: the first is the newest that all nodes
// read, and each later one is the next. It is 0 if the nodes of a new cluster have none in common,
// or have not said yet.
func (m *Map) NextVersion() keyspace.Version {
	if m.ClusterVersion != 0 {
		return m.ClusterVersion + 1
	}
	next, nodes := keyspace.Version(math.MaxInt32), 0
	for _, n := range m.nodes {
		if n.State != NodeRemoved {
			next = min(next, n.Reads.Newest)
			nodes++
		}
	}
	if nodes == 0 || len(m.CannotRead(next)) > 0 {
		return 0
	}
	return next
}

// CannotRead returns the nodes, ascending by id, that do not read a version, or have not said so
// yet. A node that has not started does not count: it says what it reads before it serves.
func (m *Map) CannotRead(v keyspace.Version) []Node { return cannotRead(m.nodes, v) }

func cannotRead(nodes map[keyspace.NodeID]Node, v keyspace.Version) []Node {
	var cannot []Node
	for _, n := range nodes {
		if n.State.Started() && !n.Reads.Has(v) {
			cannot = append(cannot, n)
		}
	}
	slices.SortFunc(cannot, func(a, b Node) int { return cmp.Compare(a.ID, b.ID) })
	return cannot
}

func (s *State) applyRaiseVersion(index uint64, o RaiseVersion) Result {
	switch {
	case o.To <= s.ClusterVersion:
		return Result{} // asked again
	case s.ClusterVersion != 0 && o.To != s.ClusterVersion+1:
		return Result{Err: kverror.New(kverror.BadRequest, "the cluster version is %d, and goes up by one, not to %d", s.ClusterVersion, o.To)}
	}
	if err := errCannotRead(cannotRead(s.nodes, o.To), o.To); err != nil {
		return Result{Err: err}
	}
	s.ClusterVersion = o.To
	s.changedMap(index)
	return Result{}
}

// errCannotRead names the nodes that keep the cluster from being raised to a version; nil if there
// are none.
func errCannotRead(cannot []Node, v keyspace.Version) error {
	if len(cannot) == 0 {
		return nil
	}
	var names []string
	for i := range cannot {
		n := &cannot[i]
		names = append(names, fmt.Sprintf("%s (build %s, which reads %s)", cmp.Or(n.Name, n.ID.String()), cmp.Or(n.Build, "unknown"), n.Reads))
	}
	return kverror.New(kverror.BadRequest, "the cluster is not raised to version %d: these nodes do not read it: %s; start a newer build there, or remove them",
		v, strings.Join(names, ", "))
}
