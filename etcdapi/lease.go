package etcdapi

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// leaseServer is etcd's Lease service.
type leaseServer struct {
	s *Server
	// A method that a newer etcd adds is a compile error, not a surprise.
	pb.UnsafeLeaseServer
}

// LeaseGrant grants a lease.
func (l *leaseServer) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if err := l.s.checkAlarms(ctx, r); err != nil {
		return nil, kverror.GRPC(err)
	}
	return serveBounded(ctx, l.s, r, l.s.opts.Leases.Grant)
}

// LeaseRevoke ends a lease and deletes its keys.
func (l *leaseServer) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	if err := l.s.checkAlarms(ctx, r); err != nil {
		return nil, kverror.GRPC(err)
	}
	c := callerOf(ctx)
	return serveBounded(ctx, l.s, r, func(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
		if c.Root() == nil {
			return l.s.opts.Leases.Revoke(ctx, r, nil)
		}
		return l.s.opts.Leases.Revoke(ctx, r, func(keys [][]byte) error {
			_, err := l.s.allowed(ctx, func(c *auth.Caller) error { return mayAll(c, rights.Write, keys) })
			return err
		})
	})
}

// LeaseTimeToLive returns the remaining time of a lease.
func (l *leaseServer) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	c := callerOf(ctx)
	if !r.GetKeys() || c.Root() == nil {
		return serveBounded(ctx, l.s, r, l.s.opts.Leases.TimeToLive)
	}
	return serveBounded(ctx, l.s, r, func(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
		return l.s.mayReadKeys(ctx, r.GetID())
	})
}

// LeaseLeases lists all leases.
func (l *leaseServer) LeaseLeases(ctx context.Context, r *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	c := callerOf(ctx)
	return serveBounded(ctx, l.s, r, func(ctx context.Context, r *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
		resp, err := l.s.opts.Leases.Leases(ctx, r)
		if err != nil || c.Root() == nil {
			return resp, err
		}
		g, each := errgroup.WithContext(ctx)
		g.SetLimit(parallelLooks)
		for _, lease := range resp.GetLeases() {
			g.Go(func() error { return l.s.mayUse(each, lease.GetID(), rights.Read, listFor) })
		}
		if err := g.Wait(); err != nil {
			return nil, err
		}
		return resp, nil
	})
}

// serveBounded passes a request on, bounded in time, and completes the response.
func serveBounded[Q any, A response](ctx context.Context, s *Server, req Q, f func(context.Context, Q) (A, error)) (none A, _ error) {
	inner, cancel, wording := s.bounded(ctx)
	defer cancel()
	resp, err := serve(inner, s, req, func(ctx context.Context, req Q) (A, error) {
		resp, err := f(ctx, req)
		if err != nil {
			err = wording(err)
		}
		return resp, err
	})
	if err != nil {
		return none, err
	}
	return resp, nil
}

// LeaseKeepAlive renews leases one after the other until the client ends the stream, as etcd does.
// A keepalive that waits for an expired lease delays those behind it, and an error ends the stream.
func (l *leaseServer) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	done := make(chan error, 1)
	// Its wait ends with the handler's return, at the latest.
	l.s.wg.Go(func() { done <- l.keepAlive(ctx, stream) })
	select {
	case err := <-done:
		return err
	case <-l.s.ending:
		return rpctypes.ErrGRPCStopped
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *leaseServer) keepAlive(ctx context.Context, stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		req, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return kverror.GRPC(err)
		}
		resp, err := serveBounded(ctx, l.s, req, l.renew)
		if err != nil {
			return err
		}
		if err := stream.Send(resp); err != nil {
			return kverror.GRPC(err)
		}
	}
}

// renew renews a lease for who may write all its keys. Each look at them goes by the rights of then: a stream outlives
// what was permitted when it began.
func (l *leaseServer) renew(ctx context.Context, r *pb.LeaseKeepAliveRequest) (resp *pb.LeaseKeepAliveResponse, err error) {
	err = l.s.again(ctx, func(ctx context.Context) error {
		c, err := l.s.allowed(ctx, (*auth.Caller).AnyUser)
		if err == nil && c.Root() != nil {
			err = l.s.mayUse(keyspace.WithPermit(ctx, c.Permit()), r.GetID(), rights.Write, renewFor)
		}
		if err == nil {
			resp, err = l.s.opts.Leases.KeepAlive(ctx, r)
		}
		return err
	})
	return resp, err
}
