package sequencer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

const (
	// sharedParts is how many parts are kept for the followers that have not taken them yet.
	sharedParts = 16
	// partCost is about what a part costs the sequencer's node for each follower, whatever is in it. The followers
	// are woken so seldom that all their parts together take about one core.
	partCost = 10 * time.Microsecond
	// minPause is the shortest pause between two wake-ups, so few followers are woken without any. maxPause is the longest.
	// Most of it is hidden: an event waits for its put to be committed too, which takes a round trip and a disk.
	minPause, maxPause = 100 * time.Microsecond, 10 * time.Millisecond
)

// ErrNoSequencer says that this node is not the sequencer, or an older one than the
// follower knows.
var ErrNoSequencer = errors.New("placement: not the sequencer")

// logParts is the allocation log for those who follow it. They mostly wait for the same part, which is then encoded once.
type logParts struct {
	// changed is set behind each change of the log.
	changed wake.Signal

	// followed says that there are followers.
	followed atomic.Bool

	mu sync.Mutex
	// Guarded by mu. followers are woken by serve, wakes counts how often.
	followers []wake.Signal
	wakes     uint64
	// term and end are up to where the log was divided into parts. Followers that have come that far take the same parts
	// from there on; all others take their own up to there.
	term uint64
	end  keyspace.Revision
	// recent are the last of those parts, the next one taking the place of recent[next].
	recent [sharedParts]encodedPart
	next   int
	// records has room for what is encoded.
	records []Allocation
}

// encodedPart is a part of a term's log as it is sent. bytes is nil where there is nothing behind after.
type encodedPart struct {
	term        uint64
	after, last keyspace.Revision
	bytes       []byte
	// full says that there was no room for all. wakes is the number of wake-ups before: it holds all that they told of.
	full  bool
	wakes uint64
}

// pauseFor is how long so many followers are left alone after they were woken.
func pauseFor(followers int) time.Duration {
	pause := time.Duration(followers) * partCost
	if pause < minPause {
		return 0
	}
	return min(pause, maxPause)
}

// serve wakes the followers behind changes of the log until stop is closed: at once behind the first one for a while, and
// those that follow it closely share a wake-up.
func (l *AllocationLog) serve(stop <-chan struct{}, c clock.Clock) {
	timer := c.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-stop:
			l.parts.wake()
			return
		case <-l.parts.changed:
		}
		pause := pauseFor(l.parts.wake())
		if pause == 0 {
			continue
		}
		timer.Reset(pause)
		select {
		case <-stop:
		case <-timer.C():
		}
	}
}

// wake wakes the followers and returns how many they are.
func (p *logParts) wake() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wakes++
	for _, f := range p.followers {
		f.Set()
	}
	return len(p.followers)
}

// join returns a new follower's signal, and a function that ends it.
func (p *logParts) join() (woken wake.Signal, leave func()) {
	woken = wake.New()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.followers = append(p.followers, woken)
	p.followed.Store(true)
	return woken, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.followers = slices.DeleteFunc(p.followers, func(o wake.Signal) bool { return o == woken })
		if len(p.followers) == 0 {
			p.followed.Store(false)
			p.recent, p.records = [sharedParts]encodedPart{}, nil
		}
	}
}

// ServeLog sends the log behind what the follower knows, and then every allocation,
// until ctx ends or this node is not the sequencer of the term any more. Allocations
// that come while it sends go together. The first part is sent at once, also without
// records: it says up to where all is known.
func ServeLog(ctx context.Context, l *AllocationLog, known LogPosition, s transport.Stream) error {
	woken, leave := l.parts.join()
	defer leave()
	term, after, _ := l.Bounds()
	if term == 0 || term < known.Term {
		return ErrNoSequencer
	}
	at := max(known.Last, after)
	for first := true; ; first = false {
		p, more, err := l.part(term, at)
		if err != nil {
			now, after, _ := l.Bounds()
			if now != term {
				return ErrNoSequencer
			}
			// The follower was too slow: what was overwritten it must learn otherwise.
			at = after
			continue
		}
		if first && p.bytes == nil {
			p.bytes = (&LogPart{Term: term, After: at, Last: at}).encode()
		}
		if p.bytes != nil {
			if err := s.Send(ctx, p.bytes); err != nil {
				return err
			}
		}
		if at = p.last; more {
			continue
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// part returns the part of the term's log behind a revision. Nobody changes its bytes, for others may send the same
// part. more says not to wait for a wake-up before one asks for the next part.
func (l *AllocationLog) part(term uint64, after keyspace.Revision) (e encodedPart, more bool, err error) {
	p := &l.parts
	p.mu.Lock()
	defer p.mu.Unlock()
	behind := p.term == term && after < p.end
	for i := range p.recent {
		if r := &p.recent[i]; behind && r.bytes != nil && r.term == term && r.after == after {
			return *r, r.full || r.wakes != p.wakes, nil
		}
	}
	if p.records == nil {
		p.records = make([]Allocation, sentLogRecords)
	}
	_, _, end := l.Bounds() // what comes behind it from here on is told of by another wake-up
	n, last, err := l.Read(term, after, p.records)
	if err != nil || n == 0 {
		return encodedPart{last: after}, false, err
	}
	if behind {
		last = min(last, p.end)
	}
	part := LogPart{Term: term, After: after, Last: last, Records: clipped(p.records[:n], after, last)}
	e = encodedPart{
		term: term, after: after, last: last, bytes: part.encode(), wakes: p.wakes,
		full: last < end,
	}
	if !behind {
		p.term, p.end = term, last
		p.recent[p.next] = e
		p.next = (p.next + 1) % sharedParts
	}
	return e, behind || e.full, nil
}

// clipped takes from records what they hold of revisions up to after, and behind last.
func clipped(records []Allocation, after, last keyspace.Revision) []Allocation {
	for len(records) > 0 && records[len(records)-1].First > last {
		records = records[:len(records)-1]
	}
	if len(records) == 0 {
		return records
	}
	if e := &records[len(records)-1]; e.Last() > last {
		e.Count = uint32(last + 1 - e.First)
	}
	if e := &records[0]; e.First <= after {
		cut := uint32(after + 1 - e.First)
		e.First += keyspace.Revision(cut)
		e.Count -= cut
	}
	return records
}
