package raftgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// A snapshot goes over one stream of the bus. Its first message says what it is. The
// receiver makes the sender wait for its turn. Then come the tables, each a sequence of
// chunks closed by its size and checksum, and an end message. The receiver answers when
// it has installed everything durably, and sends keepalives until then. A snapshot that
// fails starts over, from a newer state and perhaps another sender: see
// docs/decisions/0018-copies-begin-anew.md.
const (
	snapshotVersion = 5

	snapChunk     = 1
	snapTable     = 2 // end of a table
	snapEnd       = 3
	snapTurn      = 4 // from the receiver: it is this snapshot's turn
	snapKeepalive = 5 // from the receiver, before snapTurn and before snapDone: still working
	snapDone      = 6 // from the receiver: everything is installed and durable

	// chunkBytes is how much of a table one message carries: 1 ms of a node's default
	// rate, and enough to fill a write of the bus.
	chunkBytes = 63 << 10
	// limiterStep is how long waiters of a limiter sleep, all until the same moment:
	// waking 1 ms for each message costs more CPU than the messages do.
	limiterStep = 10 * time.Millisecond
	// limiterBurst is how much of a pause a limiter makes up for. More than one step
	// would let requests queue behind everything that the node did not send in the pause.
	limiterBurst = 10 * time.Millisecond
	// fetchesAtOnce is how many snapshots receive tables at a time; the others wait in
	// order of arrival. All at once they would share the rate, finish together, and leave
	// the rate unused while all of them are installed. The load would come in waves, with
	// requests queued behind each.
	fetchesAtOnce = 4
	// keepaliveInterval is how often the receiver sends a keepalive: while the sender
	// waits for its turn, and while the receiver checks and installs. On a full node that
	// takes minutes, and a new attempt would be no faster.
	keepaliveInterval = stallTimeout / 4
	// keepalivesMax is how many keepalives in a row the sender accepts, ten minutes'
	// worth: meanwhile it holds one of its node's slots and pins the log.
	keepalivesMax = 40
	// snapshotTablesMax and the chunk size bound what a sender can make a receiver keep.
	snapshotTablesMax = 1 << 16
	// pinTTL is how long a snapshot without progress pins the log.
	pinTTL = time.Minute
	// stallTimeout is the time without progress after which either side gives a snapshot
	// up, because slots are few.
	stallTimeout = time.Minute
	// installRetry is the pause before an install is retried after an engine error, such
	// as a full disk.
	installRetry = time.Second
)

var (
	errSnapshotRefused = errors.New("raftgroup: snapshot refused")
	errNoSnapshotSlot  = errors.New("raftgroup: no free slot for a snapshot")
	errSnapshotFormat  = errors.New("raftgroup: malformed snapshot stream")
	errSnapshotStalled = errors.New("raftgroup: snapshot made no progress")
	errSnapshotYields  = errors.New("raftgroup: the log is too long to be kept for a snapshot that waits for its turn")
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

// snapshots bounds and owns the snapshots being sent and received.
type snapshots struct {
	h *Host
	// limit is for snapshots that are sent, limitIn for those received.
	limit, limitIn limiter
	install        chan *install
	wg             sync.WaitGroup // the install loops

	mu struct {
		sync.Mutex
		sends    map[*outgoingSnapshot]struct{}
		receives map[*incomingSnapshot]struct{}
		number   uint64 // of the next staged file
		// fetches are the snapshots that receive tables or wait to, in order of arrival.
		// The channels of the first fetchesAtOnce, whose turn it is, are closed.
		fetches []chan struct{}
		ended   bool // nothing is installed any more
	}
}

func (s *snapshots) init(h *Host) {
	s.h = h
	// Otherwise the senders and receivers of all nodes would wake at once.
	now := h.cfg.Clock.Now()
	s.limit = limiter{clock: h.cfg.Clock, perSecond: h.cfg.SnapshotBytesPerSecond, since: now}
	s.mu.sends = make(map[*outgoingSnapshot]struct{})
	s.limitIn = limiter{clock: h.cfg.Clock, perSecond: h.cfg.SnapshotBytesPerSecond, since: now}
	s.mu.receives = make(map[*incomingSnapshot]struct{})
	// One slot for each receive, so that an applier never waits.
	s.install = make(chan *install, h.cfg.SnapshotReceives)
}

// addSend takes one of the slots for sends. A peer gets a slot only while more are free
// than it holds: at most half of all, and half of what the others leave. So each peer
// that never finishes leaves as many slots as it holds, and about log2 of the slots in
// such peers are needed to exhaust them.
func (s *snapshots) addSend(x *outgoingSnapshot) bool {
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

func (s *snapshots) addReceive(r *incomingSnapshot) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.receives) >= s.h.cfg.SnapshotReceives || s.h.stopping.Load() {
		return false
	}
	s.mu.receives[r] = struct{}{}
	return true
}

// queue joins the line of snapshots that wait to receive tables. The channel is closed
// when it is this one's turn. leave ends both the turn and the wait.
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

func (s *snapshots) done(x *outgoingSnapshot, r *incomingSnapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mu.sends, x)
	delete(s.mu.receives, r)
}

// mayAdd reports whether a slot for sends is free.
func (s *snapshots) mayAdd() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.mu.sends) < s.h.cfg.SnapshotSends
}

// cancel ends the group's sends because it no longer leads.
func (s *snapshots) cancel(g *Group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.mu.sends {
		if x.g == g {
			x.ctx.cancel(nil)
		}
	}
}

// yield ends the group's sends that wait for their turn, because the wal is too long to be
// kept for them. They begin anew. It returns their receivers.
func (s *snapshots) yield(g *Group) (to []keyspace.ReplicaID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for x := range s.mu.sends {
		if x.g == g && x.waits.Load() {
			x.ctx.cancel(errSnapshotYields)
			to = append(to, x.to)
		}
	}
	return to
}

// drop ends everything of a closed group.
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

// watchdog is a context that ends when no progress was reported for the stall timeout.
type watchdog struct {
	context.Context
	cancel context.CancelCauseFunc
	timer  clock.Timer
}

func newWatchdog(parent context.Context, c clock.Clock) *watchdog {
	w := &watchdog{}
	w.Context, w.cancel = context.WithCancelCause(parent)
	w.timer = c.AfterFunc(stallTimeout, func() { w.cancel(errSnapshotStalled) })
	return w
}

func (w *watchdog) progress() { w.timer.Reset(stallTimeout) }

// end ends the context if it has not ended, and names the cause of an error that follows
// from its end.
func (w *watchdog) end(err error) error {
	w.timer.Stop()
	switch cause := context.Cause(w); {
	case err == nil:
	case errors.Is(cause, errSnapshotStalled):
		err = fmt.Errorf("%w for %v: %w", cause, stallTimeout, err)
	case errors.Is(cause, errSnapshotYields):
		err = cause
	}
	w.cancel(nil)
	return err
}

// limiter spreads bytes over time for all its users: in each limiterStep it admits what
// is due in that step. The zero limiter admits everything.
type limiter struct {
	clock     clock.Clock
	perSecond int64
	since     clock.Time // steps are counted from here
	mu        sync.Mutex
	free      clock.Time // when everything admitted so far is paid for
}

// wait admits n bytes when they are due.
func (l *limiter) wait(ctx context.Context, n int) error {
	if l.perSecond == 0 {
		return nil
	}
	l.mu.Lock()
	now := l.clock.Now()
	l.free = max(l.free, now.Add(-limiterBurst))
	l.free = l.free.Add(time.Duration(int64(n) * int64(time.Second) / l.perSecond))
	free := l.free
	l.mu.Unlock()
	if free <= now {
		return ctx.Err()
	}
	if over := free.Sub(l.since) % limiterStep; over > 0 {
		free = free.Add(limiterStep - over)
	}
	return clock.Sleep(ctx, l.clock, free.Sub(now))
}

// room refuses a snapshot on a full disk: the remaining space is reserved for freeing
// space, and the tables could not be ingested.
func (r *incomingSnapshot) room() error {
	if r.g.h.cfg.Engine.Space() == engine.SpaceFull {
		return fmt.Errorf("%w: %w", errSnapshotRefused, engine.ErrNoSpace)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)
