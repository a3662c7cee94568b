package loadtest

import (
	"context"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// churnTTL is how long a lease of workload lease lives that nobody revokes: what a run leaves behind is gone soon.
const churnTTL = time.Minute

// churned is the lease that a client has.
type churned struct {
	id       int64 // 0 if it has none
	attached bool  // a key may have it
}

// churn does the next of three operations: grants a lease, puts a key with it, revokes it.
func (c *client) churn(ctx context.Context) (class, error) {
	switch {
	case c.lease.id == 0:
		granted, err := c.kv.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: int64(churnTTL / time.Second)})
		c.lease = churned{id: granted.GetID()}
		return classGrant, err
	case !c.lease.attached:
		c.ops++
		c.put.Key = c.space.appendKey(c.put.Key[:0], c.picker.next())
		c.values.put(c.put.Value, makeOpID(c.id, c.ops))
		c.put.Lease = c.lease.id
		_, err := c.kv.Put(ctx, &c.put)
		if status.Code(err) == codes.NotFound {
			c.lease.id = 0 // it has expired
		}
		c.lease.attached = !refused(err)
		return classAttach, err
	default:
		return classRevoke, c.revoke(ctx)
	}
}

// revoke revokes the client's lease. One whose fate is unknown is revoked again.
func (c *client) revoke(ctx context.Context) error {
	_, err := c.kv.LeaseRevoke(ctx, &etcdserverpb.LeaseRevokeRequest{ID: c.lease.id})
	if err == nil || status.Code(err) == codes.NotFound {
		c.lease = churned{}
	}
	return err
}

// revokeAll revokes the leases that clients have at the end of a run.
func revokeAll(ctx context.Context, clients []*client) error {
	wrong := make([]error, len(clients))
	eachOf(len(clients), func(i int) {
		c := clients[i]
		if c.lease.id == 0 {
			return
		}
		ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
		defer cancel()
		if err := c.revoke(ctx); err != nil && status.Code(err) != codes.NotFound {
			wrong[i] = fmt.Errorf("clean up: revoke lease %x: %w", c.lease.id, err)
		}
	})
	for _, err := range wrong {
		if err != nil {
			return err
		}
	}
	return nil
}
