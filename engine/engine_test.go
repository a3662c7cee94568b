package engine

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// TestCommitVisibleThenDurable walks the two steps of a write.
func TestCommitVisibleThenDurable(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	b := e.NewBatch()
	if err := b.Set(GroupLocalKey(7, []byte("k")), []byte("v")); err != nil {
		t.Fatal(err)
	}
	want := Applied{Index: 11, Term: 5, ConfIndex: 10, Replicas: []keyspace.Replica{{ID: 1, Node: 2, Role: keyspace.RoleVoter}}, Payload: []byte("descriptor")}
	if err := b.SetApplied(7, want); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	if a, ok, err := e.Applied(7); err != nil || !ok || a.Index != 11 {
		t.Fatalf("applied after commit: %+v %v %v", a, ok, err)
	}
	if a, ok, err := e.DurableApplied(7); err != nil || ok {
		t.Fatalf("durable before a flush: %+v %v %v", a, ok, err)
	}
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, ok, err := e.DurableApplied(7); err != nil || !ok || a.Index != 11 || string(a.Payload) != "descriptor" {
		t.Fatalf("durable after a flush: %+v %v %v", a, ok, err)
	}
}
