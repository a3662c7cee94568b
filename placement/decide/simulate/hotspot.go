package simulate

import (
	"maps"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/keyspace/divide"
)

// HotSpot is load on neighbouring ranges that moves along the keyspace.
type HotSpot struct {
	// Width is the number of ranges that are hot at a time, Load that of each.
	Width int
	Load  int64
	// Every is how long it stays where it is before it moves on by its width, For how
	// long it goes on; then the ranges have the load that they had.
	Every, For time.Duration
}

// MoveHotSpot lets the hot spot move over the cluster. It returns the most load that a
// node has, in parts of the mean, at the end of each stay.
func (w *World) MoveHotSpot(h HotSpot) []float64 {
	var most []float64
	at := 0
	for end := w.now.Add(h.For); w.now < end; {
		hot := map[keyspace.RangeID]int64{}
		for i := range h.Width {
			if g := w.ranges[(at+i)%len(w.ranges)]; g != nil {
				hot[g.d.Range] = g.load
				w.SetLoad(g.d.Range, h.Load, divide.Divides)
			}
		}
		known := len(w.ranges)
		w.Run(h.Every)
		most = append(most, w.Balance().LoadMax)
		w.cool(hot, known)
		at += h.Width
	}
	return most
}

// cool gives the ranges back the load that they had, and its part to what they were
// split into.
func (w *World) cool(hot map[keyspace.RangeID]int64, known int) {
	for _, id := range slices.Sorted(maps.Keys(hot)) {
		if g := w.ranges[id-1]; g != nil {
			w.SetLoad(id, hot[id], divide.Divides)
		}
	}
	for _, g := range w.ranges[known:] {
		if g == nil {
			continue
		}
		if load, ok := hot[g.parent]; ok {
			hot[g.d.Range] = load / 2
			w.SetLoad(g.d.Range, load/2, divide.Divides)
		}
	}
}
