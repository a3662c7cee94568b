package pipeline

import (
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// endingBytes bounds the commands that end locks and are under way on a node.
const endingBytes = 16 << 20

// Budget bounds the bytes of all calls of a node between admission and answer. Commands that end
// locks have a budget of their own, because calls that wait for those locks may fill the other
// one. It guards itself.
type Budget struct {
	node keyspace.NodeID
	// bytes is the bound. overloaded says that the node's log has more to write than its own.
	bytes      int64
	overloaded func() bool
	metrics    *Metrics
	// pending are the bytes of all admitted calls but those in ending.
	pending, ending atomic.Int64
}

// NewBudget returns a node's budget. overloaded is nil where the log always keeps up.
func NewBudget(node keyspace.NodeID, bytes int64, overloaded func() bool, m *Metrics) *Budget {
	return &Budget{node: node, bytes: bytes, overloaded: overloaded, metrics: m}
}

// Pending returns the bytes of admitted calls, Ending those of commands that end locks.
func (b *Budget) Pending() int64 { return b.pending.Load() }

// Ending returns the bytes of admitted commands that end locks.
func (b *Budget) Ending() int64 { return b.ending.Load() }

// admit takes a call's bytes from the budget.
func (b *Budget) admit(c *Call) error {
	if c.endsLocks() {
		if v := b.ending.Add(c.bytes); v > endingBytes && v != c.bytes {
			b.ending.Add(-c.bytes)
			return kverror.New(kverror.Busy, "%d bytes of commands that end locks are under way on node %s", v-c.bytes, b.node)
		}
		return nil
	}
	if b.overloaded != nil && b.overloaded() {
		return kverror.New(kverror.TooManyRequests, "the log of node %s has more to write than its bound", b.node)
	}
	if v := b.pending.Add(c.bytes); v > b.bytes && v != c.bytes {
		b.pending.Add(-c.bytes)
		return kverror.New(kverror.TooManyRequests, "%d bytes of requests are under way on node %s", v-c.bytes, b.node)
	}
	b.metrics.pendingBytes.Add(float64(c.bytes))
	return nil
}

// leave gives a call's bytes back.
func (b *Budget) leave(c *Call) {
	if c.endsLocks() {
		b.ending.Add(-c.bytes)
		return
	}
	b.pending.Add(-c.bytes)
	b.metrics.pendingBytes.Sub(float64(c.bytes))
}
