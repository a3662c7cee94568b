package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
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
	known := c.nodes
	for {
		m, changed := c.client.WatchMap()
		if m != nil {
			if nodes := m.NodeTable(); !sameTable(known, nodes) {
				known = nodes
				c.learnNodes(nodes)
			}
			c.router.Learn(m.Descriptors()...)
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
	for i := range nodes {
		n := &nodes[i]
		switch {
		case n.ID != c.o.Self:
			c.setPeer(n)
		case n.State == placement.NodeRemoved:
			c.fail(c.removedError())
		}
	}
	if err := c.keepTable(nodes); err != nil {
		c.fail(err)
	}
}

// errRemoved says that this node is none of its cluster any more.
var errRemoved = errors.New("the node was removed from its cluster")

func (c *Core) removedError() error {
	return fmt.Errorf("%w: node %s of cluster %s is never let in again: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
		errRemoved, c.o.Self, c.o.Cluster, c.o.DataDir, c.o.WALDir)
}

// announce publishes the node's row of the node table until it is there. A node that was
// removed from the cluster cannot go on.
func (c *Core) announce(ctx context.Context, row placement.Node) {
	for {
		err := c.client.Publish(ctx, row)
		if err == nil || ctx.Err() != nil {
			return
		}
		if errors.Is(err, kverror.NodeRemoved) {
			c.fail(c.removedError())
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

// introduceTimeout is how long a founder with an empty directory asks its peers whether
// they know it. Those that do not answer by then are taken for founders that have not
// started yet, unless another one says that the cluster runs. Who joins a cluster that
// runs waits until one of its nodes has vouched for it.
const introduceTimeout = time.Second

// judgeTimeout is how long a peer asks placement before it says that it cannot tell:
// well within introduceTimeout, since a word that comes too late is none.
const judgeTimeout = introduceTimeout / 4

// introduction is the question of a node that has never been let in with its
// directory, and its answer. An answer without a flag says that nothing is known
// against the node, and nothing of it.
type introduction struct {
	Node keyspace.NodeID
	// Known says that the node table has the node as one that has served before, Member
	// that it has it as one that has not.
	Known, Member bool
	// Removed says that the node was removed from the cluster, Absent that the cluster has
	// run before and has no such node.
	Removed, Absent bool
	// Moved says that the placement group has had other members since the founding, and
	// Holds which replica of it is on the node, 0 for none.
	Moved bool
	Holds keyspace.ReplicaID
	// Unsure says that the cluster has run before and the answerer cannot tell now
	// what its node table says: it is to be asked again.
	Unsure bool
}

// introduce asks every peer whether the cluster knows this node, whose directory is
// empty. A node that lost its disk has forgotten its votes and what it acknowledged;
// with its old id it could make the others lose both (trap 47).
func (c *Core) introduce(ctx context.Context) error {
	founder := len(c.o.Founders) > 0
	var mu sync.Mutex
	var wg sync.WaitGroup
	// by is who has spoken against this node, or, to one that joins, for it; guarded by mu
	// as word, what it said. moved is who says that the placement group has moved.
	var by keyspace.NodeID
	var word, moved introduction
	unsure := make(chan struct{}) // closed at the first answer that is none
	var once sync.Once
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, peer := range c.others() {
		wg.Go(func() {
			a, ok := c.wordOf(asking, peer, founder, func() { once.Do(func() { close(unsure) }) })
			mu.Lock()
			defer mu.Unlock()
			if ok && a.Moved {
				moved = a
			}
			if ok && by == 0 && (!founder || a.Known || a.Removed) {
				by, word = peer, a
				cancel()
			}
		})
	}
	t := c.o.Clock.AfterFunc(introduceTimeout, func() {
		select {
		case <-unsure:
			c.log.Warn("this node's directory is empty and the cluster has run before: it waits for a quorum of the others to tell whether it was a member")
		default:
			if founder {
				cancel()
			} else {
				c.log.Warn("this node's directory is empty: it waits for one of the cluster's nodes to let it in")
			}
		}
	})
	defer t.Stop()
	wg.Wait()
	switch {
	case word.Removed:
		return c.removedError()
	case word.Known:
		return fmt.Errorf("the data directory %s is empty, but node %s says that node %s is a member of cluster %s that has run before: "+
			"restore its directory, or remove the member and add it anew under another peer URL: a member that was removed does not come back",
			c.o.DataDir, by, c.o.Self, c.o.Cluster)
	case word.Absent:
		return fmt.Errorf("node %s says that cluster %s has no node %s: empty %s and %s, and let it join anew (--join, or etcdctl member add)",
			by, c.o.Cluster, c.o.Self, c.o.DataDir, c.o.WALDir)
	case !founder && by == 0 && ctx.Err() == nil:
		return fmt.Errorf("node %s is to join cluster %s, and knows none of its nodes", c.o.Self, c.o.Cluster)
	case moved.Moved:
		return errors.Join(ctx.Err(), c.service.Unfound(ctx, c.host, moved.Holds))
	}
	return ctx.Err()
}

// wordOf asks one peer until it gives an answer or ctx ends. Who joins needs one that says
// something of it. unsure is called when the peer says that it cannot tell yet.
func (c *Core) wordOf(ctx context.Context, peer keyspace.NodeID, founder bool, unsure func()) (a introduction, ok bool) {
	q, err := json.Marshal(introduction{Node: c.o.Self})
	if err != nil {
		panic(fmt.Sprintf("node: encode an introduction: %v", err)) // numbers always encode
	}
	for {
		b, err := c.bus.Call(ctx, peer, transport.MethodNodeAdmin, append([]byte{adminIntroduce}, q...))
		a = introduction{}
		if err == nil && json.Unmarshal(b, &a) == nil {
			switch {
			case a.Unsure:
				unsure()
			case founder || a.Known || a.Member || a.Removed || a.Absent:
				return a, true
			}
		}
		if clock.Sleep(ctx, c.o.Clock, introducePause) != nil {
			return a, false
		}
	}
}

// judgeIntroduction answers a node that has an empty directory. The node table as
// it is now decides; this node's own copy may be old, so it counts only where it
// speaks against the asker, or where it shows that nothing has happened since the
// founding.
func (c *Core) judgeIntroduction(ctx context.Context, q introduction) introduction {
	q = introduction{Node: q.Node}
	if !c.letIn.Load() {
		return q
	}
	v := c.service.View()
	q.judge(v.Node(q.Node))
	m, _ := c.client.WatchMap()
	if m != nil {
		q.judge(m.Node(q.Node))
	}
	// The founding map is what every founder writes for itself: it tells nothing. A node
	// that holds no replica of the group has no map at all when it starts again, but the
	// node table of its store tells whether anything has happened.
	young := v.Index <= raftgroup.InitIndex && (m == nil || m.Version <= raftgroup.InitIndex)
	for i := range c.nodes {
		n := &c.nodes[i]
		q.judge(*n, n.ID == q.Node)
		young = young && len(n.ClientURLs) == 0 && n.Since == 0
	}
	if q.Known || q.Removed || young {
		return q
	}
	ctx, cancel := context.WithTimeout(ctx, judgeTimeout)
	defer cancel()
	nodes, err := c.client.NodeTable(ctx, true)
	if err != nil {
		return introduction{Node: q.Node, Unsure: true}
	}
	group, err := c.client.PlacementGroup(ctx)
	if err != nil {
		return introduction{Node: q.Node, Unsure: true}
	}
	own := keyspace.Descriptor{Replicas: group.Replicas}
	here, _ := own.ReplicaOn(q.Node)
	q.Moved, q.Holds = group.ConfIndex > raftgroup.InitIndex, here.ID
	i := slices.IndexFunc(nodes, func(n placement.Node) bool { return n.ID == q.Node })
	if q.Absent = i < 0; !q.Absent {
		q.Member = true
		q.judge(nodes[i], true)
	}
	return q
}

// judge takes over what a row of the node table says against the node. A node publishes
// where it serves after it was let in, never before.
func (q *introduction) judge(n placement.Node, ok bool) {
	q.Removed = q.Removed || ok && n.State == placement.NodeRemoved
	q.Known = q.Known || ok && len(n.ClientURLs) > 0
}

// introducePause lies between two attempts to reach a peer that is not up yet.
const introducePause = 20 * time.Millisecond

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
