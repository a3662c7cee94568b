package eval

import (
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// ReadLimit bounds what the requests of a node hold of what they have read. It is safe for
// concurrent use.
type ReadLimit struct {
	// Node is the node's id, for errors. OneBytes bounds one request, AllBytes all of them.
	Node               keyspace.NodeID
	OneBytes, AllBytes int64
	held               atomic.Int64
}

// Held returns the bytes that are held now.
func (l *ReadLimit) Held() int64 { return l.held.Load() }

// GiveBack releases bytes that outlived their Budget.
func (l *ReadLimit) GiveBack(bytes int64) { l.held.Add(-bytes) }

// Budget returns the budget of one request.
func (l *ReadLimit) Budget() Budget { return Budget{limit: l, left: l.OneBytes} }

// Budget counts what one request holds of what it has read, against its own
// bound and the node's. It is for one goroutine.
type Budget struct {
	limit *ReadLimit
	// left is what the request may still take. taken is its share of the node's bound, and
	// reserved the unused part of that share.
	left, reserved, taken int64
}

// A budget takes from the node's bound in portions, which double from the first to the second:
// many small reads at a time hold little.
const (
	readReserveFirst = 4 << 10
	readReserveBytes = 256 << 10
)

// Take counts bytes. It fails with TooManyRequests where a bound is reached.
func (b *Budget) Take(bytes int64) error {
	if b.left -= bytes; b.left < 0 {
		return kverror.New(kverror.TooManyRequests, "the request reads more than the node may hold for one: use a limit")
	}
	if b.reserved -= bytes; b.reserved >= 0 {
		return nil
	}
	more := max(min(max(b.taken, readReserveFirst), readReserveBytes), -b.reserved)
	if v := b.limit.held.Add(more); v > b.limit.AllBytes && v != b.taken+more {
		b.limit.held.Add(-more)
		return kverror.New(kverror.TooManyRequests, "node %s holds %d bytes for reads", b.limit.Node, v-more)
	}
	b.taken += more
	b.reserved += more
	return nil
}

// GiveBack makes room for what the request no longer holds.
func (b *Budget) GiveBack(bytes int64) {
	b.left += bytes
	b.reserved += bytes
}

// Exceeded says whether the request has read more than one may.
func (b *Budget) Exceeded() bool { return b.left < 0 }

// Taken returns the bytes of the node's bound that Release gives back.
func (b *Budget) Taken() int64 { return b.taken }

// Release gives the node back what was taken.
func (b *Budget) Release() { b.limit.held.Add(-b.taken) }
