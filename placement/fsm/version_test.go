package fsm

import (
	"errors"
	"strings"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// Records of an earlier build are refused by their version, and the error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"command": {FormatVersion, second(DecodeCommand([]byte{FormatVersion - 1, 1, 1}))},
		"record":  {FormatVersion, NewState().Load([]byte("m"), []byte{FormatVersion - 1, 0, 0, 0})},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Newest != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// TestRaiseVersion: the cluster version goes up by one, and only if each node that has started reads
// the new one. A node of an older build is refused from then on.
func TestRaiseVersion(t *testing.T) {
	s := NewState()
	apply := func(op Effect) error { return s.Apply(1, op).Err }
	publish := func(id keyspace.NodeID, oldest, newest keyspace.Version, now UnixMillis) error {
		n := Node{ID: id, Name: id.String(), Build: "b", Reads: keyspace.Versions{Oldest: oldest, Newest: newest}}
		return apply(PutNode{Change: NodePublishes, Now: now, Node: n})
	}
	refused := func(err error, says ...string) {
		t.Helper()
		if err == nil {
			t.Fatalf("not refused: %v", says)
		}
		for _, w := range says {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not say %q", err, w)
			}
		}
	}
	is := func(want, next keyspace.Version) {
		t.Helper()
		if m := s.View(1, 1, nil); m.Map.ClusterVersion != want || m.NextVersion() != next {
			t.Errorf("version %d, next %d; want %d and %d", m.Map.ClusterVersion, m.NextVersion(), want, next)
		}
	}
	is(0, 0) // nobody reads anything
	for id := keyspace.NodeID(1); id <= 3; id++ {
		s.nodes[id] = Node{ID: id, Name: id.String(), State: NodeServing}
	}
	s.nodes[4] = Node{ID: 4, State: NodeUnstarted}
	s.nodes[5] = Node{ID: 5, State: NodeRemoved}
	is(0, 0)
	refused(apply(RaiseVersion{To: 7}), "not raised to version 7", "1 (build unknown, which reads unknown versions)")
	for id := keyspace.NodeID(1); id <= 3; id++ {
		if err := publish(id, 6, 7, 100); err != nil {
			t.Fatal(err)
		}
	}
	is(0, 0) // node 4 is to come, and may be of another build
	delete(s.nodes, 4)
	is(0, 7)
	if err := apply(RaiseVersion{To: 6}); err != nil {
		t.Fatal(err)
	}
	is(6, 7)
	refused(apply(RaiseVersion{To: 8}), "6, and goes up by one, not to 8")
	if err := publish(3, 5, 6, 200); err != nil {
		t.Fatal(err) // it has gone back
	}
	if n := s.nodes[3]; n.ReadsSince != 200 || s.nodes[2].ReadsSince != 100 {
		t.Errorf("reads since %d and %d", n.ReadsSince, s.nodes[2].ReadsSince)
	}
	refused(apply(RaiseVersion{To: 7}), "3 (build b, which reads versions 5 to 6)", "start a newer build")
	if err := errors.Join(publish(3, 6, 7, 300), apply(RaiseVersion{To: 7}), apply(RaiseVersion{To: 7})); err != nil {
		t.Fatal(err)
	}
	is(7, 8)
	refused(publish(2, 5, 6, 400), "the cluster has version 7", "start a newer build")
	if n := s.nodes[2]; n.Reads.Newest != 7 {
		t.Errorf("the row of a refused node reads %v", n.Reads)
	}
}
