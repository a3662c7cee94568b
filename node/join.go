package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
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

// setPeer tells the bus where a node is.
func (c *Core) setPeer(n placement.Node) {
	var addrs []string
	for _, text := range n.PeerURLs {
		if u, err := url.Parse(text); err == nil {
			addrs = append(addrs, u.Host)
		}
	}
	c.bus.SetPeer(n.ID, addrs)
}

// found writes the cluster's first state, if this node is to hold a replica of it
// and its directory is new. Nothing acts on it before the introduction.
func (c *Core) found(ctx context.Context) error {
	introduced, err := c.introduced()
	if err != nil || introduced {
		return err
	}
	f := placement.Founding{Cluster: c.o.Cluster, Nodes: c.o.Founders, SplitKeys: c.o.SplitKeys}
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

// followMap keeps bus and router at what placement knows.
func (c *Core) followMap() {
	known := map[keyspace.NodeID]string{}
	for {
		m, changed := c.client.WatchMap()
		if m != nil {
			c.router.Learn(m.Descriptors()...)
			for _, n := range m.Nodes() {
				if at := fmt.Sprint(n.PeerURLs); n.ID != c.o.Self && known[n.ID] != at {
					known[n.ID] = at
					c.setPeer(n)
				}
			}
		}
		select {
		case <-changed:
		case <-c.ctx.Done():
			return
		}
	}
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
			c.fail(err)
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

// introduceTimeout is how long a node with an empty directory asks its peers
// whether they know it. Those that do not answer by then are taken for founders
// that have not started yet, unless another one says that the cluster runs.
const introduceTimeout = time.Second

// judgeTimeout is how long a peer asks placement before it says that it cannot tell:
// well within introduceTimeout, since a word that comes too late is none.
const judgeTimeout = introduceTimeout / 4

// introduction is the question of a node that has never been let in with its
// directory, and its answer. An answer with neither flag says that nothing is known
// against the node.
type introduction struct {
	Node keyspace.NodeID
	// Known says that the node table has the node as one that has served before, or that
	// was removed.
	Known bool
	// Unsure says that the cluster has run before and the answerer cannot tell now
	// what its node table says: it is to be asked again.
	Unsure bool
}

// introduce asks every peer whether the cluster knows this node, whose directory is
// empty. A node that lost its disk has forgotten its votes and what it acknowledged;
// with its old id it could make the others lose both (trap 47).
func (c *Core) introduce(ctx context.Context) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var by keyspace.NodeID
	unsure := make(chan struct{}) // closed at the first answer that is none
	var once sync.Once
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, peer := range c.others() {
		wg.Go(func() {
			known := c.knownBy(asking, peer, func() { once.Do(func() { close(unsure) }) })
			mu.Lock()
			defer mu.Unlock()
			if known {
				by = peer
				cancel()
			}
		})
	}
	t := c.o.Clock.AfterFunc(introduceTimeout, func() {
		select {
		case <-unsure:
			c.log.Warn("this node's directory is empty and the cluster has run before: it waits for a quorum of the others to tell whether it was a member")
		default:
			cancel()
		}
	})
	defer t.Stop()
	wg.Wait()
	if by != 0 {
		return fmt.Errorf("the data directory %s is empty, but node %s says that node %s is a member of cluster %s that has run before: "+
			"restore its directory, or remove the member and add it anew under another peer URL: a member that was removed does not come back",
			c.o.DataDir, by, c.o.Self, c.o.Cluster)
	}
	return ctx.Err()
}

// knownBy asks one peer until it gives an answer or ctx ends. unsure is called when
// it says that it cannot tell yet.
func (c *Core) knownBy(ctx context.Context, peer keyspace.NodeID, unsure func()) bool {
	q, err := json.Marshal(introduction{Node: c.o.Self})
	if err != nil {
		panic(fmt.Sprintf("node: encode an introduction: %v", err)) // numbers always encode
	}
	for {
		b, err := c.bus.Call(ctx, peer, transport.MethodNodeAdmin, append([]byte{adminIntroduce}, q...))
		var a introduction
		if err == nil && json.Unmarshal(b, &a) == nil {
			if !a.Unsure {
				return a.Known
			}
			unsure()
		}
		if clock.Sleep(ctx, c.o.Clock, introducePause) != nil {
			return false
		}
	}
}

// judgeIntroduction answers a node that has an empty directory. The node table as
// it is now decides; this node's own copy may be old, so it counts only where it
// speaks against the asker, or where it shows that nothing has happened since the
// founding.
func (c *Core) judgeIntroduction(ctx context.Context, q introduction) introduction {
	if !c.letIn.Load() {
		return q
	}
	// A node publishes where it serves after it was let in, never before. One that was
	// removed is never let in again.
	served := func(n placement.Node, ok bool) bool {
		return ok && (len(n.ClientURLs) > 0 || n.State == placement.NodeRemoved)
	}
	v := c.service.View()
	q.Known = served(v.Node(q.Node))
	m, _ := c.client.WatchMap()
	if m != nil {
		q.Known = q.Known || served(m.Node(q.Node))
	}
	// The founding map is what every founder writes for itself: it tells nothing.
	young := v.Index <= raftgroup.InitIndex && (m == nil || m.Version <= raftgroup.InitIndex)
	if q.Known || young {
		return q
	}
	ctx, cancel := context.WithTimeout(ctx, judgeTimeout)
	defer cancel()
	nodes, err := c.client.NodeTable(ctx, true)
	if err != nil {
		q.Unsure = true
		return q
	}
	for _, n := range nodes {
		q.Known = q.Known || n.ID == q.Node && served(n, true)
	}
	return q
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
