package conformance

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// leaseIDs are the leases of the calls; ids beyond them are never granted. They are
// few, so that ids are used again.
var leaseIDs = []int64{1, 2, 3, -7, 1 << 62, 0x7fff_ffff_ffff_ffff, -1 << 63, 7587}

// leaseTTLs are the TTLs of leaseIDs. They are far apart, because etcd lists leases in
// the order of their ends. So the order does not depend on how long a call took or on
// when a lock's session renewed its lease. None ends within a run.
var leaseTTLs = []int64{3600, 36_000, 360_000, 3_600_000, 36_000_000, 360_000_000, 3_600_000_000, 9_000_000_000}

// leaseKinds are the calls about leases. Except for deleted keys their effects show in
// no revision, so they are alone in their waves.
var leaseKinds = []*kind{
	{
		name: "LeaseGrant", method: pb.Lease_LeaseGrant_FullMethodName, weight: 2, alone: true,
		generate: func(s *source) proto.Message { return s.grantRequest() },
		response: func() proto.Message { return &pb.LeaseGrantResponse{} },
	},
	{
		name: "LeaseRevoke", method: pb.Lease_LeaseRevoke_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message { return &pb.LeaseRevokeRequest{ID: s.anyLease()} },
		response: func() proto.Message { return &pb.LeaseRevokeResponse{} },
	},
	{
		name: "LeaseTimeToLive", method: pb.Lease_LeaseTimeToLive_FullMethodName, weight: 2, alone: true,
		generate: func(s *source) proto.Message {
			return &pb.LeaseTimeToLiveRequest{ID: s.anyLease(), Keys: !s.chance(3)}
		},
		response: func() proto.Message { return &pb.LeaseTimeToLiveResponse{} },
	},
	{
		name: "LeaseLeases", method: pb.Lease_LeaseLeases_FullMethodName, weight: 1, alone: true,
		generate: func(*source) proto.Message { return &pb.LeaseLeasesRequest{} },
		response: func() proto.Message { return &pb.LeaseLeasesResponse{} },
	},
	{
		name: "LeaseKeepAlive", method: pb.Lease_LeaseKeepAlive_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message { return &pb.LeaseKeepAliveRequest{ID: s.anyLease()} },
		response: func() proto.Message { return &pb.LeaseKeepAliveResponse{} },
		invoke:   keepAlive,
	},
}

// keepAlive is one message each way on a stream.
func keepAlive(ctx context.Context, conn *grpc.ClientConn, req, resp proto.Message) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewLeaseClient(conn).LeaseKeepAlive(ctx)
	if err != nil {
		return err
	}
	// Where the stream has ended before, Recv says why.
	if err := stream.Send(req.(*pb.LeaseKeepAliveRequest)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return stream.RecvMsg(resp)
}

// grantRequest asks for a lease, or for one that no store grants. It never leaves the
// id to the store: the two stores would hold different leases.
func (s *source) grantRequest() *pb.LeaseGrantRequest {
	i := s.IntN(len(leaseIDs))
	r := &pb.LeaseGrantRequest{ID: leaseIDs[i], TTL: leaseTTLs[i]}
	if s.chance(10) {
		r.TTL = pick(s, []int64{9_000_000_001, 1<<63 - 1})
		r.ID = pick(s, []int64{0, r.ID})
	}
	return r
}

func (s *source) leaseID() int64 { return pick(s, leaseIDs) }

// anyLease is a lease, or sometimes 0, which is none.
func (s *source) anyLease() int64 {
	if s.chance(20) {
		return 0
	}
	return s.leaseID()
}

// liveLease returns a lease that was granted and not revoked, 0 if there is none.
func (s *source) liveLease() int64 {
	if len(s.leases) == 0 {
		return 0
	}
	return pick(s, s.leases)
}

// observeLease learns from an answer about leases.
func (s *source) observeLease(c *call, a answer) {
	switch r := a.response.(type) {
	case *pb.LeaseGrantResponse:
		s.leases = append(s.leases, r.GetID())
	case *pb.LeaseRevokeResponse:
		id := c.request.(*pb.LeaseRevokeRequest).GetID()
		s.leases = slices.DeleteFunc(s.leases, func(l int64) bool { return l == id })
	}
}

// settled removes from an answer about leases what no two stores can agree on. One is
// the number of seconds left, if it differs only by the time between two calls. The
// other is etcd's order of a lease's keys, which is the order of a Go map.
func settled(m proto.Message) {
	r, ok := m.(*pb.LeaseTimeToLiveResponse)
	if !ok {
		return
	}
	if left := r.GetGrantedTTL() - r.GetTTL(); left >= 0 && left <= 1800 {
		r.TTL = r.GetGrantedTTL()
	}
	slices.SortFunc(r.Keys, bytes.Compare)
}
