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
// than the seat takes to move. So if one node asks for most revisions, the sequencer goes there
// first, and the ranges need not come here.
type gathering struct {
	on bool
	// used is the processor's time at the beginning of the window, and began that beginning, 0
	// before the first.
	used  time.Duration
	began clock.Time
	// row counts the windows in a row that speak for a change.
	row int
	// restedAt is when it may begin again, and rest how long it waited for that.
	restedAt clock.Time
	rest     time.Duration
}

const (
	gatherWindow = seatWindow
	// gatherBelow and gatherAbove are parts of the processors. With puts a node that leads everything has up to 1.5 times the work of one
	// that shares the leads, so it does not have too much at once. With gets it may have three times as much, and is spread again.
	gatherBelow, gatherAbove = 0.4, 0.7
	// gatherRow and spreadRow are how many windows in a row change it.
	gatherRow, spreadRow = seatRow + 2, 2
	// Each time that the leads are spread it rests twice as long, from first to last. Some loads are little
	// while they are spread, and much where they are gathered.
	gatherRestFirst = 10 * time.Minute
	gatherRestLast  = 16 * time.Hour
)

// due says whether a window is over, or none has begun.
func (g *gathering) due(now clock.Time) bool { return g.began == 0 || now.Sub(g.began) >= gatherWindow }

// look closes a window that is over, and begins the next one. The process has used so much time of its processors since it
// began.
func (g *gathering) look(used time.Duration, processors float64, now clock.Time) {
	if g.began != 0 {
		g.close(float64(used-g.used)/(float64(now.Sub(g.began))*processors), now)
	}
	g.used, g.began = used, now
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
		g.rest = min(max(2*g.rest, gatherRestFirst), gatherRestLast)
		g.restedAt = now.Add(g.rest)
	}
}

// gather tells the model whether leads go to this node.
func (d *decider) gather(now clock.Time) {
	if d.s.o.Processors == nil || !d.gathering.due(now) {
		return
	}
	used, processors := d.s.o.Processors()
	was := d.gathering.on
	d.gathering.look(used, processors, now)
	if d.gathering.on == was {
		return
	}
	to := keyspace.NodeID(0)
	if d.gathering.on {
		to = d.s.o.Self
	}
	d.c.Gather(to)
	d.s.o.Logger.Info("whether the leads of ranges in use go to the sequencer's node has changed: they do while it has little to do",
		zap.Bool("gathers", d.gathering.on))
}
