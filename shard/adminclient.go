package shard

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// AdminClient asks for what changes, moves or describes replicas, on all nodes. It may be
// used from many goroutines.
type AdminClient struct {
	self  keyspace.NodeID
	local *Store
	bus   rangeapi.Caller
}

// ask sends an admin request to a node.
func (c *AdminClient) ask(ctx context.Context, node keyspace.NodeID, q *adminRequest, write bool) (*adminAnswer, error) {
	if node == c.self {
		return c.local.admin(ctx, q)
	}
	b, err := json.Marshal(q)
	if err != nil {
		return nil, fmt.Errorf("shard: encode admin request: %w", err)
	}
	b, err = c.bus.Call(ctx, node, transport.MethodShardAdmin, append([]byte{adminVersion}, b...))
	if err != nil {
		return nil, rangeapi.CallError(err, write)
	}
	return decodeAdminAnswer(b)
}

func decodeAdminAnswer(b []byte) (*adminAnswer, error) {
	if len(b) < 2 || b[0] != adminVersion {
		return nil, fmt.Errorf("shard: admin answer of %d bytes", len(b))
	}
	if b[1] == rangeapi.StatusError {
		e, err := kverror.Decode(b[2:])
		if err != nil {
			return nil, err
		}
		return nil, e
	}
	var a adminAnswer
	if err := json.Unmarshal(b[2:], &a); err != nil {
		return nil, fmt.Errorf("shard: admin answer: %w", err)
	}
	return &a, nil
}

// Split cuts the range at key, see Replica.Split, or where key is empty in the middle of
// its bytes. The node must lead the range.
func (c *AdminClient) Split(
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, generation keyspace.Generation, key []byte,
) ([]keyspace.Descriptor, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminSplit, Range: id, Generation: generation, Key: key}, true)
	if err != nil {
		return nil, err
	}
	return a.Descriptors, nil
}

// Show returns the state of the node's replica of the range.
func (c *AdminClient) Show(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (*Status, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminShow, Range: id}, false)
	if err != nil {
		return nil, err
	}
	if a.Status == nil {
		return nil, fmt.Errorf("shard: node %s showed no state of range %s", node, id)
	}
	return a.Status, nil
}

// vouch asks a node for its replica's hash, as Replica.vouch.
func (c *AdminClient) vouch(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, spread bool) (*Status, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminVouch, Range: id, Spread: spread}, false)
	if err != nil {
		return nil, err
	}
	if a.Status == nil {
		return nil, fmt.Errorf("shard: node %s does not vouch for range %s", node, id)
	}
	return a.Status, nil
}

// Look returns what the node's replica says of the range, see Replica.Look.
func (c *AdminClient) Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminLook, Range: id}, false)
	if err != nil {
		return keyspace.Descriptor{}, 0, err
	}
	if len(a.Descriptors) != 1 {
		return keyspace.Descriptor{}, 0, fmt.Errorf("shard: node %s gave %d descriptors of range %s, wanted 1", node, len(a.Descriptors), id)
	}
	return a.Descriptors[0], a.Leader, nil
}

// List returns a summary of every replica of the node, in the order of their spans.
func (c *AdminClient) List(ctx context.Context, node keyspace.NodeID) ([]Summary, error) {
	return listAll(func(start []byte, id keyspace.RangeID) ([]Summary, bool, error) {
		a, err := c.ask(ctx, node, &adminRequest{Op: adminList, Key: start, Range: id}, false)
		if err != nil {
			return nil, false, err
		}
		return a.List, a.More, nil
	})
}

// listAll puts the parts of a list together, each of which is asked for by where the one before
// has ended.
func listAll(part func(start []byte, id keyspace.RangeID) (l []Summary, more bool, err error)) (all []Summary, err error) {
	var start []byte
	var id keyspace.RangeID
	for {
		l, more, err := part(start, id)
		if err != nil {
			return nil, err
		}
		if all = append(all, l...); !more || len(l) == 0 {
			return all, nil
		}
		last := &l[len(l)-1].Descriptor
		start, id = last.Span.Start, last.Range
	}
}

// HashAt returns the hash of the node's replica of the range, see Replica.HashAt.
func (c *AdminClient) HashAt(
	ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, at, compacted keyspace.Revision,
) (uint64, error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminHash, Range: id, Revision: at, Compacted: compacted}, false)
	if err != nil {
		return 0, err
	}
	return a.Hash, nil
}

// HashPart returns the hash of a part of a range as the node's replica has it, and the key at which the
// next part begins, nil at the range's end.
func (c *AdminClient) HashPart(ctx context.Context, node keyspace.NodeID, q *rangeapi.HashRequest) (sum uint64, next []byte, err error) {
	a, err := c.ask(ctx, node, &adminRequest{Op: adminHashPart, Part: q}, false)
	if err != nil {
		return 0, nil, err
	}
	return a.Hash, a.Next, nil
}

// CreateRanges makes the node's replicas of new ranges, see Store.Create.
func (c *AdminClient) CreateRanges(ctx context.Context, node keyspace.NodeID, ds []keyspace.Descriptor) error {
	_, err := c.ask(ctx, node, &adminRequest{Op: adminCreate, Descriptors: ds}, true)
	return err
}
