package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
)

// found writes the cluster's first state, if this node is a founder that is to hold a
// replica of it and its directory is new. Nothing acts on it before the introduction.
func (c *Core) found(ctx context.Context) error {
	introduced, err := c.introduced()
	if err != nil || introduced || len(c.o.Founders) == 0 {
		return err
	}
	f := placement.Founding{Cluster: c.o.Cluster, Nodes: c.o.Founders, SplitKeys: c.o.SplitKeys, PlacementReplicas: c.o.PlacementReplicas}
	return placement.Found(ctx, c.engine, c.host, &f, c.o.Self)
}

// join introduces a new node to its peers and starts what takes part in the
// cluster. The bus speaks already.
func (c *Core) join(ctx context.Context) error {
	introduced, err := c.introduced()
	if err != nil {
		return err
	}
	if !introduced {
		if err := c.introduce(ctx); err != nil {
			return err
		}
		if err := c.setIntroduced(ctx); err != nil {
			return err
		}
	}
	c.letIn.Store(true)
	c.host.Start()
	if err := c.service.Open(c.host); err != nil {
		return err
	}
	c.service.Start()
	c.client.Start()
	c.wait.Go(c.watchFatal)
	c.wait.Go(c.followMap)
	return nil
}

// introducedKey is where a node notes that its peers let this directory in.
var introducedKey = engine.NodeLocalKey([]byte("node/introduced"))

func (c *Core) introduced() (bool, error) {
	_, ok, err := c.engine.Get(introducedKey)
	if err != nil {
		return false, fmt.Errorf("read whether the node was introduced: %w", err)
	}
	return ok, nil
}

func (c *Core) setIntroduced(ctx context.Context) error {
	b := c.engine.NewBatch()
	err := b.Set(introducedKey, []byte{1})
	if err == nil {
		// With it: who was let in, and then asks nobody any more, knows whom to speak to.
		err = b.Set(tableKey, placement.EncodeNodeTable(c.nodes))
	}
	if err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = c.engine.Flush(ctx)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("note that the node was introduced: %w", err), b.Close())
	}
	return nil
}

// followMap keeps bus, directory and router at what placement knows. The bus comes first:
// it is to reach a node before anybody is sent there.
func (c *Core) followMap() {
	known, version := c.nodes, uint64(0)
	for {
		m, changed := c.client.WatchMap()
		if m != nil {
			if nodes := m.NodeTable(); !sameTable(known, nodes) {
				known = nodes
				c.learnNodes(nodes)
			}
			c.router.Learn(m.DescriptorsSince(version)...)
			version = m.Version
		}
		select {
		case <-changed:
		case <-c.ctx.Done():
			return
		}
	}
}

// sameTable says whether two node tables, ascending by id, are the same.
func sameTable(a, b []placement.Node) bool {
	return slices.EqualFunc(a, b, func(x, y placement.Node) bool { return x.Equal(&y) })
}

// learnNodes takes over another node table.
func (c *Core) learnNodes(nodes []placement.Node) {
	c.bus.SetQueueBytes(c.queueBytes(nodes))
	for i := range nodes {
		n := &nodes[i]
		switch {
		case n.ID != c.o.Self:
			if !mutation.Is(mutation.NewcomerUnknown) {
				c.setPeer(n)
			}
		case n.State == placement.NodeRemoved:
			c.fail(c.removedError())
		}
	}
	if err := c.keepTable(nodes); err != nil {
		c.fail(err)
	}
}

// ErrRemoved says that this node is none of its cluster any more.
var ErrRemoved = errors.New("the node was removed from its cluster")

func (c *Core) removedError() error {
	return fmt.Errorf("%w: node %s of cluster %s is never let in again: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
		ErrRemoved, c.o.Self, c.o.Cluster, c.o.DataDir, c.o.WALDir)
}

// announce publishes the node's row of the node table until it is there. A node that was
// removed from the cluster, or is that of another directory, cannot go on.
func (c *Core) announce(ctx context.Context, row placement.Node) {
	row.Instance = c.dirs.Identity.Instance
	for {
		err := c.client.Publish(ctx, row)
		if err == nil || ctx.Err() != nil {
			return
		}
		if errors.Is(err, kverror.NodeRemoved) {
			c.fail(c.removedError())
			return
		}
		if errors.Is(err, kverror.NodeExists) {
			c.fail(fmt.Errorf("this directory is none of the cluster: %w", otherDirectory(&placement.Node{ID: c.o.Self})))
			return
		}
		c.log.Info("publish this node", zap.Error(err))
		if clock.Sleep(ctx, c.o.Clock, announcePause) != nil {
			return
		}
	}
}

// announcePause lies between two attempts to publish the node.
const announcePause = time.Second

// The requests of MethodNodeAdmin, by their first byte; the rest is JSON, as are
// the answers: they are rare, and read by people when something is wrong.
const (
	adminIntroduce = 1
	adminReport    = 2
)

// handleAdmin answers MethodNodeAdmin.
func (c *Core) handleAdmin(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	if len(payload) == 0 {
		return nil, errors.New("node: empty request")
	}
	switch body := payload[1:]; payload[0] {
	case adminIntroduce:
		var q introduction
		if err := json.Unmarshal(body, &q); err != nil {
			return nil, fmt.Errorf("node: introduction of node %s: %w", from, err)
		}
		return json.Marshal(c.judgeIntroduction(ctx, q))
	case adminReport:
		return json.Marshal(c.report())
	}
	return nil, fmt.Errorf("node: unknown request %d", payload[0])
}
