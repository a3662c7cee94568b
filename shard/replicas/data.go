package replicas

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sort"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// deleter returns what deletes the data of the replicas that are removed together. Each asks for
// the other replicas that hold a part of its span. All records of the node are read once for them.
func (m *Manager) deleter() raftgroup.Deleter {
	var hs *holders
	return func(b *engine.Batch, g keyspace.GroupID) (err error) {
		if hs == nil {
			if hs, err = m.holders(m.cfg.Groups.Removed()); err != nil {
				return err
			}
		}
		return m.deleteData(b, g, hs)
	}
}

// deleteData writes the deletion of what the node has of a removed replica, and its tombstone. Its
// user keys stay where another replica holds a part of its span when the batch is written: a snapshot
// for the rest clears it. Until the batch is committed, Destroy keeps the span from snapshots.
func (m *Manager) deleteData(b *engine.Batch, g keyspace.GroupID, hs *holders) error {
	local := engine.GroupLocalSpan(g)
	if err := b.DeleteRange(local.Lower, local.Upper); err != nil || g.IsSystem() {
		return err
	}
	if err := m.cfg.Owner.DeleteNotes(b, g.Range()); err != nil {
		return err
	}
	a, ok, err := m.cfg.Engine.Applied(g)
	if err != nil || !ok {
		return err
	}
	if self, member := on(a.Replicas, m.cfg.Self); member {
		if err := m.Tombstones.Set(b, g, self); err != nil {
			return err
		}
	}
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		return fmt.Errorf("shard: range %s: applied record at index %d: %w", g.Range(), a.Index, err)
	}
	others := slices.Collect(hs.overlapping(rec.Span))
	if rec.Merge.Frozen() {
		// The target of its merge claims nothing when it applies the merge. It may have done so since
		// the records were read.
		others = append(others, rec.Merge.Other.Group())
	}
	held, err := m.heldByOthers(g, rec.Span, others, hs.gone)
	if err != nil || held {
		return err
	}
	txns, err := command.LoadTxns(m.cfg.Engine, g.Range())
	if err != nil {
		// A bad table must not keep the replica, which is in quarantine for it.
		if txns, err = m.attachedByIndex(rec.Span); err != nil {
			return err
		}
	}
	return deleteSpan(b, rec.Span, &txns)
}

// attachedByIndex returns the leases of the span's keys by the node's index of leases, all of which
// it reads.
func (m *Manager) attachedByIndex(span keyspace.Span) (txns command.TxnState, err error) {
	all := engine.LeaseIndexSpan()
	it, err := m.cfg.Engine.NewIter(engine.IterOptions{Lower: all.Lower, Upper: all.Upper})
	if err != nil {
		return txns, err
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var lease keyspace.LeaseID
		var key []byte
		if lease, key, err = engine.DecodeLeaseKey(it.Key()); err == nil && span.Contains(key) {
			txns.PutAttachment(rangeapi.Attachment{Lease: lease, Incarnation: 1})
		}
	}
	return txns, errors.Join(err, it.Error(), it.Close())
}

// DeleteUnheld deletes the keys of a span, unless another range's replica holds a part of it here.
func (m *Manager) DeleteUnheld(id keyspace.RangeID, span keyspace.Span) error {
	hs, err := m.holders(nil)
	if err != nil {
		return err
	}
	held, err := m.heldByOthers(id.Group(), span, slices.Collect(hs.overlapping(span)), nil)
	if err != nil || held {
		return err
	}
	data := engine.VersionedSpan(span)
	return m.commit(func(b *engine.Batch) error { return b.DeleteRange(data.Lower, data.Upper) })
}

// heldByOthers says whether a part of the span is that of another group's replica here, of those in
// others that are not gone. It looks at each record again: it may have changed since others was made.
func (m *Manager) heldByOthers(g keyspace.GroupID, span keyspace.Span, others []keyspace.GroupID, gone map[keyspace.GroupID]bool) (bool, error) {
	for _, o := range others {
		if o == g || gone[o] {
			continue
		}
		a, ok, err := m.cfg.Engine.Applied(o)
		if err != nil {
			return false, err
		}
		self, member := on(a.Replicas, m.cfg.Self)
		if !ok || !member {
			continue
		}
		rec, err := command.DecodeRecord(a.Payload)
		if err != nil {
			return false, fmt.Errorf("shard: range %s: applied record at index %d: %w", o.Range(), a.Index, err)
		}
		if !rec.Span.Overlaps(span) {
			continue
		}
		left, err := m.Tombstones.Left(o)
		if err != nil || self > left {
			return true, err
		}
	}
	return false, nil
}

// holders are the spans of the node's replicas by the engine's records, as an index by key. It is
// without those that are being removed: they hold nothing any more.
type holders struct {
	gone map[keyspace.GroupID]bool
	// list is in the order of the spans' starts. Two spans may overlap: those of a frozen range and
	// of the range that absorbs it.
	list []holder
}

type holder struct {
	g    keyspace.GroupID
	span keyspace.Span
	// reach is the highest end of this span and all before it in the list.
	reach []byte
}

// holders reads all records. gone are the groups that are being removed.
func (m *Manager) holders(gone []keyspace.GroupID) (*holders, error) {
	hs := &holders{gone: make(map[keyspace.GroupID]bool, len(gone))}
	for _, g := range gone {
		hs.gone[g] = true
	}
	err := m.cfg.Engine.VisitApplied(func(g keyspace.GroupID, a engine.Applied) error {
		if g.IsSystem() || hs.gone[g] {
			return nil
		}
		rec, err := command.DecodeRecord(a.Payload)
		if err != nil {
			return fmt.Errorf("shard: range %s: applied record at index %d: %w", g.Range(), a.Index, err)
		}
		hs.list = append(hs.list, holder{g: g, span: rec.Span})
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(hs.list, func(a, b holder) int { return bytes.Compare(a.span.Start, b.span.Start) })
	for i := range hs.list {
		h := &hs.list[i]
		h.reach = h.span.End
		if i > 0 && len(h.reach) > 0 && endsBehind(hs.list[i-1].reach, h.reach) {
			h.reach = hs.list[i-1].reach
		}
	}
	return hs, nil
}

// endsBehind says whether a span's end is behind a key. An empty end is behind all keys.
func endsBehind(end, key []byte) bool { return len(end) == 0 || bytes.Compare(end, key) > 0 }

// overlapping yields the groups whose spans overlap the span.
func (hs *holders) overlapping(span keyspace.Span) iter.Seq[keyspace.GroupID] {
	return func(yield func(keyspace.GroupID) bool) {
		n := len(hs.list)
		if len(span.End) > 0 {
			n = sort.Search(n, func(i int) bool { return bytes.Compare(hs.list[i].span.Start, span.End) >= 0 })
		}
		for i := n - 1; i >= 0 && endsBehind(hs.list[i].reach, span.Start); i-- {
			if hs.list[i].span.Overlaps(span) && !yield(hs.list[i].g) {
				return
			}
		}
	}
}

// deleteSpan writes the deletion of the keys of a span and of their places in the index
// of leases.
func deleteSpan(b *engine.Batch, span keyspace.Span, txns *command.TxnState) error {
	data := engine.VersionedSpan(span)
	err := b.DeleteRange(data.Lower, data.Upper)
	for lease := range txns.Attachments {
		if s := engine.LeaseSpan(lease, span); err == nil {
			err = b.DeleteRange(s.Lower, s.Upper)
		}
	}
	return err
}
