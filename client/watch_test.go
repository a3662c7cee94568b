package client_test

import (
	"context"
	"errors"
	"fmt"
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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/embedtest"
)

// events takes n events of a watch, as text, and leaves its loop.
func events(ctx context.Context, c *client.Client, r *pb.WatchCreateRequest, n int) (string, error) {
	var all []string
	for e, err := range c.Watch(ctx, r) {
		if err != nil {
			return strings.Join(all, " "), err
		}
		text := fmt.Sprintf("%s:%s=%s", e.GetType(), e.GetKv().GetKey(), e.GetKv().GetValue())
		if e.GetPrevKv() != nil {
			text += " was " + string(e.GetPrevKv().GetValue())
		}
		if all = append(all, text); len(all) == n {
			break
		}
	}
	return strings.Join(all, " "), nil
}

// TestWatch: a watch has what the request says, from its revision on, and ends with the error that says why.
func TestWatch(t *testing.T) {
	c := open(t, at(embedtest.New(t).Endpoints()...))
	first, err := c.Put(t.Context(), "k/1", "a")
	must(t, err)
	_, err = c.Put(t.Context(), "k/2", "b")
	must(t, err)
	_, err = c.Put(t.Context(), "other", "x")
	must(t, err)
	_, err = c.Put(t.Context(), "k/1", "c")
	must(t, err)
	last, err := c.Delete(t.Context(), "k/1")
	must(t, err)
	from := first.GetHeader().GetRevision()
	for what, w := range map[string]struct {
		request *pb.WatchCreateRequest
		want    string
	}{
		"a key":                 {&pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from}, "PUT:k/1=a PUT:k/1=c DELETE:k/1="},
		"a span":                {&pb.WatchCreateRequest{Key: []byte("k/"), RangeEnd: []byte("k0"), StartRevision: from}, "PUT:k/1=a PUT:k/2=b PUT:k/1=c DELETE:k/1="},
		"a later revision":      {&pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from + 1}, "PUT:k/1=c DELETE:k/1="},
		"deletes":               {&pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}}, "DELETE:k/1="},
		"puts":                  {&pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from, Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE}}, "PUT:k/1=a PUT:k/1=c"},
		"what was there before": {&pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from + 1, PrevKv: true}, "PUT:k/1=c was a DELETE:k/1= was c"},
		"every key":             {&pb.WatchCreateRequest{RangeEnd: []byte{0}, StartRevision: from + 2}, "PUT:other=x PUT:k/1=c DELETE:k/1="},
	} {
		if got, err := events(t.Context(), c, w.request, strings.Count(w.want, ":")); got != w.want || err != nil {
			t.Errorf("%s: %s, %v, want %s", what, got, err, w.want)
		}
	}
	_, err = c.Etcd().Compact(t.Context(), last.GetHeader().GetRevision())
	must(t, err)
	if _, err := events(t.Context(), c, &pb.WatchCreateRequest{Key: []byte("k/1"), StartRevision: from}, 1); !errors.Is(err, rpctypes.ErrCompacted) || !strings.Contains(err.Error(), fmt.Sprint(last.GetHeader().GetRevision())) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := events(ctx, c, &pb.WatchCreateRequest{Key: []byte("k/1")}, 1)
		ended <- err
	}()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestWatchOfAClosedClient: it ends, before and after the client is closed.
func TestWatchOfAClosedClient(t *testing.T) {
	s := embedtest.New(t)
	cfg := at(s.Endpoints()...)
	cfg.Etcd.Logger = zap.NewNop()
	c, err := client.Open(t.Context(), cfg)
	must(t, err)
	began := make(chan struct{}, 1)
	ended := make(chan error, 1)
	from, err := c.Put(t.Context(), "k", "v")
	must(t, err)
	r := &pb.WatchCreateRequest{Key: []byte("k"), StartRevision: from.GetHeader().GetRevision()}
	go func() {
		for _, err := range c.Watch(context.Background(), r) {
			if err != nil {
				ended <- err
				return
			}
			began <- struct{}{}
		}
	}()
	<-began
	must(t, c.Close())
	if err := <-ended; !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
	if _, err := events(t.Context(), c, r, 1); !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
}

// fakeWatches is a node that serves each watch by the next step of a test.
type fakeWatches struct {
	pb.UnimplementedWatchServer

	mu    sync.Mutex
	steps []watchStep // guarded by mu; those to come
	wrong []string    // guarded by mu; what was not as it should be
	again watchStep   // guarded by mu; that of the last watch
	times int         // guarded by mu; how often it was served
}

// mostTimes bounds how often a client may miss what stands before an error.
const mostTimes = 50

// watchStep says from where a watch begins, what it gets, and how it ends.
type watchStep struct {
	from      int64
	revision  int64   // of the header
	revisions []int64 // of the events
	progress  int64   // that of a notice behind them, 0 for none
	// err ends it once seen, if there is one, is closed: etcd's client may drop events that it has not handed on yet.
	err  error
	seen chan struct{}
	// lasts is the time before err, which grows where a step is served again.
	lasts time.Duration
}

// next returns the step of a watch. One without events is served again to a client that asks for the same again: etcd's client may have
// met its error before it has handed on what came before, and nothing says when it has.
func (f *fakeWatches) next(r *pb.WatchCreateRequest) watchStep {
	f.mu.Lock()
	defer f.mu.Unlock()
	from := r.GetStartRevision()
	if !r.GetProgressNotify() {
		f.wrong = append(f.wrong, "a watch without progress")
	}
	if l := f.again; 0 < f.times && f.times < mostTimes && l.from == from && l.err != nil && len(l.revisions) == 0 {
		f.times++
		l.lasts = time.Duration(f.times) * 10 * time.Millisecond
		return l
	}
	if len(f.steps) == 0 {
		f.wrong = append(f.wrong, fmt.Sprintf("one more watch from %d", from))
		return watchStep{err: rpctypes.ErrGRPCPermissionDenied}
	}
	s := f.steps[0]
	f.steps = f.steps[1:]
	f.again, f.times = s, 1
	if s.from != from {
		f.wrong = append(f.wrong, fmt.Sprintf("a watch from %d, want %d", from, s.from))
	}
	return s
}

func (f *fakeWatches) Watch(s grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]) error {
	r, err := s.Recv()
	if err != nil {
		return err
	}
	step := f.next(r.GetCreateRequest())
	h := &pb.ResponseHeader{Revision: step.revision}
	if err := s.Send(&pb.WatchResponse{Header: h, Created: true}); err != nil {
		return err
	}
	for _, rev := range step.revisions {
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("k"), Value: fmt.Append(nil, rev), ModRevision: rev}}
		if err := s.Send(&pb.WatchResponse{Header: h, Events: []*mvccpb.Event{e}}); err != nil {
			return err
		}
	}
	if step.progress > 0 {
		if err := s.Send(&pb.WatchResponse{Header: &pb.ResponseHeader{Revision: step.progress}}); err != nil {
			return err
		}
	}
	if step.err == nil || step.seen != nil {
		select {
		case <-step.seen:
		case <-s.Context().Done():
		}
	}
	time.Sleep(step.lasts)
	return step.err
}

// start serves, and returns a client. At the end of the test all must have been as it should be.
func (f *fakeWatches) start(t *testing.T) *client.Client {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	s := grpc.NewServer()
	pipepb.RegisterPipeServer(s, &fakeNode{serve: func(_ int, s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
		return answerAll(s)
	}})
	pb.RegisterWatchServer(s, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // ends by Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.wrong) > 0 || len(f.steps) > 0 {
			t.Errorf("%v, and %d steps are left", f.wrong, len(f.steps))
		}
	})
	return open(t, at(l.Addr().String()))
}

// TestWatchFromNow: a watch of what comes next has nothing older, also if its connection is lost before anything has come.
func TestWatchFromNow(t *testing.T) {
	w := &fakeWatches{steps: []watchStep{
		{from: 0, revision: 10, err: status.Error(codes.Unavailable, "the node is gone")},
		{from: 10, revision: 11, revisions: []int64{10, 11}},
	}}
	got, err := events(t.Context(), w.start(t), &pb.WatchCreateRequest{Key: []byte("k")}, 1)
	if got != "PUT:k=11" || err != nil {
		t.Errorf("%s, %v", got, err)
	}
}

// TestQuietWatch: a watch without changes goes on behind what the node says that it has seen, which may be compacted by then.
func TestQuietWatch(t *testing.T) {
	w := &fakeWatches{steps: []watchStep{
		{from: 5, revision: 10, progress: 20, err: rpctypes.ErrGRPCNoLeader},
		{from: 21, revision: 21, revisions: []int64{21}},
	}}
	got, err := events(t.Context(), w.start(t), &pb.WatchCreateRequest{Key: []byte("k"), StartRevision: 5}, 1)
	if got != "PUT:k=21" || err != nil {
		t.Errorf("%s, %v", got, err)
	}
}

// TestWatchGoesOn: a watch that a node ends for lack of a leader goes on behind what it had, also if it had nothing.
func TestWatchGoesOn(t *testing.T) {
	seen := make(chan struct{})
	w := &fakeWatches{steps: []watchStep{
		{from: 0, revision: 10, err: rpctypes.ErrGRPCNoLeader},
		{from: 11, revision: 12, revisions: []int64{11, 12}, err: rpctypes.ErrGRPCNoLeader, seen: seen},
		{from: 13, revision: 13, revisions: []int64{13}},
	}}
	c := w.start(t)
	want := int64(11)
	for e, err := range c.Watch(t.Context(), &pb.WatchCreateRequest{Key: []byte("k")}) {
		if err != nil || e.GetKv().GetModRevision() != want {
			t.Fatalf("%v, %v, want revision %d", e, err, want)
		}
		if want == 12 {
			close(seen)
		}
		if want++; want > 13 {
			break
		}
	}
}

// TestWatchWithNodesKilled: while nodes are killed and started again, a watch has each acknowledged put once, in order.
func TestWatchWithNodesKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("three nodes, and elections")
	}
	s := embedtest.New(t, embedtest.Nodes(3))
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	c := open(t, at(s.Endpoints()...))
	first, err := c.Put(ctx, "w/", "")
	must(t, err)
	var (
		mu    sync.Mutex
		acked []int64 // guarded by mu
	)
	stop, wrote := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(wrote)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if r, err := c.Put(ctx, fmt.Sprintf("w/%c", 'a'+i%26), "v"); err == nil {
				mu.Lock()
				acked = append(acked, r.GetHeader().GetRevision())
				mu.Unlock()
			}
		}
	}()
	seen := make(chan int64, 1<<20)
	watched := make(chan error, 1)
	go func() {
		r := &pb.WatchCreateRequest{Key: []byte("w/"), RangeEnd: []byte("w0"), StartRevision: first.GetHeader().GetRevision() + 1}
		for e, err := range c.Watch(ctx, r) {
			if err != nil {
				watched <- err
				return
			}
			seen <- e.GetKv().GetModRevision()
			if string(e.GetKv().GetKey()) == "w/~end" {
				watched <- nil
				return
			}
		}
	}()
	for n := range 3 {
		time.Sleep(500 * time.Millisecond) // events before the kill
		s.Node(n).Kill()
		s.Node(n).Start()
	}
	close(stop)
	<-wrote
	for {
		if _, err := c.Put(ctx, "w/~end", ""); err == nil {
			break
		} else if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	must(t, <-watched)
	close(seen)
	got, last := map[int64]bool{}, int64(0)
	for rev := range seen {
		if rev <= last {
			t.Fatalf("revision %d comes behind %d", rev, last)
		}
		got[rev], last = true, rev
	}
	if len(acked) == 0 {
		t.Error("nothing was acknowledged")
	}
	for _, rev := range acked {
		if !got[rev] {
			t.Errorf("the watch has nothing of revision %d", rev)
		}
	}
}
