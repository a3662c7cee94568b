package shard

import (
	"math"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
	"github.com/skeindb/skein/rangeapi"
)

// RangeMeasure is what one replica of this node knows of its range's size and, where it
// leads, of its load.
type RangeMeasure struct {
	Descriptor keyspace.Descriptor
	// Leads says that this replica leads its range and serves it.
	Leads bool
	// Term is the raft term in which it leads, 0 where it does not.
	Term uint64
	// Bytes is about what the range takes of this node's disk, old versions and what is yet
	// to be flushed included. It follows within some seconds; a range at rest keeps the last
	// figure. After a split what is not flushed is in neither half.
	Bytes int64
	// WritesPerSecond and ReadsPerSecond are requests served here as leader, a transaction
	// counting once, and BytesPerSecond what the writes brought; means over some
	// loadMeanTime that decay. 0 where this replica does not lead.
	WritesPerSecond, ReadsPerSecond, BytesPerSecond float64
	// SplitKey is the key at which the load divides: only where it is above the bound for
	// splits by load, has been seen to divide, and the range is not split there yet.
	SplitKey []byte
	// Unsplit says in words why a range that is too large or has too much load is not
	// split. Empty where there is nothing to say.
	Unsplit string
}

// Load is writes and reads a second together.
func (m *RangeMeasure) Load() float64 { return m.WritesPerSecond + m.ReadsPerSecond }

// Measures returns what is known of every replica of this node, in no order. It costs a
// copy for each: nothing is asked of the store.
func (n *Node) Measures() []RangeMeasure {
	all := n.Replicas()
	out := make([]RangeMeasure, 0, len(all))
	for _, r := range all {
		r.mu.Lock()
		if r.rec.Generation != 0 && !r.stopped {
			out = append(out, r.measureLocked())
		}
		r.mu.Unlock()
	}
	return out
}

func (r *Replica) measureLocked() RangeMeasure {
	g := &r.gauge
	m := RangeMeasure{Descriptor: r.descriptorLocked(), Leads: r.lead != nil, Bytes: r.bytesLocked(), Unsplit: g.unsplit}
	if m.Leads {
		m.Term = r.lead.term
		m.WritesPerSecond, m.ReadsPerSecond, m.BytesPerSecond = g.writes, g.reads, g.bytes
		m.SplitKey = g.divides
	}
	return m
}

// bytesLocked is about what the range takes of the disk, or will when it is flushed.
func (r *Replica) bytesLocked() int64 {
	return r.gauge.stored + int64(r.tally.applied-r.gauge.flushed)
}

// tally counts what a replica does, for who measures it: it is written on the way of
// every request, under the replica's mu, which is held there anyway.
type tally struct {
	// writes and reads are requests that this replica served as leader, bytes what the
	// writes brought, applied the bytes of entries applied here: all since it was opened.
	writes, reads, bytes, applied uint64
	// due counts down the requests until one is looked at: the first one after a rest, which
	// has the replica measured again, and while the range is hot those that are sampled.
	due int64
	// metered says that the node's meter has the replica on its list.
	metered bool
	// sample is what is sampled of the requests, nil where the load is not high.
	sample *sampler
}

// never is a tally.due that no count comes down to.
const never = math.MaxInt64

// countLocked counts a call that was evaluated.
func (r *Replica) countLocked(c *call) {
	t := &r.tally
	switch {
	case c.step != nil:
		if _, prepares := c.step.op.(*rangeapi.Prepare); !prepares {
			return // it goes on with what was counted
		}
		fallthrough
	case len(c.writes) > 0:
		t.writes++
		t.bytes += uint64(c.bytes - callOverheadBytes)
	default:
		t.reads++
	}
	if t.due--; t.due < 0 {
		r.lookLocked(callSpan(c))
	}
}

// readLocked counts a read that does not go through the pipeline.
func (r *Replica) readLocked(bounds keyspace.Span) {
	t := &r.tally
	t.reads++
	if t.due--; t.due < 0 {
		r.lookLocked(bounds)
	}
}

// appliedLocked counts what is applied.
func (r *Replica) appliedLocked(bytes uint64) {
	if r.tally.applied += bytes; bytes > 0 && !r.tally.metered {
		r.meterLocked()
	}
}

// lookLocked is for the requests that are not only counted.
func (r *Replica) lookLocked(s keyspace.Span) {
	if !r.tally.metered {
		r.meterLocked()
	}
	r.tally.due = never
	if r.tally.sample != nil {
		r.tally.due = r.tally.sample.take(s)
	}
}

// meterLocked puts the replica on the meter's list.
func (r *Replica) meterLocked() {
	r.tally.metered = true
	r.node.meter.note(r)
}

// callSpan is where a call's keys lie.
func callSpan(c *call) keyspace.Span {
	if c.step == nil {
		s, _ := rangeapi.Bounds(c.req.Op)
		return s
	}
	var first []byte
	if p, ok := c.step.op.(*rangeapi.Prepare); ok {
		p.Keys(func(key, _ []byte, writes bool) {
			if first == nil || writes {
				first = key
			}
		})
	}
	return keyspace.Single(first)
}

const (
	// sampleSize bounds a sample. Three dozen requests say whether load divides into halves
	// (divide wants 32); four times as many leave each half of the sample enough.
	sampleSize = 128
	// sampleKeyBytes bounds what is kept of a key: a prefix divides as well.
	sampleKeyBytes = 256
	// sampleTime is for how long requests are sampled before it is judged where they divide.
	sampleTime = 10 * time.Second
)

// sampler keeps requests drawn evenly from those that came since it began, in their
// order. A replica's mu guards it.
type sampler struct {
	began    clock.Time
	requests []divide.Request
	// stride is how many requests there are to one that is taken, in the mean. It doubles
	// when the sample is full, which then loses every second request.
	stride int64
	// random is the state of a generator: a fixed stride would see one key of a load that
	// goes round.
	random uint64
}

// newSampler begins a sample of a load of so many requests a second.
func newSampler(now clock.Time, perSecond float64) *sampler {
	return &sampler{
		began: now, requests: make([]divide.Request, 0, sampleSize),
		stride: max(1, int64(perSecond*sampleTime.Seconds())/(sampleSize*3/4)), random: uint64(now) | 1,
	}
}

// take adds a request and returns how many to pass over until the next.
func (s *sampler) take(span keyspace.Span) int64 {
	if len(s.requests) == sampleSize {
		for i := range sampleSize / 2 {
			s.requests[i] = s.requests[2*i]
		}
		clear(s.requests[sampleSize/2:])
		s.requests = s.requests[:sampleSize/2]
		s.stride *= 2
	}
	s.requests = append(s.requests, request(span))
	// xorshift: the mean of what is returned is stride - 1.
	s.random ^= s.random << 13
	s.random ^= s.random >> 7
	s.random ^= s.random << 17
	return int64(s.random % uint64(2*s.stride-1))
}

// request returns a sampled request, in memory of its own.
func request(s keyspace.Span) divide.Request {
	clip := func(key []byte) []byte { return append([]byte(nil), key[:min(len(key), sampleKeyBytes)]...) }
	r := divide.Request{Key: clip(s.Start)}
	switch {
	case len(s.End) == 0:
		r.End = []byte{0xff} // no key begins so but by intent
	case len(s.End) != len(s.Start)+1 || s.End[len(s.Start)] != 0 || string(s.End[:len(s.Start)]) != string(s.Start):
		r.End = clip(s.End)
	}
	return r
}
