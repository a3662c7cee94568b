package adminapi

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Backend is what the service asks of the node. All methods may be called from many
// goroutines, answer for the whole cluster, and return by ctx's deadline. Errors are
// a *[Refusal], an *[Explained], a kverror, or a context's.
type Backend interface {
	// Ranges returns all ranges, or those that the request asks for, in any order; as the
	// node last knew them, and marked as stale, where no quorum can be asked. With what is
	// missing they cover the keyspace exactly once.
	Ranges(ctx context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error)
	// SplitRange makes a new range begin at the key.
	SplitRange(ctx context.Context, key []byte) (left, right *adminpb.Range, err error)
	// ShowRange returns a range and what each of its replicas says of itself; a replica
	// that does not answer has an error in its place.
	ShowRange(ctx context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error)
	// Nodes returns all nodes, in any order, stale as Ranges.
	Nodes(ctx context.Context) (*adminpb.NodeListResponse, error)
	Mover
	Joiner
	PlacementBackend
	ClusterBackend
	NodeBackend
	HoldBackend
	SurveyBackend
	HeatBackend
	SeriesBackend
	SlowBackend
	WatcherBackend
}

// Mover is what the service asks of the node about who holds ranges. Nodes are named by
// their names or by their ids in etcd's form.
type Mover interface {
	// MoveRange begins to put a replica of the range on one node in the place of that on
	// another.
	MoveRange(ctx context.Context, id keyspace.RangeID, from, to string) (*adminpb.Operation, error)
	// MergeRange begins to let the range absorb its right neighbour.
	MergeRange(ctx context.Context, left keyspace.RangeID) (*adminpb.Operation, error)
	// TransferLeader has the node lead the range.
	TransferLeader(ctx context.Context, id keyspace.RangeID, to string) error
	// Operations returns the operations under way, oldest first, stale as Ranges.
	Operations(ctx context.Context) (*adminpb.OperationListResponse, error)
}

// NodeChange is a change of what a node is to the cluster.
type NodeChange string

// The changes of a node.
const (
	Drain        NodeChange = "drain"
	Undrain      NodeChange = "undrain"
	Decommission NodeChange = "decommission"
	Recommission NodeChange = "recommission"
	Remove       NodeChange = "remove"
)

// NodeBackend is what the service asks of the node about what nodes are to the cluster.
type NodeBackend interface {
	// ShowNode says what the node holds, and what it could not be asked for.
	ShowNode(ctx context.Context, node string) (*adminpb.NodeShowResponse, error)
	// ChangeNode begins a change and returns the node as it is then. A change that has
	// begun already is no error.
	ChangeNode(ctx context.Context, change NodeChange, node string) (*adminpb.Node, error)
	// Pause has placement decide nothing by itself, or go on.
	Pause(ctx context.Context, paused bool) error
}

// Refusal is an error that tells the operator what to do next.
type Refusal struct {
	// Reason says what is refused and why.
	Reason string
	// NextStep says what can be done instead.
	NextStep string
	// Later says that it may pass by itself: a node cannot be reached, or there is no
	// quorum.
	Later bool
	// Removed says that the node in question was removed from the cluster.
	Removed bool
}

// Error implements error.
func (r *Refusal) Error() string { return r.Reason + " (" + r.NextStep + ")" }

// Explained is a failure of which the operator can be told the reason and the next step. Unlike with a [Refusal], the
// command may have been executed all the same.
type Explained struct {
	Reason, NextStep string
	Cause            error
}

// Error implements error.
func (e *Explained) Error() string { return e.Reason + " (" + e.NextStep + "): " + e.Cause.Error() }

// Unwrap returns the cause.
func (e *Explained) Unwrap() error { return e.Cause }

// maxKeyBytes bounds the key of a split. etcd has no bound of its own but that of a
// request.
const maxKeyBytes = 1 << 20

// Register adds the service to a gRPC server, such as etcdapi's. A backend that is a [BundleBackend] too makes debug bundles.
func Register(s grpc.ServiceRegistrar, b Backend) {
	desc := adminpb.Admin_ServiceDesc
	desc.Methods = slices.Clone(desc.Methods)
	for i := range desc.Methods {
		handle := desc.Methods[i].Handler
		desc.Methods[i].Handler = func(srv any, ctx context.Context, decode func(any) error, in grpc.UnaryServerInterceptor) (any, error) {
			ctx, cancel := inTime(ctx)
			defer cancel()
			return handle(srv, ctx, decode, in)
		}
	}
	bundles, _ := b.(BundleBackend)
	s.RegisterService(&desc, &server{backend: b, bundles: bundles})
}

// answerTime is how long before the caller's deadline a question ends at the latest.
const answerTime = 250 * time.Millisecond

// inTime returns ctx with an end a little before its deadline. At the deadline itself gRPC
// ends the call on both sides, and nobody reads the answer. Without a quorum the operator would
// then learn only that a stream was terminated.
func inTime(ctx context.Context) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	left := end.Sub(clock.System().Wall())
	return context.WithTimeout(ctx, left-min(left/10, answerTime))
}

type server struct {
	adminpb.UnimplementedAdminServer
	backend Backend
	bundles BundleBackend // nil where the backend makes none
}

func (s *server) RangeList(ctx context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	l, err := s.backend.Ranges(ctx, q)
	if err != nil {
		return nil, grpcError("list the ranges", err, readAgain)
	}
	slices.SortFunc(l.Ranges, func(a, b *adminpb.Range) int { return bytes.Compare(a.Start, b.Start) })
	return l, nil
}

func (s *server) RangeSplit(ctx context.Context, r *adminpb.RangeSplitRequest) (*adminpb.RangeSplitResponse, error) {
	what := fmt.Sprintf("split at %q", r.Key)
	switch {
	case len(r.Key) == 0:
		return nil, grpcError(what, &Refusal{Reason: "the key to split at is empty, and the first range begins there anyway", NextStep: "give the first key of the new range"}, lookFirst)
	case len(r.Key) > maxKeyBytes:
		return nil, grpcError("split", &Refusal{Reason: fmt.Sprintf("the key to split at has %d bytes", len(r.Key)), NextStep: fmt.Sprintf("give a key of at most %d bytes", maxKeyBytes)}, lookFirst)
	}
	left, right, err := s.backend.SplitRange(ctx, r.Key)
	if err != nil {
		return nil, grpcError(what, err, lookFirst)
	}
	return &adminpb.RangeSplitResponse{Left: left, Right: right}, nil
}

func (s *server) RangeShow(ctx context.Context, r *adminpb.RangeShowRequest) (*adminpb.RangeShowResponse, error) {
	resp, err := s.backend.ShowRange(ctx, keyspace.RangeID(r.Id))
	if err != nil {
		return nil, grpcError(fmt.Sprintf("show range %d", r.Id), err, readAgain)
	}
	return resp, nil
}

func (s *server) RangeMove(ctx context.Context, r *adminpb.RangeMoveRequest) (*adminpb.RangeMoveResponse, error) {
	o, err := s.backend.MoveRange(ctx, keyspace.RangeID(r.Id), r.From, r.To)
	if err != nil {
		return nil, grpcError(fmt.Sprintf("move range %d from %s to %s", r.Id, r.From, r.To), err, lookForOperations)
	}
	return &adminpb.RangeMoveResponse{Operation: o}, nil
}

func (s *server) RangeMerge(ctx context.Context, r *adminpb.RangeMergeRequest) (*adminpb.RangeMergeResponse, error) {
	o, err := s.backend.MergeRange(ctx, keyspace.RangeID(r.Left))
	if err != nil {
		return nil, grpcError(fmt.Sprintf("merge range %d with its right neighbour", r.Left), err, lookForOperations)
	}
	return &adminpb.RangeMergeResponse{Operation: o}, nil
}

func (s *server) RangeTransferLeader(ctx context.Context, r *adminpb.RangeTransferLeaderRequest) (*adminpb.RangeTransferLeaderResponse, error) {
	if err := s.backend.TransferLeader(ctx, keyspace.RangeID(r.Id), r.To); err != nil {
		return nil, grpcError(fmt.Sprintf("have %s lead range %d", r.To, r.Id), err, lookFirst)
	}
	return &adminpb.RangeTransferLeaderResponse{}, nil
}

func (s *server) OperationList(ctx context.Context, _ *adminpb.OperationListRequest) (*adminpb.OperationListResponse, error) {
	l, err := s.backend.Operations(ctx)
	if err != nil {
		return nil, grpcError("list the operations", err, readAgain)
	}
	return l, nil
}

func (s *server) NodeList(ctx context.Context, _ *adminpb.NodeListRequest) (*adminpb.NodeListResponse, error) {
	l, err := s.backend.Nodes(ctx)
	if err != nil {
		return nil, grpcError("list the nodes", err, readAgain)
	}
	slices.SortFunc(l.Nodes, func(a, b *adminpb.Node) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Id, b.Id))
	})
	return l, nil
}

func (s *server) NodeShow(ctx context.Context, q *adminpb.NodeShowRequest) (*adminpb.NodeShowResponse, error) {
	n, err := s.backend.ShowNode(ctx, q.Node)
	if err != nil {
		return nil, grpcError("show node "+q.Node, err, readAgain)
	}
	return n, nil
}

func (s *server) changeNode(ctx context.Context, change NodeChange, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	n, err := s.backend.ChangeNode(ctx, change, q.Node)
	if err != nil {
		return nil, grpcError(string(change)+" node "+q.Node, err, lookAtNodes)
	}
	return &adminpb.NodeChangeResponse{Node: n}, nil
}

func (s *server) NodeDrain(ctx context.Context, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	return s.changeNode(ctx, Drain, q)
}

func (s *server) NodeUndrain(ctx context.Context, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	return s.changeNode(ctx, Undrain, q)
}

func (s *server) NodeDecommission(ctx context.Context, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	return s.changeNode(ctx, Decommission, q)
}

func (s *server) NodeRecommission(ctx context.Context, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	return s.changeNode(ctx, Recommission, q)
}

func (s *server) NodeRemove(ctx context.Context, q *adminpb.NodeChangeRequest) (*adminpb.NodeChangeResponse, error) {
	return s.changeNode(ctx, Remove, q)
}

func (s *server) PlacementSetReplication(ctx context.Context, q *adminpb.PlacementSetReplicationRequest) (*adminpb.PlacementSetReplicationResponse, error) {
	r, err := s.backend.SetReplication(ctx, int(q.Factor), q.DryRun)
	if err != nil {
		return nil, grpcError(fmt.Sprintf("set the replication to %d", q.Factor), err, lookAtPlacement)
	}
	return r, nil
}

func (s *server) PlacementPause(ctx context.Context, q *adminpb.PlacementPauseRequest) (*adminpb.PlacementPauseResponse, error) {
	if err := s.backend.Pause(ctx, q.Paused); err != nil {
		return nil, grpcError("pause or resume placement", err, lookForOperations)
	}
	return &adminpb.PlacementPauseResponse{}, nil
}

// The next step after an outcome that is not known, of a question and of a change.
const (
	readAgain         = "try again with a longer --command-timeout" + lookForQuorum
	lookForOperations = "look with skein placement operations whether it has begun, then try again with a longer --command-timeout" + lookForQuorum
	lookAtNodes       = "look with skein node list whether it happened, then try again with a longer --command-timeout" + lookForQuorum
	lookFirst         = "look with skein range list whether it happened, then try again with a longer --command-timeout" + lookForQuorum
	lookForQuorum     = "; if it stays so, look with skein node list which nodes are down: a quorum is needed"
)

// grpcError words an error of the backend. A refusal travels as a detail of the
// status, so that the command can print its two halves apart. unknown is the next step
// where the outcome is not known.
func grpcError(what string, err error, unknown string) error {
	if kverror.IsAccessChanged(err) {
		return kverror.GRPC(err) // the caller is checked anew, and the command is repeated
	}
	var r *Refusal
	var x *Explained
	code := codes.FailedPrecondition
	if errors.As(err, &x) {
		r, code = &Refusal{Reason: x.Reason, NextStep: x.NextStep}, codes.Unavailable
	} else if !errors.As(err, &r) {
		e := kverror.Of(err)
		code = status.Code(kverror.GRPC(err))
		r = &Refusal{Reason: err.Error(), NextStep: nextStep(e.Kind, unknown), Removed: e.Kind == kverror.NodeRemoved}
	} else if r.Later {
		code = codes.Unavailable
	}
	st, derr := status.New(code, what+": "+r.Reason).WithDetails(&adminpb.Refusal{
		Reason: what + ": " + r.Reason, NextStep: r.NextStep, Removed: r.Removed,
	})
	if derr != nil {
		return status.Error(code, what+": "+r.Error())
	}
	return st.Err()
}

// nextStep is what helps with an error that is no refusal of the operation itself.
func nextStep(k kverror.Kind, unknown string) string {
	switch k {
	case kverror.NoLeader, kverror.NotLeader, kverror.LeaderChanged:
		return "try again" + lookForQuorum
	case kverror.Timeout, kverror.TimeoutLeaderFail, kverror.TimeoutConnectionLost, kverror.DeadlineExceeded, kverror.Canceled:
		return unknown
	case kverror.WrongRange, kverror.RangeNotHere, kverror.Busy, kverror.Dropped, kverror.ReadAgain, kverror.TooManyRequests, kverror.Unreachable:
		return "try again in a moment"
	case kverror.Stopped:
		return "the node is going down: give another one to --endpoints"
	case kverror.NodeNotFound, kverror.NodeRemoved, kverror.NodeExists, kverror.PeerURLExists:
		return "skein node list shows the nodes"
	case kverror.NoSpace:
		return "make room on the disks of the range's nodes"
	default:
		return "see the log of the node that was asked"
	}
}
