package placement

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// accessCluster is a cluster of four nodes, of which three have the placement group, in a cluster version
// with users and roles.
func accessCluster(ctx context.Context, t *testing.T) *rig {
	t.Helper()
	r := newRig(t, 1, 4, quiet)
	r.startAll()
	r.leader()
	r.publish(ctx)
	return r
}

// publish has all nodes say that they read the version with users, roles and alarms.
func (r *rig) publish(ctx context.Context) {
	r.t.Helper()
	for _, n := range r.nodes {
		n.takeViews()
		node := fsm.Node{Name: fmt.Sprintf("n%d", n.id), Reads: keyspace.Versions{Oldest: 1, Newest: keyspace.VersionAccess}}
		if err := n.client.Publish(ctx, node); err != nil {
			r.t.Fatal(err)
		}
	}
}

// awaitAccess waits until a node knows the users and roles of an index.
func (n *rigNode) awaitAccess(t *testing.T, index uint64) *fsm.Access {
	t.Helper()
	for range 200 {
		if m, _ := n.client.WatchMap(); m != nil && m.Access != nil && m.Access.Changed >= index {
			return m.Access
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("node %s does not know of index %d", n.id, index)
	return nil
}

// permitted asks for revisions for a request with a permit.
func (n *rigNode) permitted(p keyspace.Permit, count int) keyspace.SequenceAnswer {
	ch := make(chan keyspace.SequenceAnswer, 1)
	n.client.Sequence(keyspace.SequenceRequest{Range: 1, Generation: 1, Count: count, Permit: p}, func(a keyspace.SequenceAnswer) { ch <- a })
	return <-ch
}

// TestAccess: users and roles are changed at any node, each node hears of it without hashes, and a password
// is compared with what is true now. Traps 81, 82 and 107.
func TestAccess(t *testing.T) {
	virtually(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r := accessCluster(ctx, t)
		n := r.nodes[0]
		add := rights.Change{Kind: rights.AddUser, User: "root", Hash: []byte("$2a$10$theroots")}
		// A new cluster gets its version a moment after it serves, and a client need not know.
		waits, stop := context.WithTimeout(ctx, 10*time.Second)
		defer stop()
		if err := n.client.ChangeAccess(waits, "", add); !errors.Is(err, kverror.Timeout) || !strings.Contains(err.Error(), "cluster version 4") {
			t.Fatalf("in cluster version 0: %v", err)
		}
		early := make(chan error, 1)
		go func() { early <- n.client.ChangeAccess(ctx, "", add) }()
		time.Sleep(time.Second)
		if c, err := n.client.Credential(ctx, "root"); err != nil || c.Enabled || c.Since != 0 || c.Index != 0 {
			t.Fatalf("before there are users: %+v, %v", c, err)
		}
		if err := n.client.RaiseVersion(ctx, keyspace.VersionAccess); err != nil {
			t.Fatal(err)
		}
		if err := <-early; err != nil {
			t.Fatalf("a change from before the first version: %v", err)
		}
		change := func(i int, caller string, c rights.Change) {
			t.Helper()
			if err := r.nodes[i%len(r.nodes)].client.ChangeAccess(ctx, caller, c); err != nil {
				t.Fatalf("%+v: %v", c, err)
			}
		}
		change(1, "", rights.Change{Kind: rights.AddRole, Role: "r"})
		change(2, "", rights.Change{Kind: rights.AddUser, User: "alice", Hash: []byte("$2a$10$alices")})
		change(3, "", rights.Change{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.ReadWrite, Key: []byte("a"), RangeEnd: []byte("b")}})
		change(0, "", rights.Change{Kind: rights.GrantRole, User: "alice", Role: "r"})
		change(0, "", rights.Change{Kind: rights.GrantRole, User: "root", Role: "root"})
		change(1, "", rights.Change{Kind: rights.Enable})
		if err := n.client.ChangeAccess(ctx, "alice", rights.Change{Kind: rights.AddRole, Role: "s"}); !errors.Is(err, kverror.PermissionDenied) {
			t.Fatalf("alice changes roles: %v", err)
		}
		if err := n.client.ChangeAccess(ctx, "root", add); !errors.Is(err, kverror.UserExists) {
			t.Fatalf("root twice: %v", err)
		}

		leader := r.leader()
		at := leader.service.View().Access.Changed
		var key []byte
		for _, o := range r.nodes {
			a := o.awaitAccess(t, at)
			subject, ok := a.Subject("alice")
			if !a.Enabled || !ok || !subject.May(rights.Read, []byte("aa"), nil) || subject.May(rights.Read, []byte("b"), nil) {
				t.Errorf("node %s: %s", o.id, a)
			}
			if key == nil {
				key = a.Key
			}
			if len(a.Key) != secretBytes || string(a.Key) != string(key) {
				t.Errorf("node %s: a secret of %d bytes, or another one", o.id, len(a.Key))
			}
			if u := a.User("alice"); len(u.Hash) > 0 && !o.service.HasReplica() {
				t.Errorf("node %s, which has no replica, has a hash", o.id)
			}
			c, err := o.client.Credential(ctx, "alice")
			if err != nil || string(c.Hash) != "$2a$10$alices" || !c.Enabled || c.Since == 0 || c.Index != at {
				t.Errorf("node %s: %+v, %v", o.id, c, err)
			}
			if s := fmt.Sprintf("%v %+v %#v %s", c, c, c, &c); strings.Contains(s, "alices") {
				t.Errorf("a hash is printed: %s", s)
			}
		}

		// Nothing is given to a request that was permitted before something was taken away, and no
		// revision is lost. What takes away counts for all requests after its answer.
		last := n.sequence(0).Current
		for i, c := range []rights.Change{
			{Kind: rights.RevokePermission, Role: "r", Permission: rights.Permission{Key: []byte("a"), RangeEnd: []byte("b")}},
			{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.Read, Key: []byte("x")}},
			{Kind: rights.DeleteUser, User: "alice"},
		} {
			before := keyspace.PermitAt(leader.service.View().AccessIndex())
			change(i, "root", c)
			for _, o := range r.nodes {
				for _, count := range []int{0, 3} {
					a := o.permitted(before, count)
					taken := c.Kind != rights.GrantPermission
					if errors.Is(a.Err, kverror.AccessChanged) != taken || a.First != 0 && taken {
						t.Errorf("node %s after %d: %+v", o.id, c.Kind, a)
					}
					if !taken {
						last += keyspace.Revision(count)
					}
				}
				a := o.permitted(keyspace.PermitAt(leader.service.View().AccessIndex()), 2)
				if a.Err != nil || a.First != last+1 || a.Current != last+2 || a.Access != leader.service.View().AccessIndex() {
					t.Errorf("node %s: permitted now: %+v, want %d", o.id, a, last+1)
				}
				if last += 2; o.sequence(0).Current != last {
					t.Errorf("node %s: a revision is lost: %+v, want %d", o.id, o.sequence(0), last)
				}
			}
		}
		r.stopAllAtOnce()
	})
}
