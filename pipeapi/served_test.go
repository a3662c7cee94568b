package pipeapi_test

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embedtest"
)

// stream is a client's end of a pipe of a whole node.
type stream = grpc.BidiStreamingClient[pipepb.ClientFrame, pipepb.ServerFrame]

// dial returns a connection of its own to a node, from an address of this machine, "" for any.
func dial(t *testing.T, endpoint, from string) *grpc.ClientConn {
	t.Helper()
	d := net.Dialer{}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	conn, err := grpc.NewClient("passthrough:"+endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) { return d.DialContext(ctx, "tcp", address) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// open opens a pipe. It returns the window, or what refuses the pipe.
func open(t *testing.T, conn *grpc.ClientConn) (stream, *pipepb.Window, error) {
	t.Helper()
	s, err := pipepb.NewPipeClient(conn).Open(t.Context())
	if err != nil {
		return nil, nil, err
	}
	f, err := s.Recv()
	return s, f.GetWindow(), err
}

// mustOpen is open where nothing may refuse it.
func mustOpen(t *testing.T, conn *grpc.ClientConn) (stream, *pipepb.Window) {
	t.Helper()
	s, w, err := open(t, conn)
	if err != nil {
		t.Fatal(err)
	}
	return s, w
}

func putOf(tag uint64, valueBytes int) *pipepb.Operation {
	return &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Put{Put: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, valueBytes)}}}
}

// serves puts by a pipe that others must not have harmed.
func serves(t *testing.T, s stream) {
	t.Helper()
	if err := s.Send(&pipepb.ClientFrame{Operations: []*pipepb.Operation{putOf(1, 8)}}); err != nil {
		t.Fatal(err)
	}
	f, err := s.Recv()
	if err != nil || len(f.GetAnswers()) != 1 || f.GetAnswers()[0].GetPut() == nil {
		t.Errorf("%v, %v", f, err)
	}
}

// TestServedBadInput: what breaks the protocol ends its pipe with an error that says why, by gRPC too. Other pipes of the connection are served on.
func TestServedBadInput(t *testing.T) {
	conn := dial(t, embedtest.New(t).Node(0).Endpoint(), "")
	other, w := mustOpen(t, conn)
	operations := func(n uint32, tag func(i uint64) uint64) (f *pipepb.ClientFrame) {
		f = &pipepb.ClientFrame{}
		for i := range uint64(n) {
			f.Operations = append(f.Operations, &pipepb.Operation{Tag: tag(i)})
		}
		return f
	}
	for _, c := range []struct {
		name  string
		frame *pipepb.ClientFrame
		code  codes.Code
		text  string
	}{
		{"a frame too large", &pipepb.ClientFrame{Operations: []*pipepb.Operation{putOf(1, int(w.GetFrameBytes()))}}, codes.ResourceExhausted, "larger than max"},
		{"a window ignored", operations(w.GetOperations()+1, func(i uint64) uint64 { return i }), codes.ResourceExhausted, "ignores the window"},
		{"a million operations", operations(1_000_000, func(uint64) uint64 { return 0 }), codes.ResourceExhausted, "ignores the window"},
		{"a tag twice", operations(2, func(uint64) uint64 { return 7 }), codes.InvalidArgument, "the tag 7"},
		{"too many cancels", &pipepb.ClientFrame{Cancels: make([]uint64, w.GetOperations()+1)}, codes.ResourceExhausted, "cancels"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, _ := mustOpen(t, conn)
			_ = s.Send(c.frame) // the status comes by Recv
			if f, err := s.Recv(); status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, %v", f, err)
			}
			serves(t, other)
		})
	}
	// The largest frame that may be sent is one that is taken.
	s, _ := mustOpen(t, conn)
	cancels := &pipepb.ClientFrame{Cancels: make([]uint64, w.GetOperations())}
	if err := s.Send(cancels); err != nil {
		t.Fatal(err)
	}
	serves(t, s)
}

// TestServedTenThousandPipes: one address opens 10,000 pipes, or 1,000 in a short run. Most are refused, the node takes little memory for the others, and another client has
// room.
func TestServedTenThousandPipes(t *testing.T) {
	connections, each := 100, 100
	if testing.Short() {
		each = 10
	}
	node := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.MemoryBytes = 64 << 20 })).Node(0)
	first, _ := mustOpen(t, dial(t, node.Endpoint(), ""))
	var conns []*grpc.ClientConn
	for range connections {
		conns = append(conns, dial(t, node.Endpoint(), ""))
	}
	before := held()
	opened, refused := 0, map[string]int{}
	var streams []stream // they stay open
	for _, conn := range conns {
		for range each {
			s, _, err := open(t, conn)
			switch {
			case err == nil:
				streams, opened = append(streams, s), opened+1
			case status.Code(err) == codes.ResourceExhausted:
				refused[strings.Fields(status.Convert(err).Message())[2]]++ // "the clients", "this connection"
			default:
				t.Fatal(err)
			}
		}
	}
	if opened == 0 || refused["the"] == 0 || len(refused) > 2 {
		t.Fatalf("%d pipes are open, refused by %v", opened, refused)
	}
	// This process has both ends of the pipes and of the connections. 10,000 pipes would be some 400 MiB.
	if grown := held() - before; grown > 64<<20 {
		t.Errorf("%d pipes and %d connections take %d MiB", opened, connections, grown>>20)
	}
	serves(t, first)
	serves(t, streams[0])
	if runtime.GOOS == "linux" { // all of 127.0.0.0/8 are this machine's
		s, _ := mustOpen(t, dial(t, node.Endpoint(), "127.0.0.2"))
		serves(t, s)
	}
}

// TestServedTransactions: a node with the smallest budget serves all that a window allows of transactions, also if they come in
// one frame and there is no room for the parts of all of them. None is lost.
func TestServedTransactions(t *testing.T) {
	const txns, puts = 300, 32
	node := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.MemoryBytes = config.MinMemoryBytes })).Node(0)
	s, _ := mustOpen(t, dial(t, node.Endpoint(), ""))
	f := &pipepb.ClientFrame{}
	for tag := range uint64(txns) {
		r := &pb.TxnRequest{Compare: []*pb.Compare{{Key: fmt.Appendf(nil, "%03d/00", tag), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{}}}}
		for i := range puts {
			put := &pb.PutRequest{Key: fmt.Appendf(nil, "%03d/%02d", tag, i), Value: fmt.Append(nil, tag)}
			r.Success = append(r.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: put}})
		}
		f.Operations = append(f.Operations, &pipepb.Operation{Tag: tag, Request: &pipepb.Operation_Txn{Txn: r}})
	}
	if err := s.Send(f); err != nil {
		t.Fatal(err)
	}
	for answered := 0; answered < txns; {
		f, err := s.Recv()
		if err != nil {
			t.Fatalf("after %d answers: %v", answered, err)
		}
		for _, a := range f.GetAnswers() {
			if !a.GetTxn().GetSucceeded() {
				t.Errorf("the transaction %d is answered %v", a.GetTag(), a)
			}
			answered++
		}
	}
	all := &pb.RangeRequest{Key: []byte("0"), RangeEnd: []byte("9"), CountOnly: true}
	if err := s.Send(&pipepb.ClientFrame{Operations: []*pipepb.Operation{{Request: &pipepb.Operation_Range{Range: all}}}}); err != nil {
		t.Fatal(err)
	}
	if f, err := s.Recv(); err != nil || f.GetAnswers()[0].GetRange().GetCount() != txns*puts {
		t.Errorf("%v, %v", f, err)
	}
}

// held returns the bytes of memory that are in use.
func held() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
