package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

// attach puts a key with a lease at a gateway and returns the revision.
func (n *rigNode) attach(ctx context.Context, key string, lease int64) (int64, error) {
	resp, err := n.core.KV().Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte("leased"), Lease: lease})
	return resp.GetHeader().GetRevision(), err
}

// leased is a lease with a key in each of n ranges.
func (r *rig) leased(n *rigNode, ttl int64, ranges int) int64 {
	r.t.Helper()
	resp, err := n.core.Leases().Grant(r.t.Context(), &pb.LeaseGrantRequest{TTL: ttl})
	if err != nil || resp.GetTTL() != max(ttl, 2) || resp.GetID() <= 0 {
		r.t.Fatalf("grant: %v, %v", resp, err)
	}
	for i := range ranges {
		gateway := r.nodes[i%len(r.nodes)]
		if _, err := gateway.attach(r.t.Context(), keyOf(i)+fmt.Sprint(resp.GetID()), resp.GetID()); err != nil {
			r.t.Fatalf("put %d with lease %d at node %s: %v", i, resp.GetID(), gateway.id, err)
		}
	}
	return resp.GetID()
}

// ttl asks a node about a lease.
func (r *rig) ttl(n *rigNode, id int64) *pb.LeaseTimeToLiveResponse {
	r.t.Helper()
	resp, err := n.core.Leases().TimeToLive(r.t.Context(), &pb.LeaseTimeToLiveRequest{ID: id, Keys: true})
	if err != nil {
		r.t.Fatalf("ttl of lease %d at node %s: %v", id, n.id, err)
	}
	return resp
}

func (r *rig) wantLeased(n *rigNode, id int64, want int) {
	r.t.Helper()
	if resp := r.ttl(n, id); len(resp.GetKeys()) != want || resp.GetTTL() < 0 {
		r.t.Errorf("lease %d at node %s: %d keys, want %d: %v", id, n.id, len(resp.GetKeys()), want, resp)
	}
}

// total returns how many keys there are, and the current revision.
func (r *rig) total(n *rigNode) (keys, revision int64) {
	r.t.Helper()
	resp, err := n.core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, CountOnly: true})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetCount(), resp.GetHeader().GetRevision()
}

// placementLeader is the node that leads placement.
func (r *rig) placementLeader() *rigNode {
	r.t.Helper()
	var found *rigNode
	r.wait(10*time.Second, "a placement leader", func() bool {
		for _, n := range r.nodes {
			if n.core != nil && n.core.Placement().Leader() == n.id {
				found = n
			}
		}
		return found != nil
	})
	return found
}

// TestLeases: a lease with keys in six ranges is renewed at a node that does not lead,
// expires and is revoked at one revision, whichever node is asked.
func TestLeases(t *testing.T) {
	const ranges = 6
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "other")
		id := r.leased(r.nodes[1], 5, ranges)
		for _, n := range r.nodes {
			r.wantLeased(n, id, ranges)
			list, err := n.core.Leases().Leases(r.t.Context(), nil)
			if err != nil || len(list.GetLeases()) != 1 || list.GetLeases()[0].GetID() != id {
				r.t.Errorf("list: %v, %v", list, err)
			}
		}
		for range 8 {
			time.Sleep(4 * time.Second)
			resp, err := r.nodes[2].core.Leases().KeepAlive(r.t.Context(), &pb.LeaseKeepAliveRequest{ID: id})
			if err != nil || resp.GetTTL() != 5 {
				r.t.Fatalf("keepalive: %v, %v", resp, err)
			}
		}
		_, before := r.total(r.nodes[0])
		time.Sleep(4900 * time.Millisecond)
		r.wantLeased(r.nodes[0], id, ranges)
		time.Sleep(time.Second)
		if keys, rev := r.total(r.nodes[1]); keys != ranges || rev != before+1 {
			r.t.Errorf("%d keys at revision %d, want %d at %d", keys, rev, ranges, before+1)
		}
		if resp := r.ttl(r.nodes[2], id); resp.GetTTL() != -1 || resp.GetGrantedTTL() != 0 {
			r.t.Errorf("ttl after the end: %v", resp)
		}
		if resp, err := r.nodes[0].core.Leases().KeepAlive(r.t.Context(), &pb.LeaseKeepAliveRequest{ID: id}); err != nil || resp.GetTTL() != 0 {
			r.t.Errorf("keepalive after the end: %v, %v", resp, err)
		}
		_, err := r.nodes[0].attach(r.t.Context(), keyOf(0), id)
		r.wantKind("put with a lease that has expired", err, kverror.LeaseNotFound)
		if _, rev := r.total(r.nodes[0]); rev != before+1 {
			r.t.Errorf("a refused put took revision %d", rev)
		}

		id = r.leased(r.nodes[0], 60, ranges)
		_, before = r.total(r.nodes[0])
		resp, err := r.nodes[1].core.Leases().Revoke(r.t.Context(), &pb.LeaseRevokeRequest{ID: id}, nil)
		if err != nil || resp.GetHeader().GetRevision() != before+1 {
			r.t.Errorf("revoke: %v, %v", resp, err)
		}
		if keys, rev := r.total(r.nodes[2]); keys != ranges || rev != before+1 {
			r.t.Errorf("%d keys at revision %d after the revoke", keys, rev)
		}
		_, err = r.nodes[2].core.Leases().Revoke(r.t.Context(), &pb.LeaseRevokeRequest{ID: id}, nil)
		r.wantKind("revoke again", err, kverror.LeaseNotFound)
	})
}

// TestRevokeChecked: a revoke by who may delete only some keys deletes no key that is attached while the keys are
// checked, whether its range has keys of the lease already or not. Trap 110.
func TestRevokeChecked(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		r.spread(r.nodes[0], ranges, "other")
		var denied error = kverror.New(kverror.PermissionDenied, "key secret")
		revoke := func(id int64, check func(round int, secret bool) error) (rounds int, err error) {
			_, err = r.nodes[1].core.Leases().Revoke(r.t.Context(), &pb.LeaseRevokeRequest{ID: id}, func(keys [][]byte) error {
				rounds++
				return check(rounds, slices.ContainsFunc(keys, func(k []byte) bool { return bytes.HasSuffix(k, []byte("secret")) }))
			})
			return rounds, err
		}
		for keysIn := range 3 {
			for at := range ranges {
				id := r.leased(r.nodes[0], 60, keysIn)
				secret := keyOf(at) + "secret"
				n, err := revoke(id, func(_ int, seen bool) error {
					if seen {
						return denied
					}
					_, err := r.nodes[2].attach(r.t.Context(), secret, id)
					return err
				})
				if what := fmt.Sprintf("keys in %d ranges, one attached in range %d", keysIn, at); n != 2 || kverror.Of(err).Kind != kverror.PermissionDenied {
					r.t.Errorf("%s: %d checks, %v", what, n, err)
				}
				r.mustGet(r.nodes[0], secret, "leased")
				r.wantLeased(r.nodes[2], id, keysIn+1)
				if resp, err := r.nodes[0].core.Leases().KeepAlive(r.t.Context(), &pb.LeaseKeepAliveRequest{ID: id}); err != nil || resp.GetTTL() != 60 {
					r.t.Errorf("keepalive of a lease that stays: %v, %v", resp, err)
				}
				// A key that is written meanwhile is seen, and one that only leaves is no reason to look again.
				n, err = revoke(id, func(round int, seen bool) error {
					switch round {
					case 1:
						_, err := r.nodes[2].attach(r.t.Context(), secret, id)
						return err
					case 2:
						r.mustRemove(r.nodes[0], secret)
					}
					if !seen {
						return errors.New("the secret was not shown")
					}
					return nil
				})
				if n != 2 || err != nil {
					r.t.Errorf("revoked after %d checks: %v", n, err)
				}
				if resp := r.ttl(r.nodes[0], id); resp.GetTTL() != -1 {
					r.t.Errorf("ttl after the end: %v", resp)
				}
			}
		}
		if keys, _ := r.total(r.nodes[0]); keys != ranges {
			r.t.Errorf("%d keys are left, want %d", keys, ranges)
		}
		_, err := revoke(99, func(int, bool) error { return nil })
		r.wantKind("revoke of an unknown lease", err, kverror.LeaseNotFound)
	})
}

// TestRevokeCheckedPauses: a revoke whose keys are written again and again waits longer each time before it looks again,
// because each look costs the placement group entries.
func TestRevokeCheckedPauses(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		id := r.leased(r.nodes[0], 60, 1)
		ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
		defer cancel()
		var looks []time.Time
		_, err := r.nodes[1].core.Leases().Revoke(ctx, &pb.LeaseRevokeRequest{ID: id}, func([][]byte) error {
			looks = append(looks, time.Now())
			_, err := r.nodes[2].attach(r.t.Context(), keyOf(0), id)
			return err
		})
		if !errors.Is(err, kverror.KeysChanged) && !errors.Is(err, context.DeadlineExceeded) {
			r.t.Errorf("a revoke of keys that are always written: %v", err)
		}
		if len(looks) < 5 {
			r.t.Errorf("%d looks in 5 s", len(looks))
		}
		for i := 1; i < len(looks); i++ {
			if pause, least := looks[i].Sub(looks[i-1]), min(10*time.Millisecond<<(i-1), time.Second); pause < least {
				r.t.Errorf("look %d came after %v, before %v were over", i+1, pause, least)
			}
		}
		r.wantLeased(r.nodes[0], id, 2)
	})
}

// TestLeasesOverLeaderChanges: leases outlive their leader, planned or not, and the end
// of all nodes. A revoke that waits when its leader dies is done by the next one.
func TestLeasesOverLeaderChanges(t *testing.T) {
	const ranges = 6
	bubble(t, 3, borders(ranges), nil, func(r *rig) {
		short, long := r.leased(r.nodes[0], 5, ranges), r.leased(r.nodes[0], 600, ranges)
		for round := range 4 {
			old := r.placementLeader()
			gateway := r.nodes[old.id%3]
			time.Sleep(3 * time.Second)
			if round%2 == 0 {
				r.crash(old)
			} else if err := gateway.core.Placement().TransferLeader(r.t.Context(), gateway.id); err != nil {
				r.t.Fatal(err)
			}
			resp, err := gateway.core.Leases().KeepAlive(r.t.Context(), &pb.LeaseKeepAliveRequest{ID: short})
			if err != nil || resp.GetTTL() != 5 {
				r.t.Errorf("round %d: keepalive: %v, %v", round, resp, err)
			}
			if old.core == nil {
				r.start(old)
			}
		}
		revoked := r.leased(r.nodes[0], 600, ranges)
		old := r.placementLeader()
		gateway := r.nodes[old.id%3]
		done := make(chan error, 1)
		go func() {
			_, err := gateway.core.Leases().Revoke(r.t.Context(), &pb.LeaseRevokeRequest{ID: revoked}, nil)
			done <- err
		}()
		time.Sleep(2 * time.Millisecond)
		r.crash(old)
		if err := <-done; err != nil && kverror.Of(err).Fate() != kverror.Unknown {
			r.t.Error(err)
		}
		r.start(old)
		r.wait(20*time.Second, "the short lease ends", func() bool { return r.ttl(gateway, short).GetTTL() == -1 })
		r.wantLeased(gateway, long, ranges)

		r.stop(r.nodes...)
		r.start(r.nodes...)
		r.wait(10*time.Second, "all serve again", func() bool { _, err := r.nodes[0].put(r.t.Context(), keyOf(0), ""); return err == nil })
		r.wantLeased(r.nodes[0], long, ranges)
		keys, err := r.nodes[1].core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}})
		if err != nil {
			r.t.Fatal(err)
		}
		for _, kv := range keys.GetKvs() {
			if !slices.Contains([]int64{0, long, revoked}, kv.GetLease()) {
				r.t.Errorf("key %q is left of lease %d", kv.GetKey(), kv.GetLease())
			}
		}
	})
}

// TestManyLeasesExpire: writes go on beside many leases that expire in one moment.
func TestManyLeasesExpire(t *testing.T) {
	t.Parallel()
	leases := fewer(300, 60)
	bubble(t, 3, borders(4), shortLog, func(r *rig) {
		ctx := r.t.Context()
		for i := range leases {
			resp, err := r.nodes[i%3].core.Leases().Grant(ctx, &pb.LeaseGrantRequest{TTL: 10, ID: int64(i + 1)})
			if err != nil {
				r.t.Fatal(err)
			}
			for k := range 2 {
				if _, err := r.nodes[i%3].attach(ctx, keyOf((i+k)%4)+fmt.Sprint(i, k), resp.GetID()); err != nil {
					r.t.Fatal(err)
				}
			}
		}
		slowest := time.Duration(0)
		end := time.Now().Add(15 * time.Second)
		for time.Now().Before(end) {
			start := time.Now()
			r.mustPut(r.nodes[0], keyOf(1), "beside")
			slowest = max(slowest, time.Since(start))
			time.Sleep(fewer(20*time.Millisecond, 50*time.Millisecond))
		}
		if keys, _ := r.total(r.nodes[0]); keys != 1 {
			r.t.Errorf("%d keys are left", keys-1)
		}
		if slowest > 200*time.Millisecond {
			r.t.Errorf("a put took %v beside %d leases that expire", slowest, leases)
		}
	})
}
