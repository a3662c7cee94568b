package raftgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// A snapshot goes over one stream of the bus. Its first message says what it is;
// the receiver lets it wait until it is its turn; then come the tables, each a run of
// chunks closed by its size and checksum, and the end. The receiver answers when it has
// installed everything durably, and says that it is at it while that lasts.
// A copy that fails begins anew, from a newer state and perhaps with another sender:
// see docs/decisions/0018-copies-begin-anew.md.
const (
	snapshotVersion = 5

	snapChunk = 1
	snapTable = 2 // end of a table
	snapEnd   = 3
	snapTurn  = 4 // from the receiver: the tables may come
	snapWait  = 5 // from the receiver, before its turn and before the end: the sender is to wait
	snapDone  = 6 // from the receiver: all is installed and durable

	// chunkBytes is how much of a table a message has: a ms of what a node sends by
	// default, and what fills a write of the bus.
	chunkBytes = 63 << 10
	// paceStep is how long those sleep who are ahead of a limiter, and all wake together: a
	// ms for each message costs more of the processors than the messages do.
	paceStep = 10 * time.Millisecond
	// catchUp is how much of a pause a limiter makes up for: no more than a step, or requests
	// stand behind all that a node was not asked for in a while.
	catchUp = 10 * time.Millisecond
	// fetchesAtOnce is how many snapshots have their tables come at a time; the others wait,
	// first come, first served. All at once they would share the rate, come to their end
	// together and then, while all of them are installed, leave it unused: the machine had
	// copies in waves, and requests stood behind each.
	fetchesAtOnce = 4
	// waitTold is how often a sender hears that it is to wait: for its turn, or for what a
	// receiver does with what has come. On a node that is full that takes minutes, and a copy
	// that were given up then would be no faster the next time.
	waitTold = stallTimeout / 4
	// waitsTold is how often it may hear that on end, ten minutes long: it has one of its node's
	// places meanwhile, and keeps the log.
	waitsTold = 40
	// snapshotTablesMax and the chunk bound what a sender can make a receiver keep.
	snapshotTablesMax = 1 << 16
	// pinTTL is how long a snapshot that makes no progress keeps the log.
	pinTTL = time.Minute
	// stallTimeout is after how much time without progress either side gives a snapshot
	// up: the places for snapshots are few.
	stallTimeout = time.Minute
	// installRetry is how long an install waits after an error of the engine (a full
	// disk) before it tries again.
	installRetry = time.Second
)

var (
	errSnapshotRefused = errors.New("raftgroup: snapshot refused")
	errSnapshotWaits   = errors.New("raftgroup: no place for a snapshot yet")
	errSnapshotFormat  = errors.New("raftgroup: malformed snapshot stream")
	errSnapshotStalled = errors.New("raftgroup: no progress of a snapshot")
)

// snapshotHeader is the first message of a snapshot's stream.
type snapshotHeader struct {
	group    keyspace.GroupID
	from, to keyspace.ReplicaID
	term     uint64
	applied  engine.Applied
}

func encodeSnapshotHeader(h *snapshotHeader) []byte {
	dst := []byte{snapshotVersion}
	dst = binary.AppendUvarint(dst, uint64(h.group))
	dst = binary.AppendUvarint(dst, uint64(h.from))
	dst = binary.AppendUvarint(dst, uint64(h.to))
	dst = binary.AppendUvarint(dst, h.term)
	return engine.AppendApplied(dst, &h.applied)
}

func decodeSnapshotHeader(b []byte) (*snapshotHeader, error) {
	r := wire.NewReader(b)
	if err := keyspace.CheckVersion("snapshot", uint64(r.Byte()), snapshotVersion); err != nil {
		return nil, fmt.Errorf("%w: %w", errSnapshotFormat, err)
	}
	h := &snapshotHeader{group: keyspace.GroupID(r.Uvarint())}
	h.from, h.to, h.term = keyspace.ReplicaID(r.Uvarint()), keyspace.ReplicaID(r.Uvarint()), r.Uvarint()
	if !r.OK() || h.group == 0 || h.from == 0 || h.to == 0 || h.from == h.to || h.term == 0 {
		return nil, fmt.Errorf("%w: header of %d bytes", errSnapshotFormat, len(b))
	}
	var err error
	if h.applied, err = engine.DecodeApplied(r.Rest()); err != nil {
		return nil, fmt.Errorf("%w: %w", errSnapshotFormat, err)
	}
	if h.applied.Index == 0 || h.applied.Term == 0 || h.applied.Term > h.term {
		return nil, fmt.Errorf("%w: applied (%d, %d) in term %d", errSnapshotFormat, h.applied.Index, h.applied.Term, h.term)
	}
	return h, nil
}

// snapshots bounds and owns the snapshots that are sent and received.
type snapshots struct {
	h *Host
	// limit is for what is sent, limitIn for what is received.
	limit, limitIn limiter
	install        chan *install
	wg             sync.WaitGroup // the install loops

	mu struct {
		sync.Mutex
		sends    map[*sending]struct{}
		receives map[*receive]struct{}
		number   uint64 // of the next staged file
		// fetches are those whose tables come or that wait for it, in the order in which they
		// came. Those that have their turn, the first fetchesAtOnce, are closed.
		fetches []chan struct{}
		ended   bool // nothing is installed any more
	}
}

func (s *snapshots) init(h *Host) {
	s.h = h
	// Not in step with other nodes, whose senders and receivers would all wake at once.
	now := h.cfg.Clock.Now()
	s.limit = limiter{clock: h.cfg.Clock, perSecond: h.cfg.SnapshotBytesPerSecond, since: now}
	s.mu.sends = make(map[*sending]struct{})
	s.limitIn = limiter{clock: h.cfg.Clock, perSecond: h.cfg.SnapshotBytesPerSecond, since: now}
	s.mu.receives = make(map[*receive]struct{})
	// One place for each receive, so that an applier never waits.
	s.install = make(chan *install, h.cfg.SnapshotReceives)
}

func (s *snapshots) start() {
	for range s.h.cfg.SnapshotReceives {
		s.wg.Go(s.installLoop)
	}
}

// addSend takes one of the places for sends. A node gets one only while more are free than
// it has: at most half of all, and half of what the others leave. So however many of the
// places nodes hold that take nothing in, each of them leaves as many as it has, and it
// takes about log2 of the places in such nodes until none is left for the others.
func (s *snapshots) addSend(x *sending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	free := s.h.cfg.SnapshotSends - len(s.mu.sends)
	if free <= 0 || s.h.stopping.Load() {
		return false
	}
	same := 0
	for o := range s.mu.sends {
		if o.node == x.node {
			same++
		}
	}
	if same >= free {
		return false
	}
	s.mu.sends[x] = struct{}{}
	return true
}

func (s *snapshots) addReceive(r *receive) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.receives) >= s.h.cfg.SnapshotReceives || s.h.stopping.Load() {
		return false
	}
	s.mu.receives[r] = struct{}{}
	return true
}

// queue gets in line for having tables come; the channel is closed when it is the turn.
// leave ends both the turn and the wait for it.
func (s *snapshots) queue() (turn chan struct{}) {
	turn = make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.fetches = append(s.mu.fetches, turn)
	if len(s.mu.fetches) <= fetchesAtOnce {
		close(turn)
	}
	return turn
}

func (s *snapshots) leave(turn chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.mu.fetches, turn)
	s.mu.fetches = slices.Delete(s.mu.fetches, i, i+1)
	if i < fetchesAtOnce && len(s.mu.fetches) >= fetchesAtOnce {
		close(s.mu.fetches[fetchesAtOnce-1])
	}
}

func (s *snapshots) done(x *sending, r *receive) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.sends, x)
	delete(s.mu.receives, r)
}

// mayAdd says whether a place for sends is free.
func (s *snapshots) mayAdd() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.sends) < s.h.cfg.SnapshotSends
}

// cancel ends the group's sends: it leads no more.
func (s *snapshots) cancel(g *Group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.mu.sends {
		if x.g == g {
			x.ctx.cancel(nil)
		}
	}
}

// drop ends everything of a group that is closed.
func (s *snapshots) drop(g *Group) {
	s.cancel(g)
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.mu.receives {
		if r.g == g {
			r.cancel()
		}
	}
}

func (s *snapshots) nextFile() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.number++
	return s.mu.number
}

// watch is a context that ends where progress has not been reported for the stall
// timeout.
type watch struct {
	context.Context
	cancel context.CancelCauseFunc
	timer  clock.Timer
}

func newWatch(parent context.Context, c clock.Clock) *watch {
	w := &watch{}
	w.Context, w.cancel = context.WithCancelCause(parent)
	w.timer = c.AfterFunc(stallTimeout, func() { w.cancel(errSnapshotStalled) })
	return w
}

func (w *watch) progress() { w.timer.Reset(stallTimeout) }

// end ends the context if it has not ended, and says what an error that follows from
// its end comes from.
func (w *watch) end(err error) error {
	w.timer.Stop()
	if err != nil && errors.Is(context.Cause(w), errSnapshotStalled) {
		err = fmt.Errorf("%w for %v: %w", errSnapshotStalled, stallTimeout, err)
	}
	w.cancel(nil)
	return err
}

// limiter spreads bytes over time for all who use it: within each paceStep comes what is due
// in it. The zero limiter lets all through.
type limiter struct {
	clock     clock.Clock
	perSecond int64
	since     clock.Time // from when on steps are counted
	mu        sync.Mutex
	free      clock.Time // when what was let through is paid for
}

// wait lets n bytes through when their time has come.
func (l *limiter) wait(ctx context.Context, n int) error {
	if l.perSecond == 0 {
		return nil
	}
	l.mu.Lock()
	now := l.clock.Now()
	l.free = max(l.free, now.Add(-catchUp))
	l.free = l.free.Add(time.Duration(int64(n) * int64(time.Second) / l.perSecond))
	free := l.free
	l.mu.Unlock()
	if free <= now {
		return ctx.Err()
	}
	if over := free.Sub(l.since) % paceStep; over > 0 {
		free = free.Add(paceStep - over)
	}
	return clock.Sleep(ctx, l.clock, free.Sub(now))
}
