package etcdapi

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rights"
)

// from returns the context of a call from an address.
func from(ctx context.Context, a net.Addr) context.Context {
	return peer.NewContext(ctx, &peer.Peer{Addr: a})
}

// TestWhileLoading: a cluster that is loaded shows what it has once it follows its source, to linearizable reads and
// to transactions of nothing else. Its users come last: before that the reads must come from here.
func TestWhileLoading(t *testing.T) {
	read := func(serializable bool) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("a"), Serializable: serializable}}}
	}
	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("a")}}}
	nested := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{Success: []*pb.RequestOp{put}}}}
	const kv = "/etcdserverpb.KV/"
	for _, c := range []struct {
		name, method string
		req          any
		follows      bool
	}{
		{"a read", kv + "Range", &pb.RangeRequest{}, true},
		{"a serializable read", kv + "Range", &pb.RangeRequest{Serializable: true}, false},
		{"reads", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), read(false)}}, true},
		{"reads, one serializable", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), read(true)}}, false},
		{"a put", kv + "Put", &pb.PutRequest{}, false},
		{"a put in a transaction", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false), put}}, false},
		{"a put in a transaction's other branch", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{read(false)}, Failure: []*pb.RequestOp{put}}, false},
		{"a put in a nested transaction", kv + "Txn", &pb.TxnRequest{Success: []*pb.RequestOp{nested}}, false},
		{"a comparison", kv + "Txn", &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("a")}}}, false},
		{"a grant", "/etcdserverpb.Lease/LeaseGrant", &pb.LeaseGrantRequest{}, false},
		{"a watch", "/etcdserverpb.Watch/Watch", nil, false},
	} {
		for _, follows := range []bool{false, true} {
			s := &Server{}
			s.opts.Users = gateOf(t, false)
			s.opts.Loading = func() (bool, error) { return follows, errors.New("it is loaded") }
			here, far := from(t.Context(), loopback), from(t.Context(), faraway)
			if err := s.whileLoading(here, c.method, c.req); (err == nil) != (follows && c.follows) {
				t.Errorf("%s, follows %t: %v", c.name, follows, err)
			}
			if err := s.whileLoading(far, c.method, c.req); err == nil || follows && c.follows != strings.Contains(err.Error(), "192.0.2.7:4711 may not read it") {
				t.Errorf("%s from far away, follows %t: %v", c.name, follows, err)
			}
			s.opts.Users = gateOf(t, true)
			if err := s.whileLoading(far, c.method, c.req); (err == nil) != (follows && c.follows) {
				t.Errorf("%s from far away, with users that are checked elsewhere, follows %t: %v", c.name, follows, err)
			}
			s.opts.Loading = func() (bool, error) { return false, nil }
			if err := s.whileLoading(far, c.method, c.req); err != nil {
				t.Errorf("%s of a cluster that serves: %v", c.name, err)
			}
		}
	}
}

// A node that was down at the end of a load knows of it as soon as a request needs to know.
func TestALoadThatEndedElsewhere(t *testing.T) {
	for _, ended := range []bool{false, true} {
		s := &Server{}
		s.opts.Users = gateOf(t, false)
		known, asked := errors.New("it is loaded"), 0
		s.opts.Loading = func() (bool, error) { return false, known }
		s.opts.LearnLoad = func(context.Context) {
			if asked++; ended {
				known = nil
			}
		}
		for range 2 {
			if err := s.whileLoading(from(t.Context(), faraway), "/etcdserverpb.KV/Put", &pb.PutRequest{}); (err == nil) != ended {
				t.Errorf("ended %t: %v", ended, err)
			}
		}
		if want := map[bool]int{false: 2, true: 1}[ended]; asked != want {
			t.Errorf("ended %t: asked %d times, want %d", ended, asked, want)
		}
	}
}

// gateOf returns the users of a cluster, who are checked or not.
func gateOf(t *testing.T, checked bool) *Users {
	t.Helper()
	g := auth.NewGate(clock.System(), nil)
	state := rights.New()
	state.Enabled = checked
	g.Update(&auth.View{Rights: state, Index: 1})
	return &Users{Gate: g}
}

// What a copy of the whole store gives is not for everybody while a cluster is loaded. Its loader goes on once its users
// are checked, who serve nobody yet.
func TestWhoMayWhileLoading(t *testing.T) {
	s := &Server{}
	s.opts.Users = gateOf(t, false)
	s.opts.Loading = func() (bool, error) { return true, errors.New("it is loaded") }
	for _, method := range []string{pb.Maintenance_Snapshot_FullMethodName, datapb.Data_Read_FullMethodName} {
		if err := s.whileLoading(from(t.Context(), faraway), method, nil); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s from far away: %v", method, err)
		}
		if err := s.whileLoading(from(t.Context(), loopback), method, nil); err != nil {
			t.Errorf("%s from here: %v", method, err)
		}
	}
	users := gateOf(t, true)
	s.opts.Users, s.opts.RequestTimeout = users, time.Second
	s.confirm.ask = func() error { return nil }
	rule := auth.RuleOf(datapb.Load_LoadFinish_FullMethodName)
	if _, err := s.begin(from(t.Context(), loopback), rule); err != nil {
		t.Errorf("the loader: %v", err)
	}
	if _, err := s.begin(from(t.Context(), faraway), rule); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a loader from far away: %v", err)
	}
	s.opts.Loading = func() (bool, error) { return false, nil }
	if _, err := s.begin(from(t.Context(), loopback), rule); !errors.Is(rpctypes.Error(err), rpctypes.ErrUserEmpty) {
		t.Errorf("the loader of a cluster that serves: %v", err)
	}
}
