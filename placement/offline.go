package placement

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// tableKey is where a node keeps its newest node table: its peers at the next start.
var tableKey = engine.NodeLocalKey([]byte("node/table"))

// StoredNodeTable returns the node table that a node keeps; ok is false if there is none yet.
func StoredNodeTable(e engine.Reader) (nodes []fsm.Node, ok bool, err error) {
	b, ok, err := e.Get(tableKey)
	if err == nil && ok {
		nodes, err = DecodeNodeTable(b)
	}
	if err != nil {
		return nil, false, fmt.Errorf("read the node table: %w", err)
	}
	return nodes, ok, nil
}

// StoreNodeTable has a node keep the node table.
func StoreNodeTable(w engine.Writer, nodes []fsm.Node) error {
	return w.Set(tableKey, EncodeNodeTable(nodes))
}

// LoadStored returns the group's state as a node's engine has it, and its applied record; ok is false if
// the node has no replica.
func LoadStored(e engine.Reader) (s *fsm.State, a engine.Applied, ok bool, err error) {
	a, ok, err = engine.ReadApplied(e, keyspace.PlacementGroup)
	if err != nil || !ok {
		return nil, a, false, err
	}
	s = fsm.NewState()
	s.SetMembers(a.ConfIndex, a.Replicas)
	if err = loadRecords(e, s); err == nil {
		err = s.Check()
	}
	if err != nil {
		return nil, a, false, fmt.Errorf("load placement state at index %d: %w", a.Index, err)
	}
	return s, a, true, nil
}

// WriteStored writes what has changed in the state, and its applied record. The node must not run.
func WriteStored(b *engine.Batch, s *fsm.State, a *engine.Applied) error {
	if err := s.Flush(groupWriter{b}); err != nil {
		return fmt.Errorf("write placement records at index %d: %w", a.Index, err)
	}
	return b.SetApplied(keyspace.PlacementGroup, *a)
}

// DeleteStored writes the deletion of the group's state. The node must not run.
func DeleteStored(b *engine.Batch) error {
	if err := deleteOwn(b, keyspace.PlacementGroup); err != nil {
		return err
	}
	return b.DeleteApplied(keyspace.PlacementGroup)
}

// StoreLeft makes it durable that a replica of the group has left the node, and LeftStored returns the
// newest that has.
func StoreLeft(ctx context.Context, e *engine.Engine, id keyspace.ReplicaID) error {
	return storeLeft(ctx, e, id)
}

// LeftStored is StoreLeft's counterpart.
func LeftStored(e *engine.Engine) (keyspace.ReplicaID, error) {
	return tombstones(e).Left(keyspace.PlacementGroup)
}
