package console

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// freshFor is how long an answer is shared, an error too: without a quorum questions take long.
const freshFor = time.Second

// keptFor is how long an answer is kept in memory: the list of 100,000 ranges takes tens of megabytes.
const keptFor = 10 * time.Second

// shared is an answer that all who ask within a second share. One of them asks, in their own name; the others wait.
type shared[T any] struct {
	clock clock.Clock
	ask   func(ctx context.Context) (T, error)

	mu   sync.Mutex
	last *answer[T]  // guarded by mu; nil before the first question, and once it is let go
	let  clock.Timer // lets go of last; guarded by mu
}

type answer[T any] struct {
	done  chan struct{}
	value T
	err   error
	// came is when it came, 0 while it is asked for. Guarded by the mutex of shared.
	came clock.Time
}

// get returns an answer that is at most a second old. The caller who asks goes on to the end though its own reader is
// gone, within limit, because others wait for the same.
func (s *shared[T]) get(ctx context.Context, limit time.Duration) (T, error) {
	s.mu.Lock()
	a := s.last
	if a != nil && (a.came == 0 || s.clock.Now().Sub(a.came) < freshFor) {
		s.mu.Unlock()
		select {
		case <-a.done:
			return a.value, a.err
		case <-ctx.Done():
			var none T
			return none, ctx.Err()
		}
	}
	a = &answer[T]{done: make(chan struct{}), err: errGivenUp}
	s.last = a
	s.mu.Unlock()
	defer s.came(a)
	asking, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	a.value, a.err = s.ask(asking)
	return a.value, a.err
}

// errGivenUp is what others get where the one who asked has ended in a panic.
var errGivenUp = errors.New("console: the question was not answered")

// came lets an answer be read.
func (s *shared[T]) came(a *answer[T]) {
	s.mu.Lock()
	a.came = max(s.clock.Now(), 1)
	if s.let != nil {
		s.let.Stop()
	}
	s.let = s.clock.AfterFunc(keptFor, func() { s.forget(a) })
	s.mu.Unlock()
	close(a.done)
}

func (s *shared[T]) forget(a *answer[T]) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == a {
		s.last = nil
	}
}
