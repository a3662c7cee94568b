package etcdapi

import (
	"context"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/kverror"
)

// whileLoading refuses keys, leases and watches of a cluster that is being loaded. Once it follows its source,
// linearizable reads are answered at its position; what a replica has by itself is not to be seen yet. The source may check
// users, who come last: so before that only who is here may read.
func (s *Server) whileLoading(ctx context.Context, method string, req any) error {
	err := s.whileLoadingAsKnown(ctx, method, req)
	if err == nil || s.opts.LearnLoad == nil {
		return err
	}
	s.opts.LearnLoad(ctx) // a node that was down when the load ended may not have heard of the end yet
	return s.whileLoadingAsKnown(ctx, method, req)
}

// whileLoadingAsKnown is whileLoading by what the node knows.
func (s *Server) whileLoadingAsKnown(ctx context.Context, method string, req any) error {
	if s.opts.Loading == nil {
		return nil
	}
	follows, err := s.opts.Loading()
	if err == nil {
		return nil
	}
	service, _, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	switch service {
	case "etcdserverpb.KV", "etcdserverpb.Lease", "etcdserverpb.Watch", "v3lockpb.Lock", "v3electionpb.Election":
		if !follows || !onlyReads(req) {
			return kverror.GRPC(err)
		}
	default:
		if method != pb.Maintenance_Snapshot_FullMethodName && method != datapb.Data_Read_FullMethodName {
			return nil
		}
	}
	if s.opts.Users.Gate.Off() == nil {
		return nil // users are checked
	}
	return s.fromHere(ctx, readsLoad)
}

// isLoading says whether the cluster is being loaded, as far as this node knows.
func (s *Server) isLoading() bool {
	if s.opts.Loading == nil {
		return false
	}
	_, err := s.opts.Loading()
	return err != nil
}

// onlyReads says whether a request is a linearizable read, or several.
func onlyReads(req any) bool {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return !r.GetSerializable()
	case *pb.TxnRequest:
		for _, op := range r.GetSuccess() {
			if q := op.GetRequestRange(); q == nil || q.GetSerializable() {
				return false
			}
		}
		return len(r.GetCompare())+len(r.GetFailure()) == 0
	}
	return false
}
