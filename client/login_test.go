package client_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/client"
)

// unsteadyLogin is a node at which the first logins fail.
type unsteadyLogin struct {
	pb.UnimplementedAuthServer

	mu     sync.Mutex
	errors []error // guarded by mu; of the logins to come
}

func (u *unsteadyLogin) Authenticate(context.Context, *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.errors) == 0 {
		return &pb.AuthenticateResponse{Token: "t"}, nil
	}
	err := u.errors[0]
	u.errors = u.errors[1:]
	return nil, err
}

// TestLoginAtANodeThatIsDown: a login that fails for its node is made again, until the caller's time is over.
func TestLoginAtANodeThatIsDown(t *testing.T) {
	f := newFakeNodeWithLogin(t, pb.UnimplementedWatchServer{}, rpctypes.ErrGRPCNoLeader, rpctypes.ErrGRPCStopped, rpctypes.ErrGRPCRequestTooManyRequests, rpctypes.ErrGRPCTimeout)
	cfg := at(f)
	cfg.Etcd.Username, cfg.Etcd.Password = "u", "pw"
	_, err := open(t, cfg).Put(t.Context(), "k", "v")
	must(t, err)

	cfg.Etcd.Endpoints, cfg.Etcd.Logger = []string{"127.0.0.1:1"}, zap.NewNop()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := client.Open(ctx, cfg); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Error(err)
	}
}

// TestOpenWithinAnEndedContext: where the context of etcd's client has ended, nothing is waited for.
func TestOpenWithinAnEndedContext(t *testing.T) {
	life, end := context.WithCancel(t.Context())
	end()
	for _, user := range []string{"", "u"} {
		cfg := at("127.0.0.1:1")
		cfg.Etcd.Username, cfg.Etcd.Password, cfg.Etcd.Context, cfg.Etcd.Logger = user, "pw", life, zap.NewNop()
		if _, err := client.Open(t.Context(), cfg); !errors.Is(err, context.Canceled) {
			t.Errorf("user %q: %v", user, err)
		}
	}
}

// watchesByToken is a node whose streams of watches keep the token that they were opened with. It has changes for each watch.
type watchesByToken struct {
	pb.UnimplementedWatchServer

	mu      sync.Mutex
	streams int  // guarded by mu; how many were opened
	old     bool // guarded by mu; the token of the first stream is not valid any more
}

func (w *watchesByToken) Watch(s grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]) error {
	w.mu.Lock()
	first := w.streams == 0
	w.streams++
	w.mu.Unlock()
	for id := int64(0); ; id++ {
		r, err := s.Recv()
		if err != nil {
			return nil //nolint:nilerr // the client's side is closed
		}
		if r.GetCreateRequest() == nil {
			continue
		}
		w.mu.Lock()
		refused := first && w.old
		w.mu.Unlock()
		created := &pb.WatchResponse{Header: &pb.ResponseHeader{Revision: 10}, Created: true, WatchId: id}
		if refused { // as etcd does
			created.WatchId, created.Canceled, created.CancelReason = -1, true, rpctypes.ErrGRPCInvalidAuthToken.Error()
		}
		if err := s.Send(created); err != nil {
			return err
		}
		if refused {
			continue
		}
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("k"), Value: []byte("v"), ModRevision: 11}}
		if err := s.Send(&pb.WatchResponse{Header: &pb.ResponseHeader{Revision: 11}, WatchId: id, Events: []*mvccpb.Event{e}}); err != nil {
			return err
		}
	}
}

// TestWatchesWithAnOldToken: where the stream of a watch has a token that is not valid any more, another watch logs in anew.
func TestWatchesWithAnOldToken(t *testing.T) {
	w := &watchesByToken{}
	cfg := at(newFakeNodeWithLogin(t, w))
	cfg.Etcd.Username, cfg.Etcd.Password = "u", "pw"
	c := open(t, cfg)
	for _, err := range c.Watch(t.Context(), &pb.WatchCreateRequest{Key: []byte("k")}) {
		must(t, err)
		w.mu.Lock()
		w.old = true
		w.mu.Unlock()
		got, err := events(t.Context(), c, &pb.WatchCreateRequest{Key: []byte("k")}, 1)
		if got != "PUT:k=v" || err != nil {
			t.Errorf("%s, %v", got, err)
		}
		break
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams != 2 {
		t.Errorf("%d streams, want 2", w.streams)
	}
}

// newFakeNodeWithLogin serves pipes and watches to who has logged in, which fails so at first. It returns the address.
func newFakeNodeWithLogin(t *testing.T, w pb.WatchServer, errs ...error) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s := grpc.NewServer()
	pipepb.RegisterPipeServer(s, &fakeNode{serve: func(_ int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		return answerAll(s)
	}})
	pb.RegisterWatchServer(s, w)
	pb.RegisterAuthServer(s, &unsteadyLogin{errors: errs})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends by Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
	return l.Addr().String()
}
