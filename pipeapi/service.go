package pipeapi

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Operations serve single operations; package etcdapi has them.
type Operations interface {
	Node
	// Do serves a request of etcd's KV service: a RangeRequest, PutRequest, DeleteRangeRequest or TxnRequest. It
	// returns the response as it is sent, which the caller frees. Errors have a gRPC status.
	Do(ctx context.Context, request any) (mem.BufferSlice, error)
	// Begin is Do in two parts, of which the first does not block. finish is the other one, called once. If the request is begun,
	// answered is called once, from any goroutine, when it has been carried out or has failed. After answered(true) finish does
	// not block. Else it does, for no longer than ctx lasts.
	Begin(ctx context.Context, request any, answered func(ok bool)) (finish func() (mem.BufferSlice, error), begun bool)
	// Place says who leads a key, if that is another node. Of its span it tells what whoever sends the context may know. It
	// does not block for long.
	Place(ctx context.Context, key []byte) *pipepb.Place
}

// Node is what pipes need of the server that they are part of.
type Node interface {
	// Closing is closed when the node is about to stop.
	Closing() <-chan struct{}
	// Go runs what ends soon after the last stream.
	Go(func())
	// MaxMessageBytes is the size of the largest message that a client may send.
	MaxMessageBytes() int
}

// Options configure a Service. Operations and Clock are required.
type Options struct {
	Operations Operations
	Clock      clock.Clock
	// Node is the member id of the node, which clients are told.
	Node keyspace.NodeID
	// Nil Metrics are unregistered ones.
	Metrics *Metrics
	// WindowOperations is how many operations of a pipe may be under way. 0 means 1,024. Too few keep a client
	// waiting for the network; more than the node's requests bring nothing.
	WindowOperations int
	// MaxPipes bounds the open pipes of the node. 0 means 4,096. Clients of one address have no more than they leave free, so that
	// others find room.
	MaxPipes int
	// MaxPipesOfConnection bounds those of one connection, so that one client does not take all. 0 means 64.
	MaxPipesOfConnection int
	// PartBytes bounds the memory of the parts of transactions, over all pipes, counted where a transaction has more than a few. One
	// pipe has half of it at most, or one transaction. 0 means 64 MiB. Transactions that find no room wait for it, in the order in which they came.
	PartBytes int64
	// PartWait is how long one waits for that room before it is refused. It should be the time that a request may last, as those
	// that have room are answered by then. 0 means 7 s.
	PartWait time.Duration
	// Grace is how long clients may send to a node that stops. 0 means 1 s.
	Grace time.Duration
}

// PipeBytes is what an open pipe takes at rest: 6 kB of heap and 16 kB of stacks for each of 1,984 after a put. Its window is beside that.
const PipeBytes = 24 << 10

// Service is the service of pipes.
type Service struct {
	o      Options
	window *pipepb.Window
	// parts is the room of Options.PartBytes.
	parts *semaphore.Weighted
	// idle takes operations to workers that wait for one; waiting counts these.
	idle    chan *operation
	waiting atomic.Int64

	mu sync.Mutex
	// Guarded by mu. open are the open pipes. connections and clients are how many of them each connection has, by the address and
	// port of its client, and each client, by its address.
	open                 int
	connections, clients map[string]int
	pipepb.UnsafePipeServer
}

// New returns a service.
func New(o Options) *Service {
	if o.WindowOperations <= 0 {
		o.WindowOperations = 1024
	}
	if o.MaxPipes <= 0 {
		o.MaxPipes = 4096
	}
	if o.MaxPipesOfConnection <= 0 {
		o.MaxPipesOfConnection = 64
	}
	if o.PartBytes <= 0 {
		o.PartBytes = 64 << 20
	}
	if o.PartWait <= 0 {
		o.PartWait = 7 * time.Second
	}
	if o.Grace <= 0 {
		o.Grace = time.Second
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	frame := uint64(o.Operations.MaxMessageBytes())
	return &Service{
		o: o, idle: make(chan *operation), connections: map[string]int{}, clients: map[string]int{}, parts: semaphore.NewWeighted(o.PartBytes),
		// A client can always fill one frame while another is under way.
		window: &pipepb.Window{Operations: uint32(o.WindowOperations), Bytes: max(4<<20, 2*frame), FrameBytes: frame, Node: uint64(o.Node)},
	}
}

// Open implements pipepb.PipeServer.
func (s *Service) Open(stream grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
	connection, client := sourceOf(stream.Context())
	if err := s.enter(connection, client); err != nil {
		s.o.Metrics.Broken.Inc()
		return err
	}
	defer s.leave(connection, client)
	s.o.Metrics.Open.Inc()
	defer s.o.Metrics.Open.Dec()
	p := newPipe(s, stream)
	defer p.end()
	s.o.Operations.Go(p.reader)
	return p.write()
}

// sourceOf returns the address and port of a stream's client, and its address. IPv6 addresses with the same first 64 bits count as
// one. Without a port both are "", which may be many.
func sourceOf(ctx context.Context) (connection, client string) {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return "", ""
	}
	a, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return "", ""
	}
	ip := a.Addr().Unmap().WithZone("")
	if ip.Is6() {
		net, _ := ip.Prefix(64) // it has as many
		return a.String(), net.String()
	}
	return a.String(), ip.String()
}

// enter counts a pipe, or returns why it may not be opened.
func (s *Service) enter(connection, client string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch free := s.o.MaxPipes - s.open; {
	case connection != "" && s.connections[connection] >= s.o.MaxPipesOfConnection:
		return status.Errorf(codes.ResourceExhausted, "skein: pipe: this connection has %d open pipes, and may have no more: one is enough for a client", s.o.MaxPipesOfConnection)
	case free <= 0:
		return status.Errorf(codes.ResourceExhausted, "skein: pipe: this node has %d open pipes, and takes no more: one is enough for a client", s.open)
	case s.clients[client] >= free:
		return status.Errorf(codes.ResourceExhausted, "skein: pipe: the clients of this address have %d open pipes, and the %d that are left are kept for others: one is enough for a client", s.clients[client], free)
	}
	s.open++
	s.connections[connection]++
	s.clients[client]++
	return nil
}

// leave is the end of what enter has counted.
func (s *Service) leave(connection, client string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	less(s.connections, connection)
	less(s.clients, client)
}

// less takes one from a count.
func less(counts map[string]int, of string) {
	if counts[of]--; counts[of] == 0 {
		delete(counts, of)
	}
}

// keptWorkers is how many workers wait for operations. They hold about 8 MiB.
const keptWorkers = 512

// begin has a worker do an operation. One that waits has a grown stack.
func (s *Service) begin(o *operation) {
	select {
	case s.idle <- o:
	default:
		s.o.Operations.Go(func() { s.work(o) })
	}
}

// work does operations for as long as it may wait for the next one.
func (s *Service) work(o *operation) {
	for {
		o.do()
		if s.waiting.Add(1) > keptWorkers {
			s.waiting.Add(-1)
			return
		}
		select {
		case o = <-s.idle:
			s.waiting.Add(-1)
		case <-s.o.Operations.Closing():
			s.waiting.Add(-1)
			return
		}
	}
}
