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

// whole has the range that holds the span answer a request, within the router's timeout. It returns
// errMultiRange if no range holds all of it.
func (r *Router) whole(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	limit := r.limited(ctx)
	defer limit.End()
	resp, err := r.answerOf(limit.LazyDeadline, span, req, at)
	if errors.Is(err, errMultiRange) {
		return nil, err
	}
	if err != nil {
		return nil, limit.outcome(err)
	}
	return resp, r.reserve(ctx, at.reserved, keysBytes(resp))
}

// part is whole without the router's timeout.
func (r *Router) part(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	resp, err := r.answerOf(ctx, span, req, at)
	if err != nil {
		return nil, err
	}
	return resp, r.reserve(ctx, at.reserved, keysBytes(resp))
}

// answerOf has the range answer. The answer is not reserved yet.
func (r *Router) answerOf(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at readPoint) (*pb.RangeResponse, error) {
	got, err := r.readFrom(ctx, span, at, req)
	if err != nil {
		return nil, err
	}
	resp, ok := got.(*pb.RangeResponse)
	if !ok {
		return nil, kverror.New(kverror.Internal, "a range answered a read with %T", got)
	}
	return resp, nil
}

// readPoint is the revision of a read, its transaction, its reservation and its replicas.
type readPoint struct {
	// rev is the current revision. The read may not exceed it, and reads there if it names none.
	rev keyspace.Revision
	// term is that of the sequencer that named it, 0 if it is no present revision.
	term uint64
	// txn is the committed transaction that reads, or nil.
	txn *rangeapi.TxnName
	// reserved counts the bytes of the answer; nil if they are few.
	reserved *reservation
	// encoded, if not nil, is where the keys of the answer go as a RangeResponse encodes them. Then
	// the answer itself has none.
	encoded *[][]byte
	// where says which replicas may answer.
	where replicaChoice
}

// revision returns the revision of the state that a request reads.
func (m *readPoint) revision(req *pb.RangeRequest) keyspace.Revision {
	if rev := keyspace.Revision(req.GetRevision()); rev > 0 {
		return rev
	}
	return m.rev
}

// maxParallelParts bounds the ranges that one read asks at the same time.
const maxParallelParts = 8

// readFrom has the range that holds a span answer a read of it.
func (r *Router) readFrom(ctx context.Context, span keyspace.Span, at readPoint, op proto.Message) (proto.Message, error) {
	build := func(rt *route) *rangeapi.Request {
		return &rangeapi.Request{Range: rt.desc.Range, Generation: rt.desc.Generation, ReadRevision: at.rev, ReadTerm: at.term, Txn: at.txn, Op: op}
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
		case at.where == localOnly || kverror.Of(err).Kind == kverror.ReadByPages || isFinal(op, err):
			return nil, err
		}
	}
	return r.single(ctx, span, build, true, nil)
}

// Local reads from this node's own replicas, whoever leads their ranges; *shard.Store does.
type Local interface {
	// ResolvedHere returns the revisions at which the replica of a range of that generation can be
	// read; ok is false if there is none.
	ResolvedHere(id keyspace.RangeID, g keyspace.Generation) (from, to keyspace.Revision, ok bool)
	// ReadHere answers a read from the replica, at a revision that it has resolved.
	ReadHere(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error)
}

// replicaChoice says which replicas may answer.
type replicaChoice uint8

const (
	// leaders: only leaders answer linearizable reads.
	leaders replicaChoice = iota
	// nearest: this node's replica if it has resolved the revision, otherwise the leader.
	nearest
	// localOnly: this node's replica alone.
	localOnly
)

// isFinal says whether another attempt at a serializable read would fail in the same way. A large
// read must not be done three times, and a compacted revision needs no quorum.
func isFinal(op proto.Message, err error) bool {
	if k := kverror.Of(err).Kind; k == kverror.AnswerTooLarge || k == kverror.TooManyRequests {
		return true
	} else if k != kverror.Compacted {
		return false
	}
	named, ok := op.(interface{ GetRevision() int64 })
	return ok && named.GetRevision() > 0
}
