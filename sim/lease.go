package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/lease"
	"github.com/skeindb/skein/sim/judge"
)

// TTLs of a run's leases, in seconds. The shortest is the nodes' minimum.
const (
	minTTL = 2
	maxTTL = 4
)

// leasePool is the leases that clients attach keys to: recent grants, some of which
// have ended.
type leasePool struct {
	mu sync.Mutex
	// Guarded by mu.
	last   int64
	recent []int64
}

// recentLeases bounds the pool.
const recentLeases = 8

// next returns an id that was never used.
func (p *leasePool) next() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	return p.last
}

// add offers a lease to the clients.
func (p *leasePool) add(id int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.recent = append(p.recent, id); len(p.recent) > recentLeases {
		p.recent = slices.Delete(p.recent, 0, 1)
	}
}

func (p *leasePool) draw(rng *rand.Rand) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.recent) == 0 {
		return 0
	}
	return p.recent[rng.IntN(len(p.recent))]
}

// attach gives some of the puts of a request a lease, the same for all.
func (c *client) attach(r *pb.TxnRequest) {
	if c.c.cfg.Leases == 0 || c.rng.IntN(4) > 0 {
		return
	}
	id := c.c.leases.draw(c.rng)
	for _, op := range r.GetSuccess() {
		if p := op.GetRequestPut(); p != nil && c.rng.IntN(3) > 0 {
			p.Lease = id
		}
	}
}

// put is a put of a key, sometimes with a lease, or with the one that the key has.
func (c *client) put(key string) *pb.PutRequest {
	r := &pb.PutRequest{Key: []byte(key), Value: c.value(), PrevKv: c.rng.IntN(2) == 0}
	if c.c.cfg.Leases == 0 {
		return r
	}
	switch c.rng.IntN(12) {
	case 0, 1, 2:
		r.Lease = c.c.leases.draw(c.rng)
	case 3:
		r.IgnoreLease = c.seen[key] != nil // if it has ended, the put is refused
	}
	return r
}

// holder is a client that has a lease.
type holder struct {
	*client
	id  int64
	ttl time.Duration
	// until is when the lease may end, as far as the holder knows.
	until time.Duration
	stop  <-chan struct{}
}

// rivals is the difference between the ids of a holder and of its rival.
const rivals = 100

// runHolder holds one lease after the other until stop is closed.
func (c *client) runHolder(stop <-chan struct{}) {
	rival := newClient(c.c, c.h, c.id+rivals)
	for !closed(stop) {
		h := c.acquire(rival, stop)
		if h == nil {
			c.c.sleep(time.Duration(50+c.rng.IntN(200)) * time.Millisecond)
			continue
		}
		c.c.leases.add(h.id)
		if h.keep() {
			h.end()
		}
	}
}

// acquire grants a lease. The id was never used, or the node chooses it, or a rival
// wants it at the same moment; then whoever gets the lease holds it. It returns nil if
// nobody knows of a lease, or if a grant may come later.
func (c *client) acquire(rival *client, stop <-chan struct{}) *holder {
	seconds := minTTL + c.rng.Int64N(maxTTL-minTTL+1)
	req := &pb.LeaseGrantRequest{ID: c.c.leases.next(), TTL: seconds}
	asked := make([]*judge.Op, 2)
	var wg sync.WaitGroup
	switch c.rng.IntN(4) {
	case 0:
		req.ID = 0
	case 1:
		wg.Go(func() { asked[1] = rival.ask(req, requestTimeout) })
	}
	asked[0] = c.ask(req, requestTimeout)
	wg.Wait()
	var grant *judge.Op
	for _, o := range asked {
		switch {
		case o == nil:
		case o.Outcome == judge.Unknown:
			return nil
		case o.Outcome == judge.Answered && grant == nil:
			grant = o
		}
	}
	if grant == nil {
		return nil
	}
	ttl := time.Duration(seconds) * time.Second
	return &holder{client: c, id: judge.LeaseOf(grant), ttl: ttl, until: grant.Began + ttl, stop: stop}
}

func closed(stop <-chan struct{}) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}

// ask does an operation at a gateway that is up, mostly the client's own; nil if there
// is none.
func (c *client) ask(req proto.Message, timeout time.Duration) *judge.Op {
	ms := c.c.machines
	at := c.id
	if c.rng.IntN(3) == 0 {
		at = c.rng.IntN(len(ms))
	}
	for i := range ms {
		m := ms[(at+i)%len(ms)]
		if r := m.current(); r != nil {
			return c.do(m, r, req, timeout)
		}
	}
	return nil
}

// keep renews the lease for a while, attaches keys and asks about it. It returns false
// if the lease ends before the holder wants it.
func (h *holder) keep() bool {
	beats := 1 + h.rng.IntN(16)
	if h.rng.IntN(3) == 0 {
		beats *= 5 // long enough to see several leaders of its record
	}
	for range beats {
		if closed(h.stop) {
			return false
		}
		for range h.rng.IntN(3) {
			h.attachOne()
		}
		if h.rng.IntN(4) == 0 {
			h.ask(&pb.LeaseTimeToLiveRequest{ID: h.id, Keys: h.rng.IntN(2) == 0}, requestTimeout)
		}
		h.c.sleep(h.ttl/12 + time.Duration(h.rng.Int64N(int64(h.ttl/3))))
		if alive := h.keepAlive(); !alive {
			return false
		}
	}
	return true
}

// keepAlive renews the lease, and says whether the lease exists as far as the holder
// knows.
func (h *holder) keepAlive() bool {
	o := h.ask(&pb.LeaseKeepAliveRequest{ID: h.id}, h.ttl/2)
	if o == nil || o.Outcome != judge.Answered {
		return true
	}
	if o.Response.(*pb.LeaseKeepAliveResponse).GetTTL() <= 0 {
		return false
	}
	h.until = max(h.until, o.Began+h.ttl)
	return true
}

// attachOne attaches a key, or a few at once. It returns false if there is no such
// lease.
func (h *holder) attachOne() bool {
	o := h.ask(h.attachment(h.id), requestTimeout)
	return o == nil || o.Outcome != judge.Refused || !errors.Is(o.Err, kverror.LeaseNotFound)
}

// attachment is a request that attaches a key, or a few at once, to a lease.
func (c *client) attachment(id int64) proto.Message {
	put := &pb.PutRequest{Key: []byte(c.key()), Value: c.value(), PrevKv: true, Lease: id}
	if c.rng.IntN(3) > 0 {
		return put
	}
	t := c.several(c.group())
	t.Compare = nil
	for _, op := range t.GetSuccess() {
		if p := op.GetRequestPut(); p != nil {
			p.Lease = id
		}
	}
	return t
}

// end lets the lease expire or revokes it, and attaches keys meanwhile.
func (h *holder) end() {
	if h.rng.IntN(2) == 0 {
		timeout := requestTimeout
		if h.rng.IntN(4) == 0 {
			timeout = time.Duration(1+h.rng.IntN(8)) * time.Millisecond
		}
		h.ask(&pb.LeaseRevokeRequest{ID: h.id}, timeout)
	} else {
		h.c.sleep(max(0, h.until-h.c.elapsed()-100*time.Millisecond))
	}
	for try := 0; try < 40 && !closed(h.stop) && h.attachOne(); try++ {
		h.c.sleep(time.Duration(2+h.rng.IntN(80)) * time.Millisecond)
	}
	switch h.rng.IntN(3) {
	case 0:
		h.keepAlive()
	case 1:
		h.ask(&pb.LeaseTimeToLiveRequest{ID: h.id, Keys: true}, requestTimeout)
	}
}

// endWithin is how long after healing every lease that nobody renews has ended. It
// covers a lease that has just restarted, the pause after a failed attempt, and the
// time of both.
const endWithin = maxTTL*time.Second + 2*election + 15*time.Second

// drain waits until all leases have expired and then until their keys are gone.
func drain(rep *Report, c *cluster, probe *client) bool {
	if c.cfg.Leases == 0 {
		return true
	}
	m := c.standing()[0]
	for begin := c.elapsed(); ; c.sleep(200 * time.Millisecond) {
		o := probe.do(m, m.current(), &pb.LeaseLeasesRequest{}, requestTimeout)
		if o.Outcome == judge.Answered && len(o.Response.(*pb.LeaseLeasesResponse).GetLeases()) == 0 {
			rep.Drained = true
			return true
		}
		if c.elapsed()-begin > endWithin {
			rep.Violate("leases: some are left %v after healing: %s", c.elapsed()-begin, o)
			return false
		}
	}
}

// askLeases makes a request about leases.
func askLeases(ctx context.Context, g *lease.Gateway, req proto.Message) (proto.Message, error) {
	switch q := req.(type) {
	case *pb.LeaseGrantRequest:
		return g.Grant(ctx, q)
	case *pb.LeaseRevokeRequest:
		return g.Revoke(ctx, q, nil)
	case *pb.LeaseKeepAliveRequest:
		return g.KeepAlive(ctx, q)
	case *pb.LeaseTimeToLiveRequest:
		return g.TimeToLive(ctx, q)
	case *pb.LeaseLeasesRequest:
		return g.Leases(ctx, q)
	}
	panic(fmt.Sprintf("sim: no operation: %T", req))
}

// checkAttachments checks that no range has attachments of leases whose records do not list it. A
// lease with such a key would leave it behind.
func checkAttachments(ctx context.Context, r *run, ds []keyspace.Descriptor) error {
	all, _, err := r.core.Placement().ListLeases(ctx)
	if err != nil {
		return err
	}
	listed := make([]int, len(ds))
	for i := range all {
		info, err := r.core.Placement().LookLease(ctx, all[i].ID)
		if err != nil {
			return err
		}
		for k := range ds {
			if slices.ContainsFunc(info.Spans, func(s keyspace.Span) bool { return s.Covers(ds[k].Span) }) {
				listed[k]++
			}
		}
	}
	for k := range ds {
		for _, rep := range ds[k].Replicas {
			st, err := r.core.Ranges().Show(ctx, rep.Node, ds[k].Range)
			if err != nil {
				return fmt.Errorf("range %s on node %s: %w", ds[k].Range, rep.Node, err)
			}
			if st.Leases > listed[k] {
				return fmt.Errorf("range %s on node %s has attachments of %d leases, and %d list it", ds[k].Range, rep.Node, st.Leases, listed[k])
			}
		}
	}
	return nil
}
