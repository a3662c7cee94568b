package simulate

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
)

// Leaders split their ranges by the rule of package shard/load, and these are its bounds.
// The settings of the decisions say what is too large and what is too much load.
const (
	splitAfter     = 30 * time.Second
	splitRest      = 10 * time.Second
	splitRetry     = 5 * time.Second
	splitRetryMost = time.Hour
	splitsAtOnce   = 2 // of a node, in a step
	sampleTime     = 10 * time.Second
	sampleRest     = 30 * time.Second
	coolPart       = 0.8
)

// hotRange is what the leader of a range keeps to split it. It ends with the leadership.
type hotRange struct {
	// hotAt is since when the load is above the bound, 0 where it is not. sampleAt is when
	// the sample begins, and divides the key at which the last one divides.
	hotAt, sampleAt clock.Time
	divides         []byte
	splitAt         clock.Time // when it may be split next
	backoff         time.Duration
}

// restless says whether the leader of the range keeps looking at it.
func (w *World) restless(g *span) bool {
	return g.hot.hotAt != 0 || g.reported >= w.settings.SplitLoad || g.bytes > w.settings.RangeMaxBytes
}

// measure takes the leader's look at the load of its range.
func (w *World) measure(g *span) {
	h, bound, load := &g.hot, float64(w.settings.SplitLoad), float64(g.reported)
	switch {
	case load < bound*coolPart:
		h.cool()
	case load >= bound && h.hotAt == 0:
		h.hotAt, h.sampleAt = w.now, w.now
	case h.hotAt != 0 && w.now.Sub(h.sampleAt) >= sampleTime:
		h.sampleAt = w.now
		key, shape := w.sample(g).Divide()
		if shape == divide.Divides && g.d.Span.Contains(key) && string(key) != string(g.d.Span.Start) {
			h.divides = key
			return
		}
		h.divides, h.sampleAt = nil, w.now.Add(sampleRest)
	}
}

func (h *hotRange) cool() { h.hotAt, h.sampleAt, h.divides = 0, 0, nil }

// splitDue has leaders split their ranges that are too large, or whose load is too much and
// divides.
func (w *World) splitDue() {
	begun := map[keyspace.NodeID]int{}
	for _, g := range w.warm {
		h := &g.hot
		large := g.bytes > w.settings.RangeMaxBytes
		if w.ranges[g.d.Range-1] != g || w.now < h.splitAt || begun[g.leader] >= splitsAtOnce ||
			!large && (h.divides == nil || w.now.Sub(h.hotAt) < splitAfter) {
			continue
		}
		if !w.canSplit(g) {
			h.backoff = min(max(2*h.backoff, splitRetry), splitRetryMost)
			h.splitAt = w.now.Add(h.backoff)
			continue
		}
		begun[g.leader]++
		at, cause := g.from+(g.to-g.from)/2, "size"
		if large {
			w.Report.SplitsBySize++
		} else {
			at, cause = binary.BigEndian.Uint64(h.divides), "load"
			w.Report.SplitsByLoad++
		}
		w.split(g, at, cause)
	}
}

// canSplit says whether the range has a leader that may split it: all replicas are voters on
// nodes that live, and no operation is under way.
func (w *World) canSplit(g *span) bool {
	return g.leader != 0 && g.task == nil && !slices.ContainsFunc(g.d.Replicas, func(r keyspace.Replica) bool {
		return r.Role != keyspace.RoleVoter || !w.node(r.Node).up
	})
}

// split divides the range at a position.
func (w *World) split(g *span, at uint64, cause string) {
	w.trace(cause, "split range %s at %q", g.d.Range, spanOf(at, 0).Start)
	right := &span{
		parent: g.d.Range, from: at, to: g.to, leader: g.leader, bytes: g.bytes / 2, load: g.load / 2, reported: g.reported / 2,
		born: w.now, shape: g.shape,
	}
	id := keyspace.RangeID(len(w.ranges) + 1)
	g.bytes, g.load, g.reported, g.to, g.born = g.bytes-right.bytes, g.load-right.load, g.reported-right.reported, at, w.now
	g.hot = hotRange{splitAt: w.now.Add(splitRest)}
	g.d.Generation++
	g.d.Span = spanOf(g.from, g.to)
	right.d = keyspace.Descriptor{Range: id, Generation: g.d.Generation, Span: spanOf(right.from, right.to), ConfIndex: 1}
	for _, r := range g.d.Replicas {
		right.d.Replicas = append(right.d.Replicas, w.replica(w.node(r.Node), r.Role))
	}
	w.ranges = append(w.ranges, right)
	w.living++
	w.Report.lastEnd = w.now
	w.put(g)
	w.put(right)
	w.watch(right)
}

// sample is what the leader of a hot range has sampled.
func (w *World) sample(g *span) *divide.Sample {
	const requests = 64
	width := g.to - g.from // wraps around rightly where to is the end
	s := &divide.Sample{}
	for i := range uint64(requests) {
		at := g.from + w.random.Uint64N(max(width, 1))
		var end []byte
		switch g.shape {
		case divide.HotKey:
			at = g.from + width/3
		case divide.Tail:
			at = g.from + width/requests*i
		case divide.Spans:
			at, end = g.from, spanOf(0, g.to).End
		default:
		}
		s.Requests = append(s.Requests, divide.Request{Key: binary.BigEndian.AppendUint64(nil, at), End: end})
	}
	return s
}
