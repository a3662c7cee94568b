package shard

import (
	"bytes"
	"encoding/binary"
	"errors"

	"github.com/cespare/xxhash/v2"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// compareFact evaluates a guard. One on a single key has an outcome even where the key
// is not there. One on a span is a piece of a compare that may lie in several ranges:
// without a key it says nothing against it.
func compareFact(w *view, c *pb.Compare) (f rangeapi.Fact, err error) {
	f.Holds = true
	if len(c.GetRangeEnd()) == 0 {
		it, ok, err := w.get(c.GetKey())
		if err != nil {
			return f, err
		}
		if f.Found = ok; ok {
			f.Holds, err = compareItem(c, &it)
		} else {
			f.Holds = rangeapi.CompareAbsent(c)
		}
		return f, err
	}
	s, ok := keyspace.FromEtcd(c.GetKey(), c.GetRangeEnd())
	if !ok {
		return f, nil
	}
	err = w.scan(s, newest, c.GetTarget() != pb.Compare_VALUE, func(it *item) error {
		f.Found = true
		var err error
		if f.Holds, err = compareItem(c, it); err == nil && !f.Holds {
			err = errStop
		}
		return err
	})
	return f, err
}

// txnWriter carries out the writes of a Prepare.
type txnWriter struct {
	e *evaluation
	// sweepBytes is how much tombstones may take in an entry; a delete beyond it is a
	// sweep.
	sweepBytes int
	// prevLeft is what previous keys and values may still take in the answer, of maxPrev.
	prevLeft, maxPrev int
	swept             []command.LockSpan
	results           []rangeapi.WriteResult
	// creates are the create revisions of the results, which may still be unknown.
	creates []ref
}

func (w *txnWriter) run(op *rangeapi.Write) (err error) {
	w.e.sub = op.Number
	res := rangeapi.WriteResult{Number: op.Number}
	var create ref
	switch o := op.Op.(type) {
	case *pb.PutRequest:
		create, err = w.put(o, &res)
	case *pb.DeleteRangeRequest:
		err = w.remove(o, &res)
	}
	w.results, w.creates = append(w.results, res), append(w.creates, create)
	return err
}

// gone returns the delete of the same transaction that sweeps the key away, nil for none.
func (w *txnWriter) gone(key []byte) *command.LockSpan {
	if len(w.swept) == 0 || w.e.changes.get(key) != nil {
		return nil
	}
	for i := range w.swept {
		if w.swept[i].Span.Contains(key) {
			return &w.swept[i]
		}
	}
	return nil
}

func (w *txnWriter) put(o *pb.PutRequest, res *rangeapi.WriteResult) (create ref, err error) {
	e := w.e
	if by := w.gone(o.GetKey()); by != nil {
		it, ok, err := e.view.getHead(o.GetKey())
		if err == nil && ok {
			number := e.sub
			e.sub = by.Sub
			err = e.write(&pendingVersion{key: o.GetKey(), txn: e.changes.txn, tombstone: true, lived: true}, it.lease)
			e.sub = number
		}
		if err != nil {
			return create, err
		}
	}
	resp, err := e.put(o)
	if err != nil {
		return create, err
	}
	v := e.changes.get(o.GetKey())
	res.Lived, res.Version, res.Lease = v.lived, v.version, v.lease()
	if o.GetIgnoreValue() {
		res.Value = v.value
	}
	if err := w.tells(0, len(res.Value)); err != nil {
		return create, err
	}
	if prev := resp.GetPrevKv(); prev != nil {
		res.Prevs = append(res.Prevs, prev)
		return v.create, w.tells(len(prev.GetKey()), len(prev.GetValue()))
	}
	return v.create, nil
}

// tells counts what the answer tells of what was there before.
func (w *txnWriter) tells(key, value int) error {
	if key+value == 0 {
		return nil
	}
	if w.prevLeft -= key + value + command.VersionOverheadBytes; w.prevLeft >= 0 {
		return nil
	}
	return kverror.New(kverror.RequestTooLarge,
		"the previous keys and values that a transaction asks one range for take more than %d bytes", w.maxPrev)
}

// remove deletes a span. Where the tombstones do not fit it becomes a sweep; previous
// versions are collected all the same, so that a refusal comes before the revision.
func (w *txnWriter) remove(o *pb.DeleteRangeRequest, res *rangeapi.WriteResult) error {
	e := w.e
	s, ok := keyspace.FromEtcd(o.GetKey(), o.GetRangeEnd())
	if !ok {
		return nil
	}
	var items []item
	size := e.changes.bytes
	err := e.view.scan(s, newest, !o.GetPrevKv(), func(it *item) error {
		if w.gone(it.key) != nil {
			return nil
		}
		if size += len(it.key) + command.VersionOverheadBytes; size > w.sweepBytes && len(items) > 1 {
			if res.Swept = true; !o.GetPrevKv() {
				return errStop
			}
		}
		if o.GetPrevKv() {
			if err := w.tells(len(it.key), len(it.value)); err != nil {
				return err
			}
		}
		if err := e.view.retain(it); err != nil {
			return err
		}
		items = append(items, *it)
		return nil
	})
	if err != nil {
		return err
	}
	for i := range items {
		it := &items[i]
		if o.GetPrevKv() {
			res.Deleted++
			res.Prevs = append(res.Prevs, e.draft.keep(it))
		}
		if res.Swept && e.changes.get(it.key) == nil {
			continue
		}
		if err := e.write(&pendingVersion{key: it.key, txn: e.changes.txn, tombstone: true, lived: true}, it.lease); err != nil {
			return err
		}
	}
	if res.Swept {
		w.swept = append(w.swept, command.LockSpan{Span: s, Mode: command.Sweep, Sub: e.sub})
		return w.removeOwn(s)
	}
	res.Deleted = int64(len(items))
	return nil
}

// removeOwn deletes what the transaction itself has put into a span that it sweeps.
func (w *txnWriter) removeOwn(s keyspace.Span) error {
	for _, v := range append([]*pendingVersion(nil), w.e.changes.writes...) {
		if v.replaced || v.tombstone || !s.Contains(v.key) {
			continue
		}
		if err := w.e.write(&pendingVersion{key: v.key, txn: v.txn, tombstone: true, lived: v.lived}, 0); err != nil {
			return err
		}
	}
	return nil
}

// prepareSpans returns what a Prepare locks. Where a put is refused nothing will be
// written, and what refuses it stays as it is.
func prepareSpans(op *rangeapi.Prepare, a *rangeapi.Prepared) (spans []command.LockSpan) {
	swept := map[uint32]bool{}
	for i := range a.Results {
		swept[a.Results[i].Number] = a.Results[i].Swept
	}
	add := func(key, end []byte, mode command.LockMode, sub uint32) {
		if s, ok := keyspace.FromEtcd(key, end); ok {
			spans = append(spans, command.LockSpan{Span: keyspace.Span{Start: bytes.Clone(s.Start), End: bytes.Clone(s.End)}, Mode: mode, Sub: sub})
		}
	}
	for i := range op.Guards {
		add(op.Guards[i].Compare.GetKey(), op.Guards[i].Compare.GetRangeEnd(), command.Shared, 0)
	}
	for i := range op.Writes {
		w := &op.Writes[i]
		mode, sub := command.Exclusive, uint32(0)
		if a.Refused != nil {
			mode = command.Shared
		} else if swept[w.Number] {
			mode, sub = command.Sweep, w.Number
		}
		switch o := w.Op.(type) {
		case *pb.PutRequest:
			add(o.GetKey(), nil, mode, 0)
		case *pb.DeleteRangeRequest:
			add(o.GetKey(), o.GetRangeEnd(), mode, sub)
		}
	}
	return spans
}

// seal finishes the step's item now that its place is known and all revisions before it
// are, and the answer with it.
func (s *step) seal(id rangeapi.LockID) {
	it := s.item
	switch it.Kind {
	case command.ItemLock:
		s.sealLock(id)
	case command.ItemResolve, command.ItemRelease, command.ItemCommit, command.ItemSweep:
		it.ID = s.on[0].ID
	case command.ItemFence:
		for _, h := range s.on {
			it.IDs = append(it.IDs, h.ID)
		}
	case command.ItemForget, command.ItemAttach, command.ItemDetach:
	}
}

func (s *step) sealLock(id rangeapi.LockID) {
	l := s.item.Lock
	l.ID = id
	// own leaves the transaction's own revision 0.
	own := func(f ref) keyspace.Revision {
		if f.txn == s.own {
			return 0
		}
		return f.must()
	}
	for _, p := range s.writes {
		i := command.Intent{Before: p.prior()}
		i.V.Key, i.V.Sub, i.V.Tombstone = p.key, p.sub, p.tombstone
		if !p.tombstone {
			i.V.Create, i.V.Version, i.V.Lease, i.V.Value = own(p.create), p.version, p.lease(), p.value
		}
		l.Writes = append(l.Writes, i)
	}
	a := s.answer.(*rangeapi.Prepared)
	a.Held, a.Lock = true, id
	for i := range a.Results {
		a.Results[i].Create = own(s.creates[i])
	}
	for i := range s.draft.kvs {
		f := &s.draft.kvs[i]
		f.kv.ModRevision, f.kv.CreateRevision = int64(own(f.mod)), int64(own(f.create))
	}
}

// versions calls fn with the versions that the item makes.
func (s *step) versions(fn func(v *mvcc.Version)) {
	it := s.item
	rev := it.Revision
	switch it.Kind {
	case command.ItemCommit:
		if rev = it.Record.Revision; s.on[0].Sweep() >= 0 {
			return
		}
	case command.ItemResolve:
	case command.ItemSweep:
		for _, k := range it.Keys {
			v := command.SweepVersion(k, &s.on[0].Spans[it.SpanIndex], rev)
			fn(&v)
		}
		return
	case command.ItemLock, command.ItemRelease, command.ItemFence, command.ItemForget, command.ItemAttach, command.ItemDetach:
		return
	}
	if rev == 0 {
		return
	}
	for i := range s.on[0].Writes {
		v := s.on[0].Writes[i].At(rev)
		fn(&v)
	}
}

// appendItems appends the batch's items, and returns the hash behind them.
func (b *batch) appendItems(dst []byte, hash uint64) ([]byte, uint64) {
	index := uint32(0)
	for _, c := range b.calls {
		if c.step == nil || c.step.item == nil {
			continue
		}
		c.step.seal(rangeapi.LockID{Range: c.req.Range, Term: b.link.Term, Number: b.link.Number, Index: index})
		from := len(dst)
		dst = command.AppendItem(dst, c.step.item)
		hash += xxhash.Sum64(dst[from:])
		c.step.versions(func(v *mvcc.Version) { hash += command.HashVersion(v) })
		index++
	}
	return dst, hash
}

// sweepChunkBytes bounds the tombstones of one sweep.
const sweepChunkBytes = 512 << 10

// evaluateSweep finds the next keys that a committed lock deletes. Nothing changes under
// the lock, so that the store shows what there was before it.
func (r *Replica) evaluateSweep(l *command.Lock, rev keyspace.Revision) (*command.TxnItem, error) {
	it := &command.TxnItem{Kind: command.ItemSweep, Revision: rev, SpanIndex: l.Sweep()}
	bytesLeft := min(sweepChunkBytes, r.node.cfg.Limits.MaxEntryBytes/4)
	span := l.Spans[it.SpanIndex].Span
	if l.Revoke.Lease != 0 {
		return it, r.sweepLease(l, it, span, bytesLeft)
	}
	written := l.WrittenIn(span)
	err := r.store.scan(span, newest, true, func(v *mvcc.Version) error {
		for len(written) > 0 && bytes.Compare(written[0], v.Key) < 0 {
			written = written[1:]
		}
		if v.Mod >= rev || len(written) > 0 && bytes.Equal(written[0], v.Key) {
			return nil
		}
		if bytesLeft -= len(v.Key) + command.VersionOverheadBytes; bytesLeft < 0 && len(it.Keys) > 0 {
			it.Next = bytes.Clone(v.Key)
			return errStop
		}
		it.Sweep(v)
		return nil
	})
	if errors.Is(err, errStop) {
		err = nil
	}
	return it, err
}

// entryBytes bounds what a step takes in an entry.
func (s *step) entryBytes() int { return s.size + binary.MaxVarintLen64 }
