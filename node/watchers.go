package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/transport"
)

// watchersTimeout bounds how long a node may take to list its watchers: it has them in memory.
const watchersTimeout = 2 * time.Second

// errNoClients is the answer of a Core without ports, or before they are open.
var errNoClients = errors.New("this node serves no clients yet")

// OnWatchers has f tell the node's watchers, as etcdapi.Server does.
func (c *Core) OnWatchers(f func(most int) *adminpb.WatcherListResponse) { c.watchers.Store(&f) }

// watched are the watchers of all nodes, for the admin service.
type watched struct{ c *Core }

// Watchers implements adminapi.WatcherBackend. It needs no quorum.
func (m watched) Watchers(ctx context.Context, only string, most int) (*adminpb.WatcherListResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, watchersTimeout)
	defer cancel()
	var nodes []fsm.Node
	if known, _ := m.c.client.WatchMap(); known != nil {
		nodes = known.NodeTable()
	}
	out, asked := &adminpb.WatcherListResponse{}, 0
	var mu sync.Mutex // guards out
	var wg sync.WaitGroup
	for _, n := range nodes {
		if !n.State.Started() || only != "" && only != n.Name && only != n.ID.String() {
			continue
		}
		asked++
		wg.Go(func() {
			r, err := m.of(ctx, n.ID, most)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				out.Missing = append(out.Missing, &adminpb.WatchersMissing{Node: n.Name, Reason: err.Error()})
				return
			}
			for _, w := range r.GetWatchers() {
				w.Node = n.Name
			}
			out.Watchers, out.Total = append(out.Watchers, r.GetWatchers()...), out.GetTotal()+r.GetTotal()
		})
	}
	wg.Wait()
	if asked == 0 && only != "" {
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("there is no node %q", only), NextStep: "skein node list shows the nodes"}
	}
	return out, nil
}

func (m watched) of(ctx context.Context, node keyspace.NodeID, most int) (*adminpb.WatcherListResponse, error) {
	if node == m.c.o.Self {
		return m.c.ownWatchers(most)
	}
	question, err := json.Marshal(most)
	if err != nil {
		return nil, err
	}
	b, err := m.c.bus.Call(ctx, node, transport.MethodNodeAdmin, append([]byte{questionWatchers}, question...))
	if err != nil {
		return nil, err
	}
	r := &adminpb.WatcherListResponse{}
	return r, proto.Unmarshal(b, r)
}

func (c *Core) ownWatchers(most int) (*adminpb.WatcherListResponse, error) {
	tell := c.watchers.Load()
	if tell == nil {
		return nil, errNoClients
	}
	return (*tell)(most), nil
}

// answerWatchers answers the question of another node.
func (c *Core) answerWatchers(body []byte) ([]byte, error) {
	var most int
	if err := json.Unmarshal(body, &most); err != nil {
		return nil, err
	}
	r, err := c.ownWatchers(max(0, most))
	if err != nil {
		return nil, err
	}
	return proto.Marshal(r)
}
