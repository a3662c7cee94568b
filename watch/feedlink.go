package watch

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// link is the stream of feeds from one node.
type link struct {
	node keyspace.NodeID
	// Guarded by the hub's mu.
	subs   map[rangeapi.FeedID]*subscription
	orders []rangeapi.FeedOrder
	wake   chan struct{}
}

// order queues an order.
func (k *link) order(o rangeapi.FeedOrder) {
	k.orders = append(k.orders, o)
	kick(k.wake)
}

// linkLocked returns the link with the node, which it begins where there is none.
func (h *Hub) linkLocked(node keyspace.NodeID) *link {
	if k := h.links[node]; k != nil {
		return k
	}
	k := &link{node: node, subs: map[rangeapi.FeedID]*subscription{}, wake: make(chan struct{}, 1)}
	h.links[node] = k
	r := h.run
	h.wg.Go(func() { h.runLink(r, k) })
	return k
}

// runLink is a link's life: it ends with its stream, and its subscriptions are fed anew.
func (h *Hub) runLink(r *running, k *link) {
	ctx, cancel := context.WithCancel(r.ctx)
	defer cancel()
	err := h.followLink(ctx, r, k)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != r {
		return
	}
	h.linkLostLocked(k, err)
	delete(h.links, k.node)
	for _, sub := range k.subs {
		sub.node = 0
		h.lostFeedLocked(sub, kverror.New(kverror.Unreachable, "feeds of node %s: %v", k.node, err))
	}
	h.changedLocked()
}

// linkWarnEvery is how often the end of a link is a warning at most.
const linkWarnEvery = 10 * time.Second

func (h *Hub) linkLostLocked(k *link, err error) {
	h.cfg.Metrics.LinksLost.Inc()
	level := zap.DebugLevel
	if now := h.cfg.Clock.Now(); h.linkWarned == 0 || now.Sub(h.linkWarned) >= linkWarnEvery {
		h.linkWarned, level = now, zap.WarnLevel
	}
	h.cfg.Logger.Log(level, "feeds ended", zap.Stringer("peer", k.node), zap.Int("feeds", len(k.subs)), zap.Error(err))
}

func (h *Hub) followLink(ctx context.Context, r *running, k *link) error {
	s, err := h.cfg.Feeds.OpenFeeds(ctx, k.node)
	if err != nil {
		return err
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(ctx)
	var orders sync.WaitGroup
	orders.Go(func() {
		defer cancel()
		if err := h.sendOrders(ctx, k, s); ctx.Err() == nil {
			h.cfg.Logger.Debug("order feeds", zap.Stringer("peer", k.node), zap.Error(err))
		}
	})
	defer orders.Wait()
	defer cancel()
	for {
		ps, err := s.Recv(ctx)
		if err != nil {
			return err
		}
		h.mu.Lock()
		if h.run != r {
			h.mu.Unlock()
			return ctx.Err()
		}
		for i := range ps {
			if sub := k.subs[ps[i].ID]; sub != nil && sub.feed == ps[i].ID {
				h.takePartLocked(sub, &ps[i])
			}
		}
		h.changedLocked()
		h.mu.Unlock()
	}
}

func (h *Hub) sendOrders(ctx context.Context, k *link, s FeedStream) error {
	for {
		h.mu.Lock()
		orders := k.orders
		k.orders = nil
		h.mu.Unlock()
		if len(orders) > 0 {
			if err := s.Order(ctx, orders); err != nil {
				return err
			}
			continue
		}
		select {
		case <-k.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
