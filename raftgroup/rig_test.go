package raftgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testClock is a node's clock: virtual time at its own rate.
type testClock struct {
	clock.Clock
	rate   float64
	offset time.Duration
}

func (c testClock) Now() clock.Time {
	return clock.Time(float64(c.Clock.Now())*c.rate) + clock.Time(c.offset) + 1
}

// testBus connects the rig's hosts. Frames with the same (from, to, method, order) arrive
// in order, after the delay. filter decides on each message separately.
type testBus struct {
	mu     sync.Mutex
	nodes  map[keyspace.NodeID]*busEnd
	queues map[frameKey]chan []byte
	cut    map[[2]keyspace.NodeID]bool
	// filter returns false for a message that is to be lost.
	filter func(from, to keyspace.NodeID, m *message) bool
	// slow is the delay of every frame.
	slow  time.Duration
	stop  chan struct{}
	wg    sync.WaitGroup
	count map[pb.MessageType]int
	raw   bool // frames are delivered unchanged
	// noticesAlone counts the frames of a node that hold nothing but commit notices.
	noticesAlone map[keyspace.NodeID]int
	// slowFrom is how long the frames of a node take beside slow.
	slowFrom map[keyspace.NodeID]time.Duration
}

type frameKey struct {
	from, to keyspace.NodeID
	method   transport.Method
	order    uint64
}

type busEnd struct {
	b      *testBus
	id     keyspace.NodeID
	send   map[transport.Method]transport.SendHandler
	stream map[transport.Method]transport.StreamHandler
	down   bool
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	stall  func() // called for each chunk of a stream, if set
}

func newTestBus() *testBus {
	return &testBus{
		nodes: map[keyspace.NodeID]*busEnd{}, queues: map[frameKey]chan []byte{},
		cut: map[[2]keyspace.NodeID]bool{}, stop: make(chan struct{}), count: map[pb.MessageType]int{},
		noticesAlone: map[keyspace.NodeID]int{},
	}
}

func (b *testBus) end(id keyspace.NodeID) *busEnd {
	e := &busEnd{b: b, id: id, send: map[transport.Method]transport.SendHandler{}, stream: map[transport.Method]transport.StreamHandler{}}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

func (e *busEnd) Peers() (ids []keyspace.NodeID) {
	e.b.mu.Lock()
	defer e.b.mu.Unlock()
	for id := range e.b.nodes {
		if id != e.id {
			ids = append(ids, id)
		}
	}
	return ids
}

// start makes a node whose handlers are registered reachable.
func (e *busEnd) start() { e.b.set(func(b *testBus) { b.nodes[e.id] = e }) }

func (e *busEnd) HandleSend(m transport.Method, _ transport.Class, h transport.SendHandler) {
	e.send[m] = h
}

func (e *busEnd) HandleStream(m transport.Method, _ transport.Class, h transport.StreamHandler) {
	e.stream[m] = h
}

// cut stops all communication with the others.
func (e *busEnd) cut() {
	e.b.mu.Lock()
	e.down = true
	e.b.mu.Unlock()
}

func (e *busEnd) close() {
	e.cut()
	e.cancel()
	e.wg.Wait()
}

func (e *busEnd) Send(to keyspace.NodeID, m transport.Method, order uint64, payload []byte) error {
	b := e.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if e.down || b.nodes[to] == nil || b.nodes[to].down {
		return transport.ErrNoRoute
	}
	key := frameKey{e.id, to, m, order}
	q := b.queues[key]
	if q == nil {
		q = make(chan []byte, 1<<14)
		b.queues[key] = q
		b.wg.Go(func() { b.carry(key, q) })
	}
	select {
	case q <- payload:
		return nil
	default:
		return transport.ErrQueueFull
	}
}

func (b *testBus) carry(key frameKey, q chan []byte) {
	for {
		select {
		case p := <-q:
			if d := b.delay(key.from); d > 0 {
				time.Sleep(d)
			}
			b.mu.Lock()
			e := b.nodes[key.to]
			lost := e == nil || e.down || b.cut[[2]keyspace.NodeID{key.from, key.to}]
			if !b.raw {
				p = b.filterFrame(key, p)
			}
			b.mu.Unlock()
			if !lost && p != nil {
				e.send[key.method](key.from, p)
			}
		case <-b.stop:
			return
		}
	}
}

func (b *testBus) delay(from keyspace.NodeID) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.slow + b.slowFrom[from]
}

// filterFrame removes the messages that the filter rejects from a frame.
func (b *testBus) filterFrame(key frameKey, p []byte) []byte {
	kind, rest, err := frameKind(p)
	if err != nil || kind != frameMessages {
		if b.filter != nil && !b.filter(key.from, key.to, &message{}) {
			return nil
		}
		return p
	}
	msgs, err := decodeMessages(key.from, rest)
	if err != nil {
		panic(err)
	}
	if !slices.ContainsFunc(msgs, func(m message) bool { return m.kind != kindCommitNotice }) {
		b.noticesAlone[key.from]++
	}
	keep := appendFrameHeader(nil, msgs[0].promise)
	for i := range msgs {
		b.count[msgs[i].kind]++
		if b.filter != nil && !b.filter(key.from, key.to, &msgs[i]) {
			continue
		}
		if msgs[i].raft != nil {
			keep = appendRaftMessage(keep, msgs[i].group, msgs[i].raft)
		} else {
			keep = appendHostMessage(keep, &msgs[i])
		}
	}
	return keep
}

func (b *testBus) set(f func(b *testBus)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b)
}

// isolate cuts the node off from all others, or heals it.
func (b *testBus) isolate(id keyspace.NodeID, cut bool) {
	b.set(func(b *testBus) {
		for o := range b.nodes {
			b.cut[[2]keyspace.NodeID{id, o}], b.cut[[2]keyspace.NodeID{o, id}] = cut, cut
		}
	})
}

func (b *testBus) counted(t pb.MessageType) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count[t]
}

func (b *testBus) close() {
	close(b.stop)
	b.wg.Wait()
}

// testStream is one end of a stream.
type testStream struct {
	in, out  chan []byte
	mine     *streamEnd // closed by this side
	theirs   *streamEnd
	ctx      context.Context
	perChunk func()
}

type streamEnd struct {
	once sync.Once
	ch   chan struct{}
	err  error
}

func (e *streamEnd) close(err error) { e.once.Do(func() { e.err = err; close(e.ch) }) }

func (s *testStream) Send(ctx context.Context, p []byte) error {
	if s.perChunk != nil {
		s.perChunk()
	}
	// A closed end gets nothing more, even if there is room.
	select {
	case <-s.theirs.ch:
		return s.endErr()
	default:
	}
	select {
	case s.out <- slices.Clone(p):
		return nil
	case <-s.theirs.ch:
		return s.endErr()
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return transport.ErrUnreachable
	}
}

func (s *testStream) endErr() error {
	if s.theirs.err != nil {
		return &transport.RemoteError{Message: s.theirs.err.Error()}
	}
	return io.EOF
}

func (s *testStream) Recv(ctx context.Context) ([]byte, error) {
	select {
	case p := <-s.in:
		return p, nil
	default:
	}
	select {
	case p := <-s.in:
		return p, nil
	case <-s.theirs.ch:
		select {
		case p := <-s.in:
			return p, nil
		default:
		}
		return nil, s.endErr()
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.ctx.Done():
		return nil, transport.ErrUnreachable
	}
}

func (s *testStream) Close(err error) { s.mine.close(err) }

func (e *busEnd) OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error) {
	b := e.b
	b.mu.Lock()
	defer b.mu.Unlock()
	peer := b.nodes[to]
	if peer == nil || peer.down || e.down || b.cut[[2]keyspace.NodeID{e.id, to}] {
		return nil, &transport.CallError{Peer: to, Method: m, NotDelivered: true, Err: transport.ErrNoRoute}
	}
	sctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(peer.ctx, cancel)
	context.AfterFunc(e.ctx, cancel)
	ab, ba := make(chan []byte, 4), make(chan []byte, 4)
	ea, eb := &streamEnd{ch: make(chan struct{})}, &streamEnd{ch: make(chan struct{})}
	mine := &testStream{in: ba, out: ab, mine: ea, theirs: eb, ctx: sctx, perChunk: e.stall}
	theirs := &testStream{in: ab, out: ba, mine: eb, theirs: ea, ctx: sctx}
	h := peer.stream[m]
	peer.wg.Go(func() {
		defer stop()
		theirs.Close(h(sctx, e.id, first, theirs))
	})
	return mine, nil
}

// testSM is a state machine that keeps a hash chain over all applied entries.
type testSM struct {
	n     *testNode
	group keyspace.GroupID

	mu      sync.Mutex
	chain   uint32
	count   uint64
	bytes   uint64
	data    []string // applied in this run
	leader  LeaderState
	applied Position
	changes []LeaderState
	refuse  error
	broken  error    // of the next Apply
	closed  []string // reasons of Quarantined
	closing func()   // called by Quarantined
	done    []error  // outcomes of SnapshotDone
	slow    func()
	check   func()        // called before a snapshot's tables are checked, and before they are ingested
	disk    *simdisk.Disk // what a power failure would leave after a snapshot was installed
}

func stateKey(g keyspace.GroupID) []byte { return engine.GroupLocalKey(g, []byte("state")) }

func (s *testSM) load() {
	v, ok, err := s.n.eng.Get(stateKey(s.group))
	if err != nil {
		panic(err)
	}
	if ok {
		s.chain, s.count = binary.BigEndian.Uint32(v), binary.BigEndian.Uint64(v[4:])
	}
}

func (s *testSM) Apply(b *engine.Batch, ents []Entry) error {
	if s.slow != nil {
		s.slow()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.broken != nil {
		return s.broken
	}
	for _, e := range ents {
		if len(e.Data) == 0 {
			continue
		}
		s.chain = crc32.Update(s.chain, crc32.IEEETable, e.Data)
		s.count++
		s.bytes += uint64(len(e.Data))
		s.data = append(s.data, string(e.Data[:min(32, len(e.Data))]))
		k := engine.GroupLocalKey(s.group, binary.BigEndian.AppendUint64([]byte("e"), s.count))
		if err := b.Set(k, e.Data); err != nil {
			return err
		}
	}
	v := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(nil, s.chain), s.count)
	return b.Set(stateKey(s.group), v)
}

func (s *testSM) Applied(p Position) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.applied = p
}

func (s *testSM) LeaderChanged(l LeaderState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leader = l
	s.changes = append(s.changes, l)
}

func (s *testSM) Quarantined(reason string) {
	if s.closing != nil {
		s.closing()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.leader = append(s.closed, reason), LeaderState{}
}

func (s *testSM) Payload() []byte { return []byte("payload") }

func (s *testSM) SnapshotSpans(engine.Applied) []engine.KeySpan {
	s.mu.Lock()
	check := s.check
	s.mu.Unlock()
	if check != nil {
		check()
	}
	return []engine.KeySpan{engine.GroupLocalSpan(s.group)}
}

func (s *testSM) AcceptSnapshot(engine.Applied) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refuse
}

func (s *testSM) SnapshotDone(_ engine.Applied, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done = append(s.done, err); err == nil {
		if s.n.r.clones {
			s.disk = s.n.fs.Crash(0, nil)
		}
		s.load()
	}
}

func (s *testSM) state() (chain uint32, count uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.chain, s.count
}

func (s *testSM) leads() (LeaderState, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leader, s.leader.IsLeader
}

// testNode is one host with its disks.
type testNode struct {
	r    *rig
	id   keyspace.NodeID
	fs   *simdisk.Disk
	wfs  vfs.FS // what the wal uses; by default fs
	efs  vfs.FS // what the engine uses; by default fs
	wal  *wal.Log
	eng  *engine.Engine
	host *Host
	end  *busEnd
	rate float64
	boot keyspace.BootID
	// sms are the state machines of this run.
	sms map[keyspace.GroupID]*testSM
	// replicas maps each group to this node's replica.
	replicas map[keyspace.GroupID]keyspace.ReplicaID
	unknown  []keyspace.GroupID
	removed  []keyspace.GroupID
	mu       sync.Mutex
	up       bool
}

type rig struct {
	t      testing.TB
	bus    *testBus
	nodes  map[keyspace.NodeID]*testNode
	rng    *rand.Rand
	clk    clock.Clock
	config func(*Config)
	memtab int64
	walopt func(*wal.Options)
	engopt func(*engine.Options)
	// clones makes a state machine keep its disk when a snapshot is installed. Only for
	// one group: cloning a MemFS during another install's Link deadlocks.
	clones bool
	nextB  keyspace.BootID
	zap    *zap.Logger
}

// newRig makes nodes 1..n without groups.
func newRig(tb testing.TB, n int, config func(*Config)) *rig {
	tb.Helper()
	r := &rig{
		t: tb, bus: newTestBus(), nodes: map[keyspace.NodeID]*testNode{}, rng: rand.New(rand.NewPCG(1, 2)),
		clk: clock.Virtual(), config: config, zap: zap.NewNop(),
	}
	// Another seed gives other faults. A failure prints its seed.
	if s, err := strconv.ParseUint(os.Getenv("RAFTGROUP_TEST_SEED"), 10, 64); err == nil {
		r.rng = rand.New(rand.NewPCG(s, 2))
		tb.Logf("seed %d", s)
	}
	if os.Getenv("RAFTGROUP_TEST_LOG") != "" {
		r.zap = zaptest.NewLogger(tb)
	}
	for i := range n {
		id := keyspace.NodeID(i + 1)
		r.nodes[id] = &testNode{
			r: r, id: id, fs: simdisk.New(), rate: 1,
			replicas: map[keyspace.GroupID]keyspace.ReplicaID{},
		}
	}
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// start opens the node's stores and host, and all its replicas.
func (n *testNode) start() {
	r := n.r
	r.t.Helper()
	r.nextB++
	n.boot = r.nextB
	// Readings of different nodes must not be compared: node 1's is the highest.
	clk := testClock{r.clk, n.rate, time.Duration(10-n.id) * time.Hour}
	var err error
	wo := wal.Options{FS: n.fs, Dir: "wal", Clock: clk, SegmentBytes: 256 << 10}
	if n.wfs != nil {
		wo.FS = n.wfs
	}
	if r.walopt != nil {
		r.walopt(&wo)
	}
	n.wal, err = wal.Open(wo)
	r.must(err)
	mem := int64(1 << 20)
	if r.memtab > 0 {
		mem = r.memtab
	}
	efs := n.efs
	if efs == nil {
		efs = n.fs
	}
	eo := engine.Options{
		FS: efs, Dir: "data", Clock: clk, MemTableBytes: mem, CacheBytes: 1 << 20, BallastBytes: -1, LowSpaceBytes: -1,
	}
	if r.engopt != nil {
		r.engopt(&eo)
	}
	n.eng, err = engine.Open(eo)
	r.must(err)
	n.end = r.bus.end(n.id)
	cfg := Config{
		Node: n.id, Boot: n.boot, Clock: clk, WAL: n.wal, Engine: n.eng, Bus: n.end, Workers: 2, Appliers: 2, Logger: r.zap,
		Unknown: func(_ keyspace.NodeID, g keyspace.GroupID, _ keyspace.ReplicaID) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.unknown = append(n.unknown, g)
		},
		Removed: func(g keyspace.GroupID, _ keyspace.ReplicaID) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.removed = append(n.removed, g)
		},
	}
	if r.config != nil {
		r.config(&cfg)
	}
	n.host, err = NewHost(cfg)
	r.must(err)
	n.host.RegisterHandlers(n.end)
	n.end.start()
	n.host.Start()
	n.sms = map[keyspace.GroupID]*testSM{}
	n.up = true
	for g := range n.replicas {
		n.open(g)
	}
}

func (n *testNode) open(g keyspace.GroupID) *Group {
	n.r.t.Helper()
	sm := &testSM{n: n, group: g}
	sm.load()
	n.sms[g] = sm
	grp, err := n.host.Open(g, n.replicas[g], n.position(g), sm)
	n.r.must(err)
	return grp
}

// position is that of the group's applied record.
func (n *testNode) position(g keyspace.GroupID) Position {
	n.r.t.Helper()
	a, _, err := n.eng.Applied(g)
	n.r.must(err)
	return Position{a.Index, a.Term}
}

// stop ends the node in good order; the engine flushes its memtables.
func (n *testNode) stop() {
	n.r.t.Helper()
	if !n.up {
		return
	}
	n.up = false
	n.end.close()
	n.r.must(n.host.Stop(context.Background()))
	n.r.must(n.wal.Close())
	n.r.must(n.eng.Close())
}

// crash turns the disks into what a power failure would leave now, with the given
// percentage of unsynced data, and ends the run.
func (n *testNode) crash(unsyncedPercent int) {
	n.r.t.Helper()
	// First of all: otherwise the node would report writes that become durable after the
	// copy.
	n.end.cut()
	after := n.fs.Crash(unsyncedPercent, n.r.rng)
	n.up = false
	n.end.close()
	_ = n.host.Stop(context.Background())
	_ = n.wal.Close()
	_ = n.eng.Close()
	n.fs = after
	n.wfs, n.efs = nil, nil
}

func (r *rig) startAll() {
	r.t.Helper()
	for _, id := range r.ids() {
		r.nodes[id].start()
	}
}

func (r *rig) ids() []keyspace.NodeID {
	ids := make([]keyspace.NodeID, 0, len(r.nodes))
	for id := range r.nodes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (r *rig) close() {
	for _, id := range r.ids() {
		r.nodes[id].stop()
	}
	r.bus.close()
}

// voters returns replicas 1..n on nodes 1..n.
func voters(n int) []keyspace.Replica {
	rs := make([]keyspace.Replica, n)
	for i := range rs {
		rs[i] = keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: keyspace.NodeID(i + 1)}
	}
	return rs
}

// bootstrap durably creates groups first..first+count-1 with the replicas.
func (r *rig) bootstrap(first keyspace.GroupID, count int, replicas []keyspace.Replica) {
	r.t.Helper()
	for _, rep := range replicas {
		n := r.nodes[rep.Node]
		b := n.eng.NewBatch()
		for i := range count {
			r.must(n.host.Bootstrap(b, first+keyspace.GroupID(i), replicas, []byte("payload")))
		}
		r.must(b.Commit())
		r.must(n.eng.Flush(context.Background()))
	}
	for _, rep := range replicas {
		n := r.nodes[rep.Node]
		for i := range count {
			n.replicas[first+keyspace.GroupID(i)] = rep.ID
			n.open(first + keyspace.GroupID(i))
		}
	}
}

// eventually waits in virtual time.
func (r *rig) eventually(what string, limit time.Duration, ok func() bool) {
	r.t.Helper()
	for step, end := 10*time.Millisecond, time.Now().Add(limit); ; {
		synctest.Wait()
		if ok() {
			return
		}
		if time.Now().After(end) {
			r.t.Fatalf("not within %v: %s\n%s", limit, what, r.dump())
		}
		time.Sleep(step)
	}
}

func (r *rig) dump() string {
	s := ""
	for _, id := range r.ids() {
		n := r.nodes[id]
		if !n.up {
			s += fmt.Sprintf("node %d down\n", id)
			continue
		}
		for i, g := range n.host.Groups() {
			if i == 5 {
				break
			}
			st := g.Status()
			_, count := n.sms[g.id].state()
			s += fmt.Sprintf("node %d: %+v count %d\n", id, st, count)
		}
	}
	return s
}

// leader waits for a leader that is ready, and returns its node.
func (r *rig) leader(g keyspace.GroupID) *testNode {
	r.t.Helper()
	var found *testNode
	r.eventually(fmt.Sprintf("group %s has a leader", g), 20*time.Second, func() bool {
		found = nil
		term := uint64(0)
		for _, id := range r.ids() {
			n := r.nodes[id]
			if !n.up || n.sms[g] == nil {
				continue
			}
			if l, is := n.sms[g].leads(); is && l.Ready && l.Term > term {
				found, term = n, l.Term
			}
		}
		return found != nil
	})
	return found
}

// propose proposes data at the node and returns the error of Propose or dropped.
func (n *testNode) propose(g keyspace.GroupID, data string) error {
	grp := n.host.Group(g)
	return grp.Propose(grp.Status().Term, []byte(data), nil)
}

// write proposes data at whichever node leads, until the leader has applied it.
func (r *rig) write(g keyspace.GroupID, data string) {
	r.t.Helper()
	r.eventually("write "+data, 60*time.Second, func() bool {
		for _, id := range r.ids() {
			n := r.nodes[id]
			if !n.up || n.sms[g] == nil {
				continue
			}
			sm := n.sms[g]
			if l, is := sm.leads(); is && l.Ready {
				if sm.has(data) {
					return true
				}
				if err := n.propose(g, data); err != nil && !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrFull) {
					r.t.Fatal(err)
				}
				synctest.Wait()
				time.Sleep(5 * time.Millisecond)
				synctest.Wait()
				return sm.has(data)
			}
		}
		return false
	})
}

func (s *testSM) has(data string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.data, data[:min(32, len(data))])
}

// equal waits until all running replicas of the group have the same state.
func (r *rig) equal(g keyspace.GroupID) {
	r.t.Helper()
	r.eventually(fmt.Sprintf("replicas of %s are equal", g), 60*time.Second, func() bool {
		var chain uint32
		var count uint64
		first := true
		for _, id := range r.ids() {
			n := r.nodes[id]
			if !n.up || n.sms[g] == nil {
				continue
			}
			c, k := n.sms[g].state()
			if first {
				chain, count, first = c, k, false
			} else if c != chain || k != count {
				return false
			}
		}
		return true
	})
}

// long skips a test with -short, for the reason given: it takes much of the processor's time.
func long(t *testing.T, reason string) {
	t.Helper()
	if testing.Short() {
		t.Skip(reason)
	}
}

// fewer is how much a test does of something: usual, or fewer with -short.
func fewer(usual, short int) int {
	if testing.Short() {
		return short
	}
	return usual
}

func inBubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}
