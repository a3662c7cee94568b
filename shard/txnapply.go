package shard

import (
	"bytes"
	"fmt"
	"maps"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// lockChange is one change of the replicated locks and records, for Applied to publish.
type lockChange struct {
	// removed has ended, added is new. Both are set where a sweep has made a lock
	// smaller, and are the same where only others may decide about it again.
	removed, added *lock
	// revision is the one at which removed was committed, 0 where it was not.
	revision keyspace.Revision
	// record is new, forgotten has gone.
	record    *txnRecord
	forgotten rangeapi.TxnName
	// mark is that of a lease, which is new, or has gone where its incarnation is 0.
	mark rangeapi.Attachment
}

// applyItems applies what stands behind the transactions of a batch.
func (r *Replica) applyItems(b *engine.Batch, h header, c *batchCommand, body []byte, out *outcome) error {
	s := &r.applying
	in := newCursor(body)
	for index := uint32(0); in.Len() > 0; index++ {
		from := in.Peek()
		it := in.item()
		if in.Err() != nil {
			return in.Err()
		}
		own := from[:len(from)-in.Len()]
		s.rec.hash += xxhash.Sum64(own)
		if it.lock != nil || it.record != nil || it.next != nil {
			// It stays, the entry does not, nor what else is in it.
			c := newCursor(bytes.Clone(own))
			it = c.item()
		}
		if it.kind == itemLock {
			it.lock.id = rangeapi.LockID{Range: r.id, Term: h.term, Number: c.number, Index: index}
		}
		if err := r.applyItem(b, &it, out); err != nil {
			return fmt.Errorf("%s: %w", it.kind, err)
		}
	}
	return nil
}

func (r *Replica) applyItem(b *engine.Batch, it *txnItem, out *outcome) error {
	s := &r.applying
	switch it.kind {
	case itemLock:
		return r.applyLock(b, it.lock, out)
	case itemResolve:
		return r.endLock(b, it.id, it.revision, out)
	case itemRelease:
		return r.releaseLock(b, it.id, out)
	case itemMark:
		return r.applyMark(b, it.mark, out)
	case itemUnmark:
		return r.applyUnmark(b, it.mark, out)
	case itemCommit:
		s.txns.putRecord(it.record)
		out.locks = append(out.locks, lockChange{record: it.record})
		if l := s.txns.locks[it.id]; l != nil && l.sweep() >= 0 {
			out.locks = append(out.locks, lockChange{removed: l, added: l})
		} else if err := r.endLock(b, it.id, it.record.revision, out); err != nil {
			return err
		}
		return putRecord(b, r.id, it.record)
	case itemFence:
		s.rec.fence = max(s.rec.fence, it.fence)
		for _, id := range it.ids {
			if err := r.endLock(b, id, 0, out); err != nil {
				return err
			}
		}
		return nil
	case itemForget:
		delete(s.txns.records, it.name)
		out.locks = append(out.locks, lockChange{forgotten: it.name})
		return b.Delete(recordKey(r.id, it.name))
	case itemSweep:
		return r.applySweep(b, it, out)
	}
	return nil
}

func (r *Replica) applyLock(b *engine.Batch, l *lock, out *outcome) error {
	s := &r.applying
	for i := range l.spans {
		if !s.rec.span.Covers(l.spans[i].span) {
			return fmt.Errorf("lock of %s is outside of %s", l.spans[i].span, s.rec.span)
		}
	}
	for i := range l.writes {
		if !s.rec.span.Contains(l.writes[i].v.Key) {
			return fmt.Errorf("intent of %q is outside of %s", l.writes[i].v.Key, s.rec.span)
		}
	}
	s.txns.putLock(l)
	out.locks = append(out.locks, lockChange{added: l})
	return putLock(b, r.id, l)
}

// endLock ends a lock: at a revision its intents become versions, at 0 nothing does.
func (r *Replica) endLock(b *engine.Batch, id rangeapi.LockID, rev keyspace.Revision, out *outcome) error {
	s := &r.applying
	l := s.txns.locks[id]
	if l == nil {
		return fmt.Errorf("lock %s is not here", id)
	}
	if rev != 0 {
		if err := l.above(rev); err != nil {
			return err
		}
		for i := range l.writes {
			v := l.writes[i].at(rev)
			if err := s.addVersion(&v, l.writes[i].before, out); err != nil {
				return err
			}
		}
		s.rec.lastRevision = max(s.rec.lastRevision, rev)
	}
	delete(s.txns.locks, id)
	out.locks = append(out.locks, lockChange{removed: l, revision: rev})
	if rev != 0 && l.revoke.Lease != 0 {
		if err := r.applyUnmark(b, l.revoke, out); err != nil {
			return err
		}
	}
	return b.Delete(lockKey(r.id, id))
}

// above says whether the revision can be that of the lock's transaction.
func (l *lock) above(rev keyspace.Revision) error {
	if rev <= l.floor {
		return fmt.Errorf("lock %s of %s with floor %d is committed at revision %d", l.id, l.name, l.floor, rev)
	}
	for i := range l.writes {
		if l.writes[i].v.Create > rev {
			return fmt.Errorf("lock %s is committed at %d, key %q was created at %d", l.id, rev, l.writes[i].v.Key, l.writes[i].v.Create)
		}
	}
	return nil
}

func (r *Replica) applySweep(b *engine.Batch, it *txnItem, out *outcome) error {
	s := &r.applying
	l := s.txns.locks[it.id]
	if l == nil || it.piece >= len(l.spans) || l.spans[it.piece].mode != lockSweep {
		return fmt.Errorf("nothing to sweep in piece %d of lock %s", it.piece, it.id)
	}
	if err := l.above(it.revision); err != nil {
		return err
	}
	piece := &l.spans[it.piece]
	for i, k := range it.keys {
		if !piece.span.Contains(k) {
			return fmt.Errorf("key %q is outside of %s", k, piece.span)
		}
		v := sweepVersion(k, piece, it.revision)
		if err := s.addVersion(&v, prior{lived: true, lease: it.leases[i]}, out); err != nil {
			return err
		}
	}
	s.rec.lastRevision = max(s.rec.lastRevision, it.revision)
	smaller := *l
	smaller.spans = slices.Clone(l.spans)
	if it.next == nil {
		smaller.spans = slices.Delete(smaller.spans, it.piece, it.piece+1)
	} else if !piece.span.Contains(it.next) {
		return fmt.Errorf("key %q is outside of %s", it.next, piece.span)
	} else {
		smaller.spans[it.piece].span.Start = it.next
	}
	s.txns.locks[l.id] = &smaller
	out.locks = append(out.locks, lockChange{removed: l, added: &smaller, revision: it.revision})
	return putLock(b, r.id, &smaller)
}

// addVersion takes a version of the batch at hand in: into the counts, the hash and
// what is written.
func (s *applyState) addVersion(v *mvcc.Version, before prior, out *outcome) error {
	s.rec.hash += versionHash(v)
	s.versions = append(s.versions, *v)
	if before.replaced {
		s.replaced++
		return nil
	}
	var d int64
	switch {
	case v.Tombstone && before.lived:
		d = -1
	case !v.Tombstone && !before.lived:
		d = 1
	}
	if v.Lease != 0 || before.lease != 0 {
		if err := s.noteLeases(v, before.lease); err != nil {
			return err
		}
	}
	if d != 0 {
		s.rec.live += d
		out.deltas = addDelta(out.deltas, v.Mod, d)
	}
	return nil
}

// splitTxns moves what the child of a split at key takes over of locks and records: a
// lock that lies on both sides is cut, and both halves keep its id. moved is what the
// child begins with.
func (r *Replica) splitTxns(b *engine.Batch, key []byte, out *outcome) (moved txnState, err error) {
	s := &r.applying
	moved.marks = maps.Clone(s.txns.marks)
	for id, l := range s.txns.locks {
		left, right := l.cut(key)
		if right == nil {
			continue
		}
		if !mutation.Is(mutation.LocksLostAtSplit) {
			moved.putLock(right)
		}
		out.locks = append(out.locks, lockChange{removed: l, added: left})
		if left == nil {
			delete(s.txns.locks, id)
			err = b.Delete(lockKey(r.id, id))
		} else {
			s.txns.locks[id] = left
			err = putLock(b, r.id, left)
		}
		if err != nil {
			return moved, err
		}
	}
	for name, t := range s.txns.records {
		if bytes.Compare(t.anchor, key) < 0 {
			continue
		}
		moved.putRecord(t)
		delete(s.txns.records, name)
		out.locks = append(out.locks, lockChange{forgotten: name})
		if err := b.Delete(recordKey(r.id, name)); err != nil {
			return moved, err
		}
	}
	return moved, nil
}

// cut divides a lock at key; a side on which it has nothing is nil.
func (l *lock) cut(key []byte) (left, right *lock) {
	a, z := *l, *l
	a.spans, z.spans, a.writes, z.writes = nil, nil, nil, nil
	for _, s := range l.spans {
		if low, ok := s.span.Intersect(keyspace.Span{End: key}); ok {
			a.spans = append(a.spans, lockSpan{low, s.mode, s.sub})
		}
		if high, ok := s.span.Intersect(keyspace.Span{Start: key}); ok {
			z.spans = append(z.spans, lockSpan{high, s.mode, s.sub})
		}
	}
	for _, w := range l.writes {
		if bytes.Compare(w.v.Key, key) < 0 {
			a.writes = append(a.writes, w)
		} else {
			z.writes = append(z.writes, w)
		}
	}
	a.noteLeases()
	z.noteLeases()
	// Of a lease that is revoked both sides lock the mark.
	if len(a.spans) > 0 || l.revoke.Lease != 0 {
		left = &a
	}
	if len(z.spans) > 0 || l.revoke.Lease != 0 {
		right = &z
	}
	return left, right
}

// write writes the state of transactions with which a range begins.
func (s *txnState) write(b *engine.Batch, r keyspace.RangeID) error {
	for _, l := range s.locks {
		if err := putLock(b, r, l); err != nil {
			return err
		}
	}
	for _, t := range s.records {
		if err := putRecord(b, r, t); err != nil {
			return err
		}
	}
	for lease, incarnation := range s.marks {
		if err := putMark(b, r, rangeapi.Attachment{Lease: lease, Incarnation: incarnation}); err != nil {
			return err
		}
	}
	return nil
}
