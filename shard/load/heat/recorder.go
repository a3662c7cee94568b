package heat

import (
	"math/bits"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/keyspace"
)

const (
	// samplesPerSecond bounds the samples that a node takes between two turns. The stride aims at
	// half of it: load may rise within a second.
	samplesPerSecond = 2000
	// maxSampledBytes bounds the samples of a minute. Above it every second one goes.
	maxSampledBytes = 2 << 20
	// sampleBytes is what a sample takes beside its key, in a slice that has grown.
	sampleBytes = 80
	// maxPending bounds the spans of a minute. Where there are more, the minute is stored in parts.
	maxPending = 1 << 16
	// maxWeight bounds for how many requests a sample stands, maxWeightBytes the bytes that it counts with: the
	// weights of all samples are added up.
	maxWeight, maxWeightBytes = 1 << 24, 1 << 24
)

// Sample is one of many requests.
type Sample struct {
	key string
	// weight is for how many requests it stands. bytes is what a write brought.
	weight, bytes uint64
	wrote         bool
}

// NewSample returns a sample that stands for so many requests. It keeps a copy of the key's beginning.
func NewSample(key []byte, wrote bool, bytes uint64, stride int64) Sample {
	return Sample{key: clip(key), weight: uint64(min(stride, maxWeight)), bytes: min(bytes, maxWeightBytes), wrote: wrote}
}

// Part is what a range has served since the last Part of it.
type Part struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	// Span is that of the generation.
	Span keyspace.Span
	Counts
	Samples []Sample
}

// Recorder makes columns of what the ranges of a node serve. Its methods may be called from many goroutines.
type Recorder struct {
	keep func(at int64, c Column)

	// stride is for how many requests a sample stands, left how many samples may be taken until the next turn.
	stride, left atomic.Int64

	mu sync.Mutex
	// Guarded by mu. at is the beginning of the minute that is pending, in unix seconds. sampled are the bytes of
	// its samples, requests those since the last turn.
	at       int64
	pending  map[spanID]*pending
	sampled  int
	requests uint64
}

// spanID names the span of a range: another generation has another one.
type spanID struct {
	id         keyspace.RangeID
	generation keyspace.Generation
}

// pending is what a span has had within the minute.
type pending struct {
	start, end string
	Counts
	samples []Sample
}

// NewRecorder returns a Recorder that gives each minute with any load to keep, with its beginning in unix
// seconds. It may give a minute in several parts.
func NewRecorder(keep func(at int64, c Column)) *Recorder {
	r := &Recorder{keep: keep, pending: map[spanID]*pending{}}
	r.stride.Store(1)
	r.left.Store(samplesPerSecond)
	return r
}

// Stride returns for how many requests the next sample stands. ok is false if none may be taken before the next Turn.
func (r *Recorder) Stride() (stride int64, ok bool) {
	if r.left.Add(-1) < 0 {
		return 0, false
	}
	return r.stride.Load(), true
}

// StrideNow returns for how many requests a sample stands now.
func (r *Recorder) StrideNow() int64 { return r.stride.Load() }

// Turn begins a second. If it is another minute than before, the pending one is kept; kept says so. A Recorder that is nil
// keeps nothing.
func (r *Recorder) Turn(wall time.Time) (kept bool) {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stride.Store(int64(max(1, r.requests/(samplesPerSecond/2))))
	r.left.Store(samplesPerSecond)
	r.requests = 0
	now := max(0, wall.Unix())
	if at := now - now%minute; at != r.at {
		kept = r.flushLocked()
		r.at = at
	}
	return kept
}

// Add takes what a range has served since the last Turn. The Part's samples are the Recorder's from then on.
func (r *Recorder) Add(p Part) {
	if r == nil || p.Counts == (Counts{}) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests += p.Writes + p.Reads
	id := spanID{p.Range, p.Generation}
	of := r.pending[id]
	if of == nil {
		if len(r.pending) == maxPending {
			r.flushLocked()
		}
		of = newPending(p.Span)
		r.pending[id] = of
	}
	of.add(p.Counts)
	for _, s := range p.Samples {
		if s.key >= of.start && (of.end == "" || s.key < of.end) {
			of.samples = append(of.samples, s)
			r.sampled += sampleBytes + len(s.key)
		}
	}
	for r.sampled > maxSampledBytes {
		r.thinLocked()
	}
}

func newPending(s keyspace.Span) *pending {
	p := &pending{start: clip(s.Start), end: clip(s.End)}
	if p.end != "" && p.end <= p.start { // they differ behind what is kept of them
		p.end = after(p.start)
	}
	return p
}

// thinLocked drops every second sample of the minute. The others stand for twice as many requests.
func (r *Recorder) thinLocked() {
	drop := false
	r.sampled = 0
	for _, p := range r.pending {
		p.samples = slices.DeleteFunc(p.samples, func(Sample) bool {
			drop = !drop
			return drop
		})
		p.samples = slices.Clone(p.samples) // in less memory
		for i := range p.samples {
			p.samples[i].weight = min(2*p.samples[i].weight, maxWeight)
			r.sampled += sampleBytes + len(p.samples[i].key)
		}
	}
}

// Flush keeps what is pending, so that a query sees it.
func (r *Recorder) Flush() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.flushLocked()
}

func (r *Recorder) flushLocked() (kept bool) {
	if len(r.pending) == 0 {
		return false
	}
	bands := make([]band, 0, len(r.pending))
	for _, p := range r.pending {
		bands = append(bands, p.band())
	}
	clear(r.pending)
	r.sampled = 0
	c, _ := pack(bands)
	r.keep(r.at, c)
	return true
}

// band returns the cells of the span: one for each sampled key, and for what lies between two.
func (p *pending) band() band {
	slices.SortStableFunc(p.samples, func(a, b Sample) int { return strings.Compare(a.key, b.key) })
	b := band{starts: []string{p.start}, width: 1, counts: []Counts{{}}}
	cell := func(start string) *Counts {
		if b.starts[len(b.starts)-1] != start {
			b.starts, b.counts = append(b.starts, start), append(b.counts, Counts{})
		}
		return &b.counts[len(b.counts)-1]
	}
	if len(p.samples) == 0 {
		b.counts[0] = p.Counts
	}
	shape := p.shape()
	for i, s := range p.samples {
		cell(s.key).add(shape.next(&s))
		if next := after(s.key); next != "" && (p.end == "" || next < p.end) && (i+1 == len(p.samples) || next < p.samples[i+1].key) {
			cell(next)
		}
	}
	if p.end != "" {
		cell(p.end)
	}
	return b
}

// shape divides counts among samples. What cannot be divided evenly goes to later ones.
type shape struct {
	// whole is what is divided: writes, reads and bytes. all is the weight of all samples for each of these, and seen the
	// weight of those so far.
	whole, all, seen [3]uint64
	// any says that no sample is of that kind: all of them count alike.
	any [3]bool
}

func (p *pending) shape() *shape {
	s := &shape{whole: [3]uint64{p.Writes, p.Reads, p.Bytes}}
	for i := range p.samples {
		for kind, w := range s.weights(&p.samples[i]) {
			s.all[kind] += w
		}
	}
	for kind := range s.all {
		if s.all[kind] > 0 {
			continue
		}
		s.any[kind] = true
		for i := range p.samples {
			s.all[kind] += p.samples[i].weight
		}
	}
	return s
}

// weights is what a sample weighs for writes, reads and bytes.
func (s *shape) weights(of *Sample) (w [3]uint64) {
	if of.wrote {
		w[0], w[2] = of.weight, of.weight*of.bytes
	} else {
		w[1] = of.weight
	}
	for kind := range w {
		if s.any[kind] {
			w[kind] = of.weight
		}
	}
	return w
}

// next returns what falls to the next sample.
func (s *shape) next(of *Sample) Counts {
	var part [3]uint64
	for kind, w := range s.weights(of) {
		before := share(s.whole[kind], s.seen[kind], s.all[kind])
		s.seen[kind] += w
		part[kind] = share(s.whole[kind], s.seen[kind], s.all[kind]) - before
	}
	return Counts{Writes: part[0], Reads: part[1], Bytes: part[2]}
}

// share is v × part / all, rounded down.
func share(v, part, all uint64) uint64 {
	hi, lo := bits.Mul64(v, part)
	q, _ := bits.Div64(hi, lo, all) // hi < all, since part is at most all
	return q
}
