package etcdapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/keyspace"
)

// maintenanceServer is etcd's Maintenance service.
type maintenanceServer struct {
	s *Server
	pb.UnsafeMaintenanceServer
}

// Status reports on this node. Leader, term and indexes are the placement group's, and sizes are
// the node's own. There is no quota, which is a quota of 0.
func (m *maintenanceServer) Status(context.Context, *pb.StatusRequest) (*pb.StatusResponse, error) {
	st := m.s.opts.Node.Status()
	resp := &pb.StatusResponse{
		Header:           m.s.own(st.Revision),
		Version:          EtcdVersion,
		StorageVersion:   StorageVersion,
		Leader:           uint64(m.s.opts.Node.Leader()),
		RaftTerm:         m.s.opts.Node.Term(),
		RaftIndex:        st.RaftIndex,
		RaftAppliedIndex: st.AppliedIndex,
		DbSize:           st.DBSizeBytes,
		DbSizeInUse:      st.DBSizeInUseBytes,
		IsLearner:        st.Learner,
		DowngradeInfo:    &pb.DowngradeInfo{},
	}
	if resp.Leader == 0 {
		resp.Errors = append(resp.Errors, rpctypes.ErrNoLeader.Error())
	}
	for _, a := range m.s.opts.Node.Alarms() {
		resp.Errors = append(resp.Errors, a.String())
	}
	return resp, nil
}

// Alarm lists alarms, for etcdctl endpoint health. Alarms come and go by themselves here; setting
// and clearing them is not supported yet.
func (m *maintenanceServer) Alarm(_ context.Context, r *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	if r.GetAction() != pb.AlarmRequest_GET {
		return nil, notYet("Alarm "+r.GetAction().String(), ": alarms come and go with their cause")
	}
	resp := &pb.AlarmResponse{Header: m.s.own(m.s.opts.Node.Status().Revision)}
	for _, a := range m.s.opts.Node.Alarms() {
		if r.GetAlarm() == pb.AlarmType_NONE || r.GetAlarm() == a.GetAlarm() {
			resp.Alarms = append(resp.Alarms, a)
		}
	}
	return resp, nil
}

// Defragment is not supported, because nothing needs it.
func (m *maintenanceServer) Defragment(context.Context, *pb.DefragmentRequest) (*pb.DefragmentResponse, error) {
	return nil, notYet("Defragment", " and not needed: space is given back in the background")
}

// Hash is not supported yet.
func (m *maintenanceServer) Hash(context.Context, *pb.HashRequest) (*pb.HashResponse, error) {
	return nil, notYet("Hash", "")
}

// HashKV is not supported yet.
func (m *maintenanceServer) HashKV(context.Context, *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	return nil, notYet("HashKV", ": replicas compare their hashes by themselves")
}

// Snapshot is not supported yet.
func (m *maintenanceServer) Snapshot(*pb.SnapshotRequest, pb.Maintenance_SnapshotServer) error {
	return notYet("Snapshot", "")
}

// MoveLeader makes another node lead, if this one leads. As in etcd, its answer has no header.
func (m *maintenanceServer) MoveLeader(ctx context.Context, r *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	if m.s.opts.Node.Leader() != m.s.opts.Self {
		return nil, rpctypes.ErrGRPCNotLeader
	}
	inner, cancel, wording := m.s.bounded(ctx)
	defer cancel()
	if err := m.s.opts.Node.MoveLeader(inner, keyspace.NodeID(r.GetTargetID())); err != nil {
		return nil, wording(err)
	}
	return &pb.MoveLeaderResponse{}, nil
}

// Downgrade is not supported yet.
func (m *maintenanceServer) Downgrade(context.Context, *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	return nil, notYet("Downgrade", ": there is no older version")
}
