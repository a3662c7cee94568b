package node

import (
	"context"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
)

// members answers etcd's questions about the cluster.
type members struct{ c *Core }

// MemberList implements etcdapi.Cluster.
func (m members) MemberList(ctx context.Context, linearizable bool) ([]*pb.Member, error) {
	nodes, err := m.c.client.Members(ctx, linearizable)
	if err != nil {
		return nil, err
	}
	out := make([]*pb.Member, len(nodes))
	for i, n := range nodes {
		out[i] = &pb.Member{ID: uint64(n.ID), Name: n.Name, PeerURLs: n.PeerURLs, ClientURLs: n.ClientURLs}
	}
	return out, nil
}

// self answers etcd's questions about this node.
type self struct{ c *Core }

// statusTimeout bounds what a node without a placement replica asks another for
// its Status; after it the answer leaves those fields out.
const statusTimeout = time.Second

// Leader implements etcdapi.Node.
func (s self) Leader() keyspace.NodeID { return s.c.client.Leader() }

// Term implements etcdapi.Node.
func (s self) Term() uint64 { return s.c.client.Term() }

// Status implements etcdapi.Node.
func (s self) Status() etcdapi.Status {
	st := etcdapi.Status{Revision: s.c.shards.Floor()}
	st.DBSizeBytes, st.DBSizeInUseBytes = s.c.engine.DiskBytes()
	ctx, cancel := context.WithTimeout(s.c.ctx, statusTimeout)
	defer cancel()
	if p, err := s.c.client.Status(ctx); err == nil {
		st.RaftIndex, st.AppliedIndex = p.Index, p.Applied
	}
	return st
}

// Alarms implements etcdapi.Node. A node whose disk is full says so for itself.
func (s self) Alarms() []*pb.AlarmMember {
	if s.c.full() {
		return []*pb.AlarmMember{{MemberID: uint64(s.c.o.Self), Alarm: pb.AlarmType_NOSPACE}}
	}
	return nil
}
