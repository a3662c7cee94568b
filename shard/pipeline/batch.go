package pipeline

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// batch is what is sequenced together and, where it changes something, proposed as
// one entry. All fields are guarded by the pipeline's mu.
type batch struct {
	eval.Batch
	lead *leadership
	// calls are those whose place is in the batch. Once it is settled all of them have writes
	// or items. txns counts the former, items the latter, and both those that have both.
	calls []*Call
	txns  int
	items int
	both  int
	bytes int

	// link is the batch's place in the chain, and hash the range's hash behind it,
	// once it is proposed.
	link command.Link
	hash uint64
	// settled says that the batch has its revisions, from first on if it changes
	// something.
	settled bool
	first   keyspace.Revision
	// floor is the lowest of its transactions' floors: all its revisions are above.
	floor keyspace.Revision
	// permit is the oldest of its calls'.
	permit keyspace.Permit
	// refused says that the group had no room for the proposal: it is not in the log.
	refused bool

	// timed counts the calls whose evaluation has ended by a reading of the clock. asked is when revisions were asked
	// for. commit is how the entry went through the log, once it is applied.
	timed  int
	asked  time.Duration
	commit raftgroup.Commit

	// parked are calls that are evaluated again once the batch has its revisions, held
	// those that are answered once it is applied.
	parked, held []*Call
}

func (b *batch) String() string {
	if b == nil {
		return "no batch"
	}
	return fmt.Sprintf("batch %d of term %d", b.Order(), b.lead.term)
}

// leadership is the right to evaluate and propose: one term, and in it one chain
// without a cut. Whoever holds a pointer to an older one is late.
type leadership struct {
	term uint64
	// last is the batch on which the next one is proposed, hash the range's hash
	// behind it.
	last command.Link
	hash uint64
	// number is the last one that was used in the term.
	number uint64
	// revision is the last one that was allocated to this range.
	revision keyspace.Revision
}

// newBatch returns an empty batch of the leadership.
func newBatch(order uint64, lead *leadership) *batch {
	b := &batch{lead: lead}
	b.Batch = eval.NewBatch(order, b)
	return b
}

// batchOf returns the batch of which the evaluation knows, nil for none.
func batchOf(b *eval.Batch) *batch {
	if b == nil {
		return nil
	}
	return b.Owner.(*batch) //nolint:forcetypeassert // a pipeline's batches are these
}

// add adds an evaluated call.
func (b *batch) add(c *Call) {
	c.moveTo(placeBatch, b)
	b.calls = append(b.calls, c)
	if p := c.Req.Permit; p != keyspace.Internal && (b.permit == keyspace.Internal || p < b.permit) {
		b.permit = p
	}
	if n := c.op.ItemBytes(); n > 0 {
		b.items++
		b.bytes += n
		if c.Changes() {
			b.both++
		}
	}
	if !c.Changes() {
		return
	}
	c.txn.Batch = &b.Batch
	if b.txns == 0 || c.txn.Floor < b.floor {
		b.floor = c.txn.Floor
	}
	b.txns++
	for _, v := range c.writes {
		b.bytes += v.Bytes()
	}
}

// evaluated ends the evaluation of the calls that came since it was called last.
func (b *batch) evaluated(now time.Duration) {
	for _, c := range b.calls[b.timed:] {
		c.enter(stages.Batch, now)
	}
	b.timed = len(b.calls)
}

// take moves all calls out of one of the batch's lists, which is empty then.
func (b *batch) take(list *[]*Call, from place) []*Call {
	calls := *list
	*list = nil
	for _, c := range calls {
		c.isAt(from, b)
	}
	return calls
}

// answer answers all calls of the batch: with their drafts, or the error.
func (b *batch) answer(out *Answers, err error) {
	for _, c := range b.take(&b.calls, placeBatch) {
		out.Add(c, err)
	}
}

// end wakes all who wait for the batch.
func (b *batch) end(applied bool) {
	b.End(applied)
	for _, c := range b.calls {
		if c.txn != nil {
			c.txn.Batch = nil
		}
	}
}

// encode numbers the batch and returns its entry. The revisions are known.
func (b *batch) encode(id keyspace.RangeID, generation keyspace.Generation, first keyspace.Revision, sequencerTerm uint64) []byte {
	l := b.lead
	l.number++
	b.link = command.Link{Term: l.term, Number: l.number}
	hash := l.hash
	dst := make([]byte, 0, b.bytes+len(b.calls)*binary.MaxVarintLen32+128)
	dst = command.AppendHeader(dst, command.Header{Kind: command.KindBatch, Term: l.term, Generation: generation})
	dst = command.AppendBatchHeader(dst, &command.Batch{Prev: l.last, Number: l.number, Hash: hash, First: first, Txns: b.txns, SequencerTerm: sequencerTerm})
	for _, c := range b.calls {
		c.isAt(placeBatch, b)
		if len(c.writes) == 0 {
			continue
		}
		dst = binary.AppendUvarint(dst, uint64(len(c.writes)))
		for sub, p := range c.writes {
			v := p.Stored(uint32(sub))
			dst = command.AppendVersion(dst, &v, p.Prior())
			hash += mvcc.HashWrite(&v)
		}
	}
	if b.items > 0 {
		dst, hash = b.appendItems(dst, hash, id)
	}
	b.hash = hash
	l.last, l.hash = b.link, hash
	return dst
}

// appendItems appends the batch's items, and returns the hash behind them.
func (b *batch) appendItems(dst []byte, hash uint64, id keyspace.RangeID) ([]byte, uint64) {
	index := uint32(0)
	for _, c := range b.calls {
		if c.op.ItemBytes() == 0 {
			continue
		}
		var added uint64
		dst, added = c.op.AppendItem(dst, rangeapi.LockID{Range: id, Term: b.link.Term, Number: b.link.Number, Index: index})
		hash += added
		index++
	}
	return dst, hash
}
