package shard

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/cespare/xxhash/v2"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// lockChange is one change of the replicated locks, records and attachments, for Applied to publish.
type lockChange struct {
	locktable.Change
	// revision is the one at which Removed was committed, 0 where it was not.
	revision keyspace.Revision
	// attachment is a lease's new attachment. With incarnation 0 it has gone.
	attachment rangeapi.Attachment
}

// applyItems applies what stands behind the transactions of a batch.
func (r *Replica) applyItems(b *engine.Batch, h command.Header, c *command.Batch, body []byte, out *outcome) error {
	s := &r.applying
	in := command.NewCursor(body)
	for index := uint32(0); in.Len() > 0; index++ {
		from := in.Peek()
		it := in.Item()
		if in.Err() != nil {
			return refuse(in.Err())
		}
		own := from[:len(from)-in.Len()]
		s.rec.Hash += xxhash.Sum64(own)
		if it.Lock != nil || it.Record != nil || it.Next != nil {
			// It stays, the entry does not, nor what else is in it.
			c := command.NewCursor(bytes.Clone(own))
			it = c.Item()
		}
		if it.Kind == command.ItemLock {
			it.Lock.ID = rangeapi.LockID{Range: r.id, Term: h.Term, Number: c.Number, Index: index}
		}
		if err := r.applyItem(b, &it, out); err != nil {
			return fmt.Errorf("%s: %w", it.Kind, err)
		}
	}
	return nil
}

func (r *Replica) applyItem(b *engine.Batch, it *command.TxnItem, out *outcome) error {
	s := &r.applying
	switch it.Kind {
	case command.ItemLock:
		return r.applyLock(b, it.Lock, out)
	case command.ItemResolve:
		return r.endLock(b, it.ID, it.Revision, out)
	case command.ItemRelease:
		return r.releaseLock(b, it.ID, out)
	case command.ItemAttach:
		return r.applyAttachment(b, it.Attachment, out)
	case command.ItemDetach:
		return r.applyDetachment(b, it.Attachment, out)
	case command.ItemCommit:
		s.setRecord(it.Record.Name, it.Record)
		out.locks = append(out.locks, lockChange{Change: locktable.Change{Record: it.Record}})
		if l := s.txns.Locks[it.ID]; l != nil && l.Sweep() >= 0 {
			out.locks = append(out.locks, lockChange{Change: locktable.Change{Removed: l, Added: l}})
		} else if err := r.endLock(b, it.ID, it.Record.Revision, out); err != nil {
			return err
		}
		return command.PutRecord(b, r.id, it.Record)
	case command.ItemFence:
		s.rec.Fence = max(s.rec.Fence, it.Fence)
		for _, id := range it.IDs {
			if err := r.endLock(b, id, 0, out); err != nil {
				return err
			}
		}
		return nil
	case command.ItemForget:
		s.setRecord(it.Name, nil)
		out.locks = append(out.locks, lockChange{Change: locktable.Change{Forgotten: it.Name}})
		return b.Delete(command.RecordKey(r.id, it.Name))
	case command.ItemSweep:
		return r.applySweep(b, it, out)
	}
	return nil
}

func (r *Replica) applyLock(b *engine.Batch, l *command.Lock, out *outcome) error {
	s := &r.applying
	for i := range l.Spans {
		if !s.rec.Span.Covers(l.Spans[i].Span) {
			return refuse(fmt.Errorf("lock of %s is outside of %s", l.Spans[i].Span, s.rec.Span))
		}
	}
	for i := range l.Writes {
		if !s.rec.Span.Contains(l.Writes[i].V.Key) {
			return refuse(fmt.Errorf("intent of %q is outside of %s", l.Writes[i].V.Key, s.rec.Span))
		}
	}
	s.setLock(l.ID, l)
	out.locks = append(out.locks, lockChange{Change: locktable.Change{Added: l}})
	return command.PutLock(b, r.id, l)
}

// endLock ends a lock: at a revision its intents become versions, at 0 nothing does.
func (r *Replica) endLock(b *engine.Batch, id rangeapi.LockID, rev keyspace.Revision, out *outcome) error {
	s := &r.applying
	l := s.txns.Locks[id]
	if l == nil {
		return refuse(fmt.Errorf("lock %s is not here", id))
	}
	if rev != 0 {
		if err := l.Above(rev); err != nil {
			return refuse(err)
		}
		for i := range l.Writes {
			v := l.Writes[i].At(rev)
			s.addVersion(&v, l.Writes[i].Before, out)
		}
		s.rec.LastRevision = max(s.rec.LastRevision, rev)
	}
	s.setLock(id, nil)
	out.locks = append(out.locks, lockChange{Change: locktable.Change{Removed: l}, revision: rev})
	if rev != 0 && l.Revoke.Lease != 0 {
		if err := r.applyDetachment(b, l.Revoke, out); err != nil {
			return err
		}
	}
	return b.Delete(command.LockKey(r.id, id))
}

func (r *Replica) applySweep(b *engine.Batch, it *command.TxnItem, out *outcome) error {
	s := &r.applying
	l := s.txns.Locks[it.ID]
	if l == nil || it.SpanIndex >= len(l.Spans) || l.Spans[it.SpanIndex].Mode != command.Sweep {
		return refuse(fmt.Errorf("nothing to sweep in span %d of lock %s", it.SpanIndex, it.ID))
	}
	if err := l.Above(it.Revision); err != nil {
		return refuse(err)
	}
	swept := &l.Spans[it.SpanIndex]
	for i, k := range it.Keys {
		if !swept.Span.Contains(k) {
			return refuse(fmt.Errorf("key %q is outside of %s", k, swept.Span))
		}
		v := command.SweepVersion(k, swept, it.Revision)
		s.addVersion(&v, command.Prior{Lived: true, Lease: it.Leases[i]}, out)
	}
	s.rec.LastRevision = max(s.rec.LastRevision, it.Revision)
	smaller := *l
	smaller.Spans = slices.Clone(l.Spans)
	if it.Next == nil {
		smaller.Spans = slices.Delete(smaller.Spans, it.SpanIndex, it.SpanIndex+1)
	} else if !swept.Span.Contains(it.Next) {
		return refuse(fmt.Errorf("key %q is outside of %s", it.Next, swept.Span))
	} else {
		smaller.Spans[it.SpanIndex].Span.Start = it.Next
	}
	s.setLock(l.ID, &smaller)
	out.locks = append(out.locks, lockChange{Change: locktable.Change{Removed: l, Added: &smaller}, revision: it.Revision})
	return command.PutLock(b, r.id, &smaller)
}

// addVersion takes a version of the batch at hand in: into the counts, the hash and what is written.
func (s *applyState) addVersion(v *mvcc.Version, before command.Prior, out *outcome) {
	s.rec.Hash += mvcc.HashWrite(v)
	s.versions = append(s.versions, *v)
	if before.Replaced {
		s.replaced++
		return
	}
	var d int64
	switch {
	case v.Tombstone && before.Lived:
		d = -1
	case !v.Tombstone && !before.Lived:
		d = 1
	}
	if v.Lease != 0 || before.Lease != 0 {
		s.noteLeases(v, before.Lease)
	}
	if d != 0 {
		s.rec.Live += d
		out.deltas = eval.AddCountChange(out.deltas, v.Mod, d)
	}
}

// splitTxns divides locks and commit records at key and returns those of the child. A lock
// on both sides is cut, and both halves keep its id. The child gets all attachments.
func (r *Replica) splitTxns(b *engine.Batch, key []byte, out *outcome) (moved command.TxnState, err error) {
	s := &r.applying
	moved.Attachments = maps.Clone(s.txns.Attachments)
	for id, l := range s.txns.Locks {
		left, right := l.Cut(key)
		if right == nil {
			continue
		}
		if !mutation.Is(mutation.LocksLostAtSplit) {
			moved.PutLock(right)
		}
		out.locks = append(out.locks, lockChange{Change: locktable.Change{Removed: l, Added: left}})
		if left == nil {
			delete(s.txns.Locks, id)
			err = b.Delete(command.LockKey(r.id, id))
		} else {
			s.txns.Locks[id] = left
			err = command.PutLock(b, r.id, left)
		}
		if err != nil {
			return moved, err
		}
	}
	for name, t := range s.txns.Records {
		if bytes.Compare(t.Anchor, key) < 0 {
			continue
		}
		moved.PutRecord(t)
		delete(s.txns.Records, name)
		out.locks = append(out.locks, lockChange{Change: locktable.Change{Forgotten: name}})
		if err := b.Delete(command.RecordKey(r.id, name)); err != nil {
			return moved, err
		}
	}
	return moved, nil
}

// releaseLock ends a lock without a revision, and takes the attachment of its lease away.
func (r *Replica) releaseLock(b *engine.Batch, id rangeapi.LockID, out *outcome) error {
	l := r.applying.txns.Locks[id]
	if l == nil || !l.Keyless() {
		return refuse(fmt.Errorf("lock %s is not that of a lease without keys", id))
	}
	if err := r.endLock(b, id, 0, out); err != nil {
		return err
	}
	return r.applyDetachment(b, l.Revoke, out)
}

// keptVersions is how many versions' memory a replica keeps for its next batch.
const keptVersions = 1024

func (s *applyState) forgetVersions() {
	s.replaced, s.lacking = 0, s.lacking[:0]
	if cap(s.attached) > keptVersions {
		s.attached = nil
	}
	clear(s.attached)
	s.attached = s.attached[:0]
	if cap(s.versions) > keptVersions {
		s.versions = nil
		return
	}
	clear(s.versions)
	s.versions = s.versions[:0]
}

// write writes the versions of a batch in the order of the store: neighbours find
// their places in the memtable by the same path, which is then in the processor's cache.
func (s *applyState) write(b *engine.Batch) error {
	slices.SortFunc(s.versions, func(x, y mvcc.Version) int {
		return cmp.Or(bytes.Compare(x.Key, y.Key), cmp.Compare(x.Mod, y.Mod), cmp.Compare(x.Sub, y.Sub))
	})
	if s.replaced > 0 {
		if err := s.joinReplaced(); err != nil {
			return err
		}
	}
	for i := range s.versions {
		if err := mvcc.Put(b, &s.versions[i]); err != nil {
			return err
		}
	}
	return s.writeAttached(b)
}

// joinReplaced gives the versions that a transaction has replaced to those that it has left.
func (s *applyState) joinReplaced() error {
	left := s.versions[:0]
	var before *mvcc.Version
	for i := range s.versions {
		v := s.versions[i]
		if before != nil && v.Sub <= before.Sub {
			return refuse(fmt.Errorf("key %q is written at revision %d by operation %d and by operation %d", v.Key, v.Mod, before.Sub, v.Sub))
		}
		v.Earlier, before = before, nil
		if next := i + 1; next < len(s.versions) && s.versions[next].Mod == v.Mod && bytes.Equal(s.versions[next].Key, v.Key) {
			before = &v
			s.replaced--
			continue
		}
		left = append(left, v)
	}
	clear(s.versions[len(left):])
	if s.versions = left; s.replaced != 0 {
		return refuse(fmt.Errorf("%d versions are replaced by none", s.replaced))
	}
	return nil
}
