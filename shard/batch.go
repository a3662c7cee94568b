package shard

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// call is one request that goes through the pipeline, and the caller's wait for it.
type call struct {
	ctx context.Context //nolint:containedctx // it is the request's, looked at once before evaluation
	req *rangeapi.Request
	// cmd is set for a command of a transaction over several ranges, whose req has no Op.
	cmd *txnCommand
	// bytes is what the call holds of the byte budgets until it is answered.
	bytes int64

	// place is where the call is, and at the batch that it is with there, if any. Both
	// are guarded by the replica's mu; moveTo alone sets them.
	place place
	// ticket is its number among those that had to wait for a lock, 0 before.
	ticket uint32
	at     *batch

	// The result of the evaluation. A call without writes changes nothing.
	txn    *eval.PendingTxn
	writes []*eval.PendingVersion
	draft  eval.Draft
	// fail is the refusal that is held back like an answer.
	fail error
	// future is the explicit revision that the range had not heard of, 0 if none. The
	// call is evaluated again once its place is known to be at or above it.
	future keyspace.Revision
	// current and compacted are what the sequencer said when it was asked for this
	// call alone.
	current, compacted keyspace.Revision
	// seen is the newest batch of which the evaluation saw a version.
	seen *eval.Batch
	// waits counts how often the call was put back.
	waits int

	// lost says that the call was proposed by a leadership that ended.
	lost atomic.Bool
	// asked says that the call only wants the current revision before it is evaluated.
	asked bool
	// lacks is a lease that was not there when the call asked for it, 0 for none.
	lacks keyspace.LeaseID
	resp  *rangeapi.Response
	err   error
	done  chan struct{}
}

func newCall(ctx context.Context, req *rangeapi.Request) *call {
	return &call{ctx: ctx, req: req, done: make(chan struct{})}
}

// place is where a call is. It is in exactly one place at any time.
type place uint8

const (
	// placeCaller is before its admission.
	placeCaller place = iota
	placeQueue
	placeEvaluation
	// placeParked is with a batch for whose revisions it waits, to be evaluated again.
	placeParked
	// placeBlocked is with a lock for whose end it waits, to be evaluated again.
	placeBlocked
	// placeBatch is in a batch that fills, is sequenced, proposed or lost. Once the
	// batch is settled only calls with writes are there.
	placeBatch
	// placeHeld is with a batch whose writes it has seen, until they are applied.
	placeHeld
	// placeConfirming waits for a confirmation of the leadership.
	placeConfirming
	placeAnswered
)

// placeMoves says from where a call may go where.
var placeMoves = [...][]place{
	placeCaller:     {placeQueue},
	placeQueue:      {placeEvaluation, placeAnswered},
	placeEvaluation: {placeQueue, placeParked, placeBlocked, placeBatch, placeConfirming, placeAnswered},
	placeParked:     {placeQueue, placeAnswered},
	placeBlocked:    {placeQueue, placeEvaluation, placeAnswered},
	placeBatch:      {placeQueue, placeHeld, placeConfirming, placeAnswered},
	placeHeld:       {placeConfirming, placeAnswered},
	placeConfirming: {placeAnswered},
	placeAnswered:   {},
}

func (p place) String() string {
	return [...]string{
		"with its caller", "queued", "in evaluation", "parked", "blocked", "in a batch", "held", "confirming", "answered",
	}[p]
}

// moveTo takes the call from where it is to p, with batch b where p is with one.
func (c *call) moveTo(p place, b *batch) {
	if !slices.Contains(placeMoves[c.place], p) {
		panic(fmt.Sprintf("shard: a %T that is %s (%s) goes to be %s (%s)", c.req.Op, c.place, c.at, p, b))
	}
	c.place, c.at = p, b
}

// isAt asserts that the call is in the place with the batch where it was found.
func (c *call) isAt(p place, b *batch) {
	if c.place != p || c.at != b {
		panic(fmt.Sprintf("shard: a %T found %s (%s) is %s (%s)", c.req.Op, p, b, c.place, c.at))
	}
}

// answer gives the caller its answer and the node the call's bytes back. It is
// called once.
func (c *call) answer(n *Node, resp proto.Message, err error) {
	n.unadmit(c)
	if c.cmd != nil {
		c.cmd.forgetRead(n)
	}
	if err != nil {
		c.err = err
	} else {
		c.resp = &rangeapi.Response{Op: resp}
	}
	close(c.done)
}

// batch is what is sequenced together and, where it changes something, proposed as
// one entry. All fields are guarded by the replica's mu.
type batch struct {
	eval.Batch
	lead *leadership
	// calls are those whose place is in the batch; of a settled one all have writes or are
	// commands. txns counts the former, items the latter; a revoke is both.
	calls   []*call
	txns    int
	items   int
	revokes int
	bytes   int

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
	// refused says that the group had no room for the proposal: it is not in the log.
	refused bool

	// parked are calls that are evaluated again once the batch has its revisions, held
	// those that are answered once it is applied.
	parked, held []*call
}

func (b *batch) String() string {
	if b == nil {
		return "no batch"
	}
	return fmt.Sprintf("batch %d of term %d", b.Order(), b.lead.term)
}

// take moves all calls out of one of the batch's lists, which is empty then.
func (b *batch) take(list *[]*call, from place) []*call {
	calls := *list
	*list = nil
	for _, c := range calls {
		c.isAt(from, b)
	}
	return calls
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
	return b.Owner.(*batch) //nolint:forcetypeassert // a replica's batches are these
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
	// revision is the last one that was handed out to this range.
	revision keyspace.Revision
}

// encode numbers the batch and returns its entry. The revisions are known.
func (b *batch) encode(generation keyspace.Generation, first keyspace.Revision) []byte {
	l := b.lead
	l.number++
	b.link = command.Link{Term: l.term, Number: l.number}
	hash := l.hash
	dst := make([]byte, 0, b.bytes+len(b.calls)*binary.MaxVarintLen32+128)
	dst = command.AppendHeader(dst, command.Header{Kind: command.KindBatch, Term: l.term, Generation: generation})
	dst = command.AppendBatchHeader(dst, &command.Batch{Prev: l.last, Number: l.number, Hash: hash, First: first, Txns: b.txns})
	for _, c := range b.calls {
		c.isAt(placeBatch, b)
		if len(c.writes) == 0 {
			continue
		}
		dst = binary.AppendUvarint(dst, uint64(len(c.writes)))
		for sub, p := range c.writes {
			v := p.Stored(uint32(sub))
			dst = command.AppendVersion(dst, &v, p.Prior())
			hash += command.HashVersion(&v)
		}
	}
	if b.items > 0 {
		dst, hash = b.appendItems(dst, hash)
	}
	b.hash = hash
	l.last, l.hash = b.link, hash
	return dst
}
