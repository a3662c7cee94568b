package etcdapi

import (
	"errors"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/kverror"
)

// clientv3's member changes arrive, with etcd's answers: headers without a revision, all members
// after a change, etcd's errors.
func TestMemberChanges(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	check := func(what, want string, h *pb.ResponseHeader, members []*pb.Member, err error) {
		t.Helper()
		if err != nil || h.GetClusterId() != 0xc || h.GetMemberId() != 0xb || h.GetRaftTerm() != 5 || h.GetRevision() != 0 || len(members) == 0 || members[0].GetID() != 0xb {
			t.Errorf("%s: %v, %v, %v", what, h, members, err)
		}
		if got := r.node.change.Load(); got == nil || *got != want {
			t.Errorf("%s asks for %v, want %s", what, got, want)
		}
	}
	a, err := c.MemberAdd(t.Context(), []string{"http://h:2", "http://h:1"})
	check("MemberAdd", "add d", a.Header, a.Members, err)
	if fmt.Sprint(a.Member.PeerURLs) != "[http://h:1 http://h:2]" || a.Member.IsLearner || a.Member.Name != "" || len(a.Members) != 2 {
		t.Errorf("added %v, %v", a.Member, a.Members)
	}
	if a, err = c.MemberAddAsLearner(t.Context(), []string{"http://h:1"}); err != nil || !a.Member.IsLearner {
		t.Errorf("added as learner: %v, %v", a, err)
	}
	d, err := c.MemberRemove(t.Context(), 0xd)
	check("MemberRemove", "remove d", d.Header, d.Members, err)
	u, err := c.MemberUpdate(t.Context(), 0xd, []string{"http://h:3"})
	check("MemberUpdate", "update [http://h:3] d", u.Header, u.Members, err)
	p, err := c.MemberPromote(t.Context(), 0xd)
	check("MemberPromote", "promote d", p.Header, p.Members, err)

	raw := pb.NewClusterClient(c.ActiveConnection())
	for what, call := range map[string]func() error{
		"add": func() error {
			_, err := raw.MemberAdd(t.Context(), &pb.MemberAddRequest{PeerURLs: []string{"h:1"}})
			return err
		},
		"add without": func() error { _, err := raw.MemberAdd(t.Context(), &pb.MemberAddRequest{}); return err },
		"update": func() error {
			_, err := raw.MemberUpdate(t.Context(), &pb.MemberUpdateRequest{ID: 0xd, PeerURLs: []string{"http://h"}})
			return err
		},
	} {
		if err := call(); !errors.Is(err, rpctypes.ErrGRPCMemberBadURLs) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, want := range []struct {
		from error
		to   error
	}{
		{kverror.New(kverror.NodeNotFound, "node d"), rpctypes.ErrMemberNotFound},
		{kverror.New(kverror.NodeRemoved, "node d"), rpctypes.ErrMemberNotFound},
		{kverror.New(kverror.NodeExists, "node d"), rpctypes.ErrMemberExist},
		{kverror.New(kverror.PeerURLExists, "http://h"), rpctypes.ErrPeerURLExist},
		{rpctypes.ErrGRPCMemberNotLearner, rpctypes.ErrMemberNotLearner},
		{rpctypes.ErrGRPCUnhealthy, rpctypes.ErrUnhealthy},
	} {
		r.node.list.Store(&want.from)
		if _, err := c.MemberRemove(t.Context(), 0xd); !errors.Is(err, want.to) {
			t.Errorf("%v becomes %v, want %v", want.from, err, want.to)
		}
	}
}

// Only the leader takes a MoveLeader.
func TestMoveLeader(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	if resp, err := c.MoveLeader(t.Context(), 0xd); err != nil || resp.Header != nil || *r.node.change.Load() != "lead d" {
		t.Errorf("%v, %v", resp, err)
	}
	r.node.leader.Store(0xd)
	if _, err := c.MoveLeader(t.Context(), 0xd); !errors.Is(err, rpctypes.ErrNotLeader) {
		t.Error(err)
	}
	r.node.leader.Store(0)
	if _, err := c.MoveLeader(t.Context(), 0xd); !errors.Is(err, rpctypes.ErrNotLeader) {
		t.Error(err)
	}
}
