package kverror

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// TestTable checks that every row has a unique name and a status, and that nothing of
// unknown fate is repeated without asking.
func TestTable(t *testing.T) {
	names := map[string]Kind{}
	for _, r := range Table() {
		if r.Name == "" || r.GRPC == nil {
			t.Fatalf("kind %d has no row", r.Kind)
		}
		if other, dup := names[r.Name]; dup {
			t.Errorf("kinds %d and %d are both %q", other, r.Kind, r.Name)
		}
		names[r.Name] = r.Kind
		if c := status.Code(r.GRPC); c == codes.OK {
			t.Errorf("%s: code %s", r.Name, c)
		}
		if r.Fate == Unknown && r.Retry != RetryNever {
			t.Errorf("%s: fate unknown, and yet somebody repeats it", r.Name)
		}
		// A client of etcd identifies an error by its text. A write that the client may
		// repeat must not look like one of unknown fate.
		if r.Retry == RetryClient && errors.Is(rpctypes.Error(r.GRPC), rpctypes.ErrTimeout) {
			t.Errorf("%s: the client cannot tell it from a timeout", r.Name)
		}
		e := &Error{Kind: r.Kind}
		if !errors.Is(fmt.Errorf("put: %w", e), r.Kind) || e.Fate() != r.Fate || e.Retry() != r.Retry {
			t.Errorf("%s: the error does not carry its row", r.Name)
		}
		if got := GRPC(e); got.Error() != r.GRPC.Error() {
			t.Errorf("%s: GRPC %v, want %v", r.Name, got, r.GRPC)
		}
	}
}

func TestOf(t *testing.T) {
	base := &Error{Kind: NotLeader, Leader: 7}
	for _, c := range []struct {
		err  error
		want Kind
	}{
		{fmt.Errorf("x: %w", base), NotLeader},
		{fmt.Errorf("x: %w", Compacted), Compacted},
		{context.Canceled, Canceled},
		{fmt.Errorf("x: %w", context.DeadlineExceeded), DeadlineExceeded},
		{errors.New("boom"), Internal},
	} {
		if got := Of(c.err); got.Kind != c.want {
			t.Errorf("Of(%v) = %v, want %v", c.err, got, c.want)
		}
	}
	if Of(nil) != nil || GRPC(nil) != nil {
		t.Error("nil is an error")
	}
	if got := GRPC(New(Internal, "disk on fire")); status.Convert(got).Message() != "etcdserver: internal error: disk on fire" {
		t.Errorf("detail lost: %v", got)
	}
	own := status.Error(codes.Unimplemented, "no")
	if got := GRPC(own); !errors.Is(got, own) {
		t.Errorf("a status was rewritten to %v", got)
	}
}

func example() *Error {
	return &Error{
		Kind: WrongRange, Detail: "generation 4, want 6", Leader: 0xabc, CompactRevision: 99,
		Descriptors: []keyspace.Descriptor{
			{
				Range: 3, Generation: 6, Span: keyspace.Span{Start: []byte("a"), End: []byte("m")}, ConfIndex: 12,
				Replicas: []keyspace.Replica{{ID: 1, Node: 0xabc}, {ID: 4, Node: 0xdef, Role: keyspace.RoleLearner}},
			},
			{Range: 9, Generation: 6, Span: keyspace.Span{Start: []byte("m")}},
		},
	}
}

func TestCodec(t *testing.T) {
	for _, e := range []*Error{example(), {Kind: Internal}} {
		got, err := Decode(Append(nil, e))
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("got %+v, %v; want %+v", got, err, e)
		}
	}
	b := Append(nil, example())
	for n := range b {
		if _, err := Decode(b[:n]); err == nil {
			t.Fatalf("%d of %d bytes were accepted", n, len(b))
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(Append(nil, example()))
	f.Add([]byte{1, 3, 0, 0, 0, 0})
	f.Add([]byte{1, 3, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e *Error
		var err error
		if got := measure.Excess(len(b), func() { e, err = Decode(b) }); got != 0 {
			t.Fatalf("%d bytes allocated for %d that came", got, len(b))
		}
		if err != nil {
			return
		}
		again, err := Decode(Append(nil, e))
		if err != nil || !reflect.DeepEqual(e, again) {
			t.Fatalf("%+v became %+v, %v", e, again, err)
		}
	})
}
