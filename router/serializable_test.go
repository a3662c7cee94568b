package router

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// locals are the replicas of one node. resolved is their resolved revision, by the range's start.
type locals struct {
	*cluster
	resolved map[string]keyspace.Revision
	// compacted is from where they can be read, 0 for anywhere.
	compacted map[string]keyspace.Revision
	reads     int
	// asked counts requests to leaders; down says that leaders do not answer.
	asked int
	down  bool
	// refuse, if set, is what reads of the replicas return.
	refuse error
}

func (l *locals) find(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	for _, d := range l.descs {
		if d.Range == id {
			return d, true
		}
	}
	return keyspace.Descriptor{}, false
}

func (l *locals) ResolvedHere(id keyspace.RangeID, g keyspace.Generation) (from, to keyspace.Revision, ok bool) {
	d, ok := l.find(id)
	c, here := l.resolved[string(d.Span.Start)]
	return l.compacted[string(d.Span.Start)], c, ok && here && d.Generation == g
}

func (l *locals) ReadHere(_ context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	from, c, ok := l.ResolvedHere(req.Range, req.Generation)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reads++
	if l.refuse != nil {
		return nil, l.refuse
	}
	if !ok || req.ReadRevision > c {
		return nil, &kverror.Error{Kind: kverror.ReadAgain}
	}
	if req.ReadRevision < from {
		return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: from}
	}
	return l.answer(req), nil
}

// answer plays a range. All keys have the revisions of their puts; keys above the read revision are
// left out.
func (l *locals) answer(req *rangeapi.Request) *rangeapi.Response {
	all := l.kvs
	defer func() { l.kvs = all }()
	l.kvs = nil
	for _, kv := range all {
		if kv.ModRevision <= int64(req.ReadRevision) {
			l.kvs = append(l.kvs, kv)
		}
	}
	if p, ok := req.Op.(*rangeapi.Page); ok {
		return &rangeapi.Response{Op: l.page(p)}
	}
	return &rangeapi.Response{Op: evaluate(l.kvs, req.Op.(*pb.RangeRequest))}
}

// forgetTold forgets the revisions of serializable answers.
func (r *Router) forgetTold() {
	for _, rt := range r.cache.all() {
		rt.served.Store(0)
	}
}

func (l *locals) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	l.mu.Lock()
	if _, put := req.Op.(*pb.PutRequest); put {
		l.mu.Unlock()
		return l.cluster.Do(ctx, node, req)
	}
	l.asked++
	defer l.mu.Unlock()
	if l.down {
		return nil, &kverror.Error{Kind: kverror.NoLeader}
	}
	return l.answer(req), nil
}

// A serializable read of one range asks nobody. A read of several ranges is made at the highest
// resolved revision, with the leaders of the others, or at the lowest if these do not answer.
func TestSerializableReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c}
		r := newRouter(c)
		r.cfg.Ranges, r.cfg.Local = l, l
		c.split("m")
		r.Learn(c.descs...)
		for i, k := range []string{"a", "x", "b", "y", "c", "z"} { // at 2, 3, 4, 5, 6, 7
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: []byte(fmt.Sprint(i))}); err != nil {
				t.Fatal(err)
			}
		}
		all := func() *pb.RangeRequest {
			return &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Serializable: true}
		}
		low := func() *pb.RangeRequest {
			return &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("m"), Serializable: true}
		}
		for _, s := range []struct {
			name     string
			resolved map[string]keyspace.Revision
			down     bool
			req      *pb.RangeRequest
			rev      int64
			keys     int
			asked    bool
		}{
			{"one range", map[string]keyspace.Revision{"": 4, "m": 7}, true, low(), 4, 2, false},
			{"one key", map[string]keyspace.Revision{"": 4, "m": 7}, true, &pb.RangeRequest{Key: []byte("a"), Serializable: true}, 4, 1, false},
			{"several, all resolved", map[string]keyspace.Revision{"": 6, "m": 6}, true, all(), 6, 5, false},
			{"several, one behind", map[string]keyspace.Revision{"": 4, "m": 7}, false, all(), 7, 6, true},
			{"several, one behind, no quorum", map[string]keyspace.Revision{"": 4, "m": 7}, true, all(), 4, 3, true},
			{"one is not here", map[string]keyspace.Revision{"m": 7}, false, all(), 7, 6, true},
			{"an old revision", map[string]keyspace.Revision{"": 6, "m": 6}, true, func() *pb.RangeRequest { q := all(); q.Revision = 5; return q }(), 6, 0, false},
			{"a revision that is not here", map[string]keyspace.Revision{"": 6, "m": 6}, false, func() *pb.RangeRequest { q := all(); q.Revision = 7; return q }(), 7, 0, true},
		} {
			l.resolved, l.down, l.asked = s.resolved, s.down, 0
			r.forgetTold()
			resp, err := r.Range(internal(t), proto.CloneOf(s.req))
			if err != nil || resp.Header.Revision != s.rev || s.keys > 0 && len(resp.Kvs) != s.keys || (l.asked > 0) != s.asked {
				t.Errorf("%s: %v, %v, leaders were asked %d times", s.name, resp, err, l.asked)
			}
		}
		// Streams read from the replicas here, whoever leads.
		l.resolved, l.down, l.asked = map[string]keyspace.Revision{"": 4, "m": 7}, true, 0
		r.forgetTold()
		var m merged
		if err := r.RangeStream(internal(t), all(), m.send); err != nil || m.resp.Header.Revision != 4 || len(m.resp.Kvs) != 3 || l.asked != 0 {
			t.Errorf("a stream: %v, %v, leaders were asked %d times", &m.resp, err, l.asked)
		}
		// An idle range is resolved only below what another one has compacted. Such a stream begins
		// only at leaders.
		l.compacted, l.down, m = map[string]keyspace.Revision{"m": 5}, false, merged{}
		if err := r.RangeStream(internal(t), all(), m.send); err != nil || m.resp.Header.Revision != 7 || len(m.resp.Kvs) != 6 {
			t.Errorf("a stream beside a compaction: %v, %v", &m.resp, err)
		}
		l.compacted, l.down = nil, true
		begin := time.Now()
		l.resolved = nil
		if _, err := r.Range(internal(t), all()); !errors.Is(err, kverror.NoLeader) && !errors.Is(err, kverror.Timeout) {
			t.Errorf("nothing here and no leader: %v after %v", err, time.Since(begin))
		}
	})
}

// Serializable reads of a range do not go back at one gateway, whatever spans are read: a replica
// that is behind is read at its leader. If no leader answers, the replica here answers, with its
// own revision. Reads of other ranges do not count, so one at rest is read here.
func TestSerializableReadsOfARangeDoNotGoBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c, resolved: map[string]keyspace.Revision{"": 4, "m": 6}}
		r := newRouter(c)
		r.cfg.Ranges, r.cfg.Local = l, l
		c.split("m")
		r.Learn(c.descs...)
		for _, k := range []string{"a", "x", "b", "y", "c", "z"} { // at 2, 3, 4, 5, 6, 7
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: []byte("v")}); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range []struct {
			key, end string
			at       int64
			down     bool
			rev      int64
			keys     int
			asked    bool
		}{
			{"x", "", 0, true, 6, 1, false},
			{"a", "", 0, true, 4, 1, false},
			{"a", "m", 0, true, 4, 2, false},
			{"m", "\x00", 0, true, 6, 2, false},
			{"a", "\x00", 0, false, 6, 5, true}, // a and b, and c from its leader
			{"c", "", 0, false, 6, 1, true},
			{"a", "m", 4, false, 6, 2, false},
			{"a", "m", 4, true, 6, 2, false},
			{"a", "m", 0, true, 4, 2, true},
			{"m", "\x00", 0, true, 6, 2, false},
		} {
			l.down, l.asked = s.down, 0
			req := &pb.RangeRequest{Key: []byte(s.key), RangeEnd: []byte(s.end), Revision: s.at, Serializable: true}
			resp, err := r.Range(internal(t), proto.CloneOf(req))
			if err != nil || resp.Header.Revision != s.rev || len(resp.Kvs) != s.keys || (l.asked > 0) != s.asked {
				t.Errorf("%+v: %v, %v, leaders were asked %d times", s, resp, err, l.asked)
			}
		}
		// A stream that would go back is read from leaders, if they answer. What counted for the
		// parent of a split counts for each heir.
		c.split("b")
		l.resolved["b"] = 4
		r.Learn(c.descs...)
		for _, s := range []struct {
			key, end string
			down     bool
			rev      int64
			keys     int
		}{
			{"m", "\x00", false, 6, 2}, {"a", "b", false, 7, 1}, {"b", "m", false, 7, 2}, {"a", "m", true, 4, 2}, {"m", "\x00", false, 6, 2},
		} {
			l.down = s.down
			var m merged
			req := &pb.RangeRequest{Key: []byte(s.key), RangeEnd: []byte(s.end), Serializable: true}
			if err := r.RangeStream(internal(t), req, m.send); err != nil || m.resp.Header.Revision != s.rev || len(m.resp.Kvs) != s.keys {
				t.Errorf("%+v: a stream: %v, %v", s, &m.resp, err)
			}
		}
	})
}

// A serializable answer holds what its header says, and a later one may say less only of other
// ranges. So a client that lists serializably and watches behind the header misses nothing,
// whatever this node's replicas have applied and whoever answers. Headers of different ranges are
// of different times and do go back here.
func TestASerializableAnswerHoldsWhatItsHeaderSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c}
		r := newRouter(c)
		r.cfg.Ranges, r.cfg.Local = l, l
		quorum, rng := true, rand.New(rand.NewPCG(1, 2))
		r.cfg.Alive = func(keyspace.NodeID) bool { return quorum }
		c.split("m")
		c.split("t")
		r.Learn(c.descs...)
		starts := []string{"", "m", "t"}
		for i := range 60 { // at revisions 2 to 61, each key once: a version tells when it came
			key := fmt.Sprintf("%c%02d", "amt"[rng.IntN(3)], i)
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(key), Value: []byte("v")}); err != nil {
				t.Fatal(err)
			}
		}
		told, highest, backElsewhere, asked := map[string]int64{}, int64(0), 0, 0
		for i := range 600 {
			if i%12 == 0 { // another node
				l.resolved, told, highest = map[string]keyspace.Revision{"": 2, "m": 2, "t": 2}, map[string]int64{}, 0
				r.forgetTold()
			}
			at := starts[rng.IntN(3)]
			l.resolved[at] = min(l.resolved[at]+keyspace.Revision(rng.IntN(20)), 61)
			quorum = rng.IntN(8) > 0
			l.down, l.asked = !quorum, 0
			first := rng.IntN(3)
			last := first + rng.IntN(3-first)
			end := append(starts[1:], "\x00")[last]
			req := &pb.RangeRequest{Key: []byte(cmp.Or(starts[first], "\x00")), RangeEnd: []byte(end), Serializable: true}
			resp, err := serializably(internal(t), r, req, rng.IntN(2) == 0)
			if err != nil {
				t.Fatalf("%v, quorum %t: %v", req, quorum, err)
			}
			header := resp.GetHeader().GetRevision()
			var want []string
			for _, kv := range c.kvs {
				if k := string(kv.Key); k >= starts[first] && (end == "\x00" || k < end) && kv.ModRevision <= header {
					want = append(want, k)
				}
			}
			if got := keysOf(resp); !slices.Equal(got, want) {
				t.Fatalf("header %d of %v, resolved %v, quorum %t: %q, want %q", header, req, l.resolved, quorum, got, want)
			}
			for _, s := range starts[first : last+1] {
				if quorum && header < told[s] {
					t.Fatalf("header %d of %v behind %d of range %q", header, req, told[s], s)
				}
				told[s] = max(told[s], header)
			}
			if header < highest && quorum {
				backElsewhere++
			}
			highest = max(highest, header)
			asked += l.asked
		}
		if backElsewhere == 0 || asked == 0 {
			t.Errorf("%d headers below an earlier one of another range, leaders were asked %d times: this has tested nothing", backElsewhere, asked)
		}
	})
}

// serializably answers a read at once or as a stream.
func serializably(ctx context.Context, r *Router, req *pb.RangeRequest, whole bool) (*pb.RangeResponse, error) {
	if whole {
		return r.Range(ctx, req)
	}
	var m merged
	err := r.RangeStream(ctx, req, m.send)
	return &m.resp, err
}

func keysOf(resp *pb.RangeResponse) (keys []string) {
	for _, kv := range resp.GetKvs() {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

// If too few nodes are alive for a range to have a leader, a serializable read does not wait for
// one. The replicas here answer at once, for one range or several, whatever was told before.
func TestASerializableReadWaitsForNoQuorum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c, resolved: map[string]keyspace.Revision{"": 4, "m": 7}}
		r := newRouter(c)
		r.cfg.Ranges, r.cfg.Local = l, l
		quorum := true
		r.cfg.Alive = func(keyspace.NodeID) bool { return quorum }
		c.split("m")
		r.Learn(c.descs...)
		for _, k := range []string{"a", "x", "b", "y", "c", "z"} { // at 2, 3, 4, 5, 6, 7
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: []byte("v")}); err != nil {
				t.Fatal(err)
			}
		}
		read := func(key, end string) (*pb.RangeResponse, time.Duration) {
			t.Helper()
			begin := time.Now()
			resp, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte(key), RangeEnd: []byte(end), Serializable: true})
			if err != nil {
				t.Fatalf("%q up to %q: %v", key, end, err)
			}
			return resp, time.Since(begin)
		}
		if resp, _ := read("a", "\x00"); resp.Header.Revision != 7 || len(resp.Kvs) != 6 || l.asked == 0 {
			t.Errorf("with a quorum: %v, leaders were asked %d times", resp, l.asked)
		}
		quorum, l.down, l.asked = false, true, 0
		for _, end := range []string{"", "m", "\x00"} {
			resp, took := read("a", end)
			if resp.Header.Revision != 4 || took != 0 || l.asked > 0 {
				t.Errorf("up to %q without a quorum: %v after %v, leaders were asked %d times", end, resp, took, l.asked)
			}
			var m merged
			req := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("\x00"), Serializable: true}
			begin := time.Now()
			if err := r.RangeStream(internal(t), req, m.send); err != nil || m.resp.Header.Revision != 4 || time.Since(begin) != 0 {
				t.Errorf("a stream without a quorum: %v, %v after %v", &m.resp, err, time.Since(begin))
			}
		}
	})
}

// A refusal for the size, or for a compacted explicit revision, is final: nobody else is asked, and
// no quorum is needed.
func TestSerializableRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c, resolved: map[string]keyspace.Revision{"": 4, "m": 7}, down: true}
		r := newRouter(c)
		c.split("m")
		r.Learn(c.descs...)
		for _, k := range []string{"a", "x", "b", "y", "c", "z"} { // at 2, 3, 4, 5, 6, 7
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: []byte("v")}); err != nil {
				t.Fatal(err)
			}
		}
		r.cfg.Ranges, r.cfg.Local = l, l
		before := c.sequenced
		for _, s := range []struct {
			kind kverror.Kind
			rev  int64
		}{{kverror.AnswerTooLarge, 0}, {kverror.TooManyRequests, 0}, {kverror.Compacted, 3}} {
			l.refuse = &kverror.Error{Kind: s.kind, CompactRevision: 4}
			for _, end := range []string{"", "b", "\x00"} {
				req := &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte(end), Serializable: true, Revision: s.rev, SortOrder: pb.RangeRequest_DESCEND}
				l.reads = 0
				resp, err := r.Range(internal(t), req)
				if !errors.Is(err, s.kind) || kverror.Of(err).CompactRevision != 4 {
					t.Errorf("%v up to %q: %v, %v", s.kind, end, resp, err)
				}
				if l.reads > 2 { // one of each range
					t.Errorf("%v up to %q: %d reads", s.kind, end, l.reads)
				}
				var m merged
				req.SortOrder = pb.RangeRequest_NONE
				if err := r.RangeStream(internal(t), req, m.send); !errors.Is(err, s.kind) || m.parts > 0 {
					t.Errorf("%v up to %q: a stream: %v, %d parts", s.kind, end, err, m.parts)
				}
			}
		}
		if l.asked > 0 || c.sequenced > before {
			t.Errorf("leaders were asked %d times, the sequencer %d times", l.asked, c.sequenced-before)
		}
	})
}

// A serializable read that waits for memory is not taken for one whose leaders are silent: it reads
// at the same revision as otherwise.
func TestASerializableReadWaitsForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		l := &locals{cluster: c, resolved: map[string]keyspace.Revision{"": 4, "m": 7}}
		r := newRouter(c)
		c.split("m")
		r.Learn(c.descs...)
		for _, k := range []string{"a", "x", "b", "y", "c", "z"} { // at 2, 3, 4, 5, 6, 7
			if _, err := r.Put(internal(t), &pb.PutRequest{Key: []byte(k), Value: []byte("v")}); err != nil {
				t.Fatal(err)
			}
		}
		r.cfg.Ranges, r.cfg.Local, r.cfg.Answers = l, l, budget.New(100, 10000)
		first, leader := full(t, r, 100)
		// The turn comes after a moment, and the memory after longer than leaders are waited for.
		time.AfterFunc(time.Second, func() { first.Give(1) })
		time.AfterFunc(time.Minute, leader.Release)
		began := time.Now()
		resp, err := r.Range(internal(t), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte{0}, Serializable: true})
		if err != nil || resp.Header.Revision != 7 || len(resp.Kvs) != 6 {
			t.Errorf("%v, %v", resp, err)
		}
		if took := time.Since(began); took != time.Minute {
			t.Errorf("it took %v", took)
		}
		first.Release()
	})
}
