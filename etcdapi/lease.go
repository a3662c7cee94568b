package etcdapi

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/kverror"
)

// leaseServer is etcd's Lease service.
type leaseServer struct {
	s *Server
	// A method that a newer etcd adds is a compile error, not a surprise.
	pb.UnsafeLeaseServer
}

// LeaseGrant grants a lease.
func (l *leaseServer) LeaseGrant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	return serveBounded(ctx, l.s, r, l.s.opts.Leases.Grant)
}

// LeaseRevoke ends a lease and deletes its keys.
func (l *leaseServer) LeaseRevoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	return serveBounded(ctx, l.s, r, l.s.opts.Leases.Revoke)
}

// LeaseTimeToLive returns the remaining time of a lease.
func (l *leaseServer) LeaseTimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	return serveBounded(ctx, l.s, r, l.s.opts.Leases.TimeToLive)
}

// LeaseLeases lists all leases.
func (l *leaseServer) LeaseLeases(ctx context.Context, r *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error) {
	return serveBounded(ctx, l.s, r, l.s.opts.Leases.Leases)
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
		resp, err := serveBounded(ctx, l.s, req, l.s.opts.Leases.KeepAlive)
		if err != nil {
			return err
		}
		if err := stream.Send(resp); err != nil {
			return kverror.GRPC(err)
		}
	}
}
