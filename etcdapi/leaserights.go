package etcdapi

import (
	"context"
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
	// attachFor is for how long a user may go on attaching keys to a lease after its keys were checked, and
	// renewFor for how long it may renew the lease.
	attachFor = time.Second
	renewFor  = 5 * time.Second
	// maxLeaseVerdicts bounds the verdicts that are remembered.
	maxLeaseVerdicts = 4096
)

// leaseVerdicts remembers who was allowed to write all keys of which lease. Each look at the keys asks the placement
// group and ranges, and users attach and renew often. Only a yes is remembered.
type leaseVerdicts struct {
	mu  sync.Mutex
	yes map[leaseVerdict]leaseYes // guarded by mu
}

// leaseYes says when the keys of a lease were checked, and its TTL.
type leaseYes struct {
	at  clock.Time
	ttl time.Duration
}

// leaseVerdict is a user with the rights of one view, and a lease.
type leaseVerdict struct {
	user  string
	view  uint64
	lease int64
}

// counts says whether there is a verdict that is not older than within, nor than a third of the lease's TTL.
func (v *leaseVerdicts) counts(k leaseVerdict, now clock.Time, within time.Duration) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	yes, ok := v.yes[k]
	return ok && now.Sub(yes.at) <= min(within, yes.ttl/3)
}

func (v *leaseVerdicts) note(k leaseVerdict, yes leaseYes) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.yes == nil || len(v.yes) >= maxLeaseVerdicts {
		v.yes = make(map[leaseVerdict]leaseYes)
	}
	v.yes[k] = yes
}

// mayAttach refuses a put with a lease of which the user may not write all keys, as etcd does: that user could not
// revoke the lease. It is not atomic with the put.
func (s *Server) mayAttach(ctx context.Context, c *auth.Caller, m proto.Message) error {
	if c.Root() == nil {
		return nil
	}
	for lease := range leasesOf(m) {
		if err := s.mayWriteKeys(ctx, lease, attachFor); err != nil {
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

// mayWriteKeys returns an error where the caller may not write all keys of a lease. A yes counts for a while.
func (s *Server) mayWriteKeys(ctx context.Context, lease int64, within time.Duration) error {
	_, err := s.allowed(ctx, func(c *auth.Caller) error {
		if c.Off() {
			return nil
		}
		// A verdict is not for an old identity, which each key refuses. A lease without keys is anybody's, as in etcd.
		k, now := leaseVerdict{c.User, c.Index, lease}, s.opts.Clock.Now()
		if c.Stale() == nil && s.verdicts.counts(k, now, within) {
			return nil
		}
		resp, err := s.keysOf(ctx, c, lease, rights.Write)
		if err == nil && c.Stale() == nil {
			s.verdicts.note(k, leaseYes{now, time.Duration(resp.GetGrantedTTL()) * time.Second})
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
