package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement/fsm"
)

// joiner returns a machine with an empty disk whose node is to join the cluster.
func (r *rig) joiner(name string) *rigNode {
	n := &rigNode{name: name, disk: newMemDisk(simdisk.New())}
	r.nodes = append(r.nodes, n)
	return n
}

// peerURL is where the rig's node of that name is said to be.
func peerURL(name string) string { return "http://" + name + ":2380" }

// joinerOf is what the joiner finds its place with: via answers for --join.
func (r *rig) joinerOf(n, via *rigNode, disk *memDisk) *join.Joiner {
	cfg := config.Default()
	u, err := url.Parse(peerURL(n.name))
	if err != nil {
		r.t.Fatal(err)
	}
	cfg.Name, cfg.DataDir, cfg.WALDir = n.name, "data", "wal"
	cfg.AdvertisePeerURLs, cfg.Join = []url.URL{*u}, []string{via.id.String()}
	ask := func(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
		via.mu.Lock()
		core := via.core
		via.mu.Unlock()
		if core == nil {
			return nil, fmt.Errorf("node %s is down", via.id)
		}
		return core.Admin().JoinNode(ctx, q)
	}
	return &join.Joiner{Config: cfg, FS: disk, Clock: clock.Virtual(), Logger: zap.NewNop(), Ask: join.AskAgain(ask)}
}

// join starts a joiner as skein start --join does, without its ports.
func (r *rig) join(ctx context.Context, n, via *rigNode) error {
	c, err := r.open(ctx, n, via, n.disk, func(seat *join.Membership) { n.id, n.seat = seat.Self, seat })
	if err == nil {
		n.set(c)
	}
	return err
}

// open is join without a change of the machine: found is told the place before the
// directories are opened.
func (r *rig) open(ctx context.Context, n, via *rigNode, disk *memDisk, found func(*join.Membership)) (*Core, error) {
	seat, err := r.joinerOf(n, via, disk).Find(ctx)
	if err != nil {
		return nil, err
	}
	found(seat)
	return Open(ctx, r.optionsOf(&rigNode{id: seat.Self, seat: seat, disk: disk}))
}

// joinAdded starts a joiner as --initial-cluster-state existing does: others answer at the
// peer URLs of their names.
func (r *rig) joinAdded(ctx context.Context, n *rigNode, others map[string]*rigNode) error {
	p := r.joinerOf(n, n, n.disk)
	p.Config.Join, p.Config.InitialClusterState = nil, config.StateExisting
	p.Config.InitialCluster = types.URLsMap{n.name: p.Config.AdvertisePeerURLs}
	byAddr := map[string]*rigNode{}
	for name, o := range others {
		u, err := url.Parse(peerURL(name))
		if err != nil {
			r.t.Fatal(err)
		}
		p.Config.InitialCluster[name] = types.URLs{*u}
		byAddr[u.Host] = o
	}
	p.PeerTable = func(_ context.Context, addr string) ([]byte, error) {
		if o := byAddr[addr]; o != nil && o.core != nil {
			if b := o.core.PeerTable(); b != nil {
				return b, nil
			}
		}
		return nil, errors.New("it does not answer")
	}
	seat, err := p.Find(ctx)
	if err != nil {
		return err
	}
	n.id, n.seat = seat.Self, seat
	c, err := Open(ctx, r.optionsOf(n))
	if err == nil {
		n.set(c)
	}
	return err
}

// A node that etcd's MemberAdd has added finds itself by its peer URLs, whichever of the
// others answers, and again after a crash; who was not added is told to be.
func TestAnAddedMemberFindsItself(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		n := r.joiner("n4")
		others := map[string]*rigNode{"a": nil, "b": r.nodes[1], "c": nil}
		err := r.joinAdded(r.t.Context(), n, others)
		if err == nil || !strings.Contains(err.Error(), "etcdctl member add n4 --peer-urls="+peerURL("n4")) {
			r.t.Errorf("one that was not added: %v", err)
		}
		// What the one that answers knows may be older than the answer to MemberAdd.
		added, _, err := r.nodes[0].core.Members(1, true).MemberAdd(r.t.Context(), []string{peerURL("n4")}, false)
		if err != nil {
			r.t.Fatal(err)
		}
		if err := r.joinAdded(r.t.Context(), n, others); err != nil || uint64(n.id) != added.GetID() {
			r.t.Fatalf("it finds itself as %s, %v", n.id, err)
		}
		r.crash(n)
		if err := r.joinAdded(r.t.Context(), n, others); err != nil || uint64(n.id) != added.GetID() {
			r.t.Fatalf("after a crash: %s, %v", n.id, err)
		}
		r.announced(n)
		r.mustPut(n, "k", "v")
		r.stop(n)
		if err := r.joinAdded(r.t.Context(), n, map[string]*rigNode{"a": nil}); err != nil {
			r.t.Fatalf("with a directory nobody has to answer: %v", err)
		}
		r.mustGet(n, "k", "v")
		r.crash(n)
		n.disk = newMemDisk(simdisk.New())
		if err := r.joinAdded(r.t.Context(), n, others); err == nil || !strings.Contains(err.Error(), "has run before") {
			r.t.Errorf("with an empty directory after its start: %v", err)
		}
	})
}

// announced has a node that has joined publish itself, as its ports do.
func (r *rig) announced(n *rigNode) {
	r.t.Helper()
	n.core.Announce(r.t.Context(), fsm.Node{Name: n.name, PeerURLs: []string{peerURL(n.name)}, ClientURLs: []string{"http://" + n.name + ":2379"}})
}

// rows returns the rows of the node table with that name.
func (r *rig) rows(name string) (found []fsm.Node) {
	r.t.Helper()
	table, err := r.nodes[0].core.client.NodeTable(r.t.Context(), true)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, n := range table {
		if n.Name == name {
			found = append(found, n)
		}
	}
	return found
}

// mustMove moves every range's replica from one node to another, and waits for it.
func (r *rig) mustMove(id keyspace.RangeID, from, to *rigNode) {
	r.t.Helper()
	a := r.nodes[1].core.Admin()
	r.wait(time.Minute, "the move begins", func() bool {
		_, err := a.MoveRange(r.t.Context(), id, from.id.String(), to.id.String())
		return err == nil
	})
	r.wait(time.Minute, "the move is over", func() bool {
		ops, err := r.nodes[1].core.client.Operations(r.t.Context())
		return err == nil && len(ops) == 0
	})
}

// pause has placement decide nothing by itself: what is moved is the test's matter.
func (r *rig) pause() {
	r.t.Helper()
	if err := r.nodes[0].core.client.SetPaused(r.t.Context(), true); err != nil {
		r.t.Fatal(err)
	}
}

// load puts keys at the nodes by turns until stop is called, which returns how many puts
// there were and how many failed.
func (r *rig) load(nodes ...*rigNode) (stop func() (puts, failed int)) {
	ctx, cancel := context.WithCancel(r.t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	puts, failed := 0, 0
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				_, err := nodes[(w+i)%len(nodes)].put(r.t.Context(), fmt.Sprintf("k%04d/%d", i%4, w), fmt.Sprint(i))
				mu.Lock()
				puts++
				if err != nil {
					failed++
				}
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	return func() (int, int) {
		cancel()
		wg.Wait()
		return puts, failed
	}
}

// A fourth node joins under load. It serves everything and holds nothing, then a range
// moves to it. After a restart it knows its own id and its peers.
func TestANodeJoinsUnderLoad(t *testing.T) {
	const ranges = 4
	bubble(t, 3, borders(ranges), shortLog, func(r *rig) {
		r.publish(r.nodes...)
		r.pause()
		stop := r.load(r.nodes...)
		n := r.joiner("n4")
		if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
			r.t.Fatal(err)
		}
		if rows := r.rows("n4"); len(rows) != 1 || rows[0].State != fsm.NodeUnstarted || rows[0].ID != n.id {
			r.t.Fatalf("before it has published: %+v", rows)
		}
		r.wait(time.Minute, "a move to a node that has not started is refused for that", func() bool {
			_, err := r.nodes[0].core.Admin().MoveRange(r.t.Context(), 1, r.nodes[2].id.String(), n.id.String())
			return err != nil && strings.Contains(err.Error(), "unstarted")
		})
		r.announced(n)
		if rows := r.rows("n4"); len(rows) != 1 || rows[0].State != fsm.NodeServing {
			r.t.Fatalf("after it has published: %+v", rows)
		}
		r.spread(n, ranges, "by n4")
		for i := range ranges {
			r.mustGet(n, keyOf(i), "by n4")
		}
		if held := n.summaries(); len(held) != 0 {
			r.t.Errorf("it holds %v", held)
		}
		r.mustMove(1, r.nodes[2], n)
		r.wait(time.Minute, "it holds the range", func() bool { return len(n.summaries()) == 1 })
		time.Sleep(time.Second) // however quickly all this went, there was load beside and behind it
		if puts, failed := stop(); failed > 0 || puts < 100 {
			r.t.Errorf("%d of %d puts failed", failed, puts)
		}
		r.caughtUp(time.Minute)
		// Nobody answers for --join any more, and nobody has to.
		r.stop(n)
		r.crash(r.nodes[1])
		if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		r.start(r.nodes[1])
		r.spread(n, ranges, "again")
		r.caughtUp(time.Minute)
	})
}

// The power of a node that joins fails at any moment: the same command, repeated, ends with
// one node, which serves.
func TestJoiningIsFinishedAfterACrashAtAnyMoment(t *testing.T) {
	for seed := range uint64(fewer(12, 4)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, 3, nil, nil, func(r *rig) {
				r.publish(r.nodes...)
				n, rng := r.joiner("n4"), rand.New(rand.NewPCG(seed, 4))
				var mu sync.Mutex
				ids := map[keyspace.NodeID]bool{}
				for range 4 {
					via, disk := r.nodes[rng.IntN(3)], n.disk
					ctx, cancel := context.WithCancel(r.t.Context())
					done := make(chan *Core, 1)
					go func() {
						c, _ := r.open(ctx, n, via, disk, func(seat *join.Membership) {
							mu.Lock()
							defer mu.Unlock()
							ids[seat.Self] = true
						})
						done <- c
					}()
					time.Sleep(time.Duration(rng.Int64N(int64(150 * time.Millisecond))))
					mu.Lock()
					for id := range ids {
						r.net.Crash(id)
					}
					mu.Unlock()
					n.disk = disk.crash(50, rng)
					cancel()
					if c := <-done; c != nil {
						c.Crash()
					}
					time.Sleep(2 * time.Second) // the id of a second row would differ
				}
				if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil {
					r.t.Fatal(err)
				}
				r.announced(n)
				if ids[n.id] = true; len(ids) != 1 {
					r.t.Errorf("it was told several ids: %v", ids)
				}
				if rows := r.rows("n4"); len(rows) != 1 || rows[0].ID != n.id {
					r.t.Errorf("rows: %+v", rows)
				}
				r.mustPut(n, "k", "v")
				r.mustGet(r.nodes[2], "k", "v")
			})
		})
	}
}

// Who cannot be admitted is told why and what to do.
func TestJoinRefusals(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		for _, n := range r.nodes {
			n.core.Announce(r.t.Context(), fsm.Node{Name: fmt.Sprintf("n%d", n.id), PeerURLs: []string{peerURL(fmt.Sprintf("n%d", n.id))}, ClientURLs: []string{"http://c"}})
		}
		refused := func(what string, err error, says ...string) {
			r.t.Helper()
			if err == nil {
				r.t.Errorf("%s: admitted", what)
				return
			}
			for _, s := range says {
				if !strings.Contains(err.Error(), s) {
					r.t.Errorf("%s: %v, want %q", what, err, s)
				}
			}
		}
		ask := func(name string, peerURLs ...string) error {
			_, err := r.nodes[0].core.Admin().JoinNode(r.t.Context(), &adminpb.NodeJoinRequest{Name: name, PeerUrls: peerURLs, Instance: 9})
			return err
		}
		refused("a name that is taken", ask("n2", "http://x:1"), "node 2 is named n2 already", "--name")
		refused("a peer URL that is taken", ask("n9", "http://x:1", "http://n2:2380"), "node n2 (2) has one of the peer URLs", "--initial-advertise-peer-urls")
		refused("a founder without its directory", ask("n2", "http://n2:2380"), "has run before", "node decommission 2")
		refused("no name", ask("", "http://x:1"), "--name")
		refused("no peer URL", ask("n9"), "--initial-advertise-peer-urls")
		if rows := r.rows("n9"); len(rows) != 0 {
			r.t.Errorf("rows of n9: %+v", rows)
		}

		// A directory of another cluster.
		stranger := r.joiner("n4")
		dirs, err := engine.OpenDir(stranger.disk, "data", "wal", engine.Identity{Cluster: 0xc2, Node: 9}, keyspace.OwnVersions())
		if err != nil {
			r.t.Fatal(err)
		}
		dirs.Close()
		refused("a directory of another cluster", r.join(r.t.Context(), stranger, r.nodes[0]), "belongs to cluster c2", "another --data-dir")

		// A node that has lost its directory before it started, or another one in its place, is
		// admitted when the first is removed; one that has started is not.
		n := r.joiner("n5")
		if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil {
			r.t.Fatal(err)
		}
		first := n.id
		r.crash(n)
		n.disk = newMemDisk(simdisk.New())
		refused("another directory", r.join(r.t.Context(), n, r.nodes[0]), "another directory has been admitted as node "+first.String(), "etcdctl member remove "+first.String(), "--name")
		if err := r.nodes[0].core.client.RemoveNode(r.t.Context(), first); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(time.Second) // the id comes from the time
		if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil || n.id == first {
			r.t.Fatalf("after the first was removed: node %s, then %s, %v", first, n.id, err)
		}
		r.announced(n)
		r.crash(n)
		n.disk = newMemDisk(simdisk.New())
		refused("a node that has started, with an empty directory", r.join(r.t.Context(), n, r.nodes[0]), "has run before", "decommission")
		// Nor by an identity that somebody has written.
		n.seat = &join.Membership{Cluster: 0xc1, Self: n.id, Peers: func(ctx context.Context) ([]fsm.Node, error) {
			return r.nodes[0].core.client.NodeTable(ctx, true)
		}}
		_, err = Open(r.t.Context(), r.optionsOf(n))
		refused("an empty directory with its id", err, "has run before")
	})
}

// A node that hears no quorum says so in time for the joiner to ask the next one of --join.
func TestANodeWithoutAQuorumSendsAJoinerOn(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		r.net.Partition(r.nodes[0].id)
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second) // of an attempt to join
		defer cancel()
		q := &adminpb.NodeJoinRequest{Name: "n4", PeerUrls: []string{peerURL("n4")}, Instance: 9}
		_, err := r.nodes[0].core.Admin().JoinNode(ctx, q)
		if e := kverror.Of(err); err == nil || e.Kind != kverror.Timeout || ctx.Err() != nil {
			t.Errorf("without a quorum: %v, and the joiner's deadline: %v", err, ctx.Err())
		}
		if _, err := r.nodes[1].core.Admin().JoinNode(ctx, q); err != nil {
			t.Errorf("the next one: %v", err)
		}
	})
}

// A node that was removed ends, is not admitted again, and comes back as another one.
func TestARemovedNodeIsNeverAdmittedAgain(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.publish(r.nodes...)
		n := r.joiner("n4")
		if err := r.join(r.t.Context(), n, r.nodes[0]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		first := n.id
		down := r.joiner("n5")
		if err := r.join(r.t.Context(), down, r.nodes[0]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(down)
		r.stop(down)
		c := r.nodes[0].core.client
		for _, gone := range []*rigNode{n, down} {
			if err := c.SetNodeState(r.t.Context(), gone.id, fsm.NodeServing, fsm.NodeDecommissioned); err != nil {
				r.t.Fatal(err)
			}
			if err := c.RemoveNode(r.t.Context(), gone.id); err != nil {
				r.t.Fatal(err)
			}
		}
		select {
		case <-n.core.Fatal():
		case <-time.After(time.Minute):
			r.t.Fatal("it goes on")
		}
		if err := n.core.Err(); !errors.Is(err, join.ErrRemoved) || !strings.Contains(err.Error(), "join anew") {
			r.t.Errorf("it ended by %v", err)
		}
		r.crash(n)
		// The peer that answers for --join says it, or the cluster does if no peer answers.
		if err := r.join(r.t.Context(), n, r.nodes[0]); err == nil || !strings.Contains(err.Error(), "was removed") {
			r.t.Errorf("it starts again: %v", err)
		}
		nobody := &rigNode{id: 99}
		if err := r.join(r.t.Context(), down, nobody); err != nil {
			r.t.Fatal(err)
		}
		select {
		case <-down.core.Fatal():
		case <-time.After(time.Minute):
			r.t.Fatal("one that was down when it was removed goes on")
		}
		if err := down.core.Err(); !errors.Is(err, join.ErrRemoved) {
			r.t.Errorf("it ended by %v", err)
		}
		r.crash(down)
		// Its identity without its data.
		n.disk = newMemDisk(simdisk.New())
		n.seat = &join.Membership{Cluster: 0xc1, Self: first, Peers: func(ctx context.Context) ([]fsm.Node, error) {
			return c.NodeTable(ctx, true)
		}}
		if _, err := Open(r.t.Context(), r.optionsOf(n)); !errors.Is(err, join.ErrRemoved) {
			r.t.Errorf("an empty directory with its id: %v", err)
		}
		// Name and URLs are free again.
		n.disk = newMemDisk(simdisk.New())
		if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil || n.id == first {
			r.t.Fatalf("it joins anew as node %s, was %s: %v", n.id, first, err)
		}
		r.announced(n)
		r.mustPut(n, "k", "v")
		r.wantKind("publish as another node", c.AddNode(r.t.Context(), fsm.Node{ID: first, PeerURLs: []string{"http://z:1"}}), kverror.NodeRemoved)
	})
}
