package router

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// merged puts a stream together like its client. It checks that header, more and count come with
// the last part and only there.
type merged struct {
	resp  pb.RangeResponse
	parts int
	ended bool
}

func (m *merged) send(keys []byte, last *pb.RangeResponse) error {
	if m.ended {
		return errors.New("a part behind the last")
	}
	if last == nil && len(keys) == 0 {
		return errors.New("an empty part that is not the last")
	}
	m.parts++
	var part pb.RangeResponse
	if err := proto.Unmarshal(keys, &part); err != nil {
		return err
	}
	proto.Merge(&m.resp, &part)
	if last != nil {
		m.ended = true
		proto.Merge(&m.resp, last)
	}
	return nil
}

// However the ranges are and change while it runs, the parts of a stream make up the answer of one
// range that holds everything.
func TestAStreamIsTheRead(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(seed)
			r := newRouter(c)
			fill(t, c, r, seed)
			rng := rand.New(rand.NewPCG(seed, 3))
			c.chaos = 0.2
			for range 100 {
				req := randomRange(rng, int64(c.rev))
				req.SortTarget, req.SortOrder, req.MinModRevision, req.MaxModRevision = 0, 0, 0, 0
				var m merged
				if err := r.RangeStream(internal(t), proto.CloneOf(req), m.send); err != nil {
					t.Fatalf("seed %d: %v: %v", seed, req, err)
				}
				want := evaluate(c.kvs, req)
				want.Header = header(c.rev)
				if !m.ended || !proto.Equal(&m.resp, want) {
					t.Fatalf("seed %d: %v\n got %v\nwant %v", seed, req, &m.resp, want)
				}
				if got := r.cfg.Answers.Held(); got != 0 {
					t.Fatalf("seed %d: %v: %d bytes are held", seed, req, got)
				}
			}
			if len(c.descs) < 4 {
				t.Fatalf("seed %d: only %d ranges", seed, len(c.descs))
			}
		})
	}
}

// fill puts keys and splits the keyspace.
func fill(t *testing.T, c *cluster, r *Router, seed uint64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 2))
	for i := range 60 {
		key := string(rune('a'+rng.IntN(26))) + string(rune('a'+rng.IntN(4)))
		if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(key), Value: []byte(fmt.Sprint(i))}); err != nil {
			t.Fatal(err)
		}
	}
	c.split("g")
	c.split("p")
}

// A compaction above a stream's revision ends it as in etcd. Before anything was sent, a stream
// without explicit revision begins anew.
func TestAStreamIsOvertakenByACompaction(t *testing.T) {
	for _, explicit := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(1)
			r := newRouter(c)
			fill(t, c, r, 1)
			req := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
			if explicit {
				req.Revision = int64(c.rev)
			}
			var m merged
			err := r.RangeStream(internal(t), req, func(keys []byte, last *pb.RangeResponse) error {
				c.mu.Lock()
				c.compacted = c.rev + 1
				c.mu.Unlock()
				return m.send(keys, last)
			})
			if !errors.Is(err, kverror.Compacted) || m.parts == 0 || m.ended {
				t.Errorf("explicit %v: %v after %d parts", explicit, err, m.parts)
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		fill(t, c, r, 1)
		first := true
		s := &hooked{cluster: c, before: func(req *rangeapi.Request) {
			if _, ok := req.Op.(*rangeapi.Page); ok && first {
				first = false
				c.mu.Lock()
				defer c.mu.Unlock()
				c.rev++
				c.compacted = c.rev
			}
		}}
		r.cfg.Ranges = s
		var m merged
		if err := r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, m.send); err != nil || m.resp.Header.Revision != int64(c.rev) {
			t.Errorf("%v, %v", err, m.resp.Header)
		}
	})
}

// hooked is a cluster with a hook before each request.
type hooked struct {
	*cluster
	before func(*rangeapi.Request)
}

func (h *hooked) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	h.before(req)
	return h.cluster.Do(ctx, node, req)
}

// A stream whose client takes nothing holds a bounded part, and reads on when the client does. An
// error of the client ends it.
func TestAStreamWaitsForItsClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		fill(t, c, r, 1)
		want := evaluate(c.kvs, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
		var m merged
		err := r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func(keys []byte, last *pb.RangeResponse) error {
			synctest.Wait() // the readers have come as far as they may
			c.mu.Lock()
			ahead := c.pages - m.parts
			c.mu.Unlock()
			if most := int64(streamPages * (smallPageBytes + largePageBytes)); ahead > streamPages || r.cfg.Answers.Held() > most {
				return fmt.Errorf("%d pages and %d bytes are ahead", ahead, r.cfg.Answers.Held())
			}
			return m.send(keys, last)
		})
		if err != nil || m.resp.Count != want.Count || len(m.resp.Kvs) != len(want.Kvs) {
			t.Errorf("%d keys of %d, %v", len(m.resp.Kvs), len(want.Kvs), err)
		}
		gone := errors.New("the client is gone")
		if err := r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, func([]byte, *pb.RangeResponse) error { return gone }); !errors.Is(err, gone) {
			t.Error(err)
		}
		if got := r.cfg.Answers.Held(); got != 0 {
			t.Errorf("%d bytes are held", got)
		}
	})
}

// Streams without room wait; with little room the pages are small.
func TestStreamsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		fill(t, c, r, 1)
		sizes := map[int]int{}
		r.cfg.Ranges = &hooked{cluster: c, before: func(req *rangeapi.Request) {
			if p, ok := req.Op.(*rangeapi.Page); ok {
				c.mu.Lock()
				defer c.mu.Unlock()
				sizes[p.MaxBytes]++
			}
		}}
		stream := func() error {
			clear(sizes)
			var m merged
			return r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, m.send)
		}
		if err := stream(); err != nil || sizes[smallPageBytes] != 3 || sizes[largePageBytes] == 0 || len(sizes) != 2 {
			t.Errorf("with room: %v, pages %v", err, sizes)
		}
		r.cfg.Answers = budget.New(streamPages*smallPageBytes+1, streamPages*smallPageBytes)
		if err := stream(); err != nil || len(sizes) != 1 || sizes[smallPageBytes] == 0 {
			t.Errorf("with little room: %v, pages %v", err, sizes)
		}
		first, leader := full(t, r, 2)
		ended := make(chan error, 1)
		go func() { ended <- stream() }()
		synctest.Wait()
		if len(sizes) != 0 || r.cfg.Answers.Waiting() != 1 {
			t.Errorf("without room: pages %v", sizes)
		}
		first.Release()
		if err := <-ended; err != nil || len(sizes) != 1 || sizes[smallPageBytes] == 0 {
			t.Errorf("when room came: %v, pages %v", err, sizes)
		}
		leader.Release()
	})
}

// A client that pages through several ranges at one revision costs one request per page: the keys
// behind a page are counted once.
func TestPagesAreCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		c.chaos = 0
		fill(t, c, r, 1)
		for _, k := range []string{"c", "k", "t", "w"} {
			c.split(k)
		}
		r.Learn(c.descs...)
		all := evaluate(c.kvs, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}).Kvs
		req := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("zz"), Limit: 2, Revision: int64(c.rev)}
		var got []string
		for page := 0; ; page++ {
			c.counted = 0
			resp, err := r.Range(internal(t), proto.CloneOf(req))
			if err != nil {
				t.Fatal(err)
			}
			if want := int64(len(all) - len(got)); resp.Count != want || resp.More != (want > 2) {
				t.Fatalf("page %d: count %d, more %v, %d keys remain", page, resp.Count, resp.More, want)
			}
			for _, kv := range resp.Kvs {
				got = append(got, string(kv.Key))
			}
			if page > 0 && c.counted > 0 {
				t.Fatalf("page %d counted %d ranges", page, c.counted)
			}
			if !resp.More {
				break
			}
			req.Key = keyspace.Next(resp.Kvs[len(resp.Kvs)-1].Key)
		}
		if len(got) != len(all) || !slices.IsSorted(got) {
			t.Errorf("%d keys of %d", len(got), len(all))
		}
	})
}

// The last keys of many ranges are read from the last ranges.
func TestLastKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		fill(t, c, r, 1)
		r.Learn(c.descs...)
		for limit := range int64(len(c.kvs) + 2) {
			c.counted, c.paged, c.pages = 0, 0, 0
			req := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("zz"), SortOrder: pb.RangeRequest_DESCEND, Limit: limit}
			got, err := r.Range(internal(t), proto.CloneOf(req))
			want := evaluate(c.kvs, req)
			want.Header = header(c.rev)
			if err != nil || !proto.Equal(got, want) {
				t.Fatalf("limit %d: %v, %v\nwant %v", limit, got, err, want)
			}
			if limit == 2 && (c.paged != 1 || c.counted != 2 || c.pages != 0) {
				t.Errorf("%d whole reads, %d counts, %d pages", c.paged, c.counted, c.pages)
			}
		}
	})
}

// A read beyond the bound is refused with a clear error, and its reservation is returned.
func TestALargeReadIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: c, Sequencer: c, Placement: c, Alive: alive, Answers: budget.New(1<<20, 4000)})
		fill(t, c, r, 1)
		for _, req := range []*pb.RangeRequest{
			{Key: []byte{0}, RangeEnd: []byte{0}},
			{Key: []byte{0}, RangeEnd: []byte{0}, Limit: 50},
			{Key: []byte{0}, RangeEnd: []byte{0}, SortOrder: pb.RangeRequest_DESCEND},
		} {
			if _, err := r.Range(internal(t), req); !errors.Is(err, kverror.AnswerTooLarge) {
				t.Errorf("%v: %v", req, err)
			}
			if got := r.cfg.Answers.Held(); got != 0 {
				t.Errorf("%v: %d bytes are held", req, got)
			}
		}
		if resp, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Limit: 5}); err != nil || len(resp.Kvs) != 5 {
			t.Error(resp, err)
		}
		var m merged
		if err := r.RangeStream(internal(t), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, m.send); err != nil || !m.ended {
			t.Error(err)
		}
	})
}

func TestCountsAreBounded(t *testing.T) {
	c := newCounts()
	for i := range 3 * maxCounts {
		c.put(keyspace.Revision(i), keyspace.Span{Start: []byte("a")}, int64(i))
	}
	if n, ok := c.get(3*maxCounts-1, keyspace.Span{Start: []byte("a")}); !ok || n != 3*maxCounts-1 || len(c.known) != maxCounts || len(c.ring) != maxCounts {
		t.Errorf("%d, %v; %d known, ring of %d", n, ok, len(c.known), len(c.ring))
	}
	if _, ok := c.get(0, keyspace.Span{Start: []byte("a")}); ok {
		t.Error("the oldest is still known")
	}
	c.put(1, keyspace.Span{Start: []byte("a"), End: []byte("bc")}, 7)
	if _, ok := c.get(1, keyspace.Span{Start: []byte("ab"), End: []byte("c")}); ok {
		t.Error("two spans with the same bytes are one")
	}
}
