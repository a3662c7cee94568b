package lifecycle

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// Tombstones are the node's own notes of the newest replica of each group that has left it. That
// replica and all before it never come back.
type Tombstones struct {
	Engine *engine.Engine
	// Key returns the engine's key of a group's note.
	Key func(g keyspace.GroupID) []byte
}

// Left returns the newest replica of the group that has left, 0 for none.
func (t Tombstones) Left(g keyspace.GroupID) (keyspace.ReplicaID, error) {
	v, ok, err := t.Engine.Get(t.Key(g))
	if err != nil || !ok {
		return 0, err
	}
	id, rest, err := wire.Uvarint(v)
	if err != nil || len(rest) > 0 {
		return 0, fmt.Errorf("lifecycle: group %s: %d bytes for the replica that has left", g, len(v))
	}
	return keyspace.ReplicaID(id), nil
}

// Set writes that a replica has left.
func (t Tombstones) Set(b *engine.Batch, g keyspace.GroupID, id keyspace.ReplicaID) error {
	return b.Set(t.Key(g), binary.AppendUvarint(nil, uint64(id)))
}

// Store makes it durable that replicas have left.
func (t Tombstones) Store(ctx context.Context, left map[keyspace.GroupID]keyspace.ReplicaID) error {
	b := t.Engine.NewBatch()
	err := t.setAll(b, left)
	if err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = t.Engine.Flush(ctx)
	}
	if err = errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("lifecycle: store that replicas of %d groups have left: %w", len(left), err)
	}
	return nil
}

func (t Tombstones) setAll(b *engine.Batch, left map[keyspace.GroupID]keyspace.ReplicaID) error {
	for g, id := range left {
		have, err := t.Left(g)
		if err == nil {
			err = t.Set(b, g, max(id, have))
		}
		if err != nil {
			return fmt.Errorf("group %s: %w", g, err)
		}
	}
	return nil
}

// SetDeparted writes that this node's replica has left if it is among the members before a change
// and not after it. A state machine calls it with the batch that applies the change.
func (t Tombstones) SetDeparted(b *engine.Batch, g keyspace.GroupID, self keyspace.NodeID, before, after []keyspace.Replica) error {
	for _, m := range before {
		if m.Node == self && !Has(after, m.ID) {
			return t.Set(b, g, m.ID)
		}
	}
	return nil
}

// Has says whether the replica is among the members.
func Has(members []keyspace.Replica, id keyspace.ReplicaID) bool {
	return slices.ContainsFunc(members, func(m keyspace.Replica) bool { return m.ID == id })
}

// Removed says whether a replica is certainly no member any more: the configuration that it has
// applied itself, or a newer one that the node heard of, is without it. Both are committed, and
// no replica's id is ever used again. A ConfIndex of 0 says that nothing is known.
func Removed(id keyspace.ReplicaID, applied, heard *keyspace.Descriptor) bool {
	return applied.ConfIndex > 0 && !Has(applied.Replicas, id) || heard.Newer(applied) && !Has(heard.Replicas, id)
}
