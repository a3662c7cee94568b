package eval

import (
	"context"
	"errors"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/kverror"
)

// ReadLimit bounds what the requests of a node hold of what they have read. It is safe for
// concurrent use.
type ReadLimit struct {
	bytes    *budget.Bytes
	oneBytes int64
}

// NewReadLimit returns a ReadLimit of oneBytes for one request, and allBytes for all others
// together.
func NewReadLimit(oneBytes, allBytes int64) *ReadLimit {
	// The last portion that a request takes may be larger than what it needs.
	return &ReadLimit{bytes: budget.New(allBytes, oneBytes+readReserveBytes), oneBytes: oneBytes}
}

// Held returns the bytes that are held now.
func (l *ReadLimit) Held() int64 { return l.bytes.Held() }

// Budget returns the budget of one request, which waits for memory until ctx ends. Nobody may have
// to wait for the request meanwhile.
func (l *ReadLimit) Budget(ctx context.Context) Budget {
	b := l.AtOnce()
	b.ctx = ctx
	return b
}

// AtOnce returns the budget of a request that does not wait, because a worker evaluates it or because
// others may wait for its locks. What it reads counts all the same, and reads wait for it.
func (l *ReadLimit) AtOnce() Budget {
	return Budget{limit: l, share: l.bytes.Share(), left: l.oneBytes}
}

// Budget counts what one request holds of what it has read, against its own
// bound and the node's. It is for one goroutine.
type Budget struct {
	// ctx is nil if the request does not wait.
	ctx   context.Context
	limit *ReadLimit
	// left is what the request may still take. taken is its share of the node's bound, and
	// reserved the unused part of that share.
	left, reserved, taken int64
	share                 budget.Share
}

// A budget takes from the node's bound in portions, which double from the first to the second:
// many small reads at a time hold little.
const (
	readReserveFirst = 4 << 10
	readReserveBytes = 256 << 10
)

// Take counts bytes, and waits where the node's bound is reached. It fails with AnswerTooLarge
// where the request's own is.
func (b *Budget) Take(bytes int64) error {
	if b.left -= bytes; b.left < 0 {
		return b.tooLarge()
	}
	if b.reserved -= bytes; b.reserved >= 0 {
		return nil
	}
	more := max(min(max(b.taken, readReserveFirst), readReserveBytes), -b.reserved)
	var err error
	if b.ctx == nil {
		err = b.share.Add(more)
	} else {
		err = b.share.Take(b.ctx, more)
	}
	switch {
	case errors.Is(err, budget.ErrTooLarge):
		return b.tooLarge()
	case err != nil:
		return kverror.Of(err)
	}
	b.taken += more
	b.reserved += more
	return nil
}

func (b *Budget) tooLarge() error {
	return kverror.New(kverror.AnswerTooLarge, "the request reads more than %d bytes in one range", b.limit.oneBytes)
}

// GiveBack makes room for what the request no longer holds.
func (b *Budget) GiveBack(bytes int64) {
	b.left += bytes
	b.reserved += bytes
}

// Exceeded says whether the request has read more than one may.
func (b *Budget) Exceeded() bool { return b.left < 0 }

// Keep returns what the request holds, to be released later than the budget. The budget must be one
// that does not wait.
func (b *Budget) Keep() budget.Share { return b.share }

// Release gives the node back what was taken.
func (b *Budget) Release() { b.share.Release() }
