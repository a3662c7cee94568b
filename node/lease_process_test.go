package node_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestLeasesOfClients: clientv3 keeps a lease alive on three processes, through the death
// of the leader and through a stop of all three. A lease that nobody renews expires with
// its keys in all ranges.
func TestLeasesOfClients(t *testing.T) {
	// clientv3 gives a lease up if it hears nothing of it for the TTL. So the TTL is longer
	// than the nodes are down in this test, even on a busy machine.
	const keptTTL = 30
	c := serving(t)
	cl := c.clientOf(c.nodes...)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	ids := map[string]clientv3.LeaseID{}
	for name, ttl := range map[string]int64{"kept": keptTTL, "forgotten": 4, "revoked": 600} {
		l, err := cl.Grant(ctx, ttl)
		if err != nil || l.TTL != ttl {
			t.Fatalf("grant: %+v, %v", l, err)
		}
		ids[name] = l.ID
	}
	kept, err := cl.KeepAlive(ctx, ids["kept"])
	if err != nil {
		t.Fatal(err)
	}
	// The first byte decides on the range.
	prefixes := []string{"\x01", "G", "g", "\xf0"}
	for name, id := range ids {
		for _, p := range prefixes {
			if _, err := cl.Put(ctx, p+name, "v", clientv3.WithLease(id)); err != nil {
				t.Fatal(err)
			}
		}
	}
	count := func(id clientv3.LeaseID) int {
		t.Helper()
		l, err := cl.TimeToLive(ctx, id, clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		if l.TTL == -1 {
			return -1
		}
		return len(l.Keys)
	}
	before, err := cl.Get(ctx, "\x01revoked")
	if err != nil || count(ids["revoked"]) != len(prefixes) {
		t.Fatalf("%d keys, %v", count(ids["revoked"]), err)
	}
	if resp, err := cl.Revoke(ctx, ids["revoked"]); err != nil || resp.Header.Revision <= before.Header.Revision {
		t.Errorf("revoke: %v, %v", resp, err)
	}
	if _, err := cl.Revoke(ctx, ids["revoked"]); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		t.Errorf("revoke again: %v", err)
	}
	st, err := cl.Status(ctx, c.nodes[0].client)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range c.nodes {
		s, err := cl.Status(ctx, p.client)
		if err == nil && s.Header.MemberId == st.Leader {
			p.kill()
			time.Sleep(3 * time.Second)
			c.start(p)
			break
		}
	}
	awaitRenewal := func(what string) {
		t.Helper()
		for {
			select {
			case <-kept: // of before
			default:
				select {
				case resp, ok := <-kept:
					if !ok || resp.TTL != keptTTL {
						t.Fatalf("%s: keepalive %v %v", what, resp, ok)
					}
					return
				case <-ctx.Done():
					t.Fatalf("%s: no keepalive", what)
				}
			}
		}
	}
	awaitRenewal("after the death of the leader")
	for count(ids["forgotten"]) != -1 {
		time.Sleep(200 * time.Millisecond)
	}
	list, err := cl.Leases(ctx)
	if err != nil || fmt.Sprint(list.Leases) != fmt.Sprintf("[{%d}]", ids["kept"]) {
		t.Errorf("leases: %v, %v", list, err)
	}
	resp, err := cl.Get(ctx, "\x00", clientv3.WithFromKey())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		if kv.Lease != 0 && clientv3.LeaseID(kv.Lease) != ids["kept"] {
			t.Errorf("key %q is left of lease %x", kv.Key, kv.Lease)
		}
	}
	c.stopAll()
	c.startAll()
	c.ready()
	awaitRenewal("after the end of all nodes")
	if n := count(ids["kept"]); n != len(prefixes) {
		t.Errorf("%d keys of the lease that is kept", n)
	}
}
