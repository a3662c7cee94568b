package transfer

import (
	"fmt"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

const (
	// reportEvery is the pause between two lines about how far something is, lineEvery that where a terminal shows
	// the last one.
	reportEvery = 5 * time.Second
	lineEvery   = 200 * time.Millisecond
)

// teller says now and then how far something is.
type teller struct {
	c     *Cluster
	began clock.Stopwatch

	mu   sync.Mutex
	told time.Duration // guarded by mu: when it was said last
}

func (c *Cluster) teller() *teller { return &teller{c: c, began: clock.StartStopwatch()} }

// say says it, if it is time.
func (t *teller) say(format string, args ...any) {
	every := reportEvery
	if t.c.Progress != nil {
		every = lineEvery
	}
	took := t.began.Elapsed()
	t.mu.Lock()
	defer t.mu.Unlock()
	if took-t.told < every {
		return
	}
	t.told = took
	text := fmt.Sprintf(format, args...) + fmt.Sprintf(", after %v", took.Round(time.Second))
	if t.c.Progress != nil {
		t.c.Progress(text)
		return
	}
	t.c.Report("%s", text)
}
