package etcdapi

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
)

// begins is what plays Options.Start. The test answers what it begins.
type begins struct {
	mu sync.Mutex
	// Guarded by mu. permits are those of what was begun, and each request is answered with err, or well.
	permits []keyspace.Permit
	err     error
	took    time.Duration
}

func (b *begins) start(ctx context.Context, change proto.Message, answered func(ok bool)) func() (proto.Message, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	permit, _ := keyspace.PermitOf(ctx)
	b.permits = append(b.permits, permit)
	err, took := b.err, b.took
	go func() {
		time.Sleep(took)
		answered(err == nil)
	}()
	return func() (proto.Message, error) {
		h := &pb.ResponseHeader{Revision: 9}
		switch {
		case err != nil:
			return nil, err
		case isPut(change):
			return &pb.PutResponse{Header: h}, nil
		}
		return &pb.DeleteRangeResponse{Header: h, Deleted: 3}, nil
	}
}

func isPut(m proto.Message) bool { _, ok := m.(*pb.PutRequest); return ok }

func (b *begins) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.permits)
}

// beginning makes a server whose changes may be begun, with user u as in setUp.
func beginning(t *testing.T, change func(*Options)) (*Operations, *begins, *records) {
	t.Helper()
	b := &begins{}
	s, users := virtualServer(t, func(o *Options) {
		o.Start, o.Metrics = b.start, NewMetrics(nil)
		if change != nil {
			change(o)
		}
	})
	t.Cleanup(func() { s.Stop(context.Background()) })
	return newOperations(s), b, users
}

// One change is begun and finished as a call is: by the permit of who sends it, with a complete header, and counted once.
func TestBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, b, users := beginning(t, nil)
		ctx := users.incoming(t, "u")
		told := make(chan bool, 2)
		finish, begun := o.Begin(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}, func(ok bool) { told <- ok })
		if !begun || !<-told {
			t.Fatal("not begun")
		}
		body, err := finish()
		if err != nil {
			t.Fatal(err)
		}
		resp := &pb.PutResponse{}
		if err := proto.Unmarshal(body.Materialize(), resp); err != nil || resp.Header.Revision != 9 || resp.Header.ClusterId != 0xc || resp.Header.MemberId != 0xb {
			t.Errorf("%v, %v", resp, err)
		}
		if finish, begun = o.Begin(ctx, &pb.DeleteRangeRequest{Key: []byte("k")}, func(bool) {}); !begun {
			t.Error("a delete is not begun")
		}
		if _, err := finish(); err != nil {
			t.Error(err)
		}
		if _, permit, _ := o.s.permitted(ctx, &pb.PutRequest{Key: []byte("k")}); b.permits[0] != permit.Permit() {
			t.Errorf("by permit %d, want %d", b.permits[0], permit.Permit())
		}
		m := o.s.metrics
		for name, got := range map[string]float64{
			"puts": testutil.ToFloat64(m.Puts), "deletes": testutil.ToFloat64(m.Deletes),
			"handled":  testutil.ToFloat64(m.Handled.WithLabelValues("unary", "etcdserverpb.KV", "Put", "OK")),
			"received": testutil.ToFloat64(m.MessagesReceived.WithLabelValues("unary", "etcdserverpb.KV", "Put")),
			"sent":     testutil.ToFloat64(m.MessagesSent.WithLabelValues("unary", "etcdserverpb.KV", "Put")),
		} {
			if got != 1 {
				t.Errorf("%s: %v", name, got)
			}
		}
	})
}

// What is refused, or may have to wait, is not begun. Finished it has the answer or the error of a call.
func TestBeginOtherWays(t *testing.T) {
	for name, c := range map[string]struct {
		user   string
		op     any
		change func(*Options)
		code   codes.Code
	}{
		"no key":         {"u", &pb.PutRequest{}, nil, codes.InvalidArgument},
		"a read":         {"u", &pb.RangeRequest{Key: []byte("k")}, nil, codes.OK},
		"a read txn":     {"root", &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}}}}, nil, codes.OK},
		"another's key":  {"u", &pb.PutRequest{Key: []byte("x")}, nil, codes.PermissionDenied},
		"another's span": {"u", &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("z")}, nil, codes.PermissionDenied},
		"a large one":    {"u", &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 2000)}, func(o *Options) { o.MaxRequestBytes = 1000 }, codes.InvalidArgument},
		"no space": {"u", &pb.PutRequest{Key: []byte("k")}, func(o *Options) {
			f := &fakeAlarms{}
			f.set(Alarm{Member: 1, Type: pb.AlarmType_NOSPACE, Sticky: true})
			o.Alarms = f
		}, codes.ResourceExhausted},
		"while it is loaded": {"u", &pb.PutRequest{Key: []byte("k")}, func(o *Options) {
			o.Loading = func() (bool, error) { return false, kverror.New(kverror.Loading, "") }
		}, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o, b, users := beginning(t, c.change)
				finish, begun := o.Begin(users.incoming(t, c.user), c.op, func(bool) { t.Error("told of an answer") })
				if begun || b.count() != 0 {
					t.Error("it is begun")
				}
				body, err := finish()
				if status.Code(err) != c.code {
					t.Errorf("%v, want %v", err, c.code)
				}
				body.Free()
			})
		})
	}
}

// Rights that are taken away after a change was begun refuse it, wherever its range has heard of that. Then the user is checked
// anew: who may do it no more is denied, and who may is served by the way of calls, once.
func TestRightsAreTakenFromWhatIsBegun(t *testing.T) {
	for name, c := range map[string]struct {
		change string
		code   codes.Code
		calls  int
	}{
		"its own":     {"forbid own k", codes.PermissionDenied, 0},
		"another one": {"forbid own w", codes.OK, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				kv := &fakeKV{}
				o, b, users := beginning(t, func(o *Options) { o.KV = kv })
				b.err = kverror.New(kverror.AccessChanged, "")
				told := make(chan bool, 1)
				finish, begun := o.Begin(users.incoming(t, "u"), &pb.PutRequest{Key: []byte("k")}, func(ok bool) { told <- ok })
				if !begun || <-told {
					t.Fatal("it is not refused")
				}
				users.do(t, c.change)
				start := time.Now()
				body, err := finish()
				if status.Code(err) != c.code || kv.called() != c.calls || time.Since(start) != 0 {
					t.Errorf("%v after %v and %d calls", err, time.Since(start), kv.called())
				}
				body.Free()
			})
		})
	}
}

// A slow change that was begun is told like a slow call, by another goroutine than that which finishes it.
func TestASlowBegunChangeIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var list slowList
		o, b, users := beginning(t, func(o *Options) { o.Slow, o.Names = list.add, func(s string) string { return s } })
		b.took = 2 * stages.Threshold
		told := make(chan bool, 1)
		finish, _ := o.Begin(users.incoming(t, "u"), &pb.PutRequest{Key: []byte("k")}, func(ok bool) { told <- ok })
		<-told
		if _, err := finish(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if got := list.take(); len(got) != 1 || got[0].Method != pb.KV_Put_FullMethodName || got[0].Took != b.took || got[0].RequestBytes == 0 || got[0].ResponseBytes == 0 {
			t.Errorf("%+v", got)
		}
	})
}

// A put to a lease by a user is not begun, because others look at the keys of the lease. Root's is.
func TestBeginWithALease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, b, users := beginning(t, nil)
		op := &pb.PutRequest{Key: []byte("k"), Lease: 5}
		if o.s.permittedNow(users.incoming(t, "u"), op) != nil {
			t.Error("a user's is begun")
		}
		if _, begun := o.Begin(users.incoming(t, "root"), op, func(bool) {}); !begun || b.count() != 1 {
			t.Error("root's is not begun")
		}
		if o.s.permittedNow(t.Context(), op) != nil {
			t.Error("nobody's is begun")
		}
	})
}
