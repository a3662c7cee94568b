package router

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Each request of a client carries its permit to whoever asks the sequencer for it: the range, or this node. One without
// a permit was checked by nobody.
func TestRequestsCarryTheirPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		defer r.Stop()
		ctx := keyspace.WithPermit(t.Context(), keyspace.PermitAt(9))
		var seen []keyspace.Permit
		f.read = func(req *rangeapi.Request) (*rangeapi.Response, error) {
			if req.ReadRevision == 0 {
				seen = append(seen, req.Permit)
			}
			return nil, nil
		}
		put, del := putAt("a", "1").GetRequestPut(), deleteAt("a", "").GetRequestDeleteRange()
		calls := map[string]func() error{
			"put":            func() error { _, err := r.Put(ctx, put); return err },
			"delete":         func() error { _, err := r.DeleteRange(ctx, del); return err },
			"delete nothing": func() error { _, err := r.DeleteRange(ctx, deleteAt("b", "a").GetRequestDeleteRange()); return err },
			"txn": func() error {
				_, err := r.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1")}})
				return err
			},
			"txn of nothing": func() error { _, err := r.Txn(ctx, &pb.TxnRequest{}); return err },
			"get":            func() error { _, err := r.Range(ctx, getAt("a").GetRequestRange()); return err },
			"read all": func() error {
				_, err := r.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
				return err
			},
			"serializable": func() error {
				_, err := r.Range(ctx, &pb.RangeRequest{Key: []byte("a"), Serializable: true})
				return err
			},
			"txn over ranges": func() error {
				_, err := r.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
				return err
			},
			"reads over ranges": func() error {
				_, err := r.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{getAt("a"), getAt("z")}})
				return err
			},
			"compares over ranges": func() error {
				_, err := r.Txn(ctx, &pb.TxnRequest{Compare: []*pb.Compare{versionIs("a", 9), versionIs("z", 9)}, Success: []*pb.RequestOp{putAt("a", "1")}})
				return err
			},
			"delete over ranges": func() error {
				_, err := r.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("z")})
				return err
			},
			"stream": func() error {
				return r.RangeStream(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func([]byte, *pb.RangeResponse) error { return nil })
			},
		}
		inRange := map[string]bool{"put": true, "delete": true, "txn": true}
		for name, call := range calls {
			f.access = 9
			seen = nil
			err := call()
			if e := kverror.Of(err); err != nil && e.Kind == kverror.AccessChanged {
				t.Errorf("%s by a permit that holds: %v", name, err)
			}
			for _, p := range seen {
				if p != keyspace.PermitAt(9) {
					t.Errorf("%s: a range was asked by the permit %d", name, p)
				}
			}
			f.access = 10
			if err := call(); !inRange[name] && !errors.Is(err, kverror.AccessChanged) {
				t.Errorf("%s by a permit that has ended: %v", name, err)
			}
			if inRange[name] && len(seen) == 0 {
				t.Errorf("%s asks no range", name)
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s without a permit is served", name)
					}
				}()
				held := ctx
				ctx = t.Context()
				defer func() { ctx = held }()
				_ = call()
			}()
		}
		afterwards()
	})
}

// Trap 81 over several ranges: rights are taken away between the locks and the revision. The transaction ends its
// locks, has no effect, and says so without another attempt.
func TestRightsAreTakenUnderATransaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		f.access = 9
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			if _, ok := op.(*rangeapi.Prepare); ok && id == 3 {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.access = 10
			}
			return nil, nil
		}
		ctx := keyspace.WithPermit(t.Context(), keyspace.PermitAt(9))
		req := &pb.TxnRequest{Compare: []*pb.Compare{versionIs("q", 3)}, Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}}
		resp, err := r.Txn(ctx, req)
		if !errors.Is(err, kverror.AccessChanged) {
			t.Errorf("%v, %v", resp, err)
		}
		afterwards()
		if got := f.commands(); !inOrder(got, "resolve 1@0 at 1; resolve 1@0 at 3") || strings.Contains(got, "commit") || strings.Contains(got, "prepare 2") {
			t.Errorf("asked %s", got)
		}
		if len(r.coordinator.active) != 0 || r.coordinator.bytes.Held() != 0 {
			t.Errorf("%v, %d bytes left", r.coordinator.active, r.coordinator.bytes.Held())
		}
		// The gateway checks anew and sends it again.
		if resp, err := r.Txn(keyspace.WithPermit(t.Context(), keyspace.PermitAt(10)), req); err != nil || !resp.Succeeded {
			t.Errorf("again: %v, %v", resp, err)
		}
		afterwards()
		r.Stop()
	})
}
