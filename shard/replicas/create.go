package replicas

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// Create makes this node's replicas of new ranges durable and opens them. It may be repeated:
// ranges that are here already stay as they are. A range that overlaps another one that is here
// or comes in is skipped. The order is then older than the other range, and the leader has split
// since. The replica comes by snapshot when the range's leader speaks to this node.
func (m *Manager) Create(ctx context.Context, ds []keyspace.Descriptor) error {
	ids, err := m.createRecords(ds)
	if err != nil {
		return err
	}
	// Not durable before it is flushed: a replica that had voted and forgot its first
	// record would be another one.
	if err := m.cfg.Engine.Flush(ctx); err != nil {
		return fmt.Errorf("shard: create %d ranges: %w", len(ids), err)
	}
	for _, id := range ids {
		if err := m.openCreated(id); err != nil {
			return fmt.Errorf("shard: create range %s: %w", id, err)
		}
	}
	m.campaignFirst(ds)
	return nil
}

// createRecords writes the first records of the ranges that are to be made here, and returns the
// ranges to open. Their spans are claimed. A claim outlives an error if its record is written:
// the record makes a replica sooner or later.
func (m *Manager) createRecords(ds []keyspace.Descriptor) (ids []keyspace.RangeID, err error) {
	var want []Claim
	var made []*keyspace.Descriptor
	for i := range ds {
		d := &ds[i]
		own, here := d.ReplicaOn(m.cfg.Self)
		if !here || m.cfg.Owner.Replica(d.Range) != nil {
			continue
		}
		left, err := m.Tombstones.Left(d.Range.Group())
		if err == nil && own.ID <= left {
			continue
		}
		c := Claim{Range: d.Range, Span: d.Span}
		var a engine.Applied
		var have bool
		if err == nil {
			a, have, err = m.cfg.Engine.Applied(d.Range.Group())
		}
		if err == nil && have {
			// An order before this one came so far.
			var rec command.Record
			rec, err = command.DecodeRecord(a.Payload)
			c.Span, c.Stored = rec.Span, true
		}
		if err != nil {
			return nil, fmt.Errorf("shard: create range %s: %w", d.Range, err)
		}
		want, ids = append(want, c), append(ids, d.Range)
		if !have {
			made = append(made, d)
		}
	}
	if len(made) > 0 && m.cfg.Room != nil {
		if err := m.cfg.Room(len(made)); err != nil {
			return nil, fmt.Errorf("shard: create %d ranges: %w", len(made), err)
		}
	}
	refused := m.Claim(want)
	if err := m.unclaimIfBad(ids, refused); err != nil {
		return nil, err
	}
	for id, why := range refused {
		m.log.Warn("not created: others hold the span", zap.Stringer("range", id), zap.Error(why))
	}
	kept := ids[:0]
	for _, id := range ids {
		if refused[id] == nil {
			kept = append(kept, id)
		}
	}
	b := m.cfg.Engine.NewBatch()
	for _, d := range made {
		if err == nil && refused[d.Range] == nil {
			err = m.firstRecord(b, d)
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
				m.Unclaim(d.Range)
			}
		}
		return nil, fmt.Errorf("shard: create %d ranges: %w", len(kept), err)
	}
	return kept, nil
}

// unclaimIfBad returns an error if a bad table refuses one of the ranges, and gives the claims of all up then. Nobody else
// has the span, so the order has to come again.
func (m *Manager) unclaimIfBad(ids []keyspace.RangeID, refused map[keyspace.RangeID]error) error {
	for _, why := range refused {
		if !errors.Is(why, errBadTable) {
			continue
		}
		for _, id := range ids {
			if refused[id] == nil {
				m.Unclaim(id)
			}
		}
		return fmt.Errorf("shard: create %d ranges: %w", len(ids), why)
	}
	return nil
}

func (m *Manager) firstRecord(b *engine.Batch, d *keyspace.Descriptor) error {
	rec := command.Record{RangeID: d.Range, Generation: d.Generation, Span: d.Span, Counted: true}
	if err := m.cfg.Groups.Bootstrap(b, d.Range.Group(), d.Replicas, command.AppendRecord(nil, &rec)); err != nil {
		return fmt.Errorf("range %s: %w", d.Range, err)
	}
	return nil
}

// openCreated opens a range whose first record is durable.
func (m *Manager) openCreated(id keyspace.RangeID) error {
	a, ok, err := m.cfg.Engine.Applied(id.Group())
	if err == nil && !ok {
		err = errors.New("the record is gone")
	}
	if err != nil {
		return err
	}
	return m.openHeld(id, &a)
}

// campaignFirst makes the first replica of a new range its first leader, so that
// the leaders of new ranges are spread as placement has laid them out.
func (m *Manager) campaignFirst(ds []keyspace.Descriptor) {
	for i := range ds {
		if len(ds[i].Replicas) == 0 || ds[i].Replicas[0].Node != m.cfg.Self {
			continue
		}
		if r := m.cfg.Owner.Replica(ds[i].Range); r != nil {
			m.campaign(r, firstCampaigns)
		}
	}
}
