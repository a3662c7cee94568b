package adminapi

import (
	"errors"
	"strings"
	"testing"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/kverror"
)

// A node that asks to be admitted is told who it is, or why not, and whether asking again may
// help.
func TestNodeJoin(t *testing.T) {
	b := &fakeBackend{}
	c, stop := serve(t, b)
	a, err := c.NodeJoin(t.Context(), &adminpb.NodeJoinRequest{Name: "n4", PeerUrls: []string{"http://h:1"}})
	if err != nil || a.GetCluster() != "c1" || a.GetNode() != "d" || string(a.GetNodeTable()) != "n4 at http://h:1" {
		t.Errorf("%v, %v", a, err)
	}
	for _, tc := range []struct {
		err   error
		says  string
		later bool
	}{
		{&Refusal{Reason: "the name is taken", NextStep: "give another"}, "admit node n4: the name is taken", false},
		{kverror.New(kverror.NodeRemoved, "node d"), "node removed", false},
		{kverror.New(kverror.NoLeader, "no leader"), "no leader", true},
		{kverror.New(kverror.Timeout, "placement"), "placement", true},
	} {
		b.err = tc.err
		_, err := c.NodeJoin(t.Context(), &adminpb.NodeJoinRequest{Name: "n4"})
		var r *Refusal
		if !errors.As(err, &r) || !strings.Contains(r.Reason, tc.says) || r.Later != tc.later {
			t.Errorf("%v: %+v", tc.err, err)
		}
	}
	stop()
	var r *Refusal
	if _, err := c.NodeJoin(t.Context(), &adminpb.NodeJoinRequest{Name: "n4"}); !errors.As(err, &r) || !r.Later {
		t.Errorf("nobody answers: %v", err)
	}
}
