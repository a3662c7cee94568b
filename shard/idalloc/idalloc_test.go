package idalloc

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// awayIDs hands out ids while it is not away.
type awayIDs struct {
	mu    sync.Mutex
	last  keyspace.RangeID
	away  bool
	asked int
}

func (a *awayIDs) RangeIDs(_ context.Context, n int) ([]keyspace.RangeID, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked++
	if a.away {
		return nil, errors.New("placement has no leader")
	}
	ids := make([]keyspace.RangeID, n)
	for i := range ids {
		a.last++
		ids[i] = a.last
	}
	return ids, nil
}

func (a *awayIDs) set(away bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.away = away
}

// A node splits while placement has no leader, as long as its block lasts, and
// fetches the next block as soon as there is one again. No id is used twice.
func TestSplitIDsAreFetchedAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := &awayIDs{last: 1, away: true}
		b := New(src, clock.Virtual())
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { b.Run(ctx); close(done) }()
		b.Prefetch()
		time.Sleep(time.Second)
		src.set(false)
		time.Sleep(2 * retryMax)
		src.set(true)
		seen := map[keyspace.RangeID]bool{}
		take := func() error {
			id, err := b.Allocate(ctx)
			if err == nil && (id < 2 || seen[id]) {
				t.Fatalf("id %s after %v", id, seen)
			}
			seen[id] = true
			return err
		}
		for i := range blockSize {
			if err := take(); err != nil {
				t.Fatalf("id %d of the block: %v", i, err)
			}
		}
		if err := take(); err == nil {
			t.Fatal("an id beyond the block")
		}
		src.set(false)
		if err := take(); err != nil {
			t.Fatalf("an id with an empty block: %v", err)
		}
		time.Sleep(2 * retryMax)
		src.set(true)
		for range blockSize {
			if err := take(); err != nil {
				t.Fatal(err)
			}
		}
		// Nobody asks again and again for a node that does not split.
		src.set(false)
		time.Sleep(2 * retryMax)
		src.mu.Lock()
		asked := src.asked
		src.mu.Unlock()
		time.Sleep(time.Hour)
		synctest.Wait()
		src.mu.Lock()
		if src.asked != asked {
			t.Errorf("asked %d times in an idle hour", src.asked-asked)
		}
		src.mu.Unlock()
		cancel()
		<-done
	})
}
