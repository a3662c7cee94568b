package placement

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// nodeView is what a node of the rig knows of rights, as package node has it: it says what it has taken in,
// and holds a view lease.
type nodeView struct {
	n *rigNode
	// client is the run's: it ends what follows it.
	client *Client
	// at is the access index that is taken in, on whether rights are checked.
	at atomic.Uint64
	on atomic.Bool
	// until is when the lease ends, by the node's clock.
	until atomic.Int64
}

// takeViews has a node that has been started take in what it hears of rights.
func (n *rigNode) takeViews() *nodeView {
	v := &nodeView{n: n, client: n.client}
	n.views = v
	c, clk := n.client, n.clock
	n.ending.Go(func() {
		for c.ctx.Err() == nil {
			m, changed := c.WatchMap()
			pause := time.Hour
			if m != nil && m.Access != nil {
				v.at.Store(m.Access.Meta.Access)
				v.on.Store(m.Access.Enabled)
			}
			if v.on.Load() {
				sent, at := clk.Now(), keyspace.AccessIndex(v.at.Load())
				ctx, cancel := clock.WithTimeout(c.ctx, clk, time.Second)
				now, err := c.TakenAccess(ctx, at)
				cancel()
				if err == nil && now <= at {
					v.until.Store(int64(sent.Add(ViewLease(time.Second))))
				}
				pause = time.Second
			}
			timer := clk.NewTimer(pause)
			select {
			case <-changed:
			case <-timer.C():
			case <-c.ctx.Done():
			}
			timer.Stop()
		}
	})
	return v
}

// serves says whether the node serves by rights older than the index: then a change of it must not have
// been acknowledged.
func (v *nodeView) serves(at keyspace.AccessIndex) bool {
	return v.client.ctx.Err() == nil && keyspace.AccessIndex(v.at.Load()) < at && (!v.on.Load() || int64(v.n.clock.Now()) < v.until.Load())
}

// rightsRig is an accessCluster with users, in which rights are checked.
type rightsRig struct {
	*rig
	t   *testing.T
	ctx context.Context
}

func newRightsRig(ctx context.Context, t *testing.T) *rightsRig {
	t.Helper()
	r := &rightsRig{accessCluster(ctx, t), t, ctx}
	if err := r.nodes[0].client.RaiseVersion(ctx, keyspace.VersionAccess); err != nil {
		t.Fatal(err)
	}
	for _, c := range []rights.Change{
		{Kind: rights.AddUser, User: "root", Hash: []byte("$2a$10$theroots")},
		{Kind: rights.GrantRole, User: "root", Role: "root"},
		{Kind: rights.AddRole, Role: "r"},
	} {
		r.quickly(0, c)
	}
	time.Sleep(2 * time.Second) // until all nodes follow the map
	r.quickly(1, rights.Change{Kind: rights.Enable})
	return r
}

// change makes a change at a node and returns how long that took. Once it is acknowledged no node serves
// by what was before.
func (r *rightsRig) change(ctx context.Context, i int, c rights.Change) (time.Duration, error) {
	caller := ""
	if r.leader().service.View().Access != nil && r.leader().service.View().Access.Enabled {
		caller = "root"
	}
	begun := time.Now()
	err := r.nodes[i].client.ChangeAccess(ctx, caller, c)
	took := time.Since(begun)
	takes := c.Kind == rights.Enable || c.Kind == rights.RevokePermission
	if state := r.leader().service.View().Access; err == nil && takes && state.Enabled {
		at := keyspace.AccessIndex(state.Meta.Access)
		for _, n := range r.nodes {
			if n.up() && n.views.serves(at) {
				r.t.Errorf("node %s serves by rights of index %d after the acknowledgement of index %d, after %v", n.id, n.views.at.Load(), at, took)
			}
		}
	}
	return took, err
}

func (r *rightsRig) within(least, most time.Duration, i int, c rights.Change) {
	r.t.Helper()
	if took, err := r.change(r.ctx, i, c); err != nil || took < least || took > most {
		r.t.Errorf("change of kind %d at node %d: %v after %v, want %v to %v", c.Kind, i+1, err, took, least, most)
	}
}

// quickly makes a change for whose acknowledgement nobody is missing.
func (r *rightsRig) quickly(i int, c rights.Change) {
	r.t.Helper()
	r.within(0, 20*time.Millisecond, i, c)
}

func grant(key string) rights.Change {
	return rights.Change{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.Read, Key: []byte(key)}}
}

func revoke(key string) rights.Change {
	return rights.Change{Kind: rights.RevokePermission, Role: "r", Permission: rights.Permission{Key: []byte(key)}}
}

// cut cuts a node off from all others.
func (r *rightsRig) cut(id keyspace.NodeID) {
	for _, n := range r.nodes {
		if n.id != id {
			r.net.Cut(id, n.id)
			r.net.Cut(n.id, id)
		}
	}
}

// TestTakenRights: a change that takes rights is acknowledged when each node has taken it in, or has no view
// lease any more. Trap 106.
func TestTakenRights(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		for i := range 4 {
			r.quickly(i, grant("a"))
			r.quickly(i, revoke("a"))
		}

		// A node that is cut off serves until its lease ends. Nothing else waits for it.
		r.quickly(0, grant("a"))
		time.Sleep(2 * time.Second)
		r.cut(4)
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			r.within(1900*time.Millisecond, 4*time.Second, 0, revoke("a"))
		}()
		time.Sleep(100 * time.Millisecond)
		begun := time.Now()
		r.quickly(1, grant("b"))
		if err := r.nodes[1].client.PutSetting(r.ctx, "ranges/max-bytes", nil); err != nil {
			t.Error(err)
		}
		if a := r.nodes[2].sequence(1); a.Err != nil {
			t.Error(a.Err)
		}
		if took := time.Since(begun); took > 100*time.Millisecond {
			t.Errorf("others waited %v", took)
		}
		<-waits

		// Who switches checks on waits for all: the node may not know of them. An impatient caller is told that the change is
		// made, and which node is missing.
		soon, cancel := context.WithTimeout(r.ctx, 10*time.Second)
		_, err := r.change(soon, 0, rights.Change{Kind: rights.Enable})
		cancel()
		if !errors.Is(err, kverror.Timeout) || !strings.Contains(err.Error(), fmt.Sprint([]keyspace.NodeID{4})) {
			t.Errorf("an impatient caller: %v", err)
		}

		// The node comes back, and nobody waits for it.
		r.net.HealAll()
		time.Sleep(5 * time.Second)
		r.quickly(2, grant("c"))
		r.quickly(2, revoke("c"))

		// A node that is dead, and comes back.
		r.nodes[3].crash()
		r.quickly(0, grant("c"))
		r.within(1900*time.Millisecond, 4*time.Second, 0, revoke("c"))
		// Its lease has run out, and nobody waits for it.
		for i := range 3 {
			r.quickly(i, grant("c"))
			r.quickly(i, revoke("c"))
		}
		r.nodes[3].start()
		r.nodes[3].takeViews()
		time.Sleep(5 * time.Second)
		r.quickly(0, grant("c"))
		r.quickly(0, revoke("c"))
		r.stopAllAtOnce()
	})
}

// TestSilentNodes: no change waits for a node that has had no answer for a view lease. The next leader does not know
// that, and waits once. Traps 106 and 108.
func TestSilentNodes(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		r.quickly(0, grant("a"))
		time.Sleep(3 * time.Second)
		r.cut(4)
		r.within(1900*time.Millisecond, 4*time.Second, 0, revoke("a"))
		for i := range 3 {
			r.quickly(i, grant("a"))
			r.quickly(i, revoke("a"))
		}
		leader := r.leader()
		next := r.nodes[leader.id%3]
		r.quickly(0, grant("a"))
		if err := leader.client.TransferLeader(r.ctx, next.id); err != nil {
			t.Fatal(err)
		}
		r.within(2500*time.Millisecond, 4*time.Second, 0, revoke("a"))
		for i := range 3 {
			r.quickly(i, grant("a"))
			r.quickly(i, revoke("a"))
		}
		// A node that has been back for a moment counts again.
		r.net.HealAll()
		time.Sleep(1500 * time.Millisecond)
		r.quickly(0, grant("a"))
		r.cut(4)
		r.within(1500*time.Millisecond, 4*time.Second, 0, revoke("a"))
		r.net.HealAll()
		r.stopAllAtOnce()
	})
}

// TestOnlyLeadersAreAskedOnce: what must not be repeated does not go to a node that may not lead, not even while nobody is
// known to lead. It may be out of reach, and then nobody could say whether the request was carried out.
func TestOnlyLeadersAreAskedOnce(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		r.cut(4)
		leader := r.leader().id
		for range 20 {
			r.nodes[0].client.heard(leader, 0)
			r.within(0, 2*time.Second, 0, grant("a"))
		}
		r.net.HealAll()
		r.stopAllAtOnce()
	})
}

// TestTakenRightsLeader: the leader goes between a change and its acknowledgement, and the next one does
// not know the leases that were given. Trap 108.
func TestTakenRightsLeader(t *testing.T) {
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprintf("crash=%t", crash), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newRightsRig(t.Context(), t)
				r.quickly(0, grant("a"))
				time.Sleep(3 * time.Second)
				leader := r.leader()
				old := keyspace.PermitAt(leader.service.View().AccessIndex())
				asks, cut := r.nodes[3], r.nodes[leader.id%3] // without a replica, and a follower
				if !cut.service.HasReplica() || cut == leader {
					t.Fatalf("node %s", cut.id)
				}
				r.cut(cut.id)
				done := make(chan struct{})
				go func() {
					defer close(done)
					err := asks.client.ChangeAccess(r.ctx, "root", revoke("a"))
					if at := r.nodes[3].views.at.Load(); err != nil || cut.views.serves(keyspace.AccessIndex(at)) || keyspace.AccessIndex(at) == 0 {
						t.Errorf("%v, serves %t", err, cut.views.serves(keyspace.AccessIndex(at)))
					}
				}()
				time.Sleep(300 * time.Millisecond)
				select {
				case <-done:
					t.Error("acknowledged though a node is cut off")
				default:
				}
				if crash {
					leader.crash()
					r.net.HealAll() // a quorum needs it
				} else {
					for _, n := range r.nodes[:3] {
						if n != leader && n != cut {
							if err := leader.client.TransferLeader(r.ctx, n.id); err != nil {
								t.Error(err)
							}
						}
					}
				}
				begun := time.Now()
				<-done
				if took := time.Since(begun); took > 4*time.Second {
					t.Errorf("acknowledged after %v", took)
				}
				r.net.HealAll()
				for _, n := range r.nodes {
					if n.up() {
						if a := n.permitted(old, 1); !errors.Is(a.Err, kverror.AccessChanged) {
							t.Errorf("the next leader gives revisions by old rights: %+v", a)
						}
					}
				}
				r.stopAllAtOnce()
			})
		})
	}
}

// TestTakenRightsBegin: a node that is cut off while nothing is checked serves for ever, as etcd's does. So
// the change that begins the checks is acknowledged by all nodes, or not at all. Trap 106.
func TestTakenRightsBegin(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		r.quickly(0, rights.Change{Kind: rights.Disable})
		r.quickly(0, grant("a"))
		time.Sleep(5 * time.Second)
		r.cut(4)
		r.quickly(0, revoke("a")) // nobody's rights are checked
		for range 2 {
			soon, cancel := context.WithTimeout(r.ctx, 10*time.Second)
			_, err := r.change(soon, 1, rights.Change{Kind: rights.Enable})
			cancel()
			if !errors.Is(err, kverror.Timeout) || !strings.Contains(err.Error(), fmt.Sprint([]keyspace.NodeID{4})) {
				t.Errorf("with a node cut off: %v", err)
			}
		}
		r.net.HealAll()
		r.within(0, 4*time.Second, 1, rights.Change{Kind: rights.Enable})
		r.quickly(1, rights.Change{Kind: rights.Enable})
		r.stopAllAtOnce()
	})
}

// TestTakenRightsMany: 1,000 changes in a row, each of which is acknowledged by all nodes.
func TestTakenRightsMany(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		for i := range 500 {
			r.quickly(i%4, grant("a"))
			r.quickly((i+1)%4, revoke("a"))
		}
		r.stopAllAtOnce()
	})
}
