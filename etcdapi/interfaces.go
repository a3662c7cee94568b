package etcdapi

import (
	"context"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rights"
)

// KV serves keys for the whole cluster; the router implements it. This package has checked the
// requests. Responses have a header with etcd's revision. Errors are kverrors, contexts' errors or
// gRPC statuses. All methods return soon after ctx is done. All but a physical Compact also have
// their own bound: etcd's request timeout, for each request to a range that a large read makes.
type KV interface {
	Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error)
	// RangeSpan is Range of a span of keys, which waits until the answer has memory. share is what
	// the answer holds of Options.Answers until the caller gives it back. If keys is not nil, it has
	// the keys as a RangeResponse encodes them, resp has none, and share holds exactly their bytes.
	RangeSpan(ctx context.Context, r *pb.RangeRequest) (keys [][]byte, resp *pb.RangeResponse, share *budget.Share, err error)
	// RangeStream is Range without order and filters. It calls send with keys as a RangeResponse
	// encodes them, one call at a time. The last call has the rest of the response. It ends with
	// the first error of send. Its memory is bounded, and so is the time between two calls of send.
	RangeStream(ctx context.Context, r *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) error
	Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error)
	DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error)
	Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error)
	Compact(ctx context.Context, r *pb.CompactionRequest) (*pb.CompactionResponse, error)
}

// Leases serves leases for the whole cluster; package lease implements it. The callers bound the
// calls in time. Responses have a header with etcd's revision. Errors are kverrors or contexts'
// errors.
type Leases interface {
	Grant(ctx context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error)
	// Revoke returns when the keys of the lease are gone. The check may be nil. It is asked for all keys of the lease,
	// several times if keys are attached meanwhile. No key is deleted that it has not allowed.
	Revoke(ctx context.Context, r *pb.LeaseRevokeRequest, check func(keys [][]byte) error) (*pb.LeaseRevokeResponse, error)
	// KeepAlive answers with TTL 0 for a lease that does not exist. It waits for the end of an
	// expired lease.
	KeepAlive(ctx context.Context, r *pb.LeaseKeepAliveRequest) (*pb.LeaseKeepAliveResponse, error)
	// TimeToLive answers with TTL -1 for a lease that does not exist.
	TimeToLive(ctx context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error)
	Leases(ctx context.Context, r *pb.LeaseLeasesRequest) (*pb.LeaseLeasesResponse, error)
}

// Cluster knows and changes the members. A change returns all members after it. Errors are
// kverrors, contexts' errors or gRPC statuses. All methods return by ctx's deadline.
type Cluster interface {
	// MemberList returns all members in the order of their ids. A linearizable list comes from the
	// placement group, any other from this node, without waiting.
	MemberList(ctx context.Context, linearizable bool) ([]*pb.Member, error)
	// MemberAdd adds a row and an id for a node that will join at peer URLs, which are sorted.
	MemberAdd(ctx context.Context, peerURLs []string, learner bool) (member *pb.Member, all []*pb.Member, err error)
	// MemberRemove returns when the node is no member any more. If its replicas have to be moved
	// first, that may take longer than ctx, and goes on.
	MemberRemove(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error)
	MemberUpdate(ctx context.Context, id keyspace.NodeID, peerURLs []string) ([]*pb.Member, error)
	MemberPromote(ctx context.Context, id keyspace.NodeID) ([]*pb.Member, error)
}

// Node is this node's view of itself and of the placement group. All methods may be called from
// many goroutines, Leader and Term for each request. Only Status and MoveLeader block.
type Node interface {
	// Leader is the node that leads the placement group, or 0 if this node knows of none. To
	// clients it is the cluster's leader.
	Leader() keyspace.NodeID
	// Term is the placement group's raft term as this node knows it.
	Term() uint64
	// Status returns what Maintenance.Status reports. A node without a placement replica asks
	// another one, for at most a second, and otherwise leaves those fields out.
	Status() Status
	// MoveLeader makes another node lead the placement group, which this node leads. It returns
	// when that node leads.
	MoveLeader(ctx context.Context, to keyspace.NodeID) error
}

// Alarms knows, raises and ends the alarms of all members. Members that are not there have some too. Errors are
// kverrors or contexts' errors.
type Alarms interface {
	// Known returns all alarms that this node knows of. Its own are those of now.
	Known() []Alarm
	// Sticky returns those of Known that clients have raised. It is called for each change.
	Sticky() []Alarm
	// List returns all alarms as of a moment after the call.
	List(ctx context.Context) ([]Alarm, error)
	// Activate raises an alarm that stays until Deactivate.
	Activate(ctx context.Context, t pb.AlarmType, member keyspace.NodeID) error
	// Deactivate ends an alarm, and says whether it was raised. One whose cause lasts comes back.
	Deactivate(ctx context.Context, t pb.AlarmType, member keyspace.NodeID) (was bool, err error)
}

// Alarm is an alarm of a member. A sticky one was raised by a client, any other by the member itself.
type Alarm struct {
	Type   pb.AlarmType
	Member keyspace.NodeID
	Sticky bool
}

// Downgrades lets all nodes go back to the release before, as long as that reads what they write.
// Errors are kverrors or contexts' errors.
type Downgrades interface {
	// GoingBack says whether the release before may still be started, and whether somebody holds the
	// cluster's version for it. With linearizable the second is not older than the call. ready is
	// false while the cluster has no version.
	GoingBack(ctx context.Context, linearizable bool) (may, held, ready bool, err error)
	// Hold keeps the cluster's version from being raised by itself, or lets it.
	Hold(ctx context.Context, hold bool) error
}

// Hashes hashes the data of the cluster as this node has them, and those of others where it has none;
// the router implements it. Errors are kverrors.
type Hashes interface {
	// HashKV has no bound but ctx.
	HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error)
}

// Snapshots makes etcd's database files of the store. Errors are kverrors, contexts' errors or have a gRPC status.
type Snapshots interface {
	// Snapshot makes a file of the store as of a moment after the call. It has no bound but ctx.
	Snapshot(ctx context.Context) (SnapshotFile, error)
}

// SnapshotFile is what etcdctl snapshot save writes: a database file, and its SHA-256 behind it. Close removes it.
type SnapshotFile interface {
	io.ReadCloser
	// Size is how many bytes Read gives, with the hash.
	Size() int64
}

// Status is a node's state for Maintenance.Status.
type Status struct {
	// Revision is the last revision that this node has heard of.
	Revision keyspace.Revision
	// RaftIndex and AppliedIndex are the placement group's committed and applied index,
	// on this node if it has a replica.
	RaftIndex, AppliedIndex uint64
	// DBSizeBytes is the size of the node's data, and DBSizeInUseBytes that of its live part.
	DBSizeBytes, DBSizeInUseBytes int64
	// DBQuotaBytes is the size at which the node takes no more data, 0 if it is not known.
	DBQuotaBytes int64
	// Learner says whether the node was added as a learner and is not promoted yet.
	Learner bool
}

// AccessRecords has the users and roles; the client of the placement group implements it. Errors are kverrors or
// contexts' errors.
type AccessRecords interface {
	// Credential returns what proves that somebody is the user, as of a moment after the call.
	Credential(ctx context.Context, user string) (rights.Credential, error)
	// ChangeAccess makes a change on behalf of a user, empty for none, and returns once nobody is permitted any
	// more what it takes away.
	ChangeAccess(ctx context.Context, caller string, change rights.Change) error
}
