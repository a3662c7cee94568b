package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// whole has a request answered by the one range that holds its span: errMultiRange where
// there is none. It has the router's patience.
func (r *Router) whole(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	limit := r.limited(ctx)
	defer limit.End()
	resp, err := r.part(limit.Patience, span, req, at)
	if errors.Is(err, errMultiRange) {
		return nil, err
	}
	return resp, limit.outcome(err)
}

// part is whole within the caller's patience.
func (r *Router) part(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	got, err := r.readFrom(ctx, span, at, req)
	if err != nil {
		return nil, err
	}
	resp, ok := got.(*pb.RangeResponse)
	if !ok {
		return nil, kverror.New(kverror.Internal, "a range answered a read with %T", got)
	}
	return resp, r.reserve(at.reserved, keysBytes(resp))
}

// readPoint is when a read is made.
type readPoint struct {
	// at is the current revision, which the read may not exceed, and reads where it names
	// none.
	rev keyspace.Revision
	// txn is the committed transaction for which it is made, nil for none.
	txn *rangeapi.TxnName
	// reserved counts the bytes of the answer, nil where there are few.
	reserved *reservation
	// where says who may be asked.
	where replicaChoice
}

// revision is that of the state which a request reads.
func (m *readPoint) revision(req *pb.RangeRequest) keyspace.Revision {
	if rev := keyspace.Revision(req.GetRevision()); rev > 0 {
		return rev
	}
	return m.rev
}

// maxParallelParts bounds how many ranges one read asks at the same time.
const maxParallelParts = 8

// readFrom has a read of a span answered by the one range that holds it.
func (r *Router) readFrom(ctx context.Context, span keyspace.Span, at readPoint, op proto.Message) (proto.Message, error) {
	build := func(rt *route) *rangeapi.Request {
		return &rangeapi.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, ReadRevision: at.rev, Txn: at.txn, Op: op}
	}
	if at.where != leaders {
		rt, err := r.cover(ctx, span)
		if err != nil {
			return nil, err
		}
		resp, err := r.cfg.Local.ReadHere(ctx, build(rt))
		switch {
		case err == nil:
			return resp.Op, nil
		case at.where == localOnly || kverror.Of(err).Kind == kverror.ReadInPieces || isFinal(op, err):
			return nil, err
		}
	}
	return r.single(ctx, span, build, true)
}

// Local reads from this node's own replicas, whoever leads their ranges; *shard.Node does.
type Local interface {
	// ResolvedHere returns the revisions at which the replica of a range of that generation
	// can be read; ok is false where there is none.
	ResolvedHere(id keyspace.RangeID, g keyspace.Generation) (from, to keyspace.Revision, ok bool)
	// ReadHere answers a read from the replica, at a revision up to which it is complete.
	ReadHere(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error)
}

// where says which replicas may be asked.
type replicaChoice uint8

const (
	// leaders alone know what is linearizable.
	leaders replicaChoice = iota
	// nearest is this node's replica where it is complete up to the revision, and else the
	// leader.
	nearest
	// localOnly is this node's replica and nobody else.
	localOnly
)

// final says whether an error of a serializable read stands, since it would be no other if
// it were asked elsewhere or again: who reads much is not to read it three times, and that
// a revision is compacted needs no quorum.
func isFinal(op proto.Message, err error) bool {
	if k := kverror.Of(err).Kind; k == kverror.AnswerTooLarge || k == kverror.TooManyRequests {
		return true
	} else if k != kverror.Compacted {
		return false
	}
	named, ok := op.(interface{ GetRevision() int64 })
	return ok && named.GetRevision() > 0
}
