package driver

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// A seat says on which node the sequencer had better sit. A write asks the sequencer from the node
// that leads its range. On the same node that is a function call, elsewhere a round trip.
//
// Windows follow one another. A node wins a window if it has asked for most of its revisions. Who
// wins several in a row gets the seat. Two thirds are needed, so that two nodes with about as much
// to do do not take it from each other. Each leadership begins anew, so the seat is taken
// once in that time at most.
type seat struct {
	// Each node's count at the beginning of the window. Nil before the first.
	counts map[keyspace.NodeID]uint64
	began  clock.Time
	// winner has won the last row windows.
	winner keyspace.NodeID
	row    int
	// After an attempt that has failed the next one waits.
	nextAt clock.Time
	pause  time.Duration
}

const (
	seatWindow = 15 * time.Second
	// seatRow is how many windows in a row must be won.
	seatRow = 3
	// seatLeast is how many revisions of a window count: with fewer nothing is gained.
	seatLeast = 150
	// The pause after a failed attempt doubles from first to last.
	seatPauseFirst = time.Minute
	seatPauseLast  = 16 * time.Minute
)

// look returns who should have the seat, 0 if nobody has earned it. asked counts the revisions that each
// node has ever got in this leadership; nil
// is unknown.
func (s *seat) look(asked map[keyspace.NodeID]uint64, now clock.Time) keyspace.NodeID {
	if asked == nil || s.counts != nil && now.Sub(s.began) < seatWindow {
		return 0
	}
	if s.counts != nil {
		s.close(asked)
	}
	s.counts, s.began = asked, now
	if s.row < seatRow || now < s.nextAt {
		return 0
	}
	return s.winner
}

// close says who has won the window that ends.
func (s *seat) close(asked map[keyspace.NodeID]uint64) {
	var sum, most uint64
	var first keyspace.NodeID
	for id, n := range asked {
		n -= s.counts[id]
		sum += n
		if n > most {
			first, most = id, n
		}
	}
	if sum < seatLeast || 3*most < 2*sum {
		first = 0
	}
	if first != s.winner {
		s.winner, s.row = first, 0
	}
	if first != 0 {
		s.row++
	}
}

// failed has the next attempt wait.
func (s *seat) failed(now clock.Time) {
	s.pause = min(max(2*s.pause, seatPauseFirst), seatPauseLast)
	s.nextAt = now.Add(s.pause)
}

// followLoad gives the leadership of the placement group to the node that asks for most revisions, if that
// has a voter and can take it. It waits while operations are under way: the next leader would have to
// continue them.
func (d *decider) followLoad(ctx context.Context, own *keyspace.Descriptor, busy bool) {
	if d.s.o.Asked == nil {
		return
	}
	now := d.s.o.Clock.Now()
	to := d.seat.look(d.s.o.Asked(d.term), now)
	if to == 0 || to == d.s.o.Self || busy {
		return
	}
	n, known := d.nodes[to]
	m, has := own.ReplicaOn(to)
	if !has || m.Role != keyspace.RoleVoter || !known || !n.Takes() {
		return
	}
	ctx, cancel := clock.WithTimeout(ctx, d.s.o.Clock, OperationStep)
	defer cancel()
	err := d.s.o.Group.CanTransfer(ctx, m.ID)
	if err == nil {
		err = d.s.o.Group.TransferLeader(ctx, to)
	}
	if err != nil {
		d.seat.failed(now)
		d.s.o.Logger.Info("a node asks for most revisions, and cannot lead placement now", zap.Stringer("peer", to), zap.Error(err))
		return
	}
	d.s.o.Logger.Info("a node asks for most revisions, and leads placement from now on: writes there need not ask another node", zap.Stringer("peer", to))
}
