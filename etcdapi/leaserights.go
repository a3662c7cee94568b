package etcdapi

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

const (
	// For so long after the keys of a lease were checked a user may attach keys to it, is told that it exists, and
	// may renew it.
	attachFor = time.Second
	listFor   = time.Second
	renewFor  = 5 * time.Second
	// denyFor is for how long none of that is allowed after it was denied.
	denyFor = time.Second
	// parallelLooks bounds the leases whose keys one list of leases looks at at a time.
	parallelLooks = 16
	// maxLeaseVerdicts bounds the verdicts that are remembered.
	maxLeaseVerdicts = 4096
)

// leaseVerdicts remembers who was allowed to read or write all keys of which lease. Each look at the keys asks the
// placement group and ranges, and users attach, renew and list often.
type leaseVerdicts struct {
	mu  sync.Mutex
	all map[leaseQuestion]leaseVerdict // guarded by mu
}

// leaseVerdict says when the keys of a lease were checked, its TTL, and why something was denied.
type leaseVerdict struct {
	at     clock.Time
	ttl    time.Duration
	denied error
}

// leaseQuestion is what a user with the rights of one view wants to do to the keys of a lease.
type leaseQuestion struct {
	user  string
	view  uint64
	lease int64
	what  rights.Type
}

// find returns a verdict that is not older than within, nor than a third of the lease's TTL.
func (v *leaseVerdicts) find(q leaseQuestion, now clock.Time, within time.Duration) (found bool, denied error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	a, ok := v.all[q]
	if a.denied != nil {
		return now.Sub(a.at) <= denyFor, a.denied
	}
	return ok && now.Sub(a.at) <= min(within, a.ttl/3), nil
}

func (v *leaseVerdicts) note(q leaseQuestion, a leaseVerdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.all == nil || len(v.all) >= maxLeaseVerdicts {
		v.all = make(map[leaseQuestion]leaseVerdict)
	}
	v.all[q] = a
}

// mayAttach refuses a put with a lease of which the user may not write all keys, as etcd does: that user could not
// revoke the lease. It is not atomic with the put.
func (s *Server) mayAttach(ctx context.Context, c *auth.Caller, m proto.Message) error {
	if c.Root() == nil {
		return nil
	}
	for lease := range leasesOf(m) {
		if err := s.mayUse(ctx, lease, rights.Write, attachFor); err != nil {
			return kverror.GRPC(err)
		}
	}
	return nil
}

// leasesOf yields the leases of all puts of a request.
func leasesOf(m proto.Message) map[int64]struct{} {
	if p, ok := m.(*pb.PutRequest); ok && p.GetLease() == 0 {
		return nil
	}
	all := map[int64]struct{}{}
	var of func(m proto.Message)
	of = func(m proto.Message) {
		switch r := m.(type) {
		case *pb.PutRequest:
			if r.GetLease() != 0 {
				all[r.GetLease()] = struct{}{}
			}
		case *pb.TxnRequest:
			for _, ops := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
				for _, op := range ops {
					of(op.GetRequestPut())
					of(op.GetRequestTxn())
				}
			}
		}
	}
	of(m)
	return all
}

// mayUse returns an error where the caller may not do what the type says to all keys of a lease. A verdict counts for
// a while.
func (s *Server) mayUse(ctx context.Context, lease int64, what rights.Type, within time.Duration) error {
	_, err := s.allowed(ctx, func(c *auth.Caller) error {
		if c.Off() {
			return nil
		}
		// A verdict is not for an old identity, which each key refuses. A lease without keys is anybody's, as in etcd.
		if c.Stale() != nil {
			_, err := s.keysOf(ctx, c, lease, what)
			return err
		}
		q, now := leaseQuestion{c.User, c.Index, lease, what}, s.opts.Clock.Now()
		if found, denied := s.verdicts.find(q, now, within); found {
			return denied
		}
		resp, err := s.keysOf(ctx, c, lease, what)
		if err == nil || errors.Is(err, kverror.PermissionDenied) {
			s.verdicts.note(q, leaseVerdict{now, time.Duration(resp.GetGrantedTTL()) * time.Second, err})
		}
		return err
	})
	return err
}

// mayReadKeys returns an error where the caller may not read all keys of a lease, else what there is to tell of it.
func (s *Server) mayReadKeys(ctx context.Context, lease int64) (resp *pb.LeaseTimeToLiveResponse, err error) {
	_, err = s.allowed(ctx, func(c *auth.Caller) (err error) {
		resp, err = s.keysOf(ctx, c, lease, rights.Read)
		return err
	})
	return resp, err
}

// keysOf looks at a lease and all its keys, and returns an error where the caller may not do what the type says to
// all of them.
func (s *Server) keysOf(ctx context.Context, c *auth.Caller, lease int64, what rights.Type) (*pb.LeaseTimeToLiveResponse, error) {
	inner, cancel, wording := s.bounded(ctx)
	defer cancel()
	resp, err := s.opts.Leases.TimeToLive(inner, &pb.LeaseTimeToLiveRequest{ID: lease, Keys: true})
	if err != nil {
		return nil, wording(err)
	}
	if err := mayAll(c, what, resp.GetKeys()); err != nil {
		return nil, err
	}
	return resp, nil
}

// mayAll returns an error where the caller may not do what the type says to all keys.
func mayAll(c *auth.Caller, what rights.Type, keys [][]byte) error {
	for _, key := range keys {
		if err := c.May(what, key, nil); err != nil {
			return err
		}
	}
	return nil
}
