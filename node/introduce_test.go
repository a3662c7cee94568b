package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/transport"
)

// publish writes the nodes' rows of the node table, as nodes with ports do.
func (r *rig) publish(nodes ...*rigNode) {
	r.t.Helper()
	for _, n := range nodes {
		n.core.Announce(r.t.Context(), fsm.Node{Name: "n", PeerURLs: []string{"http://n"}, ClientURLs: []string{"http://c"}})
	}
}

// refusedWithoutItsDisk starts others and a node that has lost its disk, which is refused.
func (r *rig) refusedWithoutItsDisk(lost *rigNode, others ...*rigNode) {
	r.t.Helper()
	lost.disk = newMemDisk(simdisk.New())
	refused := make(chan error, 1)
	go func() {
		c, err := Open(context.Background(), r.optionsOf(lost))
		if err == nil {
			c.Crash()
		}
		refused <- err
	}()
	r.start(others...)
	if err := <-refused; err == nil || !strings.Contains(err.Error(), "has run before") {
		r.t.Errorf("a node that lost its disk: %v", err)
	}
}

// trap 47, at its worst moment: all nodes start at the same time, one of them with an
// empty disk, and each peer knows only its own disk yet.
func TestANodeWithoutItsDiskIsRefusedAmongStartingPeers(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
		}
		lost := r.nodes[0]
		r.refusedWithoutItsDisk(lost, r.nodes[1], r.nodes[2])
	})
}

// A founder that comes late is admitted, and one that nobody can vouch for waits.
func TestALateFounderIsAdmitted(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		late := r.nodes[2]
		late.core.Crash()
		late.core = nil
		late.disk = newMemDisk(simdisk.New()) // it had not published: it was never admitted
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
		late.disk = newMemDisk(simdisk.New())
		r.start(r.nodes[1], late)
		r.publish(late)
	})
}

// One founder alone bootstraps nothing: it may have lost its disk, and the others may be out of
// reach. A majority bootstraps at once, and who comes later is admitted.
func TestFoundersThatStartOneByOne(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
			n.disk = newMemDisk(simdisk.New())
		}
		first, logs := r.watched(r.nodes[0])
		if err := r.waits(first, time.Minute); err != nil {
			t.Fatal(err)
		}
		said := logs.FilterMessageSnippet("majority of the founders")
		if n := said.Len(); n < 2 || n > 8 {
			t.Errorf("within a minute it said %d times what it waits for: %v", n, logs.All())
		}
		if first := said.All(); len(first) > 0 && fmt.Sprint(first[0].ContextMap()["silent"]) != "[2 3]" {
			t.Errorf("it waits for %v", first[0].ContextMap())
		}
		begun := time.Now()
		r.start(r.nodes[0], r.nodes[1])
		if took := time.Since(begun); took > 3*time.Second {
			t.Errorf("a majority bootstraps after %v", took)
		}
		r.mustPut(r.nodes[1], "k", "v")
		r.start(r.nodes[2])
		r.publish(r.nodes...)
	})
}

// watched is optionsOf with what the node logs.
func (r *rig) watched(n *rigNode) (Options, *observer.ObservedLogs) {
	o := r.optionsOf(n)
	core, logs := observer.New(zap.WarnLevel)
	o.Logger = zap.New(core)
	return o, logs
}

// waits returns an error for a node that does anything else for that long than wait to be
// admitted.
func (r *rig) waits(o Options, long time.Duration) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), long)
	defer cancel()
	c, err := Open(ctx, o)
	if err == nil {
		c.Crash()
		return fmt.Errorf("node %s was admitted", o.Self)
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("node %s: %w", o.Self, err)
	}
	return nil
}

// trap 47: a founder that has lost its disk and hears nobody does not bootstrap the cluster a
// second time, and is refused when it hears the others.
func TestAnIsolatedFounderWithoutItsDiskWaits(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		lost := r.nodes[0]
		r.crash(lost)
		lost.disk = newMemDisk(simdisk.New())
		r.net.Partition(lost.id)
		if err := r.waits(r.optionsOf(lost), time.Minute); err != nil {
			t.Fatal(err)
		}
		r.net.HealAll()
		c, err := Open(r.t.Context(), r.optionsOf(lost))
		if err == nil {
			c.Crash()
		}
		if err == nil || !strings.Contains(err.Error(), "has run before") {
			t.Errorf("when it hears the others: %v", err)
		}
	})
}

// A node that has joined the cluster, and comes to founders that have lost their disks, keeps
// them from bootstrapping it anew.
func TestANodeThatHasJoinedTellsThatTheClusterHasRun(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
			n.disk = newMemDisk(simdisk.New())
		}
		lost := r.optionsOf(r.nodes[0])
		bus := lost.NewBus
		lost.NewBus = func(c transport.Config) (Bus, error) {
			time.AfterFunc(time.Second/2, func() { c.Unknown(4) })
			return bus(c)
		}
		waits := make(chan error, 2)
		go func() { waits <- r.waits(lost, time.Minute) }()
		time.Sleep(time.Second) // it has heard of the other, and tells the next one
		go func() { waits <- r.waits(r.optionsOf(r.nodes[1]), 30*time.Second) }()
		for range 2 {
			if err := <-waits; err != nil {
				t.Error(err)
			}
		}
	})
}

// trap 47: the only founder has nobody to ask when it has lost its disk. Nodes that have
// joined since tell it, so it does not bootstrap a second cluster beside the running one.
func TestTheOnlyFounderWithoutItsDiskIsRefused(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		only := r.nodes[0]
		r.crash(only)
		only.disk = newMemDisk(simdisk.New())
		lost := r.visited(only, func(c transport.Config) {
			time.Sleep(300 * time.Millisecond)
			c.Knocked(4)
			time.Sleep(2 * time.Second)
			c.Unknown(4)
		})
		c, err := Open(r.t.Context(), lost)
		if err == nil {
			c.Crash()
		}
		if err == nil || !strings.Contains(err.Error(), "has run before") {
			t.Errorf("a node that lost its disk: %v", err)
		}
		r.start(only)
		r.mustPut(only, "k", "v")
	})
}

// trap 47: a node that knows the only founder may start after it. By then the founder without its disk has bootstrapped a second
// cluster. It gives up, and is refused until its directory is empty again. It goes on if its own cluster has added the node. It
// goes on too if the node comes late: by then its cluster may be the one with the data.
func TestTheOnlyFounderWithoutItsDiskGivesUpLater(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		only := r.nodes[0]
		r.crash(only)
		for _, c := range []struct {
			what    string
			after   time.Duration
			known   bool
			givesUp bool
		}{
			{"at once", 10 * time.Second, false, true},
			{"a known one", 10 * time.Second, true, false},
			{"after long", 2 * time.Minute, false, false},
		} {
			only.disk = newMemDisk(simdisk.New())
			o := r.visited(only, func(b transport.Config) {
				time.Sleep(c.after)
				b.Unknown(4)
			})
			core, err := Open(r.t.Context(), o)
			if err != nil {
				r.t.Fatalf("%s: %v", c.what, err)
			}
			only.set(core)
			r.mustPut(only, "k", "v")
			if c.known {
				if err := core.client.AddNode(r.t.Context(), fsm.Node{ID: 4, Name: "n4", PeerURLs: []string{"http://n4:2380"}, Instance: 7}); err != nil {
					r.t.Fatal(err)
				}
			}
			time.Sleep(c.after + time.Second)
			if err := core.Err(); (err != nil) != c.givesUp || err != nil && !strings.Contains(err.Error(), "has run before") {
				r.t.Errorf("%s: %v", c.what, err)
			}
			if !c.givesUp {
				r.mustPut(only, "k", "w")
			}
			r.crash(only)
			again, err := Open(r.t.Context(), r.optionsOf(only))
			if (err != nil) != c.givesUp || err != nil && !strings.Contains(err.Error(), "holds a second cluster") {
				r.t.Errorf("%s: started again: %v", c.what, err)
			}
			if err == nil {
				again.Crash()
			}
		}
	})
}

// A single node serves within a second of its first start, in the time of its own clock.
func TestASingleNodesFirstStartIsPrompt(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		n := r.nodes[0]
		r.crash(n)
		n.disk = newMemDisk(simdisk.New())
		began := time.Now()
		r.start(n)
		r.mustPut(n, "k", "v")
		if took := time.Since(began); took >= time.Second {
			r.t.Errorf("it took %v", took)
		}
	})
}

// visited returns options by which a node's bus, once it has started, hears what visit tells it.
func (r *rig) visited(n *rigNode, visit func(transport.Config)) Options {
	o := r.optionsOf(n)
	bus := o.NewBus
	o.NewBus = func(c transport.Config) (Bus, error) {
		b, err := bus(c)
		return visitedBus{b, func() { visit(c) }}, err
	}
	return o
}

// visitedBus hears of nodes after its start.
type visitedBus struct {
	Bus
	visit func()
}

func (b visitedBus) Start() error {
	go b.visit()
	return b.Bus.Start()
}

// trap 47: a founder that starts again knows by its log that the cluster has run, although
// its store is still empty. Together with a founder that has lost its disk it would form a
// quorum that lacks acknowledged writes.
func TestAFoundersLogTellsThatTheClusterHasRun(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		for _, n := range r.nodes {
			r.net.Crash(n.id)
			n.disk = n.disk.crash(0, r.rng)
			n.core.Crash()
			n.core = nil
		}
		lost := r.nodes[0]
		lost.disk = newMemDisk(simdisk.New())
		o := r.optionsOf(lost)
		waits := make(chan error, 1)
		go func() { waits <- r.waits(o, time.Minute) }()
		r.start(r.nodes[1])
		if err := <-waits; err != nil {
			t.Error(err)
		}
		r.start(r.nodes[2])
		r.mustGet(r.nodes[1], "k", "v")
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
				_, err := r.nodes[4].core.client.BeginOperation(r.t.Context(), fsm.Operation{Range: fsm.OwnGroup, Kind: fsm.OperationMove, From: from.id, To: to.id})
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
		if err := r.nodes[4].core.client.PutSetting(r.t.Context(), fsm.SettingPaused, []byte("1")); err != nil {
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
		r.refusedWithoutItsDisk(lost, r.nodes[0], r.nodes[1])
	})
}
