package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// bootstrap writes the cluster's first state, if this node is a founder that is to hold a
// replica of it and its directory is new. Nothing acts on it before the admission.
func (c *Core) bootstrap(ctx context.Context) error {
	admitted, err := c.storedAdmission()
	if err != nil || admitted || len(c.o.Founders) == 0 {
		return err
	}
	b := fsm.Bootstrap{Cluster: c.o.Cluster, Nodes: c.o.Founders, SplitKeys: c.o.SplitKeys}
	return placement.WriteBootstrap(ctx, c.engine, c.host, &b, c.o.Self)
}

// takePart has the peers admit a new node and starts what takes part in the cluster. The bus
// speaks already.
func (c *Core) takePart(ctx context.Context) error {
	if err := c.awaitSurvivors(ctx); err != nil {
		return err
	}
	admitted, err := c.storedAdmission()
	if err != nil {
		return err
	}
	if !admitted {
		if err := c.admission.Request(ctx); err != nil {
			return err
		}
		if err := c.storeAdmission(ctx); err != nil {
			return err
		}
	}
	c.admission.SetAdmitted()
	c.host.Start()
	if err := c.service.Open(c.host); err != nil {
		return err
	}
	c.service.Start()
	c.client.Start()
	c.wait.Go(c.watchFatal)
	c.wait.Go(c.followMap)
	c.wait.Go(func() { c.access.follow(c.ctx) })
	c.wait.Go(func() { c.access.ask(c.ctx) })
	if c.admission.Alone() {
		c.wait.Go(func() { c.admission.MindStrangers(c.ctx) })
	}
	if c.o.ScrubEvery > 0 {
		c.wait.Go(c.scrub)
	}
	return nil
}

// admittedKey is where a node notes that its peers have admitted this directory.
var admittedKey = engine.NodeLocalKey([]byte("node/introduced"))

// The values of admittedKey.
const (
	noteAdmitted = 1
	// noteGaveUp: the only founder had bootstrapped a cluster that has run before.
	noteGaveUp = 2
)

func (c *Core) storedAdmission() (bool, error) {
	v, ok, err := c.engine.Get(admittedKey)
	if err != nil {
		return false, fmt.Errorf("read whether the node was admitted: %w", err)
	}
	if ok && len(v) > 0 && v[0] == noteGaveUp {
		return false, fmt.Errorf("the directory %s holds a second cluster %s, which node %s bootstrapped after it had lost its disk, and has given up: "+
			"empty it and %s, and have the member removed and let it join anew (--join); to bootstrap the cluster anew, stop its other nodes first, or give another --initial-cluster-token",
			c.o.DataDir, c.o.Cluster, c.o.Self, c.o.WALDir)
	}
	return ok, nil
}

// giveUp ends the node, and has its directory refused from now on.
func (c *Core) giveUp(why error) {
	c.fail(errors.Join(why, c.setNote(admittedKey, noteGaveUp)))
}

// setNote writes a note of one byte that is durable when it returns.
func (c *Core) setNote(key []byte, note byte) error {
	b := c.engine.NewBatch()
	err := b.Set(key, []byte{note})
	if err == nil {
		err = b.Commit()
	}
	if err != nil {
		return errors.Join(err, b.Close())
	}
	return c.engine.Flush(c.ctx)
}

// knocked is what the bus tells of nodes that look for this one. Only a founder without others has to know.
func (c *Core) knocked() func(keyspace.NodeID) bool {
	if len(c.o.Founders) != 1 {
		return nil
	}
	return func(id keyspace.NodeID) bool { return c.admission.Knocked(id) }
}

func (c *Core) storeAdmission(ctx context.Context) error {
	b := c.engine.NewBatch()
	err := b.Set(admittedKey, []byte{noteAdmitted})
	if err == nil {
		// In the same batch: an admitted node asks nobody any more, and must know its peers.
		err = placement.StoreNodeTable(b, c.nodes)
	}
	if err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = c.engine.Flush(ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("note that the node was admitted: %w", err), b.Close())
	}
	return nil
}

// logsEmpty reports that no group on this node has ever had a leader that it heard of.
func (c *Core) logsEmpty() bool {
	return !slices.ContainsFunc(c.wal.Groups(), func(g keyspace.GroupID) bool { return c.wal.Group(g).LastIndex() > raftgroup.InitIndex })
}

// raiseAgain is how long a node without room waits before it notes the cluster version again.
const raiseAgain = time.Second

// followMap keeps bus, directory and router at what placement knows. The bus comes first:
// it is to reach a node before anybody is sent there.
func (c *Core) followMap() {
	known, version := c.nodes, uint64(0)
	for {
		m, changed := c.client.WatchMap()
		var again <-chan time.Time
		if m != nil {
			// Before anything else: what is sent and stored from here on may be in it. A node without
			// room on its disk, or without a free file, is one that has not heard of it yet.
			err := c.version.Raise(m.ClusterVersion)
			switch {
			case err == nil || c.ctx.Err() != nil:
			case engine.IsNoRoom(err):
				c.log.Warn("the node notes the cluster version once its disk has room, and it may open files", zap.Error(err))
				again = c.o.Clock.NewTimer(raiseAgain).C()
			default:
				c.fail(err)
			}
			if nodes := m.NodeTable(); !sameTable(known, nodes) {
				known = nodes
				c.learnNodes(nodes)
			}
			c.router.Learn(m.DescriptorsSince(version)...)
			c.shards.SetHeld(m.Holds.Lowest())
			version = m.Version
		}
		select {
		case <-changed:
		case <-again:
		case <-c.ctx.Done():
			return
		}
	}
}

// sameTable says whether two node tables, ascending by id, are the same.
func sameTable(a, b []fsm.Node) bool {
	return slices.EqualFunc(a, b, func(x, y fsm.Node) bool { return x.Equal(&y) })
}

// learnNodes takes over another node table.
func (c *Core) learnNodes(nodes []fsm.Node) {
	if err := c.keepTable(nodes); err != nil { // first, so that a node that was removed knows it at its next start
		c.fail(err)
	}
	c.setMembers(nodes)
	c.names.set(nodes)
	for i := range nodes {
		n := &nodes[i]
		switch {
		case n.ID != c.o.Self:
			if !mutation.Is(mutation.JoinerUnknown) {
				c.setPeer(n)
			}
		case n.State == fsm.NodeRemoved:
			c.fail(c.admission.RemovedError())
		}
	}
}

// Announce publishes the node's row of the node table, with where it serves clients, until
// it is there or ctx ends. A node that was removed from the cluster cannot go on, nor can one
// whose row is another directory's.
func (c *Core) Announce(ctx context.Context, row fsm.Node) {
	row.Instance = c.dirs.Identity.Instance
	row.Build, row.Reads = etcdapi.SkeinVersion, c.o.versions()
	if err := c.admission.Announce(ctx, row); err != nil {
		c.fail(err)
	}
}

// PeerTable is the node's answer to a node that asks at its peer address who the cluster's
// nodes are; empty before it knows any.
func (c *Core) PeerTable() []byte {
	m, _ := c.client.WatchMap()
	if m == nil || !c.admission.Admitted() {
		return nil
	}
	return join.EncodePeerTable(c.o.Cluster, m.Version, m.NodeTable())
}
