package etcdapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/kverror"
)

func (a *Alarm) member() *pb.AlarmMember {
	return &pb.AlarmMember{MemberID: uint64(a.Member), Alarm: a.Type}
}

// checkAlarms refuses a change that sticky alarms do not let pass: after the checks of its look and size, and
// before that of rights. An alarm may have been ended by another member a moment ago. So placement is asked
// before the change is refused.
func (s *Server) checkAlarms(ctx context.Context, change proto.Message) error {
	if s.opts.Alarms == nil || refusal(s.opts.Alarms.Sticky(), change) == nil {
		return nil
	}
	if mutation.Is(mutation.AlarmEndUnseen) {
		return refusal(s.opts.Alarms.Sticky(), change)
	}
	inner, cancel, wording := s.bounded(ctx)
	defer cancel()
	all, err := s.opts.Alarms.List(inner)
	if err != nil {
		return wording(err)
	}
	return refusal(all, change)
}

// refusal returns etcd's error for a change while there are sticky alarms, CORRUPT before NOSPACE. Observed
// alarms refuse nothing here: the ranges of the node do, if need be.
func refusal(all []Alarm, change proto.Message) error {
	noSpace, corrupt := false, false
	for i := range all {
		noSpace = noSpace || all[i].Sticky && all[i].Type == pb.AlarmType_NOSPACE
		corrupt = corrupt || all[i].Sticky && all[i].Type == pb.AlarmType_CORRUPT
	}
	switch {
	case corrupt:
		return kverror.Corrupt
	case noSpace && adds(change):
		return kverror.NoSpace
	}
	return nil
}

// adds says whether a change may take room for good, in any branch.
func adds(change proto.Message) bool {
	switch r := change.(type) {
	case *pb.PutRequest, *pb.LeaseGrantRequest:
		return true
	case *pb.TxnRequest:
		for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
			for _, op := range branch {
				if op.GetRequestPut() != nil || op.GetRequestTxn() != nil && adds(op.GetRequestTxn()) {
					return true
				}
			}
		}
	}
	return false
}

// unhealthyBy returns the alarms by which this node is not healthy: those of all members that clients have
// raised, and its own. A full disk of another member does not take this one from service.
func (s *Server) unhealthyBy() (all []Alarm) {
	for _, a := range s.known() {
		if a.Sticky || a.Member == s.opts.Self {
			all = append(all, a)
		}
	}
	return all
}

func (s *Server) known() []Alarm {
	if s.opts.Alarms == nil {
		return nil
	}
	return s.opts.Alarms.Known()
}
