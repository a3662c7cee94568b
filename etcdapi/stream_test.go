package etcdapi

import (
	"bytes"
	"context"
	"errors"
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
	for !want(r.unsent.Load()) {
		if clock.Sleep(ctx, clock.System(), time.Millisecond) != nil {
			t.Fatalf("%d bytes are unsent", r.unsent.Load())
		}
	}
}

// TestUnsentAnswersAreBounded: bytes that clients have not taken count until they do or are gone.
// Reads of many keys are refused meanwhile.
func TestUnsentAnswersAreBounded(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.UnsentBytes = 3 << 20 })
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
	if _, err := kv.Range(t.Context(), span); status.Convert(err).Message() != rpctypes.ErrorDesc(rpctypes.ErrGRPCRequestTooManyRequests) || status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a read of many keys: %v", err)
	}
	if _, err := other.Put(t.Context(), "k", "v"); err != nil {
		t.Error(err)
	}
	cancel()
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
	if _, err := other.Get(t.Context(), "a", clientv3.WithRange("b")); err != nil {
		t.Error(err)
	}
	r.awaitUnsent(t, func(n int64) bool { return n == 0 })
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
