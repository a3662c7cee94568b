package load

import (
	"context"

	"github.com/skeindb/skein/shard/load/heat"
)

// saveHeatEvery is how many minutes of the heat map a crash may take: if the store has written no tables for so many of
// them, it is asked to.
const saveHeatEvery = 5

// heatSampler samples a range's requests for the heat map. The owner's lock guards it.
type heatSampler struct {
	// due counts down the requests until one is sampled. It is 0 at rest: the first one is.
	due int64
	// random is the state of a generator: a fixed stride would see one key of a load that goes round.
	random uint64
	taken  []heat.Sample
}

// take takes a request, and says when the next one is due. Without a heat map none is.
func (s *heatSampler) take(of *heat.Recorder, q *Request) {
	s.due = never
	if of == nil {
		return
	}
	if stride, ok := of.Stride(); ok {
		s.taken = append(s.taken, heat.NewSample(q.Span.Start, q.Writes, q.Bytes, stride))
		s.next(stride)
	}
}

// next draws when the next request is due, so that one of as many as the stride is, on average.
func (s *heatSampler) next(stride int64) {
	// xorshift
	s.random ^= s.random << 13
	s.random ^= s.random >> 7
	s.random ^= s.random << 17
	s.due = int64(s.random % uint64(2*stride-1))
}

// servedLocked returns what the range has served since the meter last looked.
func (r *Range) servedLocked(s State) heat.Part {
	p := heat.Part{Range: r.id, Generation: s.Generation, Span: s.Span, Samples: r.heat.taken}
	p.Writes = r.writes - r.last.writes
	p.Reads = r.reads - r.last.reads + r.here - r.last.here
	p.Bytes = r.bytes - r.last.bytes
	r.heat.taken = nil
	// A second's samples are used up, or the stride has become shorter.
	if h := r.meter.cfg.Heat; h != nil && r.metered && r.heat.due > 2*h.StrideNow() {
		r.heat.next(h.StrideNow())
	}
	return p
}

// serve hands on what a range has served since the meter last looked, and does so for the last time.
func (m *Meter) serve(r *Range) {
	r.mu.Lock()
	p := r.servedLocked(r.owner.LoadState())
	r.last = r.counters
	r.mu.Unlock()
	m.cfg.Heat.Add(p)
}

// turnHeat begins a second of the heat map. Its columns are in no log: where the store does not write tables, as on a node that
// serves reads alone, it is asked to.
func (m *Meter) turnHeat(ctx context.Context, flushes uint64) {
	kept := m.cfg.Heat.Turn(m.cfg.Clock.Wall())
	if flushes != m.heatFlushes {
		m.heatFlushes, m.heatUnsaved = flushes, 0
	}
	if !kept {
		return
	}
	if m.heatUnsaved++; m.heatUnsaved >= saveHeatEvery && m.heatSaving.CompareAndSwap(false, true) {
		m.splits.Go(func() {
			defer m.heatSaving.Store(false)
			_ = m.cfg.Store.Flush(ctx) // if it fails, it is asked again a minute later
		})
	}
}

// endHeat keeps what was served until now.
func (m *Meter) endHeat() {
	for _, r := range m.list.take() { // in use since the last tick
		m.active[r] = struct{}{}
	}
	for r := range m.active {
		m.serve(r)
	}
	m.cfg.Heat.Flush()
}
