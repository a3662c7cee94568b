package load

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Owner is the replica whose load a Range counts.
type Owner interface {
	// LoadState returns the state that the meter needs. The owner's lock is held.
	LoadState() State
	// CanSplit says why the range must not be split at present, nil if it may be.
	CanSplit(ctx context.Context) error
	// Split splits the range of the generation at the key. It returns when the split is
	// applied.
	Split(ctx context.Context, generation keyspace.Generation, key []byte) error
}

// State is what the meter needs to know of a replica.
type State struct {
	// Generation is 0 while the replica is empty.
	Generation keyspace.Generation
	Span       keyspace.Span
	// Leads says that the replica leads its range and serves it.
	Leads bool
	// Draining says that the replica is about to hand its leadership over.
	Draining bool
	// Stopped says that the replica has ended.
	Stopped bool
}

// Figures are the size of a range and, where its replica leads, its load.
type Figures struct {
	// Bytes is about what the range takes of this node's disk, old versions and bytes that
	// are not in tables yet included. It follows within seconds; a range at rest keeps the
	// last figure. After a split the bytes that are not in tables count for neither half.
	Bytes int64
	Rates
	// SplitKey is the key at which the load divides, while the load is above the bound and
	// the range is not split there yet.
	SplitKey []byte
	// Unsplit says in words why a range that exceeds a bound is not split. It is empty
	// where there is nothing to say.
	Unsplit string
}

// Rates are what a replica serves as leader: decaying means over about 10 s, and 0 where it does not lead.
type Rates struct {
	// WritesPerSecond and ReadsPerSecond are requests; a transaction counts once.
	WritesPerSecond float64 `json:"writes_per_second,omitempty"`
	ReadsPerSecond  float64 `json:"reads_per_second,omitempty"`
	// BytesPerSecond is what the writes brought.
	BytesPerSecond float64 `json:"bytes_per_second,omitempty"`
}

// Load is reads and writes a second together.
func (f *Figures) Load() float64 { return f.WritesPerSecond + f.ReadsPerSecond }

// Range counts what one replica does, and keeps what the meter makes of it. The
// owner's lock guards it: the methods are called with it, but for Halve.
type Range struct {
	meter *Meter
	mu    *sync.Mutex
	owner Owner
	id    keyspace.RangeID
	log   *zap.Logger
	counts
	gauge
}

// Range returns the Range of a replica, which mu guards.
func (m *Meter) Range(id keyspace.RangeID, mu *sync.Mutex, owner Owner, log *zap.Logger) Range {
	return Range{meter: m, mu: mu, owner: owner, id: id, log: log, counts: counts{heat: heatSampler{random: uint64(id) | 1}}}
}

// counts are written by every request.
type counts struct {
	counters
	// due counts down the requests until one is looked at: the first one after a rest, which
	// has the range measured again, and while the range is hot those that are sampled.
	due int64
	// metered says that the meter has the range on its list.
	metered bool
	// sample is what is sampled of the requests, nil where the load is not high.
	sample *sampler
	// heat is what is sampled of all requests for the heat map.
	heat heatSampler
}

// counters count from the opening of the replica on.
type counters struct {
	// writes and reads are requests served as leader, bytes what the writes brought,
	// applied the bytes of the entries that were applied here. here are reads of what is
	// applied here, whoever leads.
	writes, reads, bytes, applied, here uint64
}

// gauge is what the meter makes of the counts.
type gauge struct {
	// stored is about what the span takes in tables. The estimate is of the span of this
	// generation, after so many flushes. There is none until estimated is true. flushed is
	// how many of the applied bytes were in tables then.
	stored     int64
	estimated  bool
	generation keyspace.Generation
	flushes    uint64
	flushed    uint64

	// last are the counters when the meter last looked, at that time; 0 is not since a rest.
	last counters
	at   clock.Time
	// quiet counts the ticks since anything was counted.
	quiet int
	// writesRate and readsRate are requests a second, bytesRate bytes a second.
	writesRate, readsRate, bytesRate float64

	// hotAt is since when the load is above the bound, 0 where it is not. sampleAt is when
	// the next sample begins; divides is the key at which the last one divides.
	hotAt, sampleAt clock.Time
	divides         []byte
	// unsplit is why the range is not split although it should be, for people.
	unsplit string
	// splitting says that an automatic split is under way, splitAt when the next one may be.
	splitting bool
	splitAt   clock.Time
	backoff   time.Duration
}

// never is a counts.due that no count comes down to.
const never = math.MaxInt64

// Request is what Look is told of a request.
type Request struct {
	// Span has its keys.
	Span keyspace.Span
	// Writes says that it was counted as a write, of so many Bytes.
	Writes bool
	Bytes  uint64
}

// Wrote counts a write that brings so many bytes. If it returns true, the caller calls
// Look with the request.
func (r *Range) Wrote(bytes uint64) (look bool) {
	r.writes++
	r.bytes += bytes
	r.due--
	r.heat.due--
	return r.due|r.heat.due < 0 // one of them
}

// Read counts a read. If it returns true, the caller calls Look with the request.
func (r *Range) Read() (look bool) {
	r.reads++
	r.due--
	r.heat.due--
	return r.due|r.heat.due < 0
}

// ReadHere counts a read of what is applied here. It is no load of the leader's, by which ranges are
// split. If it returns true, the caller calls Look with the request.
func (r *Range) ReadHere() (look bool) {
	r.here++
	r.heat.due--
	return r.heat.due < 0
}

// Look takes a look at a request that was just counted.
func (r *Range) Look(q Request) {
	if !r.metered {
		r.Measure()
	}
	if r.due < 0 {
		r.due = never
		if r.sample != nil {
			r.due = r.sample.take(q.Span)
		}
	}
	if r.heat.due < 0 {
		r.heat.take(r.meter.cfg.Heat, &q)
	}
}

// Applied counts the bytes of applied entries.
func (r *Range) Applied(bytes uint64) {
	if r.applied += bytes; bytes > 0 && !r.metered {
		r.Measure()
	}
}

// Replaced notes that a snapshot has replaced all data of the range.
func (r *Range) Replaced() {
	r.estimated, r.flushed = false, r.applied
	r.Measure()
}

// Measure puts the range on the meter's list.
func (r *Range) Measure() {
	r.metered = true
	r.meter.list.add(r)
}

// Figures returns what is known of the range. It asks nothing of the store.
func (r *Range) Figures() Figures {
	f := Figures{Bytes: r.bytesLocked(), Unsplit: r.unsplit}
	if r.owner.LoadState().Leads {
		f.WritesPerSecond, f.ReadsPerSecond, f.BytesPerSecond = r.writesRate, r.readsRate, r.bytesRate
		f.SplitKey = r.divides
	}
	return f
}

// bytesLocked is about what the range takes of the disk, or will when it is flushed.
func (r *Range) bytesLocked() int64 { return r.stored + int64(r.applied-r.flushed) }

// rateLocked brings the rates up to now.
func (r *Range) rateLocked(now clock.Time) {
	r.quiet++
	if r.at == 0 || r.counters != r.last {
		r.quiet = 0
	}
	if took := now.Sub(r.at).Seconds(); r.at != 0 && took > 0 {
		weight := 1 - math.Exp(-took/meanTime.Seconds())
		mean := func(rate *float64, now, then uint64) { *rate += (float64(now-then)/took - *rate) * weight }
		mean(&r.writesRate, r.writes, r.last.writes)
		mean(&r.readsRate, r.reads, r.last.reads)
		mean(&r.bytesRate, r.bytes, r.last.bytes)
	}
	r.last, r.at = r.counters, now
}

// restLocked takes the range off the meter's list.
func (r *Range) restLocked() {
	r.writesRate, r.readsRate, r.bytesRate, r.at = 0, 0, 0, 0
	r.metered, r.due, r.heat.due = false, 0, 0
	r.coolLocked()
}

// coolLocked ends what a hot range has beyond others.
func (r *Range) coolLocked() {
	r.hotAt, r.sampleAt, r.divides = 0, 0, nil
	if r.sample != nil {
		r.sample = nil
		r.due = never
	}
}

// estimate asks the store how large the range is. If the store has written tables since
// the last estimate, at least the first applied bytes are in them.
func (r *Range) estimate(applied, flushes uint64) {
	r.mu.Lock()
	s := r.owner.LoadState()
	r.mu.Unlock()
	bytes, err := r.meter.cfg.Store.EstimateSpanBytes(s.Span)
	if err != nil {
		r.log.Warn("cannot estimate the range's size", zap.Error(err))
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case s.Generation != r.owner.LoadState().Generation:
		return
	case r.generation != s.Generation:
		// Bytes that are not in tables may belong to either half. They count for neither until
		// they are, so that a range is not split again for bytes that have left it.
		r.flushed = r.applied
	case r.flushes != flushes:
		r.flushed = max(r.flushed, applied)
	}
	r.stored, r.estimated, r.generation, r.flushes = bytes, true, s.Generation, flushes
}

// estimatedAs says whether the estimate is of the range's generation.
func (r *Range) estimatedAs(g keyspace.Generation) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.estimated && r.generation == g
}

// Halve returns the key that halves the range's bytes, for a range of that generation and
// span. The store knows bytes by its tables, so Halve flushes first where much is not in
// tables. The owner's lock is not held.
func (r *Range) Halve(ctx context.Context, g keyspace.Generation, span keyspace.Span) (mvcc.Split, error) {
	r.mu.Lock()
	applied, memory, stored := r.applied, r.bytesLocked()-r.stored, r.stored
	r.mu.Unlock()
	store := r.meter.cfg.Store
	if memory > stored/4 || !r.estimatedAs(g) {
		if err := store.Flush(ctx); err != nil {
			return mvcc.Split{}, fmt.Errorf("load: halve range %s: %w", r.id, err)
		}
		r.mu.Lock()
		r.flushed = max(r.flushed, applied)
		r.mu.Unlock()
	}
	r.estimate(applied, r.meter.flushes.Load())
	h, err := store.Middle(span)
	if err != nil {
		return h, fmt.Errorf("load: halve range %s: %w", r.id, err)
	}
	return h, nil
}
