package etcdapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/watch"
)

// oneRange plays a cluster of one range that never changes, where a put is an event at once.
type oneRange struct {
	mu sync.Mutex
	// Guarded by mu. moved is closed and replaced at each event.
	rev, compacted keyspace.Revision
	events         []rangeapi.Event
	moved          chan struct{}
	broken         error
	// asked counts the requests for the current revision. Guarded by mu.
	asked int
	// slow is how long such a request takes. Guarded by mu.
	slow time.Duration
	// late is how long an event takes to its gateway. It does not change.
	late time.Duration
}

func (o *oneRange) breakSequencer(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.broken = err
}

var oneDescriptor = keyspace.Descriptor{Range: 1, Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}}}

func newOneRange() *oneRange { return &oneRange{rev: 1, compacted: -1, moved: make(chan struct{})} }

func (o *oneRange) put(keys ...string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.rev++
	for i, k := range keys {
		v := mvcc.Version{Key: []byte(k), Mod: o.rev, Create: o.rev, Version: 1, Sub: uint32(i), Value: []byte(strings.Repeat("v", 100))}
		o.events = append(o.events, rangeapi.Event{Version: v, Looked: true})
	}
	close(o.moved)
	o.moved = make(chan struct{})
}

func (o *oneRange) after(rev keyspace.Revision) (events []rangeapi.Event, last keyspace.Revision, moved chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, e := range o.events {
		if e.Mod > rev {
			events = append(events, e)
		}
	}
	return events, o.rev, o.moved
}

func (o *oneRange) FollowLog(ctx context.Context, known sequencer.LogPosition, take func(*sequencer.LogPart)) {
	for at := known.Last; ctx.Err() == nil; {
		_, last, moved := o.after(at)
		if last > at {
			h := sequencer.Allocation{First: at + 1, Count: uint32(last - at), Range: 1, Generation: 1}
			take(&sequencer.LogPart{Term: 1, After: at, Last: last, Records: []sequencer.Allocation{h}})
			at = last
		}
		select {
		case <-moved:
		case <-ctx.Done():
		}
	}
}

func (o *oneRange) Locate(context.Context, keyspace.Span) ([]router.Located, error) {
	return []router.Located{{Descriptor: oneDescriptor, Leader: 1}}, nil
}
func (o *oneRange) Learn(...keyspace.Descriptor)  {}
func (o *oneRange) Refresh(context.Context) error { return nil }
func (o *oneRange) SpanOf(keyspace.RangeID, keyspace.Generation) (keyspace.Span, bool) {
	return keyspace.Span{}, true
}

func (o *oneRange) Current(ctx context.Context) (keyspace.SequenceAnswer, error) {
	o.mu.Lock()
	slow := o.slow
	o.mu.Unlock()
	if err := clock.Sleep(ctx, clock.System(), slow); err != nil {
		return keyspace.SequenceAnswer{}, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asked++
	return keyspace.SequenceAnswer{Current: o.rev, Compacted: o.compacted}, o.broken
}

func (o *oneRange) AwaitResolved(context.Context, keyspace.NodeID, *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	_, last, _ := o.after(0)
	return rangeapi.FeedPosition{Term: 1, Number: uint64(last)}, nil
}

func (o *oneRange) History(_ context.Context, _ keyspace.NodeID, q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	events, _, _ := o.after(q.From - 1)
	events = slices.DeleteFunc(events, func(e rangeapi.Event) bool { return e.Mod > q.To || !q.Span.Contains(e.Key) })
	return &rangeapi.HistoryPage{Events: events, Next: q.To + 1}, nil
}

func (o *oneRange) OpenFeeds(context.Context, keyspace.NodeID) (watch.FeedStream, error) {
	return &oneFeed{o: o, opened: make(chan rangeapi.FeedOrder, 1)}, nil
}

type oneFeed struct {
	o      *oneRange
	opened chan rangeapi.FeedOrder
	order  rangeapi.FeedOrder
	at     keyspace.Revision
}

func (f *oneFeed) Order(_ context.Context, orders []rangeapi.FeedOrder) error {
	for _, o := range orders {
		if !o.Close {
			f.opened <- o
		}
	}
	return nil
}

func (f *oneFeed) Recv(ctx context.Context) ([]rangeapi.FeedPart, error) {
	for {
		events, last, moved := f.o.after(f.at)
		if f.order.ID != 0 && last > f.at {
			if err := clock.Sleep(ctx, clock.System(), f.o.late); err != nil && len(events) > 0 {
				return nil, err
			}
			f.at = last
			return []rangeapi.FeedPart{{ID: f.order.ID, Resolved: last, Position: rangeapi.FeedPosition{Term: 1, Number: uint64(last)}, Events: events}}, nil
		}
		select {
		case f.order = <-f.opened:
			f.at = f.order.From - 2
		case <-moved:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
func (f *oneFeed) Close() {}

// watchRig is a server with watchers of one range, and a raw stream to it.
func watchRig(t *testing.T, change func(*Options)) (*rig, *oneRange, pb.Watch_WatchClient) {
	t.Helper()
	return watchRigOf(t, change, 0)
}

// watchRigOf is watchRig with so many bytes for idle watchers.
func watchRigOf(t *testing.T, change func(*Options), idleBytes int64) (*rig, *oneRange, pb.Watch_WatchClient) {
	t.Helper()
	o := newOneRange()
	hub := watch.New(watch.Config{Self: 1, Clock: clock.System(), Log: o, Ranges: o, Feeds: o, IdleBytes: idleBytes})
	t.Cleanup(hub.Stop)
	r := newRig(t, "http", func(opts *Options) {
		opts.Watches = hub
		if change != nil {
			change(opts)
		}
	})
	conn, err := grpc.NewClient("passthrough:///"+r.addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ctx := metadata.AppendToOutgoingContext(t.Context(), rpctypes.MetadataRequireLeaderKey, rpctypes.MetadataHasLeader)
	st, err := pb.NewWatchClient(conn).Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return r, o, st
}

func createWatch(r *pb.WatchCreateRequest) *pb.WatchRequest {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func recv(t *testing.T, st pb.Watch_WatchClient) *pb.WatchResponse {
	t.Helper()
	resp, err := st.Recv()
	must(t, err)
	return resp
}

// A watcher's first message says that it was created, under a complete header; the events of its
// past follow.
func TestWatchCreatedComesFirst(t *testing.T) {
	_, o, st := watchRig(t, nil)
	const all = 20
	for range all {
		o.put("a")
	}
	seen := map[int64]int{}
	for range all {
		must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a"), StartRevision: 2})))
	}
	for done := 0; done < all; {
		resp := recv(t, st)
		n, created := seen[resp.WatchId]
		if resp.Created == created {
			t.Fatalf("watcher %d after %d events: %v", resp.WatchId, n, resp)
		}
		if h := resp.Header; h.ClusterId != 0xc || h.MemberId != 0xb || h.RaftTerm != 5 || h.Revision != all+1 {
			t.Fatalf("header %v", h)
		}
		if seen[resp.WatchId] = n + len(resp.Events); seen[resp.WatchId] == all {
			done++
		}
	}
}

// A watcher for which there is no memory is refused with what to do. The stream and its other
// watchers go on.
func TestWatchersBeyondTheMemoryAreRefused(t *testing.T) {
	_, o, st := watchRigOf(t, nil, 30<<10) // a stream and a few watchers
	taken := 0
	for ; ; taken++ {
		must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
		resp := recv(t, st)
		if resp.Created && resp.Canceled {
			if resp.WatchId != invalidWatchID || resp.CancelReason != reasonTooMany {
				t.Errorf("refused by %v", resp)
			}
			break
		}
		if !resp.Created || taken > 5 {
			t.Fatalf("after %d watchers: %v", taken, resp)
		}
	}
	if taken == 0 {
		t.Fatal("no watcher is taken")
	}
	o.put("a")
	for range taken {
		if resp := recv(t, st); len(resp.Events) != 1 {
			t.Errorf("a watcher that was taken got %v", resp)
		}
	}
	must(t, st.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: 0}}}))
	if resp := recv(t, st); !resp.Canceled {
		t.Errorf("cancelled: %v", resp)
	}
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	if resp := recv(t, st); !resp.Created || resp.Canceled {
		t.Errorf("when another has left: %v", resp)
	}
}

// A response larger than a message comes in fragments to a client that wants them.
func TestWatchFragments(t *testing.T) {
	_, o, st := watchRig(t, func(opts *Options) { opts.MaxRequestBytes = 2000 - grpcOverheadBytes })
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte{0}, Fragment: true})))
	recv(t, st)
	var keys []string
	for i := range 50 {
		keys = append(keys, fmt.Sprintf("k%02d", i))
	}
	o.put(keys...)
	var got []string
	for fragments := 1; ; fragments++ {
		resp := recv(t, st)
		for _, e := range resp.Events {
			got = append(got, string(e.Kv.Key))
		}
		if !resp.Fragment {
			if fragments < 3 {
				t.Errorf("%d fragments", fragments)
			}
			break
		}
	}
	if !slices.Equal(got, keys) {
		t.Errorf("got %v", got)
	}
}

// A progress request on a stream without watchers gets no answer. With a slow sequencer, a watcher
// created behind the request does not answer it.
func TestWatchProgressBeforeTheFirstWatcher(t *testing.T) {
	_, o, st := watchRig(t, nil)
	must(t, st.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{}}))
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	if resp := recv(t, st); !resp.Created || resp.Canceled {
		t.Errorf("created: %v", resp)
	}
	o.put("a")
	if resp := recv(t, st); len(resp.Events) != 1 {
		t.Errorf("got %v", resp)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.asked != 1 {
		t.Errorf("%d questions for the current revision: the watcher's is one", o.asked)
	}
}

// An idle watcher gets progress once per interval.
func TestWatchProgressNotify(t *testing.T) {
	_, o, st := watchRig(t, func(opts *Options) { opts.WatchProgressInterval = 100 * time.Millisecond })
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a"), ProgressNotify: true})))
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("b")})))
	for created, told := 0, false; !told; { // progress may come before the second watcher is there
		resp := recv(t, st)
		if resp.Created && !resp.Canceled {
			if created++; created == 2 {
				o.put("z")
			}
			continue
		}
		if len(resp.Events) != 0 || resp.WatchId != 0 || resp.Created || resp.Canceled {
			t.Fatalf("progress is %v", resp)
		}
		told = resp.Header.Revision >= 2
	}
}

// Streams that demand a leader end without one, and all end with the server.
func TestWatchStreamsEnd(t *testing.T) {
	r, _, st := watchRig(t, func(opts *Options) { opts.ElectionTimeout = 20 * time.Millisecond })
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	recv(t, st)
	r.node.leader.Store(0)
	if _, err := st.Recv(); rpctypes.ErrorDesc(err) != rpctypes.ErrorDesc(rpctypes.ErrGRPCNoLeader) {
		t.Errorf("without a leader: %v", err)
	}
	c := r.client(t, clientv3.Config{})
	plain, err := pb.NewWatchClient(c.ActiveConnection()).Watch(t.Context())
	must(t, err)
	must(t, plain.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	recv(t, plain)
	must(t, plain.CloseSend()) // it may still listen
	r.Stop(t.Context())        // it would wait for a stream that does not end
	if _, err := plain.Recv(); errors.Is(err, io.EOF) || rpctypes.ErrorDesc(err) != rpctypes.ErrorDesc(rpctypes.ErrGRPCStopped) {
		t.Errorf("at the end of the server: %v", err)
	}
}

// A sequencer that is away or overloaded ends no stream. Answers that need it wait or are left out,
// and others are sent.
func TestWatchStreamsOutliveTheSequencer(t *testing.T) {
	_, o, st := watchRig(t, nil)
	o.put("a")
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	recv(t, st)
	o.breakSequencer(kverror.New(kverror.TooManyRequests, "a test"))
	must(t, st.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{}}))
	must(t, st.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: 0}}}))
	if resp := recv(t, st); !resp.Canceled || resp.Header.Revision != 2 {
		t.Errorf("canceled: %v", resp)
	}
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("c"), RangeEnd: []byte("b")})))
	if resp := recv(t, st); !resp.Canceled || resp.CancelReason != reasonEmptyRange || resp.Header.Revision != 2 {
		t.Errorf("refused: %v", resp)
	}
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("a")})))
	time.AfterFunc(20*time.Millisecond, func() { o.breakSequencer(nil) })
	if resp := recv(t, st); !resp.Created || resp.Canceled {
		t.Errorf("created: %v", resp)
	}
}
