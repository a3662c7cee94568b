package rawwatch

import (
	"errors"
	"slices"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// TestRawWatch: decoding in place agrees with protobuf, and a watcher's revisions must
// ascend.
func TestRawWatch(t *testing.T) {
	var values []string
	total := 0
	w := &Watch{
		last: make([]int64, 2),
		take: func(n int) { total += n }, event: func(v []byte) { values = append(values, string(v)) },
	}
	read := func(r *pb.WatchResponse) error {
		b, err := proto.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		half := len(b) / 2
		return codec{}.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b[:half]), mem.SliceBuffer(b[half:])}, w)
	}
	event := func(mod int64, value string) *mvccpb.Event {
		return &mvccpb.Event{
			Kv:     &mvccpb.KeyValue{Key: []byte("k"), CreateRevision: 2, ModRevision: mod, Version: 3, Value: []byte(value), Lease: 9},
			PrevKv: &mvccpb.KeyValue{Key: []byte("k"), ModRevision: 999, Value: []byte("before")},
		}
	}
	h := &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 7, Revision: 12, RaftTerm: 3}
	if err := read(&pb.WatchResponse{Header: h, WatchId: 1, Created: true}); err != nil || !w.answer.created || w.answer.id != 1 {
		t.Fatalf("created: %+v, %v", w.answer, err)
	}
	if err := read(&pb.WatchResponse{Header: h, WatchId: 1, Events: []*mvccpb.Event{event(5, "a"), event(8, "b")}}); err != nil {
		t.Fatal(err)
	}
	if err := read(&pb.WatchResponse{Header: h, Events: []*mvccpb.Event{event(5, "c")}}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(values, []string{"a", "b", "c"}) || total != 3 || !slices.Equal(w.last, []int64{5, 8}) {
		t.Errorf("values %q, %d events, last revisions %v", values, total, w.last)
	}
	if err := read(&pb.WatchResponse{Header: h, WatchId: 1, Events: []*mvccpb.Event{event(8, "again")}}); !errors.Is(err, errOrder) {
		t.Errorf("a revision that comes twice: %v", err)
	}
	if err := read(&pb.WatchResponse{Header: h, Canceled: true, CancelReason: "because"}); !errors.Is(err, errCanceled) {
		t.Errorf("canceled: %v", err)
	}
	if err := read(&pb.WatchResponse{Header: h, WatchId: 2, Events: []*mvccpb.Event{event(9, "d")}}); err == nil {
		t.Error("events of a watcher that is not there were taken")
	}
}
