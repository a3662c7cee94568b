package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
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

// Watchers implements adminapi.WatcherBackend. It needs no quorum. One list is made at a time: it may have many rows.
func (m watched) Watchers(ctx context.Context, only string, most int) (*adminpb.WatcherListResponse, error) {
	select {
	case m.c.listing <- struct{}{}:
		defer func() { <-m.c.listing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(ctx, watchersTimeout)
	defer cancel()
	known, _ := m.c.client.WatchMap()
	nodes := m.c.nodesOf(known)
	question := []byte(strconv.Itoa(most))
	out, asked := &adminpb.WatcherListResponse{}, 0
	var mu sync.Mutex // guards out
	var wg sync.WaitGroup
	for _, n := range nodes {
		if !n.State.Started() || only != "" && only != n.Name && only != n.ID.String() {
			continue
		}
		asked++
		wg.Go(func() {
			b, err := m.ask(ctx, n.ID, question)
			mu.Lock()
			defer mu.Unlock()
			// Behind the mutex: each answer may have as many rows as are wanted of all.
			r := &adminpb.WatcherListResponse{}
			if err == nil {
				err = proto.Unmarshal(b, r)
			}
			if err != nil {
				out.Missing = append(out.Missing, &adminpb.WatchersMissing{Node: n.Name, Reason: err.Error()})
				return
			}
			for _, w := range r.GetWatchers() {
				w.Node = n.Name
			}
			out.Watchers = adminapi.FurthestBehind(append(out.Watchers, r.GetWatchers()...), most)
			out.Total += r.GetTotal()
		})
	}
	wg.Wait()
	switch {
	case asked > 0 || only == "":
		return out, nil
	case known == nil:
		return nil, &adminapi.Refusal{
			Reason:   fmt.Sprintf("this node has not heard of the cluster since its start, and knows no node %q of before", only),
			NextStep: "ask that node by --endpoints, or leave out the node",
		}
	}
	return nil, &adminapi.Refusal{Reason: fmt.Sprintf("there is no node %q", only), NextStep: "skein node list shows the nodes"}
}

func (m watched) ask(ctx context.Context, node keyspace.NodeID, question []byte) ([]byte, error) {
	if node == m.c.o.Self {
		return m.c.answerWatchers(question)
	}
	return m.c.bus.Call(ctx, node, transport.MethodNodeAdmin, append([]byte{questionWatchers}, question...))
}

// answerWatchers answers the question of a node, which is how many of the watchers it wants.
func (c *Core) answerWatchers(body []byte) ([]byte, error) {
	var most int
	if err := json.Unmarshal(body, &most); err != nil {
		return nil, err
	}
	tell := c.watchers.Load()
	if tell == nil {
		return nil, errNoClients
	}
	return proto.Marshal((*tell)(max(0, most)))
}
