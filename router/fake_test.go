package router

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// cluster is a keyspace in memory that plays ranges, sequencer and placement. The data are right by
// construction. The ranges split, move their leaders and fail by a seed.
type cluster struct {
	mu    sync.Mutex
	rng   *rand.Rand
	nodes []keyspace.NodeID
	descs []keyspace.Descriptor
	lead  map[keyspace.RangeID]keyspace.NodeID
	next  keyspace.RangeID
	// chaos is the share of requests that meet a fault.
	chaos     float64
	rev       keyspace.Revision
	compacted keyspace.Revision
	kvs       []*mvccpb.KeyValue
	// proposed counts how often each put took effect, by its value.
	proposed map[string]int
	maps     int
	// sequenced counts the requests to the sequencer.
	sequenced int
	// counted, paged and pages count reads by what they asked for: a count, a whole answer, a
	// page. at are the revisions of page reads.
	counted, paged, pages int
	at                    []keyspace.Revision
}

func newCluster(seed uint64) *cluster {
	c := &cluster{
		rng: rand.New(rand.NewPCG(seed, 1)), nodes: []keyspace.NodeID{1, 2, 3}, next: 2, rev: 1,
		lead: map[keyspace.RangeID]keyspace.NodeID{1: 1}, proposed: map[string]int{},
	}
	c.descs = []keyspace.Descriptor{{Range: 1, Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}}}}
	return c
}

// split divides the range that holds the key.
func (c *cluster) split(key string) {
	i := slices.IndexFunc(c.descs, func(d keyspace.Descriptor) bool { return d.Span.Contains([]byte(key)) })
	d := c.descs[i]
	if string(d.Span.Start) == key {
		return
	}
	left, right := d, d
	left.Generation, right.Generation = d.Generation+1, d.Generation+1
	left.Span.End, right.Span.Start = []byte(key), []byte(key)
	right.Range = c.next
	c.next++
	c.lead[right.Range] = c.lead[d.Range]
	c.descs = slices.Replace(c.descs, i, i+1, left, right)
}

func (c *cluster) Sequence(_ keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	c.mu.Lock()
	c.sequenced++
	a := keyspace.SequenceAnswer{Current: c.rev, Compacted: c.compacted}
	if c.rng.Float64() < c.chaos/4 {
		a = keyspace.SequenceAnswer{Err: kverror.New(kverror.NoLeader, "no sequencer")}
	}
	c.mu.Unlock()
	done(a)
}

func (c *cluster) RangeMap(context.Context) ([]keyspace.Descriptor, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.maps++
	return slices.Clone(c.descs), nil
}

func (c *cluster) Compact(_ context.Context, rev keyspace.Revision) (keyspace.Revision, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if rev <= c.compacted {
		return 0, &kverror.Error{Kind: kverror.Compacted}
	}
	c.compacted = rev
	return c.rev, nil
}

// mishap sometimes changes the cluster under a request, or fails the request.
func (c *cluster) mishap(id keyspace.RangeID) error {
	if c.rng.Float64() >= c.chaos {
		return nil
	}
	switch c.rng.IntN(5) {
	case 0:
		c.split(string(rune('a' + c.rng.IntN(26))))
	case 1:
		c.lead[id] = c.nodes[c.rng.IntN(len(c.nodes))]
	case 2:
		return &kverror.Error{Kind: kverror.Busy}
	case 3:
		return &kverror.Error{Kind: kverror.Unreachable}
	case 4:
		return &kverror.Error{Kind: kverror.Dropped}
	}
	return nil
}

func (c *cluster) Do(_ context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.mishap(req.Range); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(c.descs, func(d keyspace.Descriptor) bool { return d.Range == req.Range })
	if i < 0 {
		return nil, &kverror.Error{Kind: kverror.RangeNotHere}
	}
	d := c.descs[i]
	if node != c.lead[req.Range] {
		e := &kverror.Error{Kind: kverror.NotLeader}
		if c.rng.IntN(2) == 0 {
			e.Leader = c.lead[req.Range]
		}
		return nil, e
	}
	if req.Generation != d.Generation {
		e := &kverror.Error{Kind: kverror.WrongRange}
		if c.rng.IntN(2) == 0 {
			e.Descriptors = slices.Clone(c.descs)
		}
		return nil, e
	}
	if b, _ := rangeapi.Bounds(req.Op); !d.Span.Covers(b) && !(string(b.Start) == "\x00" && len(d.Span.Start) == 0) {
		panic(fmt.Sprintf("a request for %s came to %s", b, d.Span))
	}
	switch op := req.Op.(type) {
	case *pb.PutRequest:
		return &rangeapi.Response{Op: c.put(op)}, nil
	case *pb.RangeRequest:
		if req.ReadRevision != c.rev {
			panic("the revision has moved under a quiet cluster")
		}
		if op.CountOnly {
			c.counted++
		} else {
			c.paged++
		}
		return &rangeapi.Response{Op: evaluate(c.kvs, op)}, nil
	case *rangeapi.Page:
		c.pages++
		c.at = append(c.at, req.ReadRevision)
		if req.ReadRevision < c.compacted {
			if op.Revision > 0 {
				return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: c.compacted}
			}
			return nil, &kverror.Error{Kind: kverror.ReadAgain}
		}
		return &rangeapi.Response{Op: c.page(op)}, nil
	}
	return nil, kverror.New(kverror.Internal, "%T", req.Op)
}

func (c *cluster) put(op *pb.PutRequest) proto.Message {
	c.rev++
	kv := &mvccpb.KeyValue{Key: op.Key, Value: op.Value, CreateRevision: int64(c.rev), ModRevision: int64(c.rev), Version: 1}
	i, found := slices.BinarySearchFunc(c.kvs, op.Key, func(kv *mvccpb.KeyValue, k []byte) int { return bytes.Compare(kv.Key, k) })
	if found {
		kv.CreateRevision, kv.Version = c.kvs[i].CreateRevision, c.kvs[i].Version+1
		c.kvs[i] = kv
	} else {
		c.kvs = slices.Insert(c.kvs, i, kv)
	}
	c.proposed[string(op.Value)]++
	return &pb.PutResponse{Header: header(c.rev)}
}

// page answers a page request, with few keys at a time.
func (c *cluster) page(op *rangeapi.Page) *rangeapi.PageAnswer {
	q := proto.CloneOf(op.RangeRequest)
	q.Limit = 0
	passed := evaluate(c.kvs, q)
	q.MinModRevision, q.MaxModRevision, q.MinCreateRevision, q.MaxCreateRevision = 0, 0, 0, 0
	all := evaluate(c.kvs, q)
	n := 1 + c.rng.IntN(5)
	a := &rangeapi.PageAnswer{RangeResponse: &pb.RangeResponse{Header: header(c.rev)}}
	if op.Limit > 0 {
		n = min(n, int(op.Limit))
	}
	if op.WithCount {
		a.Count = all.Count
	}
	kvs := passed.Kvs
	if len(kvs) > n {
		a.More, a.Next, kvs = true, kvs[n].Key, kvs[:n]
	}
	for _, kv := range all.Kvs {
		if len(a.Next) == 0 || bytes.Compare(kv.Key, a.Next) < 0 {
			a.Seen++
		}
	}
	a.N = int64(len(kvs))
	a.Keys, _ = proto.Marshal(&pb.RangeResponse{Kvs: kvs})
	return a
}

// evaluate returns the answer of one range that holds everything.
func evaluate(kvs []*mvccpb.KeyValue, op *pb.RangeRequest) *pb.RangeResponse {
	out := &pb.RangeResponse{}
	span, ok := keyspace.FromEtcd(op.Key, op.RangeEnd)
	if !ok {
		return out
	}
	for _, kv := range kvs {
		if !span.Contains(kv.Key) {
			continue
		}
		out.Count++
		if op.CountOnly || (op.MinModRevision != 0 && kv.ModRevision < op.MinModRevision) ||
			(op.MaxModRevision != 0 && kv.ModRevision > op.MaxModRevision) {
			continue
		}
		if op.KeysOnly && op.SortTarget != pb.RangeRequest_VALUE {
			kv = &mvccpb.KeyValue{Key: kv.Key, ModRevision: kv.ModRevision, CreateRevision: kv.CreateRevision, Version: kv.Version}
		}
		out.Kvs = append(out.Kvs, proto.Clone(kv).(*mvccpb.KeyValue))
	}
	if op.SortOrder == pb.RangeRequest_NONE && op.SortTarget != pb.RangeRequest_KEY && !filtered(op) && op.Limit > 0 && int64(len(out.Kvs)) > op.Limit {
		out.Kvs = out.Kvs[:op.Limit+1] // etcd stops its scan here and sorts what it has
	}
	rangeapi.SortKeys(op, out.Kvs)
	if op.Limit > 0 && int64(len(out.Kvs)) > op.Limit {
		out.Kvs, out.More = out.Kvs[:op.Limit], true
	}
	if op.KeysOnly {
		for _, kv := range out.Kvs {
			kv.Value = nil
		}
	}
	return out
}

// internal is the context of a request that needs no permission.
func internal(t testing.TB) context.Context {
	t.Helper()
	return keyspace.WithPermit(t.Context(), keyspace.Internal)
}
