package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/sim/judge"
)

var hotKeys = []string{"c0", "l0", "u0"}

// client is one client of the cluster. It belongs to one goroutine.
type client struct {
	c   *cluster
	h   *judge.History
	id  int
	rng *rand.Rand
	// seen is the value that the client has last seen of each key, latest the highest
	// revision.
	seen   map[string]*mvccpb.KeyValue
	latest int64
	writes int
	// padding is up to how many bytes more a value has than it needs.
	padding int
}

func newClient(c *cluster, h *judge.History, id int) *client {
	return &client{c: c, h: h, id: id, padding: c.cfg.Padding, rng: rand.New(rand.NewPCG(c.cfg.Seed, 100+uint64(id))), seen: map[string]*mvccpb.KeyValue{}}
}

// Bursts: all clients are busy at about the same time and idle between, so that
// operations meet and ranges fall asleep.
const (
	burstEvery  = 600 * time.Millisecond
	burstJitter = 100 * time.Millisecond
	burstThink  = 6 * time.Millisecond
)

// burstBusy is about how long a burst lasts.
const burstBusy = 150 * time.Millisecond

// intoBurst is the time until a random moment of the next burst.
func (c *cluster) intoBurst(rng *rand.Rand) time.Duration {
	return burstEvery - c.elapsed()%burstEvery + time.Duration(rng.Int64N(int64(burstBusy)))
}

// runUntil works in bursts until stop is closed.
func (c *client) runUntil(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		for range 1 + c.rng.IntN(c.c.cfg.BurstOps*2) {
			c.step()
			c.c.sleep(time.Duration(c.rng.Int64N(int64(burstThink))))
		}
		now := c.c.elapsed()
		c.c.sleep(burstEvery - now%burstEvery + time.Duration(c.rng.Int64N(int64(burstJitter))))
	}
}

// An impatient client uses its own gateway alone and gives up soon. So it keeps asking
// a node that is cut off and whose leader may still believe that it leads. A write that
// hangs there blocks reads of its key, so the client reads other keys too.
const (
	impatience   = 100 * time.Millisecond
	impatientMin = 40 * time.Millisecond
	impatientMax = 240 * time.Millisecond
)

// runImpatient works at the gateway of one machine until stop is closed.
func (c *client) runImpatient(m *machine, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		if r := m.current(); r != nil {
			key := c.key()
			var req proto.Message = &pb.RangeRequest{Key: []byte(key)}
			switch c.rng.IntN(10) {
			case 0:
				req = &pb.PutRequest{Key: []byte(key), Value: c.value(), PrevKv: true}
			case 1:
				req = &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: true}
			case 2, 3:
				req = c.reads(key)
			}
			c.do(m, r, req, impatience)
		}
		c.c.sleep(impatientMin + time.Duration(c.rng.Int64N(int64(impatientMax-impatientMin))))
	}
}

// step does one operation at a gateway that is up, mostly the client's own.
func (c *client) step() {
	ms := c.c.machines
	at := c.id
	if c.rng.IntN(4) == 0 {
		at = c.rng.IntN(len(ms))
	}
	for i := range ms {
		m := ms[(at+i)%len(ms)]
		if r := m.current(); r != nil {
			timeout := 2 * requestTimeout
			if c.rng.IntN(40) == 0 {
				timeout = time.Duration(1+c.rng.IntN(4)) * time.Millisecond
			}
			c.do(m, r, c.request(), timeout)
			return
		}
	}
}

// do sends one request and records the outcome. It returns nil if the gateway takes no
// more requests.
func (c *client) do(m *machine, r *run, req proto.Message, timeout time.Duration) *judge.Op {
	if !r.enter() {
		return nil
	}
	defer r.leave()
	ctx, cancel := context.WithTimeout(r.ctx, timeout)
	defer cancel()
	o := c.h.Begin(c.id, m.id(), req, c.c.elapsed())
	var resp proto.Message
	var err error
	kv := r.core.KV()
	// The store keeps parts of a request, so it gets a copy of its own.
	switch q := proto.Clone(req).(type) {
	case *pb.RangeRequest:
		resp, err = kv.Range(ctx, q)
	case *pb.PutRequest:
		resp, err = kv.Put(ctx, q)
	case *pb.DeleteRangeRequest:
		resp, err = kv.DeleteRange(ctx, q)
	case *pb.TxnRequest:
		resp, err = kv.Txn(ctx, q)
	case *pb.CompactionRequest:
		resp, err = kv.Compact(ctx, q)
	default:
		resp, err = askLeases(ctx, r.core.Leases(), q)
	}
	c.h.End(o, resp, err, r.ctx.Err() != nil, c.c.elapsed())
	if o.Outcome == judge.Answered {
		c.learn(o)
	}
	return o
}

// learn keeps the values of an answer.
func (c *client) learn(o *judge.Op) {
	c.latest = max(c.latest, o.Revision())
	resps := []proto.Message{o.Response}
	if t, ok := o.Response.(*pb.TxnResponse); ok {
		for _, r := range t.GetResponses() {
			resps = append(resps, judge.Inner(r))
		}
	}
	for _, r := range resps {
		if r, ok := r.(*pb.RangeResponse); ok {
			for _, kv := range r.GetKvs() {
				c.seen[string(kv.GetKey())] = kv
			}
		}
	}
}

func (c *client) key() string {
	if c.rng.IntN(2) == 0 {
		return hotKeys[c.rng.IntN(len(hotKeys))]
	}
	return fmt.Sprintf("%c%d", judge.Groups[c.rng.IntN(len(judge.Groups))], c.rng.IntN(judge.KeysPerGroup))
}

// value returns a value that nobody else ever writes.
func (c *client) value() []byte {
	c.writes++
	v := fmt.Appendf(nil, "%d.%d", c.id, c.writes)
	if c.padding > 0 {
		v = append(v, c.noise(1+c.rng.IntN(c.padding))...)
	}
	return v
}

// noise is n bytes of text that hardly compresses.
func (c *client) noise(n int) []byte {
	b := make([]byte, 0, n+8)
	for len(b) < n {
		b = strconv.AppendUint(b, c.rng.Uint64(), 36)
	}
	return b[:n]
}

// request draws one request.
func (c *client) request() proto.Message {
	key := c.key()
	group := key[:1]
	if txns := c.c.cfg.Txns; txns > 0 && c.rng.IntN(100) < txns {
		return c.several(group)
	}
	switch n := c.rng.IntN(100); {
	case n < 30:
		return c.put(key)
	case n < 50:
		return &pb.RangeRequest{Key: []byte(key)}
	case n < 60:
		return c.list(group)
	case n < 68:
		return &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: c.rng.IntN(2) == 0}
	case n < 71:
		s := c.span(group)
		return &pb.DeleteRangeRequest{Key: s.Key, RangeEnd: s.RangeEnd, PrevKv: c.rng.IntN(2) == 0}
	case n < 86:
		return c.swap(key)
	default:
		return c.several(group)
	}
}

// reads is a swap that never succeeds: a read on the path of a write.
func (c *client) reads(key string) *pb.TxnRequest {
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte(key), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte("nobody's")}}},
		Success: []*pb.RequestOp{putOp(key, c.value())},
		Failure: []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte(key)})},
	}
}

// list reads a group or everything, in one of many ways.
func (c *client) list(group string) *pb.RangeRequest {
	r := &pb.RangeRequest{Key: []byte(group), RangeEnd: []byte(group + "9")}
	if c.rng.IntN(2) == 0 {
		r.Key, r.RangeEnd = []byte{0}, []byte{0}
	}
	switch c.rng.IntN(6) {
	case 0:
		r.Limit = 1 + c.rng.Int64N(6)
	case 1:
		r.CountOnly = true
	case 2:
		r.KeysOnly = true
	case 3:
		if c.latest > 2 {
			r.Revision = 2 + c.rng.Int64N(c.latest-1)
		}
	}
	return r
}

// swap is a compare-and-swap of one key by the client's knowledge of it.
func (c *client) swap(key string) *pb.TxnRequest {
	t := &pb.TxnRequest{
		Compare: []*pb.Compare{c.compare(key)},
		Success: []*pb.RequestOp{putOp(key, c.value())},
		Failure: []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte(key)})},
	}
	if c.rng.IntN(4) == 0 {
		t.Success = []*pb.RequestOp{rangeOp(&pb.RangeRequest{Key: []byte(key)}), deleteOp(key, true)}
	}
	c.attach(t)
	return t
}

// several is a transaction over some keys, mostly of several groups and so of several
// ranges.
func (c *client) several(group string) *pb.TxnRequest {
	at := c.rng.Perm(judge.KeysPerGroup)
	names := make([]string, 3)
	for i := range names {
		g := group
		if c.rng.IntN(2) == 0 {
			g = c.group()
		}
		names[i] = fmt.Sprintf("%s%d", g, at[i])
	}
	whole := c.span(group)
	t := &pb.TxnRequest{
		Success: []*pb.RequestOp{rangeOp(whole), putOp(names[0], c.value()), putOp(names[1], c.value()), deleteOp(names[2], c.rng.IntN(2) == 0)},
		Failure: []*pb.RequestOp{rangeOp(whole)},
	}
	if c.rng.IntN(2) == 0 {
		t.Success = append(t.Success, rangeOp(whole))
	}
	// Sometimes a key is written more than once: a put key is deleted, before or after.
	if c.rng.IntN(4) == 0 {
		t.Success = slices.Insert(t.Success, 0, deleteOp(names[1], c.rng.IntN(2) == 0))
	}
	if c.rng.IntN(4) == 0 {
		t.Success = append(t.Success, deleteOp(names[c.rng.IntN(2)], c.rng.IntN(2) == 0))
	}
	for i := range c.rng.IntN(3) {
		t.Compare = append(t.Compare, c.compare(names[i]))
	}
	c.attach(t)
	return t
}

func (c *client) group() string { return string(judge.Groups[c.rng.IntN(len(judge.Groups))]) }

// span is a group, or everything from it to another group.
func (c *client) span(group string) *pb.RangeRequest {
	r := &pb.RangeRequest{Key: []byte(group), RangeEnd: []byte(group + "9")}
	if end := c.group() + "9"; c.rng.IntN(3) == 0 && end > group {
		r.RangeEnd = []byte(end)
	}
	return r
}

// compare compares a key with the client's belief about it.
func (c *client) compare(key string) *pb.Compare {
	kv := c.seen[key]
	q := &pb.Compare{Key: []byte(key)}
	if kv == nil {
		q.Target, q.TargetUnion = pb.Compare_VERSION, &pb.Compare_Version{}
		return q
	}
	switch c.rng.IntN(5) {
	case 0:
		q.Target, q.TargetUnion = pb.Compare_MOD, &pb.Compare_ModRevision{ModRevision: kv.GetModRevision()}
	case 1:
		q.Target, q.TargetUnion = pb.Compare_VERSION, &pb.Compare_Version{Version: kv.GetVersion()}
	case 2:
		q.Target, q.TargetUnion = pb.Compare_CREATE, &pb.Compare_CreateRevision{CreateRevision: kv.GetCreateRevision()}
	case 3:
		// A number that the store cannot compare for a write that has no revision yet.
		q.Target, q.Result, q.TargetUnion = pb.Compare_MOD, pb.Compare_LESS, &pb.Compare_ModRevision{ModRevision: c.latest + c.rng.Int64N(20)}
	default:
		q.Target, q.TargetUnion = pb.Compare_VALUE, &pb.Compare_Value{Value: kv.GetValue()}
	}
	return q
}

func putOp(key string, value []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: value}}}
}

func rangeOp(r *pb.RangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
}

func deleteOp(key string, prev bool) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: prev}}}
}

// load runs all clients and returns the function that ends them.
func load(c *cluster, h *judge.History) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	for i := range c.cfg.Clients {
		cl := newClient(c, h, i)
		wg.Go(func() { cl.runUntil(end) })
	}
	for i := range c.cfg.impatient() {
		m := c.machines[i%len(c.machines)]
		cl := newClient(c, h, c.cfg.Clients+i)
		wg.Go(func() { cl.runImpatient(m, end) })
	}
	for i := range c.cfg.Leases {
		cl := newClient(c, h, judge.Holders+i)
		wg.Go(func() { cl.runHolder(end) })
	}
	return func() {
		close(end)
		wg.Wait()
	}
}
