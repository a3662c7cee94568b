package stages

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// maxRecords bounds the records that a call keeps: a read may ask very many ranges. Of more it keeps the longest.
const maxRecords = 32

// Call is the context of one request of a client at its gateway. Whoever serves the request notes here what
// takes long; a fast request has nothing to note. It may be used from many goroutines. A nil Call takes everything
// and keeps nothing.
type Call struct {
	keyspace.Room
	watch  clock.Stopwatch
	traced bool
	// asked is the node that was asked last, 0 while that is this one and all long requests to it have records.
	asked atomic.Uint64

	mu sync.Mutex
	// trail is nil while nothing is noted. Guarded by mu.
	trail *trail
}

// trail is what was noted of a request.
type trail struct {
	// retries counts the attempts that were made again, why is the cause of the last one, by the node and the
	// range that it asked. retried is when the attempt after it began.
	retries  uint32
	why      string
	node     keyspace.NodeID
	rangeID  keyspace.RangeID
	retried  time.Duration
	refusals bool
	// waited is the time that went by until the current revision was known, whyWaited the last error.
	waited    time.Duration
	whyWaited string
	// silent says that the last attempt had no answer when the request ended.
	silent  bool
	records []*Record
}

type callKey struct{}

// NewCall returns the context of a request that has come when watch was started. traced asks for the record of each range.
func NewCall(ctx context.Context, watch clock.Stopwatch, traced bool) *Call {
	c := &Call{watch: watch, traced: traced}
	c.Context = ctx
	return c
}

// Value implements context.Context.
func (c *Call) Value(key any) any {
	if key == (callKey{}) {
		return c
	}
	return c.Room.Value(key)
}

// Of returns the client's request to which a context belongs, nil for work of the cluster itself.
func Of(ctx context.Context) *Call {
	c, _ := ctx.Value(callKey{}).(*Call)
	return c
}

// In returns a context like ctx that belongs to the request, for work that goes on without its client.
func (c *Call) In(ctx context.Context) context.Context {
	if c == nil {
		return ctx
	}
	return context.WithValue(ctx, callKey{}, c)
}

// Traced says whether all records are wanted.
func (c *Call) Traced() bool { return c != nil && c.traced }

// note lets f write into the trail.
func (c *Call) note(f func(t *trail)) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.trail == nil {
		c.trail = &trail{}
	}
	f(c.trail)
}

// Retry notes that an attempt at a node has failed, and that the next one begins. leaderless says that it failed for
// want of a leader. why has no keys.
func (c *Call) Retry(r keyspace.RangeID, n keyspace.NodeID, leaderless bool, why string) {
	c.note(func(t *trail) {
		t.retries++
		t.rangeID, t.node, t.refusals, t.why = r, n, leaderless, why
		t.retried = max(t.retried, c.watch.Elapsed())
	})
}

// Silent notes that the request ended before a node had answered.
func (c *Call) Silent(r keyspace.RangeID, n keyspace.NodeID) {
	c.note(func(t *trail) { t.rangeID, t.node, t.silent = r, n, true })
}

// Asked notes a node that is asked and may leave no record: another one, or this one if it has left the record out.
func (c *Call) Asked(n keyspace.NodeID) {
	if c != nil {
		c.asked.Store(uint64(n))
	}
}

// Waited notes a wait for the current revision, and the last error, if any.
func (c *Call) Waited(d time.Duration, last error) {
	c.note(func(t *trail) {
		if t.waited += d; last != nil {
			t.whyWaited = last.Error()
		}
	})
}

// Note keeps the record of one range; nil is none.
func (c *Call) Note(r *Record) {
	if r == nil {
		return
	}
	c.note(func(t *trail) {
		if len(t.records) < maxRecords {
			t.records = append(t.records, r)
			return
		}
		shortest := 0
		for i := range t.records {
			if t.records[i].Took < t.records[shortest].Took {
				shortest = i
			}
		}
		if t.records[shortest].Took < r.Took {
			t.records[shortest] = r
		}
	})
}
