package router

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// starter begins requests at the replicas of node 2. The test answers them, by do, or by err if that is set.
type starter struct {
	*cluster
	reqs []*rangeapi.Request
	err  error
	// answers tell of the answers, in the order of reqs.
	answers []func(ok bool)
}

func (s *starter) Start(ctx context.Context, req *rangeapi.Request, answered func(ok bool)) func() (*rangeapi.Response, error) {
	done := make(chan struct{})
	var resp *rangeapi.Response
	err := s.err
	s.reqs = append(s.reqs, req)
	s.answers = append(s.answers, func(bool) {
		if err == nil {
			resp, err = s.Do(context.Background(), 2, req)
		}
		close(done)
		answered(err == nil)
	})
	return func() (*rangeapi.Response, error) {
		if _, ended := clock.Await(ctx, done); ended != nil {
			return nil, kverror.Of(ended)
		}
		return resp, err
	}
}

// begins makes a router of node 2 that has heard that the node leads the ranges [a, m) and [m, ∞).
func begins(t *testing.T) (*starter, *Router) {
	t.Helper()
	s := &starter{cluster: newCluster(1)}
	s.lead[1] = 2
	s.split("m")
	r := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: s, Sequencer: s, Placement: s, Starter: s, Alive: alive, Timeout: time.Second})
	r.Learn(s.descs...)
	for _, d := range s.descs {
		r.Led(d.Range, 2)
	}
	return s, r
}

// One range that is led here is asked, and its answer is what the methods return. Nothing is begun where another node leads, where
// keys of several ranges are named or none, and where the range is not known.
func TestStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := begins(t)
		told := 0
		answered := func(ok bool) {
			if told++; !ok {
				t.Error("an error is told")
			}
		}
		put := &pb.PutRequest{Key: []byte("a"), Value: []byte("1")}
		wait := r.Start(internal(t), put, answered)
		if wait == nil {
			t.Fatal("not begun")
		}
		if told != 0 {
			t.Error("told before it is answered")
		}
		s.answers[0](true)
		if got, err := wait(); err != nil || told != 1 || got.(*pb.PutResponse).GetHeader().GetRevision() == 0 || s.proposed["1"] != 1 {
			t.Errorf("%v, %v, told %d times, put %d times", got, err, told, s.proposed["1"])
		}
		if q := s.reqs[0]; q.Permit != keyspace.Internal || q.Op != proto.Message(put) {
			t.Errorf("asked %v", q)
		}
		for name, op := range map[string]proto.Message{
			"several ranges": &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte("z")},
			"several keys":   &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "1")}},
			"no key":         &pb.TxnRequest{},
			"an empty span":  &pb.DeleteRangeRequest{Key: []byte("b"), RangeEnd: []byte("a")},
		} {
			if r.Start(internal(t), op, answered) != nil {
				t.Errorf("%s: begun", name)
			}
		}
		r.Led(s.descs[0].Range, 3)
		if r.Start(internal(t), put, answered) != nil {
			t.Error("begun where another node leads")
		}
		unknown := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: s, Sequencer: s, Placement: s, Starter: s, Alive: alive})
		if unknown.Start(internal(t), put, answered) != nil {
			t.Error("begun without a range")
		}
		if len(s.reqs) != 1 {
			t.Errorf("%d requests are begun", len(s.reqs))
		}
	})
}

// A leader that moves while a put is under way: one that was certainly not proposed is put once, by the new leader. One whose fate is
// unknown is not repeated, and ends with the error that Put has.
func TestStartedWhereTheLeaderMoves(t *testing.T) {
	for _, row := range kverror.Table() {
		t.Run(row.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, r := begins(t)
				s.err = &kverror.Error{Kind: row.Kind}
				told := false
				wait := r.Start(internal(t), &pb.PutRequest{Key: []byte("a"), Value: []byte("1")}, func(ok bool) { told = !ok })
				s.lead[s.descs[0].Range] = 3
				s.answers[0](false)
				if !told {
					t.Error("no error is told")
				}
				got, err := wait()
				if row.Retry == kverror.RetryRouter {
					if err != nil || got.(*pb.PutResponse).GetHeader().GetRevision() == 0 || s.proposed["1"] != 1 {
						t.Errorf("%v, %v, put %d times", got, err, s.proposed["1"])
					}
				} else if err == nil || kverror.GRPC(err).Error() != row.GRPC.Error() || s.proposed["1"] != 0 {
					t.Errorf("%v, put %d times", err, s.proposed["1"])
				}
			})
		})
	}
}

// What is begun ends with its client, with the client's error, and by the router's timeout, with etcd's.
func TestStartedIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, r := begins(t)
		ctx, cancel := context.WithCancel(internal(t))
		gone := r.Start(ctx, &pb.PutRequest{Key: []byte("a")}, func(bool) {})
		late := r.Start(internal(t), &pb.PutRequest{Key: []byte("a")}, func(bool) {})
		begin := time.Now()
		cancel()
		if _, err := gone(); !errors.Is(err, kverror.Canceled) || time.Since(begin) != 0 {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		if _, err := late(); !errors.Is(err, kverror.Timeout) || time.Since(begin) != time.Second {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
	})
}
