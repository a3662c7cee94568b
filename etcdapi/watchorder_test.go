package etcdapi

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy/adapter"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/watch"
)

// virtualStream is a client's stream of watchers without a network, in virtual time.
type virtualStream struct {
	grpc.ServerStream
	t    *testing.T
	ctx  context.Context //nolint:containedctx // it is the stream's
	in   chan *pb.WatchRequest
	out  chan *pb.WatchResponse
	o    *oneRange
	done chan error
}

func (v *virtualStream) Context() context.Context { return v.ctx }

func (v *virtualStream) Recv() (*pb.WatchRequest, error) {
	select {
	case r, ok := <-v.in:
		if !ok {
			return nil, io.EOF
		}
		return r, nil
	case <-v.ctx.Done():
		return nil, v.ctx.Err()
	}
}

func (v *virtualStream) Send(r *pb.WatchResponse) error {
	select {
	case v.out <- r:
		return nil
	case <-v.ctx.Done():
		return v.ctx.Err()
	}
}

func (v *virtualStream) SendMsg(m any) error {
	var r pb.WatchResponse
	if err := proto.Unmarshal(m.(*sharedResponse).encode().Materialize(), &r); err != nil {
		return err
	}
	return v.Send(&r)
}

// inVirtualTime calls f with a stream of a server whose events come late. The stream is cancelled
// afterwards, and has to end.
func inVirtualTime(t *testing.T, late time.Duration, f func(v *virtualStream)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		o := newOneRange()
		o.late = late
		hub := watch.New(watch.Config{Self: 1, Clock: clock.Virtual(), Log: o, Ranges: o, Feeds: o})
		s := New(Options{Users: everybody(t), KV: &fakeKV{}, Members: &fakeNode{}, Node: &fakeNode{}, Clock: clock.Virtual(), Metrics: NewMetrics(nil), Watches: hub, NoGateway: true})
		ctx, cancel := context.WithCancel(t.Context())
		v := &virtualStream{t: t, ctx: ctx, in: make(chan *pb.WatchRequest), out: make(chan *pb.WatchResponse, 100), o: o, done: make(chan error, 1)}
		go func() { v.done <- (&watchServer{s: s}).Watch(v) }()
		f(v)
		cancel()
		began := time.Now()
		if err := <-v.done; time.Since(began) > 0 || err == nil {
			t.Errorf("the stream ended %v after its client: %v", time.Since(began), err)
		}
		hub.Stop()
		s.Stop(t.Context())
	})
}

// TestLocalWatchersTakeMessages: the client of locks, which is in this process, gets events as messages. Encoded ones
// ended the process.
func TestLocalWatchersTakeMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOneRange()
		hub := watch.New(watch.Config{Self: 1, Clock: clock.Virtual(), Log: o, Ranges: o, Feeds: o})
		s := New(Options{
			Users: everybody(t), KV: &fakeKV{}, Leases: &fakeLeases{}, Members: &fakeNode{}, Node: &fakeNode{}, Clock: clock.Virtual(), Metrics: NewMetrics(nil),
			Watches: hub, NoGateway: true,
		})
		ctx, cancel := context.WithCancel(t.Context())
		stream, err := adapter.WatchServerToWatchClient(s.locks.services.watches).Watch(ctx)
		must(t, err)
		for range 2 { // events are encoded for several watchers
			must(t, stream.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
			if r := recv(t, stream); !r.Created {
				t.Fatalf("told first: %v", r)
			}
		}
		o.put("a")
		for range 2 {
			if r := recv(t, stream); len(r.Events) != 1 || string(r.Events[0].Kv.Key) != "a" {
				t.Errorf("told of a put: %v", r)
			}
		}
		cancel()
		synctest.Wait()
		hub.Stop()
		s.Stop(context.Background())
	})
}

// send sends a request, which is taken at once.
func (v *virtualStream) send(r *pb.WatchRequest) {
	v.t.Helper()
	began := time.Now()
	select {
	case v.in <- r:
	case <-time.After(time.Minute):
		v.t.Fatalf("nobody takes %v", r)
	}
	if d := time.Since(began); d > 0 {
		v.t.Errorf("%v waited %v to be taken", r, d)
	}
}

// told waits for the next response, and returns it and when it came.
func (v *virtualStream) told() (r *pb.WatchResponse, after time.Duration) {
	v.t.Helper()
	began := time.Now()
	select {
	case r = <-v.out:
	case <-time.After(time.Minute):
		v.t.Fatal("nothing is told")
	}
	return r, time.Since(began)
}

// silent says whether nothing comes for so long.
func (v *virtualStream) silent(d time.Duration) bool {
	time.Sleep(d)
	return len(v.out) == 0
}

// watches creates a watcher of the key, with the id.
func (v *virtualStream) watches(id int64, key string) {
	v.t.Helper()
	v.send(createWatch(&pb.WatchCreateRequest{Key: []byte(key), WatchId: id}))
	if r, _ := v.told(); !r.Created || r.Canceled {
		v.t.Fatalf("made: %v", r)
	}
	time.Sleep(time.Second)
}

func cancelRequest(id int64) *pb.WatchRequest {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}}
}

// controls are requests whose answers name a revision, beside a watcher 1 of a and 2 of b.
var controls = []struct {
	name    string
	request *pb.WatchRequest
}{
	{"an empty range", createWatch(&pb.WatchCreateRequest{Key: []byte("b"), RangeEnd: []byte("a")})},
	{"an id that there is", createWatch(&pb.WatchCreateRequest{Key: []byte("b"), WatchId: 1})},
	{"a start that is none", createWatch(&pb.WatchCreateRequest{Key: []byte("b"), StartRevision: -1})},
	{"made", createWatch(&pb.WatchCreateRequest{Key: []byte("b")})},
	{"made in the past", createWatch(&pb.WatchCreateRequest{Key: []byte("b"), StartRevision: 1})},
	{"cancelled", cancelRequest(2)},
}

// An answer that names a revision follows the events of the stream's other watchers up to there: no
// event at or below it follows. It comes at once if there is nothing to wait for.
func TestWatchAnswersBehindEvents(t *testing.T) {
	const late = 7 * time.Millisecond
	for _, c := range controls {
		inVirtualTime(t, late, func(v *virtualStream) {
			v.watches(1, "a")
			v.watches(2, "b")
			v.send(c.request)
			if r, after := v.told(); after > 0 || r.GetHeader().GetRevision() != 1 {
				t.Errorf("%s: told after %v: %v", c.name, after, r)
			}
		})
		inVirtualTime(t, late, func(v *virtualStream) {
			v.watches(1, "a")
			v.watches(2, "b")
			for rev := int64(2); rev <= 4; rev++ {
				v.o.put("a")
			}
			v.send(c.request)
			for seen := int64(1); ; {
				r, after := v.told()
				if r.WatchId == 1 && len(r.Events) > 0 {
					seen = r.Events[len(r.Events)-1].Kv.ModRevision
					continue
				}
				if rev := r.GetHeader().GetRevision(); seen != rev || rev != 4 || after > 0 {
					t.Errorf("%s: told at revision %d %v behind the event of %d: %v", c.name, rev, after, seen, r)
				}
				return
			}
		})
	}
}

// Answers leave in the order of their requests, even if only some of them have to wait. Meanwhile
// requests are taken, and events leave.
func TestWatchAnswersInOrder(t *testing.T) {
	inVirtualTime(t, 50*time.Millisecond, func(v *virtualStream) {
		v.watches(1, "a")
		v.watches(2, "b")
		v.o.put("a")
		for _, c := range controls {
			v.send(c.request)
		}
		v.o.put("a")
		for events, answered := 0, 0; answered < len(controls); {
			r, _ := v.told()
			if events += len(r.Events); len(r.Events) > 0 {
				continue
			}
			made := answered == 3 || answered == 4
			if events == 0 || r.Canceled == made || r.Created == (answered == 5) {
				t.Errorf("%s: behind %d events: %v", controls[answered].name, events, r)
			}
			answered++
		}
	})
}

// Without the events an answer waits for some seconds, once. Answers behind it do not wait until
// events come again. The end of a stream does not wait either.
func TestWatchAnswersWithoutEvents(t *testing.T) {
	inVirtualTime(t, time.Hour, func(v *virtualStream) {
		v.watches(1, "a")
		v.o.put("a")
		for i := range controls[:4] {
			v.send(controls[i].request)
		}
		if !v.silent(settleWithin - time.Millisecond) {
			t.Error("an answer did not wait")
		}
		for i := range controls[:4] {
			if r, after := v.told(); after > time.Millisecond || r.Header.Revision != 2 {
				t.Errorf("%s: told after %v: %v", controls[i].name, after, r)
			}
		}
		v.send(cancelRequest(0))
		if r, after := v.told(); after > 0 || !r.Canceled {
			t.Errorf("cancelled after %v: %v", after, r)
		}
		v.o.put("a")
		v.send(controls[0].request)
		if r, after := v.told(); after > 0 {
			t.Errorf("told after %v: %v", after, r)
		}
	})
	inVirtualTime(t, time.Hour, func(v *virtualStream) {
		v.watches(1, "a")
		v.o.put("a")
		for range 2*controlQueue + 1 {
			v.send(controls[0].request)
		}
		if !v.silent(time.Second) {
			t.Error("an answer did not wait")
		}
	})
}

// Without a sequencer the first answer waits for it for some seconds, and those behind it hardly
// wait.
func TestWatchAnswersWithoutSequencer(t *testing.T) {
	inVirtualTime(t, time.Millisecond, func(v *virtualStream) {
		v.watches(1, "a")
		v.o.mu.Lock()
		v.o.slow = time.Hour
		v.o.mu.Unlock()
		for range 10 {
			v.send(controls[0].request)
		}
		if !v.silent(headerWithin - time.Millisecond) {
			t.Error("the first answer did not wait")
		}
		for i := range 10 {
			if r, after := v.told(); after > headerAgain || r.Header.Revision != 1 {
				t.Errorf("answer %d was told after %v: %v", i, after, r)
			}
		}
	})
}

// A client that takes events as fast as they come gets its answers all the same.
func TestWatchAnswersBetweenEvents(t *testing.T) {
	inVirtualTime(t, time.Millisecond, func(v *virtualStream) {
		v.watches(1, "a")
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for ; ; time.Sleep(100 * time.Microsecond) {
				select {
				case <-stop:
					return
				default:
					v.o.put("a")
				}
			}
		}()
		time.Sleep(10 * time.Millisecond)
		v.send(controls[0].request)
		began := time.Now()
		for r, _ := v.told(); !r.Canceled; r, _ = v.told() {
		}
		if d := time.Since(began); d > 10*time.Millisecond {
			t.Errorf("answered after %v", d)
		}
		close(stop)
		<-stopped
	})
}

// A header's revision is the sequencer's, however slow the sequencer is. Meanwhile only requests
// wait that need its answer themselves.
func TestWatchAnswersWaitForTheSequencer(t *testing.T) {
	inVirtualTime(t, 0, func(v *virtualStream) {
		v.watches(1, "a")
		v.o.mu.Lock()
		v.o.slow = time.Second
		v.o.mu.Unlock()
		v.send(controls[0].request)
		v.send(cancelRequest(1))
		v.o.put("b")
		for i := range 2 {
			if r, after := v.told(); after != time.Second || !r.Canceled || r.Header.Revision != 2 {
				t.Errorf("answer %d after %v: %v", i, after, r)
			}
		}
		v.o.mu.Lock()
		v.o.slow, v.o.broken = time.Hour, kverror.New(kverror.TooManyRequests, "a test")
		v.o.mu.Unlock()
		v.send(controls[0].request)
		if r, after := v.told(); after != headerWithin || !r.Canceled || r.Header.Revision != 2 {
			t.Errorf("answer after %v: %v", after, r)
		}
	})
}
