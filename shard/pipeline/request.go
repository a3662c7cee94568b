package pipeline

import (
	"errors"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// request is the operation of a client's request, at its pipeline.
type request Pipeline

// Command implements Operation.
func (*request) Command() rangeapi.TxnCommand { return nil }

// Gate implements Course: a request that meets a lock waits for its end.
func (r *request) Gate(c *Call, _ *Answers) (dealt bool) {
	p := (*Pipeline)(r)
	if p.locks.Empty() {
		return false
	}
	m := p.locks.Conflict(c.Req.Op)
	if m.Held == nil {
		return false
	}
	p.Block(c, m)
	return true
}

// Evaluate implements Course.
func (r *request) Evaluate(c *Call, pass *Pass) error {
	err := (*Pipeline)(r).Evaluation(c, pass).Run(c.Req.Op)
	// From here on the answer counts with the call's own bytes: it is small beside the
	// bound, or the request would not fit into an entry.
	pass.Budget.Release()
	return err
}

// Place implements Course.
func (r *request) Place(c *Call, pass *Pass, err error, out *Answers) {
	p, e := (*Pipeline)(r), &pass.Evaluation
	c.future, c.fail, c.writes, c.txn, c.draft = 0, nil, nil, nil, eval.Draft{}
	c.seen = e.Seen()
	if err != nil {
		p.placeFailed(c, err, out)
		return
	}
	if oldest := e.Oldest(); oldest != 0 && oldest < p.rec.Compacted {
		// Versions that it read at an explicit revision may have been removed meanwhile.
		c.compacted = p.rec.Compacted
		p.Requeue(c)
		return
	}
	c.draft = e.Draft()
	c.TakeWrites(e)
	if HasPut(c.writes) {
		if err := p.env.NoSpace(); err != nil {
			out.Add(c, err)
			return
		}
	}
	p.Append(c)
}

// placeFailed places a request whose evaluation ended with an error.
func (p *Pipeline) placeFailed(c *Call, err error, out *Answers) {
	var wait eval.WaitError
	var future eval.FutureError
	var refused eval.Refusal
	var missing eval.NeedsLease
	switch {
	case errors.As(err, &missing):
		p.env.AwaitLease(c, missing.Lease, out)
		return
	case errors.As(err, &wait):
		c.Lacks = 0
		p.Park(c, wait.Txn.Batch)
		return
	case errors.As(err, &future):
		c.future = future.Revision
	case errors.As(err, &refused):
		c.fail = refused.Err
	default:
		out.Add(c, err)
		return
	}
	p.Append(c)
}

// HasPut says whether there is a put among the writes.
func HasPut(writes []*eval.PendingVersion) bool {
	for _, v := range writes {
		if !v.Tombstone {
			return true
		}
	}
	return false
}

// ItemBytes implements Effect.
func (*request) ItemBytes() int { return 0 }

// AppendItem implements Effect.
func (*request) AppendItem(dst []byte, _ rangeapi.LockID) ([]byte, uint64) { return dst, 0 }

// Settle implements Effect.
func (*request) Settle(c *Call, rev keyspace.Revision) { c.draft.Settle(rev, true) }

// Undo implements Effect.
func (*request) Undo(*Call, error, *Answers) {}

// Answered implements Effect.
func (*request) Answered() {}
