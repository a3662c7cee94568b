package router

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// ofTerm are a cluster's sequencer and ranges, which know each other's term.
type ofTerm struct {
	*cluster
	term, refused atomic.Uint64
}

func newOfTerm(c *cluster, term uint64) *ofTerm {
	s := &ofTerm{cluster: c}
	s.term.Store(term)
	return s
}

func (s *ofTerm) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	s.cluster.Sequence(req, func(a keyspace.SequenceAnswer) { a.Term = s.term.Load(); done(a) })
}

func (s *ofTerm) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	if term := s.term.Load(); req.ReadTerm != 0 && req.ReadTerm < term {
		s.refused.Add(1)
		return nil, kverror.New(kverror.ReadAgain, "term %d, and there is one of term %d", req.ReadTerm, term)
	}
	return s.cluster.Do(ctx, node, req)
}

// A read whose revision comes from a sequencer that has a successor asks for another one. A
// stream that has begun goes on: its revision was the present one when it began.
func TestReadsOverAChangeOfTheSequencer(t *testing.T) {
	for _, req := range []*pb.RangeRequest{
		{Key: []byte{0}, RangeEnd: []byte{0}},
		{Key: []byte{0}, RangeEnd: []byte{0}, Limit: 1000},
		{Key: []byte{0}, RangeEnd: []byte{0}, SortTarget: pb.RangeRequest_MOD},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(1)
			r := newRouter(c)
			fill(t, c, r, 1)
			s := newOfTerm(c, 7)
			r.cfg.Sequencer, r.cfg.Ranges = s, s
			var m merged
			err := r.RangeStream(internal(t), req, func(keys []byte, last *pb.RangeResponse) error {
				s.term.Add(1) // placement is handed over, in order, again and again
				return m.send(keys, last)
			})
			if err != nil || !m.ended || m.parts < 2 || s.refused.Load() > 0 {
				t.Errorf("%v: %d parts, ended %t, %d refused: %v", req, m.parts, m.ended, s.refused.Load(), err)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		fill(t, c, r, 1)
		s, old := newOfTerm(c, 8), newOfTerm(c, 7)
		r.cfg.Sequencer, r.cfg.Ranges = old, s
		done := make(chan error, 1)
		go func() {
			_, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte("a")})
			done <- err
		}()
		synctest.Wait()
		if len(done) > 0 || s.refused.Load() == 0 {
			t.Fatalf("refused %d times", s.refused.Load())
		}
		old.term.Store(8)
		if err := <-done; err != nil || s.refused.Load() > 100 {
			t.Errorf("refused %d times: %v", s.refused.Load(), err)
		}
	})
}
