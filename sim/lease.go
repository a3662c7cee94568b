package sim

import (
	"context"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Lease is one lease of a run. Its keys are its own: each is put once, and deleted by the
// end of the lease alone.
type Lease struct {
	ID  int64
	TTL time.Duration
	// Kept is when the last call began that granted or renewed it, by its answer.
	Kept time.Duration
	// Revoked says that somebody asked for its end.
	Revoked bool
}

// leaseKeys is how many groups the keys of leases fall into, each behind all other keys.
const leaseKeys = 9

// lessee holds leases, one after the other. It belongs to one goroutine.
type lessee struct {
	cl     *client
	leases []*Lease
	keys   int
}

// holdLeases runs the lessees of a run until stop is called, which returns their leases.
func holdLeases(c *cluster, h *History, first int) (stop func() []*Lease) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	var all []*lessee
	for i := range c.cfg.Lessees {
		l := &lessee{cl: newClient(c, h, first+i)}
		all = append(all, l)
		wg.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				l.hold()
				c.sleep(time.Duration(l.cl.rng.Int64N(int64(200 * time.Millisecond))))
			}
		})
	}
	return func() (leases []*Lease) {
		close(end)
		wg.Wait()
		for _, l := range all {
			leases = append(leases, l.leases...)
		}
		return leases
	}
}

// gateway returns a machine that is up, nil if none is.
func (l *lessee) gateway() (*machine, *run) {
	ms := l.cl.c.machines
	at := l.cl.rng.IntN(len(ms))
	for i := range ms {
		if m := ms[(at+i)%len(ms)]; m.current() != nil {
			return m, m.current()
		}
	}
	return nil, nil
}

// ask calls f with a run and says whether it succeeded, and when that began.
func (l *lessee) ask(f func(ctx context.Context, r *run) error) (began time.Duration, ok bool) {
	began = l.cl.c.elapsed()
	_, r := l.gateway()
	if r == nil || !r.enter() {
		return began, false
	}
	defer r.leave()
	ctx, cancel := context.WithTimeout(r.ctx, requestTimeout)
	defer cancel()
	err := f(ctx, r)
	return began, err == nil && r.ctx.Err() == nil
}

// hold is the life of one lease: it is granted, gets keys, is renewed, and then revoked or
// left to itself; at its end the lessee is still putting keys.
func (l *lessee) hold() {
	c, rng := l.cl.c, l.cl.rng
	le := &Lease{ID: int64(l.cl.id*1000 + len(l.leases) + 1)}
	l.leases = append(l.leases, le)
	var ok bool
	le.Kept, ok = l.ask(func(ctx context.Context, r *run) error {
		resp, err := r.core.Leases().Grant(ctx, &pb.LeaseGrantRequest{ID: le.ID, TTL: 2})
		if err == nil {
			le.TTL = time.Duration(resp.GetTTL()) * time.Second
		}
		return err
	})
	if !ok {
		le.TTL = 0
		return
	}
	// Its end is an operation whose fate nobody is told.
	l.cl.h.Begin(l.cl.id, 0, &pb.LeaseRevokeRequest{ID: le.ID}, c.elapsed())
	for range rng.IntN(20) {
		l.put(le, requestTimeout)
		c.sleep(time.Duration(100+rng.IntN(600)) * time.Millisecond)
		if !l.renew(le) {
			break
		}
	}
	l.put(le, requestTimeout)
	revoked := make(chan struct{})
	if rng.IntN(3) > 0 {
		close(revoked)
		c.sleep(le.Kept + le.TTL - c.elapsed() - 30*time.Millisecond)
	} else {
		le.Revoked = true
		go func() {
			defer close(revoked)
			l.ask(func(ctx context.Context, r *run) error {
				_, err := r.core.Leases().Revoke(ctx, &pb.LeaseRevokeRequest{ID: le.ID})
				return err
			})
		}()
	}
	for until := c.elapsed() + time.Second; c.elapsed() < until && l.put(le, 200*time.Millisecond); {
		c.sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
	}
	<-revoked
}

// renew renews the lease, and says whether to go on with it.
func (l *lessee) renew(le *Lease) bool {
	alive := true
	began, ok := l.ask(func(ctx context.Context, r *run) error {
		resp, err := r.core.Leases().KeepAlive(ctx, &pb.LeaseKeepAliveRequest{ID: le.ID})
		alive = err != nil || resp.GetTTL() > 0
		return err
	})
	if ok && alive {
		le.Kept = began
	}
	return alive
}

// put attaches one more key, and says whether more may be attached.
func (l *lessee) put(le *Lease, patience time.Duration) bool {
	m, r := l.gateway()
	if r == nil {
		return true
	}
	l.keys++
	key := fmt.Appendf(nil, "{%d.%d.%d", l.cl.rng.IntN(leaseKeys), l.cl.id, l.keys)
	o := l.cl.do(m, r, &pb.PutRequest{Key: key, Value: l.cl.value(), Lease: le.ID}, patience)
	return o == nil || o.Outcome != Refused
}

// checkLeases checks that no lease ended before its time and none has a key that was
// attached behind its end. That each ends once, with all its keys, the replay checks.
func checkLeases(leases []*Lease, ops []*Op, vs []Version) (bad []string) {
	of := map[string]int64{}
	ended := map[int64]int64{}
	for _, v := range vs {
		if !v.Deleted {
			of[v.Key] = v.Lease
		} else if id := of[v.Key]; id != 0 && ended[id] == 0 {
			ended[id] = v.Mod
		}
	}
	for _, v := range vs {
		if end := ended[v.Lease]; v.Lease != 0 && end != 0 && v.Mod > end {
			bad = append(bad, fmt.Sprintf("leases: lease %d ended at revision %d, and %+v is attached to it", v.Lease, end, v))
		}
	}
	for _, le := range leases {
		end := ended[le.ID]
		if end == 0 || le.Revoked {
			continue
		}
		// Clocks of nodes may be faster than the world's.
		due := le.Kept + time.Duration(float64(le.TTL)*(1-2*maxDrift))
		for _, o := range ops {
			if o.Outcome == Answered && o.Revision() >= end && o.Ended < due {
				bad = append(bad, fmt.Sprintf("leases: lease %d was kept alive at %v for %v, and ended at revision %d: %s", le.ID, le.Kept, le.TTL, end, o))
				break
			}
		}
	}
	return bad
}
