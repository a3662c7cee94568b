package shard

import (
	"context"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

const (
	// idBlock is how many range ids a node asks for at a time. It asks for the next
	// block when half of one is left, and so has idBlock+idBlock/2 at most.
	idBlock = 16
	// Pauses between attempts to fetch a block, and the time for one.
	idRetryMin = 100 * time.Millisecond
	idRetryMax = 5 * time.Second
)

// idStock is a stock of range ids that are fetched ahead, so that a range can be split
// while placement has no leader. What is left of it when the node stops is lost:
// ids are not scarce.
type idStock struct {
	source IDs
	clock  clock.Clock
	kick   wake.Signal

	mu sync.Mutex
	// stock is guarded by mu.
	stock []keyspace.RangeID
}

func newIDStock(source IDs, c clock.Clock) *idStock {
	return &idStock{source: source, clock: c, kick: wake.New()}
}

// want says that this node may have to split soon. It does not block.
func (s *idStock) want() { s.kick.Set() }

// take returns an id that nobody has. It asks placement only where the stock is
// used up.
func (s *idStock) take(ctx context.Context) (keyspace.RangeID, error) {
	s.mu.Lock()
	var id keyspace.RangeID
	if n := len(s.stock); n > 0 {
		id = s.stock[0]
		s.stock = s.stock[1:]
	}
	short := len(s.stock) <= idBlock/2
	s.mu.Unlock()
	if short {
		s.want()
	}
	if id != 0 {
		return id, nil
	}
	fresh, err := s.source.RangeIDs(ctx, 1)
	if err != nil {
		return 0, err
	}
	return fresh[0], nil
}

// run is the goroutine that fetches.
func (s *idStock) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kick:
		}
		for pause := idRetryMin; s.short() && ctx.Err() == nil; pause = min(2*pause, idRetryMax) {
			if s.fetch(ctx) == nil {
				break
			}
			if clock.Sleep(ctx, s.clock, pause) != nil {
				return
			}
		}
	}
}

func (s *idStock) short() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.stock) <= idBlock/2
}

func (s *idStock) fetch(ctx context.Context) error {
	ctx, cancel := clock.WithTimeout(ctx, s.clock, idRetryMax)
	defer cancel()
	fresh, err := s.source.RangeIDs(ctx, idBlock)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.stock = append(s.stock, fresh...)
	s.mu.Unlock()
	return nil
}
