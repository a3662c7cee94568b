package router

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// pageBytes counts the bytes of the pages that ranges have answered.
type pageBytes struct {
	Ranges
	bytes atomic.Int64
}

func (p *pageBytes) Do(ctx context.Context, n keyspace.NodeID, q *rangeapi.Request) (*rangeapi.Response, error) {
	resp, err := p.Ranges.Do(ctx, n, q)
	if err == nil {
		if a, ok := resp.Op.(*rangeapi.PageAnswer); ok {
			p.bytes.Add(int64(len(a.Keys)))
		}
	}
	return resp, err
}

// A stream whose values are larger than its pages counts what it holds. Without room it fetches no
// page before the last one is sent.
func TestAStreamOfLargeValues(t *testing.T) {
	const value, keys = 3 << 19, 12
	for _, s := range []struct {
		name   string
		budget int64
		holds  int64 // pages, while the client takes none
	}{
		{"no room", streamPages * smallPageBytes, 2},
		{"room", 100 << 20, streamPages},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(1)
			r := newRouter(c)
			c.split("k06")
			r.Learn(c.descs...)
			for i := range keys {
				if _, err := r.Put(internal(t), &pb.PutRequest{Key: fmt.Appendf(nil, "k%02d", i), Value: make([]byte, value)}); err != nil {
					t.Fatal(err)
				}
			}
			came := &pageBytes{Ranges: &oneByOne{c}}
			r.cfg.Ranges, r.cfg.Answers = came, budget.New(s.budget, 512<<20)
			take, done := make(chan struct{}), make(chan error)
			var m merged
			go func() {
				done <- r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func(keys []byte, last *pb.RangeResponse) error {
					<-take
					return m.send(keys, last)
				})
			}()
			synctest.Wait()
			if got := came.bytes.Load(); got < s.holds*value || got >= (s.holds+1)*value {
				t.Errorf("%s: a stalled stream holds %d bytes, want %d values", s.name, got, s.holds)
			}
			if got, held := r.cfg.Answers.Held(), came.bytes.Load(); got < held {
				t.Errorf("%s: %d bytes are counted, %d are held", s.name, got, held)
			}
			close(take)
			if err := <-done; err != nil || len(m.resp.Kvs) != keys {
				t.Errorf("%s: %d keys, %v", s.name, len(m.resp.Kvs), err)
			}
			if got := r.cfg.Answers.Held(); got != 0 {
				t.Errorf("%s: %d bytes are held in the end", s.name, got)
			}
		})
	}
}

// oneByOne answers pages of one key.
type oneByOne struct{ *cluster }

func (o *oneByOne) Do(ctx context.Context, n keyspace.NodeID, q *rangeapi.Request) (*rangeapi.Response, error) {
	if p, ok := q.Op.(*rangeapi.Page); ok {
		p.Limit = 1
	}
	return o.cluster.Do(ctx, n, q)
}

// A chunk that is sorted here counts twice: as keys, and as it is sent.
func TestASortedStreamCountsWhatItSends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const value = 1 << 20
		c := newCluster(1)
		r := newRouter(c)
		r.Learn(c.descs...)
		if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, value)}); err != nil {
			t.Fatal(err)
		}
		req := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, SortTarget: pb.RangeRequest_MOD}
		err := r.RangeStream(internal(t), req, func([]byte, *pb.RangeResponse) error {
			if got := r.cfg.Answers.Held(); got < 2*value {
				t.Errorf("%d bytes count", got)
			}
			return nil
		})
		if got := r.cfg.Answers.Held(); err != nil || got != 0 {
			t.Errorf("%v, %d bytes count in the end", err, got)
		}
	})
}
