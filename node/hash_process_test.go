package node_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// What `etcdctl endpoint hashkv --cluster` and `etcdctl defrag --cluster` ask of three processes. Every
// member of the list has the same hash, before and after everybody has defragmented.
func TestHashesOfAllMembers(t *testing.T) {
	c := serving(t)
	cl := c.clientOf(c.nodes...)
	for _, k := range []string{"a", "b", "c"} {
		if _, err := cl.Put(t.Context(), k, "v"); err != nil {
			t.Fatal(err)
		}
	}
	members, err := cl.MemberList(t.Context())
	if err != nil || len(members.Members) != 3 {
		t.Fatal(members, err)
	}
	var first *clientv3.HashKVResponse
	for _, defrag := range []bool{false, true} {
		for _, m := range members.Members {
			at := m.GetClientURLs()[0]
			if defrag {
				if _, err := cl.Defragment(t.Context(), at); err != nil {
					t.Errorf("defragment %s: %v", at, err)
				}
			}
			h, err := cl.HashKV(t.Context(), at, 0)
			if err != nil {
				t.Fatalf("hash of %s: %v", at, err)
			}
			if first == nil {
				first = h
			}
			if h.Hash != first.Hash || h.HashRevision != first.HashRevision || h.Header.GetMemberId() != m.GetID() {
				t.Errorf("%s has %+v, the first one %+v", at, h, first)
			}
		}
	}
	etcdctl, err := exec.LookPath("etcdctl")
	if err != nil {
		t.Log("left out, etcdctl itself: ", err)
		return
	}
	for _, args := range [][]string{{"endpoint", "hashkv"}, {"defrag"}} {
		cmd := exec.CommandContext(t.Context(), etcdctl, append(args, "--cluster", "--endpoints", c.nodes[0].client)...)
		cmd.Env = append(os.Environ(), "ETCDCTL_API=3")
		out, err := cmd.CombinedOutput()
		if lines := strings.Split(strings.TrimSpace(string(out)), "\n"); err != nil || len(lines) != 3 {
			t.Errorf("etcdctl %v: %v\n%s", args, err, out)
		}
		t.Logf("etcdctl %v\n%s", args, out)
	}
}
