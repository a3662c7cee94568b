package transport

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Config identifies an Endpoint and sets its bounds. A zero number means the default.
type Config struct {
	Cluster keyspace.ClusterID
	Node    keyspace.NodeID
	Boot    keyspace.BootID
	Clock   clock.Clock
	Logger  *zap.Logger
	Metrics *Metrics // nil: unregistered ones
	// Version is the version in which this node writes; nil writes in none. There is no session
	// with a peer that does not read it.
	Version Version
	// Recovery is what the node knows of a recovery of its directory; nil knows of none.
	Recovery Recovery
	// Tell returns the answer to a node that asks without knowing its own identity (see
	// Ask), less than 32 MiB. An empty answer, or no Tell, refuses.
	Tell func() []byte
	// Unknown is called for a node of the same cluster that is not among this one's
	// peers; the node is refused. It must not block. It may be nil.
	Unknown func(keyspace.NodeID)
	// Knocked is called for a node that says that it belongs to this cluster and looks for this node, and is not among this
	// one's peers. Nothing of it is proven. It returns whether it wants to hear of more, and must not block. It may be nil.
	Knocked func(keyspace.NodeID) bool

	// Named says whether the node of the node table bears the name that a certificate proves. It
	// must not block. Without it no name fits.
	Named func(id keyspace.NodeID, name string) bool

	// Relays returns nodes that hear a node, as far as this one knows. They pass on calls
	// and streams of ClassRequest to a peer without a session. It must not block. It may be
	// nil: then nothing is passed on for this node.
	Relays func(to keyspace.NodeID) []keyspace.NodeID

	// QueueBytes bounds the bytes that wait to be sent to all peers together (pool). Half as much
	// again is for what the handlers of their calls hold, and half as much for what is received
	// and not read (streamWindow). It should hold some of the largest messages. Too little drops messages
	// in bursts and answers calls with ErrPeerBusy. Default 256 MiB.
	QueueBytes int64
	// Lanes is the number of streams of each class. Order keys are spread over them, so
	// that one lost packet delays only a part of them. More lanes mean smaller batches.
	// Default 1, 4, 3, 1; the last of several request lanes carries large calls and
	// answers. At most 16 each.
	Lanes [numClasses]int
	// MaxMessageBytes bounds one payload. Default 32 MiB.
	MaxMessageBytes int
	// MaxHandlers bounds, per peer and method, the calls served at a time; more are
	// answered ErrPeerBusy. It counts by method, because calls of one method may wait
	// for those of another. Default 4096.
	MaxHandlers int
	// MaxStreams bounds, per peer, the streams served at a time. More are answered
	// ErrPeerBusy. Default 16384.
	MaxStreams int
	// MaxCalls bounds, per peer, the calls that wait for an answer; more fail with
	// ErrQueueFull. Default 65536.
	MaxCalls int
	// StreamWindowBytes is how much an unread stream may hold here, plus one message.
	// Too little makes streams wait for round trips. Default 1 MiB.
	StreamWindowBytes int
	// PingInterval is the time between two probes of a session. Probes measure the
	// round trip and notice a restarted peer. While a peer is heard and answers, it gets a quarter of them. Default 500 ms.
	PingInterval time.Duration
	// MaxMissedPings is how many probes in a row may stay unanswered before the session
	// ends. Default 6.
	MaxMissedPings int
}

// Version is the version in which a node writes. It only grows.
type Version interface {
	// Now returns the version, and those that the node reads.
	Now() (keyspace.Version, keyspace.Versions)
	// Raise has the node write in a higher version, one of those that it reads. It returns when
	// that is durable.
	Raise(keyspace.Version) error
	// Fresh says that Now is only what the node's build begins with: the node is new, and its peers
	// have not admitted it yet.
	Fresh() bool
}

// Recovery is what a node knows of the recovery plan that was applied to its directory while it did not run.
// None of its methods blocks.
type Recovery interface {
	// Now returns the plan, 0 for none, and whether all its survivors are known to have applied it.
	Now() (plan uint64, together bool)
	// Meet takes note of what a peer says of itself before there is a session with it, and returns whether there may be one.
	Meet(peer keyspace.NodeID, plan uint64, together bool) bool
}

func (c *Config) setDefaults() {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	lanes := [numClasses]int{1, 4, 3, 1}
	for i := range numClasses {
		def(&c.Lanes[i], lanes[i])
	}
	if c.QueueBytes == 0 {
		c.QueueBytes = 256 << 20
	}
	def(&c.MaxMessageBytes, 32<<20)
	def(&c.MaxHandlers, 4096)
	def(&c.MaxStreams, 16384)
	def(&c.MaxCalls, 65536)
	def(&c.StreamWindowBytes, 1<<20)
	def(&c.MaxMissedPings, 6)
	if c.PingInterval == 0 {
		c.PingInterval = 500 * time.Millisecond
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics(nil)
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
}

// maxLanes bounds Config.Lanes and what a peer may open.
const maxLanes = 16

func (c *Config) validate() error {
	if c.Node == 0 || c.Clock == nil {
		return fmt.Errorf("transport: node id %s and clock %v are needed", c.Node, c.Clock)
	}
	for i, n := range c.Lanes {
		if n < 0 || n > maxLanes || i == int(ClassControl) && n > 1 {
			return fmt.Errorf("transport: %d lanes of class %s", n, Class(i))
		}
	}
	if c.QueueBytes < 0 {
		return fmt.Errorf("transport: queues of %d bytes", c.QueueBytes)
	}
	if c.MaxMessageBytes < 0 || c.MaxMessageBytes > 1<<30 {
		return fmt.Errorf("transport: message limit of %d bytes", c.MaxMessageBytes)
	}
	return nil
}

// Endpoint is one node's end of the bus without the network, which is a carrier's task:
// handlers, queues, calls, streams and peers. All methods may be called from many
// goroutines; the Handle methods only before Start.
type Endpoint struct {
	cfg     Config
	log     *zap.Logger
	metrics *Metrics
	clock   clock.Clock

	sends   map[Method]sendEntry
	calls   map[Method]callEntry
	streams map[Method]streamEntry

	// queues is what the queues of all peers share, and handling what the handlers of their calls do.
	queues, handling pool

	loop   loopback
	nextID atomic.Uint64 // of calls and streams
	timers clock.Timers
	// pendings keeps each pendingCall for reuse.
	pendings sync.Pool
	ctx      context.Context
	cancel   context.CancelCauseFunc
	wg       sync.WaitGroup // every goroutine of the endpoint, its carrier and its handlers
	life     sync.RWMutex   // held for writing while closed is set, for reading while wg grows
	closed   bool           // guarded by life

	// table is replaced as a whole, under mu, so that senders read it without a lock.
	table atomic.Pointer[map[keyspace.NodeID]*peer]

	mu        sync.Mutex // guards what follows, and PeerState of all peers
	started   bool
	listeners []func(keyspace.NodeID, PeerState)
	changed   []keyspace.NodeID // peers whose listeners must be called, each once
	notify    wake.Signal
}

type sendEntry struct {
	class Class
	fn    SendHandler
}

type callEntry struct {
	class Class
	// index is the method's place among the methods that have a call handler.
	index uint8
	fn    CallHandler
}

// maxCallMethods bounds the methods that have a call handler.
const maxCallMethods = 32

type streamEntry struct {
	class Class
	fn    StreamHandler
}

// peer is what the endpoint knows of one other node.
type peer struct {
	id       keyspace.NodeID
	sessions [numKinds]atomic.Pointer[Session]
	handlers [maxCallMethods]atomic.Int32 // of calls, by callEntry.index
	held     budget                       // what the handlers of its calls hold
	streams  atomic.Int32
	detours  detours
	state    PeerState // guarded by Endpoint.mu
	metrics  peerMetrics

	attach  sync.Mutex                  // one Attach at a time
	readers [numClasses]*sync.WaitGroup // of the last session; guarded by attach
}

// NewEndpoint makes an endpoint. Only carriers need it.
func NewEndpoint(cfg Config) (*Endpoint, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg.setDefaults()
	e := &Endpoint{
		cfg: cfg, log: cfg.Logger, metrics: cfg.Metrics, clock: cfg.Clock,
		sends: map[Method]sendEntry{}, calls: map[Method]callEntry{}, streams: map[Method]streamEntry{},
		notify: wake.New(),
	}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	e.divide(0)
	e.table.Store(&map[keyspace.NodeID]*peer{})
	e.loop.init(e)
	return e, nil
}

// Self returns the node's own id.
func (e *Endpoint) Self() keyspace.NodeID { return e.cfg.Node }

// Config returns the configuration with defaults filled in.
func (e *Endpoint) Config() Config { return e.cfg }

// HandleSend registers the handler of one-way messages of a method.
func (e *Endpoint) HandleSend(m Method, c Class, fn SendHandler) {
	e.checkHandle(m, c)
	e.sends[m] = sendEntry{c, fn}
}

// HandleCall registers the handler of a method's calls.
func (e *Endpoint) HandleCall(m Method, c Class, fn CallHandler) {
	e.checkHandle(m, c)
	h, again := e.calls[m]
	if h.class, h.fn = c, fn; !again {
		if len(e.calls) == maxCallMethods {
			panic(fmt.Sprintf("transport: %s is one method more than the %d that may have handlers of calls", m, maxCallMethods))
		}
		h.index = uint8(len(e.calls))
	}
	e.calls[m] = h
}

// HandleStream registers the handler of a method's streams.
func (e *Endpoint) HandleStream(m Method, c Class, fn StreamHandler) {
	e.checkHandle(m, c)
	e.streams[m] = streamEntry{c, fn}
}

// checkHandle panics on a mistake of the program.
func (e *Endpoint) checkHandle(m Method, c Class) {
	e.mu.Lock()
	started := e.started
	e.mu.Unlock()
	known, ok := e.classOf(m)
	if started || c >= numClasses || ok && known != c {
		panic(fmt.Sprintf("transport: handler of %s in class %s (the table says %s) after start %t", m, c, known, started))
	}
}

// classOf returns the class of a method: the table's, or that of its handler.
func (e *Endpoint) classOf(m Method) (Class, bool) {
	if d, ok := methods[m]; ok {
		return d.class, true
	}
	if h, ok := e.sends[m]; ok {
		return h.class, true
	}
	if h, ok := e.calls[m]; ok {
		return h.class, true
	}
	h, ok := e.streams[m]
	return h.class, ok
}

// Run starts the endpoint's own goroutines. Carriers call it in their Start.
func (e *Endpoint) Run() error {
	e.mu.Lock()
	again := e.started
	e.started = true
	e.mu.Unlock()
	if again || !e.Go(e.notifyLoop) {
		return fmt.Errorf("transport: node %s: started twice or after its end", e.cfg.Node)
	}
	e.loop.run()
	return nil
}

// Go runs fn in a goroutine that Wait waits for. It returns false after the endpoint
// was closed.
func (e *Endpoint) Go(fn func()) bool {
	e.life.RLock()
	defer e.life.RUnlock()
	if e.closed {
		return false
	}
	e.wg.Go(fn)
	return true
}

// Done is closed when Stop begins.
func (e *Endpoint) Done() <-chan struct{} { return e.ctx.Done() }

// Stop ends all sessions and all handlers' contexts; nothing is sent or handled
// afterwards. A carrier's Close calls it, then ends what its own goroutines wait for,
// then calls Wait.
func (e *Endpoint) Stop() {
	e.life.Lock()
	e.closed = true
	e.life.Unlock()
	e.cancel(ErrClosed)
	for _, p := range *e.table.Load() {
		p.end(ErrClosed)
	}
	e.loop.close()
}

// Wait returns when every goroutine of the endpoint, its carrier and its handlers
// has ended.
func (e *Endpoint) Wait() { e.wg.Wait() }

func (p *peer) end(err error) {
	for k := range p.sessions {
		if s := p.sessions[k].Load(); s != nil {
			s.End(err)
		}
	}
}

// AddPeer makes a node known. Carriers call it in their SetPeer.
func (e *Endpoint) AddPeer(id keyspace.NodeID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	old := *e.table.Load()
	if _, ok := old[id]; ok || id == e.cfg.Node {
		return
	}
	table := maps.Clone(old)
	p := &peer{id: id, metrics: e.metrics.know(e.cfg.Node, id)}
	p.held.pool, p.held.total = &e.handling, new(atomic.Int64)
	table[id] = p
	e.table.Store(&table)
	e.divide(len(table))
}

// DropPeer ends the sessions with a node and forgets it. Carriers call it in their
// RemovePeer.
func (e *Endpoint) DropPeer(id keyspace.NodeID) {
	e.mu.Lock()
	old := *e.table.Load()
	p := old[id]
	if p == nil {
		e.mu.Unlock()
		return
	}
	table := maps.Clone(old)
	delete(table, id)
	e.table.Store(&table)
	e.divide(len(table))
	e.mu.Unlock()
	p.end(ErrNoRoute)
	p.detours.end(ErrNoRoute)
	e.metrics.forget(id)
}

// Peer returns what is known of a node, and the zero state for a node that is no peer.
// The node itself is always up.
func (e *Endpoint) Peer(id keyspace.NodeID) PeerState {
	if id == e.cfg.Node {
		return PeerState{Up: true, Boot: e.cfg.Boot}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if p := e.peer(id); p != nil {
		return p.state
	}
	return PeerState{}
}

// Peers returns the ids of the known peers in ascending order.
func (e *Endpoint) Peers() []keyspace.NodeID {
	return slices.Sorted(maps.Keys(*e.table.Load()))
}

func (e *Endpoint) peer(id keyspace.NodeID) *peer { return (*e.table.Load())[id] }

// OnPeer registers a listener for changes of Up and Boot and for replaced sessions. One
// goroutine calls all listeners, in order, with the state of that moment. A listener
// may see quick changes as one, with another Since.
func (e *Endpoint) OnPeer(fn func(keyspace.NodeID, PeerState)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.listeners = append(e.listeners, fn)
}

// setStateLocked changes a peer's state and schedules its listeners. e.mu is held.
func (e *Endpoint) setStateLocked(p *peer, up bool, boot keyspace.BootID) {
	p.state.Up, p.state.Boot, p.state.Since = up, boot, e.clock.Now()
	p.metrics.active.Set(0)
	if up {
		p.metrics.active.Set(1)
	}
	if !slices.Contains(e.changed, p.id) {
		e.changed = append(e.changed, p.id)
	}
	e.notify.Set()
}

func (e *Endpoint) notifyLoop() {
	for {
		select {
		case <-e.notify:
		case <-e.ctx.Done():
			return
		}
		for e.notifyOne() {
		}
	}
}

// notifyOne tells the listeners of one changed peer. It says whether there was one.
func (e *Endpoint) notifyOne() bool {
	e.mu.Lock()
	if len(e.changed) == 0 {
		e.mu.Unlock()
		return false
	}
	id := e.changed[0]
	e.changed = slices.Delete(e.changed, 0, 1)
	var state PeerState
	if p := e.peer(id); p != nil {
		state = p.state
	}
	listeners := slices.Clone(e.listeners)
	e.mu.Unlock()
	for _, fn := range listeners {
		fn(id, state)
	}
	return true
}
