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
	// attachFor is for how long a user may go on attaching keys to a lease after its keys were checked, and
	// renewFor for how long it may renew the lease.
	attachFor = time.Second
	renewFor  = 5 * time.Second
	// maxLeaseVerdicts bounds the verdicts that are remembered.
	maxLeaseVerdicts = 4096
)

// leaseVerdicts remembers who was allowed to write all keys of which lease: users attach many keys to one lease, and
// renew it again and again, and each look at its keys is a question to the placement group and to ranges. Only a yes
// is remembered.
type leaseVerdicts struct {
	mu sync.Mutex
	at map[leaseVerdict]clock.Time // guarded by mu; when the keys were checked
}

// leaseVerdict is a user with the rights of one state, and a lease. A subject is another one once rights have changed.
type leaseVerdict struct {
	subject *rights.Subject
	lease   int64
}

// since says whether there is a verdict that is not older.
func (v *leaseVerdicts) since(k leaseVerdict, oldest clock.Time) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	at, ok := v.at[k]
	return ok && at >= oldest
}

func (v *leaseVerdicts) note(k leaseVerdict, at clock.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.at == nil || len(v.at) >= maxLeaseVerdicts {
		v.at = make(map[leaseVerdict]clock.Time)
	}
	v.at[k] = at
}

// mayAttach refuses a put with a lease of which the user may not write all keys, as etcd does: that user could not
// revoke the lease. It is not atomic with the put.
func (s *Server) mayAttach(ctx context.Context, c *auth.Caller, m proto.Message) error {
	if c.Root() == nil {
		return nil
	}
	for lease := range leasesOf(m) {
		if err := s.mayWriteKeys(ctx, c, lease, attachFor); err != nil {
			return kverror.GRPC(err)
		}
	}
	return nil
}

// leasesOf yields the leases of all puts of a request.
func leasesOf(m proto.Message) map[int64]struct{} {
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
func (s *Server) mayWriteKeys(ctx context.Context, c *auth.Caller, lease int64, within time.Duration) error {
	k, now := leaseVerdict{c.Subject, lease}, s.opts.Clock.Now()
	if s.verdicts.since(k, now.Add(-within)) {
		return nil
	}
	if _, err := s.keysOf(ctx, c, lease, rights.Write); err != nil {
		if errors.Is(err, kverror.LeaseNotFound) {
			return nil // it has no keys, and who uses it hears that it does not exist
		}
		return err
	}
	s.verdicts.note(k, now)
	return nil
}

// keysOf looks at a lease and all its keys, and returns an error where the caller may not do what the type says to
// all of them.
func (s *Server) keysOf(ctx context.Context, c *auth.Caller, lease int64, what rights.Type) (*pb.LeaseTimeToLiveResponse, error) {
	resp, err := s.opts.Leases.TimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: lease, Keys: true})
	if err != nil {
		return nil, err
	}
	for _, key := range resp.GetKeys() {
		if err := c.May(what, key, nil); err != nil {
			return nil, err
		}
	}
	return resp, nil
}
