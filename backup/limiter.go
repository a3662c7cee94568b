package backup

import (
	"context"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

// limiter lets bytes pass at a rate. Without one it lets all pass.
type limiter struct {
	clock     clock.Clock
	perSecond int64

	mu   sync.Mutex
	free clock.Time // when the next bytes may pass
}

// burst is how much unused time counts.
const burst = 100 * time.Millisecond

// wait returns once n bytes may pass.
func (l *limiter) wait(ctx context.Context, n int) error {
	if l.perSecond <= 0 {
		return nil
	}
	l.mu.Lock()
	now := l.clock.Now()
	l.free = max(l.free, now.Add(-burst))
	pause := l.free.Sub(now)
	l.free = l.free.Add(time.Duration(float64(n) / float64(l.perSecond) * float64(time.Second)))
	l.mu.Unlock()
	if pause <= 0 {
		return ctx.Err()
	}
	return clock.Sleep(ctx, l.clock, pause)
}
