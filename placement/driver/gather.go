package driver

import (
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// A gathering says whether this node, which has the sequencer, has so little to do that the leads of
// ranges in use had better be here too. Then a write asks the sequencer by a function call. On
// a node with much to do the other nodes' processors are worth more than that.
//
// Windows follow one another, and each shows how much of its processors the process has used. A
// window that speaks for a change counts with those right before it. To begin takes more of them
// than the seat takes to move: if one node asks for most revisions, the sequencer goes there,
// instead of the range coming here at the same moment.
type gathering struct {
	on bool
	// used is the processor's time at the beginning of the window, and began that beginning, 0
	// before the first.
	used  time.Duration
	began clock.Time
	// row counts the windows in a row that speak for a change.
	row int
	// restedAt is when it may begin again.
	restedAt clock.Time
}

const (
	gatherWindow = seatWindow
	// gatherBelow and gatherAbove are parts of the processors. A node that leads everything has
	// about twice as much to do as one of three that share the leads. So what is spread is not
	// gathered again for the same load.
	gatherBelow, gatherAbove = 0.3, 0.7
	// gatherRow and spreadRow are how many windows in a row change it.
	gatherRow, spreadRow = seatRow + 2, 2
	// gatherRest is how long it does not begin again.
	gatherRest = 10 * time.Minute
)

// look says whether leads had better be here, if the process has used so much time of its processors since it
// began.
func (g *gathering) look(used time.Duration, processors int, now clock.Time) bool {
	window := now.Sub(g.began)
	if g.began != 0 && window < gatherWindow {
		return g.on
	}
	if g.began != 0 {
		part := float64(used-g.used) / (float64(window) * float64(max(processors, 1)))
		g.close(part, now)
	}
	g.used, g.began = used, now
	return g.on
}

// close takes in how much of the processors a window has used.
func (g *gathering) close(part float64, now clock.Time) {
	most := gatherRow
	speaks := part < gatherBelow && now >= g.restedAt
	if g.on {
		most, speaks = spreadRow, part > gatherAbove
	}
	if g.row++; !speaks {
		g.row = 0
	}
	if g.row < most {
		return
	}
	if g.row, g.on = 0, !g.on; !g.on {
		g.restedAt = now.Add(gatherRest)
	}
}

// gather tells the model whether leads go to this node.
func (d *decider) gather(now clock.Time) {
	if d.s.o.Processors == nil {
		return
	}
	used, processors := d.s.o.Processors()
	was := d.gathering.on
	on, to := d.gathering.look(used, processors, now), keyspace.NodeID(0)
	if on {
		to = d.s.o.Self
	}
	d.c.Gather(to)
	if on != was {
		d.s.o.Logger.Info("whether the leads of ranges in use go to the sequencer's node has changed: they do while it has little to do",
			zap.Bool("gathers", on))
	}
}
