// Package idalloc allocates range ids from a block that is fetched ahead, so that a range can be
// split while placement has no leader.
package idalloc

import (
	"context"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

const (
	// blockSize is how many ids a node asks for at a time. It asks for the next block when half
	// of one is left, and so has blockSize+blockSize/2 at most.
	blockSize = 16
	// Pauses between attempts to fetch a block. retryMax is also the time for one.
	retryMin = 100 * time.Millisecond
	retryMax = 5 * time.Second
)

// Source gives range ids that were never used; placement's client does.
type Source interface {
	RangeIDs(ctx context.Context, n int) ([]keyspace.RangeID, error)
}

// Allocator allocates range ids. The rest of its block is lost when the node stops: ids are not
// scarce.
type Allocator struct {
	source Source
	clock  clock.Clock
	short  wake.Signal

	mu sync.Mutex
	// block is guarded by mu.
	block []keyspace.RangeID
}

// New returns an Allocator without a block. Run fetches.
func New(source Source, c clock.Clock) *Allocator {
	return &Allocator{source: source, clock: c, short: wake.New()}
}

// Prefetch says that this node may have to split soon. It does not block.
func (a *Allocator) Prefetch() { a.short.Set() }

// Allocate returns an id that nobody has. It asks the source only if the block is used up.
func (a *Allocator) Allocate(ctx context.Context) (keyspace.RangeID, error) {
	a.mu.Lock()
	var id keyspace.RangeID
	if len(a.block) > 0 {
		id = a.block[0]
		a.block = a.block[1:]
	}
	short := a.shortLocked()
	a.mu.Unlock()
	if short {
		a.Prefetch()
	}
	if id != 0 {
		return id, nil
	}
	fresh, err := a.source.RangeIDs(ctx, 1)
	if err != nil {
		return 0, err
	}
	return fresh[0], nil
}

// Run fetches blocks until ctx ends.
func (a *Allocator) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.short:
		}
		for pause := retryMin; a.isShort() && ctx.Err() == nil; pause = min(2*pause, retryMax) {
			if a.fetch(ctx) == nil {
				break
			}
			if clock.Sleep(ctx, a.clock, pause) != nil {
				return
			}
		}
	}
}

func (a *Allocator) isShort() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.shortLocked()
}

func (a *Allocator) shortLocked() bool { return len(a.block) <= blockSize/2 }

func (a *Allocator) fetch(ctx context.Context) error {
	ctx, cancel := clock.WithTimeout(ctx, a.clock, retryMax)
	defer cancel()
	fresh, err := a.source.RangeIDs(ctx, blockSize)
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.block = append(a.block, fresh...)
	a.mu.Unlock()
	return nil
}
