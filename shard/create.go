package shard

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
)

// Create makes this node's replicas of new ranges durable and opens them. Ranges
// that are here already stay as they are, so that it can be repeated. So does what
// overlaps a range that is here or comes in: the order is older than that one, whose
// leader has split since. What the order was for comes by snapshot, when the range's
// leader speaks to this node.
func (n *Node) Create(ctx context.Context, ds []keyspace.Descriptor) error {
	ids, err := n.createRecords(ds)
	if err != nil {
		return err
	}
	// Not durable before it is flushed: a replica that had voted and forgot its first
	// record would be another one.
	if err := n.cfg.Engine.Flush(ctx); err != nil {
		return fmt.Errorf("shard: create %d ranges: %w", len(ids), err)
	}
	for _, id := range ids {
		if err := n.openCreated(id); err != nil {
			return fmt.Errorf("shard: create range %s: %w", id, err)
		}
	}
	n.campaignFirst(ds)
	return nil
}

// createRecords writes the first records of those of the ranges that are to be made
// here, and returns which are to be opened. Their spans are claimed. A claim whose
// record is written outlives an error: the record makes a replica sooner or later.
func (n *Node) createRecords(ds []keyspace.Descriptor) (ids []keyspace.RangeID, err error) {
	var want []claim
	var made []*keyspace.Descriptor
	for i := range ds {
		d := &ds[i]
		m, here := d.ReplicaOn(n.cfg.Self)
		if !here || n.Replica(d.Range) != nil {
			continue
		}
		left, err := n.left(d.Range)
		if err == nil && m.ID <= left {
			continue
		}
		c := claim{id: d.Range, span: d.Span}
		var a engine.Applied
		var have bool
		if err == nil {
			a, have, err = n.cfg.Engine.Applied(d.Range.Group())
		}
		if err == nil && have {
			// An order before this one came so far.
			var rec command.Record
			rec, err = command.DecodeRecord(a.Payload)
			c.span = rec.Span
		}
		if err != nil {
			return nil, fmt.Errorf("shard: create range %s: %w", d.Range, err)
		}
		want, ids = append(want, c), append(ids, d.Range)
		if !have {
			made = append(made, d)
		}
	}
	refused := n.claim(want)
	for id, why := range refused {
		n.log.Warn("not created: others hold the span", zap.Stringer("range", id), zap.Error(why))
	}
	kept := ids[:0]
	for _, id := range ids {
		if refused[id] == nil {
			kept = append(kept, id)
		}
	}
	b := n.cfg.Engine.NewBatch()
	for _, d := range made {
		if err == nil && refused[d.Range] == nil {
			err = n.firstRecord(b, d)
		}
	}
	if err == nil && !b.Empty() {
		err = b.Commit()
	} else {
		err = errors.Join(err, b.Close())
	}
	if err != nil {
		for _, d := range made {
			if refused[d.Range] == nil {
				n.unclaim(d.Range)
			}
		}
		return nil, fmt.Errorf("shard: create %d ranges: %w", len(kept), err)
	}
	return kept, nil
}

func (n *Node) firstRecord(b *engine.Batch, d *keyspace.Descriptor) error {
	rec := command.Record{RangeID: d.Range, Generation: d.Generation, Span: d.Span, Counted: true}
	if err := n.cfg.Groups.bootstrap(b, d.Range.Group(), d.Replicas, command.AppendRecord(nil, &rec)); err != nil {
		return fmt.Errorf("range %s: %w", d.Range, err)
	}
	return nil
}

// openCreated opens a range whose first record is durable.
func (n *Node) openCreated(id keyspace.RangeID) error {
	a, ok, err := n.cfg.Engine.Applied(id.Group())
	if err == nil && !ok {
		err = errors.New("the record is gone")
	}
	var txns command.TxnState
	if err == nil {
		txns, err = command.LoadTxns(n.cfg.Engine, id)
	}
	if err == nil {
		err = n.openStored(id, &a, txns)
	}
	if errors.Is(err, raftgroup.ErrExists) {
		return nil // a message for it was faster; whoever opens it gives the claim up
	}
	if err == nil && n.Replica(id) != nil { // else its span waits for its removal
		n.unclaim(id)
	}
	return err
}

// campaignFirst makes the first replica of a new range its first leader, so that
// the leaders of new ranges are spread as placement has laid them out.
func (n *Node) campaignFirst(ds []keyspace.Descriptor) {
	for i := range ds {
		if len(ds[i].Replicas) == 0 || ds[i].Replicas[0].Node != n.cfg.Self {
			continue
		}
		if r := n.Replica(ds[i].Range); r != nil {
			n.campaign(r, firstCampaigns)
		}
	}
}
