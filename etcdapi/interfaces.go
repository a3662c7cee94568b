package etcdapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
)

// KV serves keys for the whole cluster; the router implements it. Requests have
// passed the checks of this package. Responses have a header with the revision that
// etcd would put there. Errors are kverrors, contexts' errors or gRPC statuses. All
// methods return soon after ctx is done, and, but for a physical Compact, within a bound
// of their own, which is etcd's request timeout for each of the steps that a large read
// takes.
type KV interface {
	Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error)
	// RangeStream is Range without order and filters that calls send, one call at a time,
	// with the keys as they stand in an encoded RangeResponse, and with the last of them
	// with the rest of the response. It ends with the first error of send. It is bounded
	// in memory, and in time from one call of send to the next.
	RangeStream(ctx context.Context, r *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) error
	Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error)
	DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error)
	Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error)
	Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error)
}

// Leases serves leases for the whole cluster; package lease implements it. The callers
// bound the calls in time. Responses have a header with the revision that etcd would put
// there. Errors are kverrors or contexts' errors.
type Leases interface {
	Grant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error)
	// Revoke returns when the keys of the lease are gone.
	Revoke(ctx context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error)
	// KeepAlive answers with TTL 0 where there is no such lease; one that has expired and
	// is still there is waited for.
	KeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error)
	// TimeToLive answers with TTL -1 where there is no such lease.
	TimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error)
	Leases(ctx context.Context, r *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error)
}

// Cluster knows and changes the members. What a change returns are all members after it.
// Errors are kverrors, contexts' errors or gRPC statuses; all methods return by ctx's
// deadline.
type Cluster interface {
	// MemberList returns all members, ascending by id: from the placement group where
	// linearizable is set, and else from what this node knows, without waiting.
	MemberList(ctx context.Context, linearizable bool) ([]*pb.Member, error)
	// MemberAdd makes a row, and an id, for a node that is to join at peer URLs, which are
	// ascending.
	MemberAdd(ctx context.Context, peerURLs []string, learner bool) (member *pb.Member, all []*pb.Member, err error)
	// MemberRemove returns when the node is none of the members any more; where its
	// replicas have to be moved first that may take longer than ctx, and goes on.
	MemberRemove(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error)
	MemberUpdate(ctx context.Context, id keyspace.NodeID, peerURLs []string) ([]*pb.Member, error)
	MemberPromote(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error)
}

// Node is what this node knows of itself and of the placement group. All methods may
// be called from many goroutines, Leader and Term for each request; none but Status and
// MoveLeader blocks.
type Node interface {
	// Leader is the node that leads the placement group, which to clients is the
	// cluster's leader; 0 where this node knows of none.
	Leader() keyspace.NodeID
	// Term is the placement group's raft term as this node knows it.
	Term() uint64
	// Status returns what Maintenance.Status reports. A node without a placement replica
	// asks another one, for a second at most, and then leaves those fields out.
	Status() Status
	// Alarms returns the alarms of the cluster that stand.
	Alarms() []*pb.AlarmMember
	// MoveLeader has another node lead the placement group, which this one leads. It
	// returns when that one does.
	MoveLeader(ctx context.Context, to keyspace.NodeID) error
}

// Status is a node's state for Maintenance.Status.
type Status struct {
	// Revision is the last revision that this node has heard of.
	Revision keyspace.Revision
	// RaftIndex and AppliedIndex are the placement group's committed and applied index,
	// on this node if it has a replica.
	RaftIndex, AppliedIndex uint64
	// DBSizeBytes is the size of the node's data, DBSizeInUseBytes that of it which is
	// not garbage.
	DBSizeBytes, DBSizeInUseBytes int64
	// Learner says whether the node was added as a learner and not promoted yet.
	Learner bool
}
