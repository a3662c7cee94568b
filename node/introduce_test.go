package node

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// publish writes the nodes' rows of the node table, as nodes with ports do.
func (r *rig) publish(nodes ...*rigNode) {
	r.t.Helper()
	for _, n := range nodes {
		n.core.announce(r.t.Context(), placement.Node{Name: "n", PeerURLs: []string{"http://n"}, ClientURLs: []string{"http://c"}})
	}
}

// trap 47, in its worst moment: all nodes start at the same time, one of them with
// an empty disk, and no peer knows anything yet but what is on its own disk.
func TestANodeWithoutItsDiskIsRefusedAmongStartingPeers(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
		}
		lost := r.nodes[0]
		lost.disk = newMemDisk(vfs.NewCrashableMem())
		refused := make(chan error, 1)
		go func() {
			c, err := Open(context.Background(), r.optionsOf(lost))
			if err == nil {
				c.Crash()
			}
			refused <- err
		}()
		r.start(r.nodes[1], r.nodes[2])
		if err := <-refused; err == nil || !strings.Contains(err.Error(), "has run before") {
			r.t.Errorf("a node that lost its disk: %v", err)
		}
	})
}

// A founder that comes late is let in, and one that nobody can vouch for waits.
func TestALateFounderIsLetIn(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		late := r.nodes[2]
		late.core.Crash()
		late.core = nil
		late.disk = newMemDisk(vfs.NewCrashableMem()) // it had not published: it was never let in
		r.publish(r.nodes[0], r.nodes[1])
		// With only one other node left there is no quorum that could tell.
		r.nodes[1].core.Crash()
		r.nodes[1].core = nil
		ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
		defer cancel()
		if c, err := Open(ctx, r.optionsOf(late)); !errors.Is(err, context.DeadlineExceeded) {
			if err == nil {
				c.Crash()
			}
			r.t.Errorf("with no quorum to ask: %v", err)
		}
		late.disk = newMemDisk(vfs.NewCrashableMem())
		r.start(r.nodes[1], late)
		r.publish(late)
	})
}

// Founders that start one after another do not wait for each other to vouch.
func TestFoundersThatStartOneByOne(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
			n.disk = newMemDisk(vfs.NewCrashableMem())
		}
		for _, n := range r.nodes {
			r.start(n)
		}
		r.publish(r.nodes...)
	})
}

// Founders that hold nothing any more know all the same that the cluster has run: their
// node tables tell, though they have no map when all nodes start at once.
func TestANodeWithoutItsDiskIsRefusedByFoundersThatWereReplaced(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		for _, name := range []string{"n4", "n5"} {
			n := r.joiner(name)
			if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
				t.Fatal(err)
			}
			r.announced(n)
		}
		move := func(from, to *rigNode) {
			r.wait(time.Minute, "begin", func() bool {
				_, err := r.nodes[4].core.client.BeginOperation(r.t.Context(), placement.Operation{Range: placement.OwnGroup, Kind: placement.OperationMove, From: from.id, To: to.id})
				return err == nil
			})
			r.wait(time.Minute, "moved", func() bool {
				st, err := r.nodes[4].core.client.PlacementGroup(r.t.Context())
				if err != nil {
					return false
				}
				d := keyspace.Descriptor{Replicas: st.Replicas}
				_, a := d.ReplicaOn(from.id)
				b, bok := d.ReplicaOn(to.id)
				return !a && bok && b.Role == keyspace.RoleVoter
			})
		}
		if err := r.nodes[4].core.client.PutSetting(r.t.Context(), placement.SettingPaused, []byte("1")); err != nil {
			t.Fatal(err)
		}
		move(r.nodes[0], r.nodes[3])
		move(r.nodes[1], r.nodes[4])
		time.Sleep(15 * time.Second)
		r.mustMove(1, r.nodes[0], r.nodes[3])
		r.mustMove(1, r.nodes[1], r.nodes[4])
		time.Sleep(15 * time.Second)
		r.mustPut(r.nodes[3], "k", "0")
		r.nodes[4].core.Crash()
		r.nodes[4].core = nil
		time.Sleep(5 * time.Second)
		r.mustPut(r.nodes[3], "a", "1")
		for _, n := range r.nodes[:4] {
			n.core.Crash()
			n.core = nil
		}
		lost := r.nodes[2]
		lost.disk = newMemDisk(vfs.NewCrashableMem())
		refused := make(chan error, 1)
		go func() {
			c, err := Open(context.Background(), r.optionsOf(lost))
			if err == nil {
				c.Crash()
			}
			refused <- err
		}()
		r.start(r.nodes[0], r.nodes[1])
		if err := <-refused; err == nil || !strings.Contains(err.Error(), "has run before") {
			t.Errorf("a node that lost its disk: %v", err)
		}
	})
}
