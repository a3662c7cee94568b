package eval

import (
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// ErrOtherPath says that a guard has another outcome than the path demands.
var ErrOtherPath = errors.New("shard: the path through the compares is another one")

// Prepared is what a Prepare found and does.
type Prepared struct {
	Answer *rangeapi.Prepared
	// Creates are the create revisions of the answer's results, which may still be unknown.
	Creates []Ref
	// HoldsRead says that the answer holds what the evaluation took of its budget.
	HoldsRead bool
}

// Prepare evaluates the guards, then all that can refuse the writes, then the writes. Deletes
// of more than sweepBytes become sweeps; previous keys and values take maxPrev bytes in the
// answer at most. The error is a [WaitError], a [NeedsLease], [ErrOtherPath], or one that
// needs no holding back.
func (e *Evaluation) Prepare(op *rangeapi.Prepare, sweepBytes, maxPrev int) (p Prepared, err error) {
	e.view.in.Absent = op.Absent
	w := txnWriter{e: e, sweepBytes: sweepBytes, maxPrev: maxPrev, prevLeft: maxPrev}
	defer func() { p.HoldsRead = w.prevLeft < w.maxPrev }()
	e.changes.txn = &PendingTxn{Floor: e.view.in.Floor}
	a := &rangeapi.Prepared{Facts: make([]rangeapi.Fact, len(op.Guards))}
	p.Answer = a
	for i := range op.Guards {
		g := &op.Guards[i]
		f, err := compareFact(&e.view, g.Compare)
		if err != nil {
			return p, err
		}
		a.Facts[i] = f
		if g.Want == rangeapi.WantHolds && !f.Holds || g.Want == rangeapi.WantFails && f.Holds {
			p.Answer = &rangeapi.Prepared{Facts: a.Facts[:i+1]}
			return p, ErrOtherPath
		}
	}
	for i := range op.Writes {
		put, ok := op.Writes[i].Op.(*pb.PutRequest)
		if !ok {
			continue
		}
		if err := e.checkPut(put); refuses(err) {
			a.Refused, a.RefusedAt = kverror.Of(err), op.Writes[i].Number
			return p, nil
		} else if err != nil {
			return p, err
		}
	}
	e.view.own = &e.changes
	for i := range op.Writes {
		if err := w.run(&op.Writes[i]); refuses(err) {
			a.Refused, a.RefusedAt = kverror.Of(err), op.Writes[i].Number
			return p, nil
		} else if err != nil {
			return p, err
		}
	}
	a.Results, a.Changes = w.results, len(e.changes.writes) > 0 || len(w.swept) > 0
	p.Creates = w.creates
	return p, nil
}

// refuses says whether the error is one that the state gives a put.
func refuses(err error) bool {
	var refused Refusal
	return errors.As(err, &refused) || errors.Is(err, kverror.LeaseNotFound)
}

// compareFact evaluates a guard. One on a single key has an outcome even where the key
// is not there. One on a span is a part of a compare that may lie in several ranges:
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
	err = w.scan(s, c.GetTarget() != pb.Compare_VALUE, func(it *item) error {
		f.Found = true
		var err error
		if f.Holds, err = compareItem(c, it); err == nil && !f.Holds {
			err = ErrStop
		}
		return err
	})
	return f, err
}

// txnWriter evaluates the writes of a Prepare.
type txnWriter struct {
	e *Evaluation
	// sweepBytes is how much tombstones may take in an entry; a delete beyond it is a
	// sweep.
	sweepBytes int
	// prevLeft is what previous keys and values may still take in the answer, of maxPrev.
	prevLeft, maxPrev int
	swept             []command.LockSpan
	results           []rangeapi.WriteResult
	// creates are the create revisions of the results, which may still be unknown.
	creates []Ref
}

func (w *txnWriter) run(op *rangeapi.Write) (err error) {
	w.e.sub = op.Number
	res := rangeapi.WriteResult{Number: op.Number}
	var create Ref
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

func (w *txnWriter) put(o *pb.PutRequest, res *rangeapi.WriteResult) (create Ref, err error) {
	e := w.e
	if by := w.gone(o.GetKey()); by != nil {
		it, ok, err := e.view.getHead(o.GetKey())
		if err == nil && ok {
			number := e.sub
			e.sub = by.Sub
			err = e.write(&PendingVersion{Key: o.GetKey(), Txn: e.changes.txn, Tombstone: true, Lived: true}, it.lease)
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
	res.Lived, res.Version, res.Lease = v.Lived, v.version, v.Lease()
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

// remove deletes a span. It becomes a sweep if the tombstones do not fit. Previous versions
// are collected all the same, so that a refusal comes before the revision.
func (w *txnWriter) remove(o *pb.DeleteRangeRequest, res *rangeapi.WriteResult) error {
	e := w.e
	s, ok := keyspace.FromEtcd(o.GetKey(), o.GetRangeEnd())
	if !ok {
		return nil
	}
	var items []item
	size := e.changes.bytes
	err := e.view.scan(s, !o.GetPrevKv(), func(it *item) error {
		if w.gone(it.key) != nil {
			return nil
		}
		if size += len(it.key) + command.VersionOverheadBytes; size > w.sweepBytes && len(items) > 1 {
			if res.Uncounted = true; !o.GetPrevKv() {
				return ErrStop
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
		if res.Uncounted && e.changes.get(it.key) == nil {
			continue
		}
		if err := e.write(&PendingVersion{Key: it.key, Txn: e.changes.txn, Tombstone: true, Lived: true}, it.lease); err != nil {
			return err
		}
	}
	if res.Uncounted {
		w.swept = append(w.swept, command.LockSpan{Span: s, Mode: command.Sweep, Sub: e.sub})
		return w.removeOwn(s)
	}
	res.Deleted = int64(len(items))
	return nil
}

// removeOwn deletes what the transaction itself has put into a span that it sweeps.
func (w *txnWriter) removeOwn(s keyspace.Span) error {
	for _, v := range append([]*PendingVersion(nil), w.e.changes.writes...) {
		if v.replaced || v.Tombstone || !s.Contains(v.Key) {
			continue
		}
		if err := w.e.write(&PendingVersion{Key: v.Key, Txn: v.Txn, Tombstone: true, Lived: v.Lived}, 0); err != nil {
			return err
		}
	}
	return nil
}
