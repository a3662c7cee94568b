package router

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func alive(keyspace.NodeID) bool { return true }

func newRouter(c *cluster) *Router {
	return New(Config{Self: 2, Clock: clock.Virtual(), Ranges: c, Sequencer: c, Placement: c, Alive: alive})
}

// However the ranges are and change, a read answers like one range that holds everything, and a put
// takes effect exactly once.
func TestManyRangesAnswerAsOne(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster(seed)
			r := newRouter(c)
			rng := rand.New(rand.NewPCG(seed, 2))
			c.chaos = 0.2
			for i := range 150 {
				v := fmt.Sprint(i)
				key := string(rune('a'+rng.IntN(26))) + string(rune('a'+rng.IntN(4)))
				if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(key), Value: []byte(v)}); err != nil {
					t.Fatalf("seed %d: put %s: %v", seed, key, err)
				}
				if c.proposed[v] != 1 {
					t.Fatalf("seed %d: put %s took effect %d times", seed, v, c.proposed[v])
				}
			}
			for range 150 {
				req := randomRange(rng, int64(c.rev))
				got, err := r.Range(internal(t), proto.CloneOf(req))
				if err != nil {
					t.Fatalf("seed %d: %v: %v", seed, req, err)
				}
				want := evaluate(c.kvs, req)
				want.Header = header(c.rev)
				if !proto.Equal(got, want) {
					t.Fatalf("seed %d: %v\n got %v\nwant %v", seed, req, got, want)
				}
			}
			if len(c.descs) < 5 {
				t.Fatalf("seed %d: only %d ranges", seed, len(c.descs))
			}
		})
	}
}

func randomRange(rng *rand.Rand, rev int64) *pb.RangeRequest {
	pick := func() []byte { return []byte{byte('a' + rng.IntN(26)), byte('a' + rng.IntN(4))} }
	req := &pb.RangeRequest{Key: pick()}
	switch rng.IntN(4) {
	case 0:
		req.RangeEnd = []byte{0}
	case 1, 2:
		req.RangeEnd = pick()
	}
	if rng.IntN(5) == 0 {
		req.Key, req.RangeEnd = []byte{0}, []byte{0}
	}
	if rng.IntN(2) == 0 {
		req.Limit = int64(rng.IntN(30))
	}
	req.SortTarget = pb.RangeRequest_SortTarget(rng.IntN(5))
	req.SortOrder = pb.RangeRequest_SortOrder(rng.IntN(3))
	req.KeysOnly, req.CountOnly = rng.IntN(4) == 0, rng.IntN(6) == 0
	if rng.IntN(3) == 0 {
		req.MinModRevision = rng.Int64N(rev)
	}
	if rng.IntN(3) == 0 {
		req.MaxModRevision = 1 + rng.Int64N(rev)
	}
	return req
}

// hung is a cluster one of whose nodes never answers.
type hung struct {
	*cluster
	node  keyspace.NodeID
	asked int
	// dead is set once it is asked, as if it had died at that moment.
	dead atomic.Bool
}

func (h *hung) alive(n keyspace.NodeID) bool { return n != h.node || !h.dead.Load() }

func (h *hung) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	if node == h.node {
		h.asked++
		h.dead.Store(true)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return h.cluster.Do(ctx, node, req)
}

func TestAReadGoesRoundAHangingNodeAndAWriteDoesNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		h := &hung{cluster: c, node: 2}
		r := New(Config{
			Self: 1, Clock: clock.Virtual(), Ranges: h, Sequencer: c, Placement: c, Timeout: 7 * time.Second,
			Alive: h.alive,
		})
		if _, err := r.resolve(internal(t), keyspace.Single([]byte("a"))); err != nil {
			t.Fatal(err)
		}
		r.cache.setLeader(1, 2, 0)
		start := time.Now()
		if _, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte("a")}); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > 2*time.Second {
			t.Errorf("the read took %v", d)
		}
		if h.asked == 0 {
			t.Error("the hanging node was not asked")
		}
		c.lead[1] = 2
		r.cache.setLeader(1, 2, 0)
		h.asked = 0
		h.dead.Store(false)
		_, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("a")})
		if !errors.Is(err, kverror.Timeout) || kverror.Of(err).Fate() != kverror.Unknown {
			t.Errorf("a put whose node hangs: %v", err)
		}
		if h.asked != 1 || len(c.proposed) != 0 {
			t.Errorf("the put was sent %d times and took effect %d times", h.asked, len(c.proposed))
		}
	})
}

// TestTheDeadAreNotAsked: a dead node gets no request while others are alive, even if it led before
// or somebody names it.
func TestTheDeadAreNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		h := &hung{cluster: c, node: 2}
		h.dead.Store(true)
		r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: h, Sequencer: c, Placement: c, Alive: h.alive})
		r.Learn(c.descs...)
		r.cache.setLeader(1, 2, 0)
		c.lead[1] = 2
		time.AfterFunc(300*time.Millisecond, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.lead[1] = 3
		})
		start := time.Now()
		if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("a")}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 300*time.Millisecond+2*lastPause || h.asked != 0 {
			t.Errorf("the put took %v, the dead node was asked %d times", took, h.asked)
		}
	})
}

// TestLeaderOf: the leader is the node that answered last, as long as it lives.
func TestLeaderOf(t *testing.T) {
	c := newCluster(1)
	var dead keyspace.NodeID
	r := New(Config{Self: 1, Clock: clock.System(), Ranges: c, Sequencer: c, Placement: c, Alive: func(n keyspace.NodeID) bool { return n != dead }})
	want := func(what string, leader keyspace.NodeID) {
		t.Helper()
		if _, got := r.LeaderOf([]byte("a")); got != leader {
			t.Errorf("%s: node %s, want %s", what, got, leader)
		}
	}
	want("no range is known", 0)
	r.Learn(c.descs...)
	want("nobody has answered", 0)
	c.lead[1] = 2
	if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("a")}); err != nil {
		t.Fatal(err)
	}
	want("it has answered", 2)
	dead = 2
	want("it is dead", 0)
	r.Led(1, 1)
	dead = 1
	want("this node is never dead to itself", 1)
	if span, _ := r.LeaderOf([]byte("a")); !span.Equal(keyspace.Span{}) {
		t.Errorf("the span is %s", span)
	}
}

// failing answers every request with one error.
type failing struct {
	*cluster
	err   error
	asked int
}

func (f *failing) Do(context.Context, keyspace.NodeID, *rangeapi.Request) (*rangeapi.Response, error) {
	f.asked++
	return nil, f.err
}

// Every row of the table meets a write and a read. A write that may have taken effect is never
// repeated (trap 49). One that certainly did not is repeated until the deadline, if the table says
// so.
func TestTableDecidesWhatIsRepeated(t *testing.T) {
	for _, row := range kverror.Table() {
		t.Run(row.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &failing{cluster: newCluster(1), err: &kverror.Error{Kind: row.Kind}}
				r := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: f, Sequencer: f, Placement: f, Alive: alive, Timeout: time.Second})
				start := time.Now()
				_, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("a")})
				if err == nil {
					t.Fatal("no error")
				}
				if repeated := f.asked > 1; repeated != (row.Retry == kverror.RetryRouter) {
					t.Errorf("a put was tried %d times", f.asked)
				}
				if got := kverror.GRPC(err); row.Retry != kverror.RetryRouter && got.Error() != row.GRPC.Error() {
					t.Errorf("the client gets %v, want %v", got, row.GRPC)
				}
				if d := time.Since(start); d > 2*time.Second {
					t.Errorf("it took %v with a timeout of 1s", d)
				}
			})
		})
	}
}

func TestTheClientsDeadlineIsTheClientsError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failing{cluster: newCluster(1), err: &kverror.Error{Kind: kverror.Busy}}
		r := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: f, Sequencer: f, Placement: f, Alive: alive})
		ctx, cancel := context.WithTimeout(internal(t), 50*time.Millisecond)
		defer cancel()
		if _, err := r.Put(ctx, &pb.PutRequest{Key: []byte("a")}); !errors.Is(err, kverror.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
	})
}

func TestWritesThatNameNoKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		c.split("m")
		r := newRouter(c)
		resp, err := r.Txn(internal(t), &pb.TxnRequest{})
		if err != nil || !resp.Succeeded || resp.Header.Revision != 1 {
			t.Errorf("empty txn: %v, %v", resp, err)
		}
		within := &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{}}}
		resp, err = r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{within}})
		if err != nil || !resp.Succeeded || len(resp.Responses) != 1 || !resp.Responses[0].GetResponseTxn().GetSucceeded() {
			t.Errorf("empty txn in a txn: %v, %v", resp, err)
		}
		del, err := r.DeleteRange(internal(t), &pb.DeleteRangeRequest{Key: []byte("z"), RangeEnd: []byte("a")})
		if err != nil || del.Header.Revision != 1 || del.Deleted != 0 {
			t.Errorf("delete of nothing: %v, %v", del, err)
		}
	})
}

func TestRevisionsOfReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		r := newRouter(c)
		c.rev, c.compacted = 10, 5
		for rev, want := range map[int64]error{4: kverror.Compacted, 5: nil, 10: nil, 11: kverror.FutureRevision, 0: nil, -1: nil} {
			resp, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte("a"), Revision: rev})
			if (want == nil && (err != nil || resp.Header.Revision != 10)) || (want != nil && !errors.Is(err, want)) {
				t.Errorf("revision %d: %v, %v", rev, resp, err)
			}
		}
	})
}

// removal notes the revision that it was asked to wait for, and returns a set error.
type removal struct {
	asked []keyspace.Revision
	err   error
}

func (m *removal) AwaitRemoval(ctx context.Context, compacted keyspace.Revision) error {
	m.asked = append(m.asked, compacted)
	if m.err != nil {
		<-ctx.Done()
		return fmt.Errorf("%w: %w", m.err, context.Cause(ctx))
	}
	return nil
}

// A physical compaction waits for the removal, also if the revision is compacted already, and not
// if there is nothing to wait for. Only the client's context ends the wait.
func TestPhysicalCompaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, m := newCluster(1), &removal{}
		r := New(Config{Self: 2, Clock: clock.Virtual(), Ranges: c, Sequencer: c, Placement: c, Removal: m, Alive: alive, Timeout: time.Second})
		c.rev = 10
		for _, s := range []struct {
			at       int64
			physical bool
			err      error
			waits    bool
		}{{3, false, nil, false}, {5, true, nil, true}, {5, true, kverror.Compacted, true}, {4, false, kverror.Compacted, false}, {-1, true, kverror.Compacted, false}} {
			m.asked = nil
			_, err := r.Compact(internal(t), &pb.CompactionRequest{Revision: s.at, Physical: s.physical})
			if waited := len(m.asked) == 1 && m.asked[0] == keyspace.Revision(s.at); !errors.Is(err, s.err) || waited != s.waits {
				t.Errorf("at %d, physical %t: %v, asked to wait for %d", s.at, s.physical, err, m.asked)
			}
		}
		m.err = errors.New("a version is left")
		ctx, cancel := context.WithTimeout(internal(t), time.Minute)
		defer cancel()
		begun := time.Now()
		_, err := r.Compact(ctx, &pb.CompactionRequest{Revision: 7, Physical: true})
		if kverror.Of(err).Kind != kverror.DeadlineExceeded || time.Since(begun) != time.Minute {
			t.Errorf("after %v: %v", time.Since(begun), err)
		}
	})
}

func TestCacheKeepsTheNewer(t *testing.T) {
	c := newRangeCache()
	d := func(id keyspace.RangeID, gen keyspace.Generation, start, end string) keyspace.Descriptor {
		return keyspace.Descriptor{
			Range: id, Generation: gen, Span: keyspace.Span{Start: []byte(start), End: []byte(end)},
			Replicas: []keyspace.Replica{{ID: 1, Node: 7}},
		}
	}
	c.update(d(1, 1, "", ""))
	c.setLeader(1, 7, 0)
	c.update(d(1, 2, "", "m"), d(2, 2, "m", ""))
	if rt := c.find([]byte("x")); rt == nil || rt.desc.Range != 2 {
		t.Fatalf("x is in %+v", rt)
	}
	if rt := c.find([]byte("a")); rt.leader() != 7 {
		t.Error("the leader was forgotten at a split")
	}
	if c.update(d(1, 1, "", "")) {
		t.Error("an old descriptor was taken in")
	}
	if c.update(d(2, 1, "m", "")) {
		t.Error("an old descriptor of the child was taken in")
	}
	c.update(d(2, 3, "m", "t"))
	if c.find([]byte("u")) != nil {
		t.Error("a hole is filled")
	}
	if _, ok := overlapping(c.all(), keyspace.Span{Start: []byte("a")}); ok {
		t.Error("a span with a hole counts as covered")
	}
	c.setLeader(1, 0, 3)
	if c.find([]byte("a")).leader() != 7 {
		t.Error("a hint was forgotten that nobody blamed")
	}
}

// slow is a cluster whose nodes answer reads slowly.
type slow struct {
	*cluster
	each  time.Duration
	asked atomic.Int32
}

func (s *slow) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	s.asked.Add(1)
	if err := clock.Sleep(ctx, clock.Virtual(), s.each); err != nil {
		return nil, err
	}
	return s.cluster.Do(ctx, node, req)
}

// A long read at a live node is waited for: another request would only start it anew.
func TestALongReadIsNotBegunAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		s := &slow{cluster: c, each: 3500 * time.Millisecond}
		r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: s, Sequencer: c, Placement: c, Alive: alive})
		if _, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}}); err != nil || s.asked.Load() != 1 {
			t.Errorf("%v after %d attempts", err, s.asked.Load())
		}
	})
}

// full has two other answers take the budget. The first one takes bytes of the shared area. The
// leader takes the whole reserve.
func full(t *testing.T, r *Router, bytes int64) (first, leader *budget.Share) {
	t.Helper()
	f, l := r.cfg.Answers.Share(), r.cfg.Answers.Share()
	if err := f.Take(internal(t), bytes); err != nil {
		t.Fatal(err)
	}
	for l.Bytes() < r.cfg.Answers.Reserve() {
		if err := l.Take(internal(t), r.cfg.Answers.Reserve()-l.Bytes()); err != nil {
			t.Fatal(err)
		}
	}
	return &f, &l
}

// Answers that are put together share one budget; one at a time may be larger. Others wait until
// they have room, or their clients go away.
func TestJoinedAnswersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		c.split("m")
		s := &slow{cluster: c}
		r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: s, Sequencer: c, Placement: c, Alive: alive, Answers: budget.New(100, 10000)})
		for _, k := range []string{"a", "z"} {
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: make([]byte, 200)}); err != nil {
				t.Fatal(err)
			}
		}
		all := &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
		if _, err := r.Range(internal(t), all); err != nil {
			t.Errorf("alone: %v", err)
		}
		first, leader := full(t, r, 0)
		before := r.cfg.Answers.Held()
		ctx, cancel := context.WithTimeout(internal(t), time.Minute)
		defer cancel()
		if _, err := r.Range(ctx, all); !errors.Is(err, kverror.DeadlineExceeded) {
			t.Errorf("beside another one: %v", err)
		}
		if got := r.cfg.Answers.Held(); got != before {
			t.Errorf("%d bytes are held, before %d", got, before)
		}
		ended := make(chan error, 1)
		go func() {
			_, err := r.Range(internal(t), all)
			ended <- err
		}()
		time.Sleep(time.Hour) // a client without deadline waits for longer than the router's timeout
		if len(ended) > 0 {
			t.Errorf("it did not wait: %v", <-ended)
		}
		leader.Release()
		if err := <-ended; err != nil {
			t.Errorf("once there was room: %v", err)
		}
		first.Release()
		// A small one has its place beside a large one.
		r.cfg.Answers = budget.New(2000, 10000)
		first, leader = full(t, r, 0)
		if _, err := r.Range(internal(t), all); err != nil {
			t.Errorf("a small one beside a large one: %v", err)
		}
		leader.Release()
		first.Release()
		if got := r.cfg.Answers.Held(); got != 0 {
			t.Errorf("%d bytes are held in the end", got)
		}
	})
}

// The parts of one answer wait for memory at a time. Together they ask for too much, but the answer
// fits. It is not refused, and does not wait for itself.
func TestPartsOfAnAnswerDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		c.split("m")
		r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: &oneByOne{c}, Sequencer: c, Placement: c, Alive: alive, Answers: budget.New(100, 5<<19)})
		for _, k := range []string{"a", "b", "x", "y"} {
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: make([]byte, 600<<10)}); err != nil {
				t.Fatal(err)
			}
		}
		other := r.cfg.Answers.Share()
		if err := other.Take(internal(t), 1200<<10); err != nil {
			t.Fatal(err)
		}
		other.Complete()
		ctx, cancel := context.WithTimeout(internal(t), time.Hour)
		defer cancel()
		ended := make(chan error, 1)
		go func() {
			_, err := r.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
			ended <- err
		}()
		synctest.Wait()
		if n := r.cfg.Answers.Waiting(); n == 0 {
			t.Fatal("no part waits")
		}
		other.Release()
		if err := <-ended; err != nil {
			t.Errorf("an answer that fits: %v", err)
		}
		if got := r.cfg.Answers.Held(); got != 0 {
			t.Errorf("%d bytes are held in the end", got)
		}
	})
}

// asksPages notes how many bytes the first page of each read may have.
type asksPages struct {
	*cluster
	first atomic.Int64
}

func (a *asksPages) Do(ctx context.Context, n keyspace.NodeID, q *rangeapi.Request) (*rangeapi.Response, error) {
	if p, ok := q.Op.(*rangeapi.Page); ok && len(p.Key) == 1 {
		a.first.Add(int64(p.MaxBytes))
	}
	return a.cluster.Do(ctx, n, q)
}

// Reads that begin at a time have a small page each before they wait for memory.
func TestReadsThatWaitHoldLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const readers = 100
		c := newCluster(1)
		asks := &asksPages{cluster: c}
		r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: asks, Sequencer: c, Placement: c, Alive: alive, Answers: budget.New(100, 2<<20)})
		if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("a"), Value: make([]byte, 200)}); err != nil {
			t.Fatal(err)
		}
		first, leader := full(t, r, 0)
		ctx, cancel := context.WithCancel(internal(t))
		var wg sync.WaitGroup
		for range readers {
			wg.Go(func() { _, _ = r.Range(ctx, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}}) })
		}
		synctest.Wait()
		if got := asks.first.Load(); r.cfg.Answers.Waiting() != readers || got == 0 || got > readers*64<<10 {
			t.Errorf("%d of %d reads wait, with pages of up to %d KiB", r.cfg.Answers.Waiting(), readers, got>>10)
		}
		cancel()
		wg.Wait()
		first.Release()
		leader.Release()
	})
}

// asked notes which node is asked with which deadline, and answers at last.
type asked struct {
	nodes     []keyspace.NodeID
	deadlines int
}

func (a *asked) Do(ctx context.Context, n keyspace.NodeID, _ *rangeapi.Request) (*rangeapi.Response, error) {
	a.nodes = append(a.nodes, n)
	if _, ok := ctx.Deadline(); ok {
		a.deadlines++
	}
	if len(a.nodes) < 4 {
		return nil, kverror.New(kverror.Unreachable, "node %s", n)
	}
	return &rangeapi.Response{Op: &pb.PutResponse{Header: &pb.ResponseHeader{Revision: 2}}}, nil
}

// TestOrderOfAttempts: after a leader that failed, this node's own replica is asked, then the
// others. The leader is asked again only after all of them.
func TestOrderOfAttempts(t *testing.T) {
	for leader, want := range map[keyspace.NodeID][]keyspace.NodeID{
		1: {1, 2, 3, 1}, 2: {2, 1, 3, 1}, 3: {3, 1, 2, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, a := newCluster(1), &asked{}
			r := New(Config{Self: 1, Clock: clock.Virtual(), Ranges: a, Sequencer: c, Placement: c, Alive: alive, Timeout: time.Second})
			r.Learn(c.descs...)
			r.cache.setLeader(1, leader, 0)
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte("k")}); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(a.nodes, want) {
				t.Errorf("leader %d: asked %v, want %v", leader, a.nodes, want)
			}
			if a.deadlines != len(a.nodes) {
				t.Errorf("%d of %d attempts had a deadline", a.deadlines, len(a.nodes))
			}
		})
	}
}
