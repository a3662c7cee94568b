package etcdapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/kverror"
)

// TestRangeStream: the parts make up one answer, with a complete header in the last part. Errors
// are etcd's, before the first part and behind it.
func TestRangeStream(t *testing.T) {
	r := newRig(t, "http", nil)
	kv := pb.NewKVClient(r.client(t, clientv3.Config{}).ActiveConnection())
	r.kv.value, r.kv.parts = bytes.Repeat([]byte("v"), 100_000), 20
	stream, err := kv.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_ASCEND, SortTarget: pb.RangeRequest_KEY})
	if err != nil {
		t.Fatal(err)
	}
	var all pb.RangeResponse
	for n := 1; ; n++ {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if last := n == 21; last != (part.RangeResponse.Header != nil) || len(part.RangeResponse.Kvs) != 1 {
			t.Fatalf("part %d has the header %v and %d keys", n, part.RangeResponse.Header, len(part.RangeResponse.Kvs))
		}
		proto.Merge(&all, part.RangeResponse)
	}
	h := all.Header
	if len(all.Kvs) != 21 || all.Count != 21 || !all.More || h.ClusterId != 0xc || h.MemberId != 0xb || h.RaftTerm != 5 || h.Revision != 7 || !bytes.Equal(all.Kvs[20].Value, r.kv.value) {
		t.Errorf("%d keys, count %d, more %v, header %v", len(all.Kvs), all.Count, all.More, h)
	}
	for _, c := range []struct {
		req  *pb.RangeRequest
		fail error
		want error
	}{
		{req: &pb.RangeRequest{}, want: rpctypes.ErrGRPCEmptyKey},
		{req: &pb.RangeRequest{Key: []byte("k"), SortOrder: 7}, want: rpctypes.ErrGRPCInvalidSortOption},
		{req: &pb.RangeRequest{Key: []byte("k"), SortOrder: pb.RangeRequest_DESCEND}, want: errStreamOrder},
		{req: &pb.RangeRequest{Key: []byte("k"), SortTarget: pb.RangeRequest_MOD, SortOrder: pb.RangeRequest_ASCEND}, want: errStreamOrder},
		{req: &pb.RangeRequest{Key: []byte("k"), MaxCreateRevision: -1}, want: errStreamFilter},
		{req: &pb.RangeRequest{Key: []byte("k")}, fail: kverror.FutureRevision, want: rpctypes.ErrGRPCFutureRev},
	} {
		r.kv.set(c.fail, false)
		stream, err := kv.RangeStream(t.Context(), c.req)
		if err == nil {
			_, err = stream.Recv()
		}
		if got, want := status.Convert(err), status.Convert(c.want); got.Code() != want.Code() || got.Message() != want.Message() {
			t.Errorf("%v: %v, want %v", c.req, err, c.want)
		}
	}
	// A target without an order gives key order.
	r.kv.set(nil, false)
	stream, err = kv.RangeStream(t.Context(), &pb.RangeRequest{Key: []byte("k"), SortTarget: pb.RangeRequest_MOD})
	if err == nil {
		_, err = stream.Recv()
	}
	if err != nil {
		t.Error(err)
	}
}

// awaitUnsent waits until gRPC holds so many bytes. It bounds only a test that hangs: with the race
// detector and beside other work, an answer of 24 MiB may take more than ten seconds to be encoded.
func (r *rig) awaitUnsent(t *testing.T, want func(int64) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for !want(r.opts.Answers.Held()) {
		if clock.Sleep(ctx, clock.System(), time.Millisecond) != nil {
			t.Fatalf("%d bytes are unsent", r.opts.Answers.Held())
		}
	}
}

// TestUnsentAnswersAreBounded: bytes that clients have not taken count until they do or are gone.
// Reads of many keys wait meanwhile if they find no room, within their deadlines.
func TestUnsentAnswersAreBounded(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.Answers = budget.New(3<<20, 5<<20) })
	r.kv.value = make([]byte, 4<<20)
	lazy := r.client(t, clientv3.Config{})
	span := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}
	// A stream whose messages nobody receives fills its window.
	ctx, cancel := context.WithCancel(t.Context())
	desc := pb.KV_ServiceDesc.Streams[0]
	stream, err := lazy.ActiveConnection().NewStream(ctx, &desc, pb.KV_Range_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(span); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	r.awaitUnsent(t, func(n int64) bool { return n > 4<<20 })
	other := r.client(t, clientv3.Config{})
	kv := pb.NewKVClient(other.ActiveConnection())
	soon, done := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer done()
	if _, err := kv.Range(soon, span); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a read of many keys: %v", err)
	}
	patient := make(chan error, 1)
	go func() {
		_, err := other.Get(t.Context(), "a", clientv3.WithRange("b"))
		patient <- err
	}()
	if _, err := other.Put(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	cancel()
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
	if err := <-patient; err != nil {
		t.Error(err)
	}
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
}

// TestSpanAnswers: an answer is a RangeResponse, of whatever size, and gives back what it holds
// piece by piece.
func TestSpanAnswers(t *testing.T) {
	answers := budget.New(1<<30, 1<<30)
	for _, c := range []struct {
		values []int   // the sizes of encoded values
		whole  int     // of one that is not encoded
		held   []int64 // after each piece
	}{
		{values: []int{10, 20}, held: []int64{0, 0}},
		{held: []int64{0}},
		{values: []int{1 << 20, 100, 1 << 20}, held: []int64{2 << 20, 1 << 20, 1 << 20, 0}},
		{whole: 10, held: []int64{0}},
		{whole: 1 << 20, held: []int64{0}},
	} {
		share := answers.Share()
		a := &spanAnswer{rest: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 9}, Count: 77, More: true}, share: &share}
		want := proto.CloneOf(a.rest)
		for i, n := range c.values {
			kv := &mvccpb.KeyValue{Key: fmt.Append(nil, i), Value: make([]byte, n)}
			want.Kvs = append(want.Kvs, kv)
			k, err := proto.Marshal(&pb.RangeResponse{Kvs: []*mvccpb.KeyValue{kv}})
			must(t, err)
			a.keys = append(a.keys, k)
			must(t, share.Add(int64(len(k))))
		}
		if c.whole > 0 {
			kv := &mvccpb.KeyValue{Key: []byte("k"), Value: make([]byte, c.whole)}
			want.Kvs, a.rest.Kvs = append(want.Kvs, kv), []*mvccpb.KeyValue{kv}
			must(t, share.Add(int64(c.whole)+200))
		}
		b, err := newCountingCodec(NewMetrics(nil), answers).Marshal(a)
		must(t, err)
		got := &pb.RangeResponse{}
		must(t, proto.Unmarshal(b.Materialize(), got))
		if !proto.Equal(got, want) {
			t.Errorf("%v: not the answer", c.values)
		}
		for i, part := range b {
			part.Free()
			if held := answers.Held(); held < c.held[i] || held > c.held[i]+c.held[i]/100 {
				t.Errorf("%v: %d bytes are held after piece %d, want %d", c.values, held, i, c.held[i])
			}
		}
		if held := answers.Held(); held != 0 {
			t.Errorf("%v: %d bytes are held in the end", c.values, held)
		}
	}
}

// TestStreamedKeys: every part is a RangeStreamResponse.
func TestStreamedKeys(t *testing.T) {
	kvs := []*mvccpb.KeyValue{{Key: []byte("k"), ModRevision: 3}, {Key: []byte("l"), Value: []byte("v")}}
	keys, err := proto.Marshal(&pb.RangeResponse{Kvs: kvs})
	if err != nil {
		t.Fatal(err)
	}
	rest := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: 3}, More: true, Count: 1 << 40}
	for _, s := range []*streamedKeys{{}, {keys: keys}, {last: rest}, {keys: keys, last: rest}} {
		b, err := s.encode()
		if err != nil {
			t.Fatal(err)
		}
		var got pb.RangeStreamResponse
		if err := proto.Unmarshal(b.Materialize(), &got); err != nil {
			t.Fatal(err)
		}
		want := &pb.RangeResponse{}
		if s.last != nil {
			want = proto.CloneOf(s.last)
		}
		if s.keys != nil {
			want.Kvs = kvs
		}
		if !proto.Equal(got.GetRangeResponse(), want) {
			t.Errorf("%v, want %v", got.GetRangeResponse(), want)
		}
	}
	if _, err := (&streamedKeys{last: &pb.RangeResponse{Kvs: kvs}}).encode(); !errors.Is(err, errLateKeys) {
		t.Error(err)
	}
}

// A response with events encoded for many equals protobuf's encoding, for events of any size.
func TestSharedResponse(t *testing.T) {
	for _, id := range []int64{0, 1, 300} {
		for _, size := range []int{10, copiedBytes, 5 * copiedBytes} {
			header := &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 7, Revision: 1 << 40, RaftTerm: 3}
			head, err := appendWatchHeader(nil, header)
			if err != nil {
				t.Fatal(err)
			}
			whole := &pb.WatchResponse{Header: header, WatchId: id}
			r := &sharedResponse{head: head, id: id}
			for i := range 3 {
				e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("k"), ModRevision: int64(i + 1), Value: bytes.Repeat([]byte("v"), size)}}
				b, err := proto.Marshal(&pb.WatchResponse{Events: []*mvccpb.Event{e}})
				if err != nil {
					t.Fatal(err)
				}
				whole.Events, r.events = append(whole.Events, e), append(r.events, b)
			}
			want, err := proto.Marshal(whole)
			if got := r.encode().Materialize(); err != nil || !bytes.Equal(got, want) {
				t.Errorf("watcher %d, values of %d bytes: %d bytes in place of %d, %v", id, size, len(got), len(want), err)
			}
		}
	}
}
