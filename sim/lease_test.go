package sim

import (
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// The check of leases accepts what is right and rejects each way to be wrong.
func TestCheckLeasesRejects(t *testing.T) {
	put := func(key string, rev, lease int64) Version { return Version{Key: key, Value: "v", Mod: rev, Create: rev, Version: 1, Lease: lease} }
	gone := func(key string, rev int64) Version { return Version{Key: key, Mod: rev, Deleted: true} }
	seen := func(rev int64, at time.Duration) *Op {
		return &Op{Outcome: Answered, Ended: at, Response: &pb.PutResponse{Header: &pb.ResponseHeader{Revision: rev}}}
	}
	for name, c := range map[string]struct {
		revoked bool
		vs      []Version
		ended   time.Duration
		want    string
	}{
		"right":    {false, []Version{put("a", 2, 7), put("b", 3, 7), gone("a", 5), gone("b", 5)}, 4 * time.Second, ""},
		"revoked":  {true, []Version{put("a", 2, 7), gone("a", 5)}, 2 * time.Second, ""},
		"early":    {false, []Version{put("a", 2, 7), gone("a", 5)}, 2 * time.Second, "ended at revision 5"},
		"attached": {false, []Version{put("a", 2, 7), gone("a", 5), put("b", 6, 7)}, 4 * time.Second, "is attached to it"},
	} {
		l := &Lease{ID: 7, TTL: 2 * time.Second, Kept: time.Second, Revoked: c.revoked}
		got := strings.Join(checkLeases([]*Lease{l}, []*Op{seen(3, time.Second), seen(5, c.ended)}, c.vs), "; ")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
