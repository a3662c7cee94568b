package shard

import (
	"context"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// feedBounds are bounds of feeds, in bytes. A feed holds at most queue, or one block that
// is larger, and a page, or one event that is larger. All feeds of a gateway hold conn at
// most, beside one block each, and as much of pages, beside one. A message holds at most
// message, with the versions before its events, or one event that is larger.
type feedBounds struct{ queue, conn, page, message int64 }

var defaultFeedBounds = feedBounds{queue: 1 << 20, conn: 8 << 20, page: 512 << 10, message: 256 << 10}

// maxFeeds bounds the feeds of one gateway on one node.
const maxFeeds = 1 << 20

// feedConn is one gateway's stream of feeds from this node. One goroutine takes
// orders, one sends what the replicas publish, one reads history for feeds that are
// behind.
//
// Lock order: a replica's mu, then the connection's.
type feedConn struct {
	n      *Node
	st     transport.Stream
	bounds feedBounds

	mu sync.Mutex
	// Guarded by mu. ready are feeds with something to send, hungry those that want
	// a page of history, both in the order in which they came.
	feeds         map[rangeapi.FeedID]*feed
	ready, hungry []*feed
	// bytes are those of all queues, pageBytes those of all pages.
	bytes, pageBytes int64
	closed           bool

	wakeSend, wakeRead chan struct{}
}

// handleFeeds serves bus method 21.
func (n *Node) handleFeeds(ctx context.Context, peer keyspace.NodeID, first []byte, st transport.Stream) error {
	c := &feedConn{
		n: n, st: st, bounds: n.feedBounds, feeds: make(map[rangeapi.FeedID]*feed),
		wakeSend: make(chan struct{}, 1), wakeRead: make(chan struct{}, 1),
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(n.ctx, cancel)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		if err := c.send(ctx); err != nil && ctx.Err() == nil {
			n.feedsFailed(peer, err)
		}
	})
	wg.Go(func() { c.read(ctx) })
	err := c.obey(ctx, first)
	cancel()
	c.close()
	wg.Wait()
	return err
}

// obey takes orders until the stream ends.
func (c *feedConn) obey(ctx context.Context, first []byte) error {
	for b := first; ; {
		orders, err := rangeapi.DecodeOrders(b)
		if err != nil {
			return err
		}
		for i := range orders {
			if orders[i].Close {
				c.forget(orders[i].ID)
			} else if err := c.open(&orders[i]); err != nil {
				return err
			}
		}
		if b, err = c.st.Recv(ctx); err != nil {
			return err
		}
	}
}

// forget ends a feed that the gateway does not want any more.
func (c *feedConn) forget(id rangeapi.FeedID) {
	c.mu.Lock()
	f := c.feeds[id]
	if f != nil {
		delete(c.feeds, id)
		c.emptyLocked(f)
		c.setPageLocked(f, nil)
		f.mode, f.end = feedEnded, nil
	}
	c.mu.Unlock()
	if f != nil && f.r != nil {
		f.r.removeFeed(f)
	}
}

// open begins a feed, or its end.
func (c *feedConn) open(o *rangeapi.FeedOrder) error {
	f := &feed{id: o.ID, generation: o.Generation, prev: o.Prev, conn: c, r: c.n.Replica(o.Range)}
	c.mu.Lock()
	if c.feeds[o.ID] != nil || len(c.feeds) >= maxFeeds {
		c.mu.Unlock()
		return rangeapi.BadRequest("feed %d is there already, or is one of more than %d", o.ID, maxFeeds)
	}
	c.feeds[o.ID] = f
	c.mu.Unlock()
	var err error
	if f.r == nil {
		err = kverror.New(kverror.RangeNotHere, "range %s on node %s", o.Range, c.n.cfg.Self)
	} else {
		err = f.r.addFeed(f, o.From)
	}
	if err != nil {
		c.ended(f, kverror.Of(err))
	}
	return nil
}

// started is called for a new feed under its replica's lock.
func (c *feedConn) started(f *feed, from keyspace.Revision, now *feedBlock, live bool) {
	c.n.metrics.feeds.Inc()
	c.mu.Lock()
	defer c.mu.Unlock()
	f.sent = max(from-1, 0)
	if !live {
		c.restartLocked(f)
		return
	}
	f.queue = append(f.queue, now)
	c.readyLocked(f)
}

// offer gives a feed what was published, under its replica's lock.
func (c *feedConn) offer(f *feed, b *feedBlock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case f.mode == feedEnded:
		return
	case f.mode == feedBehind:
		f.miss(b)
		return
	case f.bytes > 0 && (f.bytes+b.bytes > c.bounds.queue || c.bytes+b.bytes > c.bounds.conn):
		c.n.metrics.feedsBehind.Inc()
		c.behindLocked(f, b)
		return
	}
	f.queue = append(f.queue, b)
	f.bytes += b.bytes
	c.bytes += b.bytes
	if f.mode == feedLive {
		c.readyLocked(f)
	}
}

// behindLocked has a feed go on from the store that cannot queue what comes: from the
// lowest of that on, if it had everything, else from where it has come to, or from there,
// if that is lower. What it has read stays read, however old the lock is above whose floor
// nothing is complete: each time there would be more to read again, and never an end.
func (c *feedConn) behindLocked(f *feed, b *feedBlock) {
	for _, o := range f.queue {
		f.miss(o)
	}
	f.miss(b)
	if f.mode == feedLive {
		f.cursor, f.missed = f.missed, feedPlace{}
	}
	f.mode, f.near = feedBehind, false
	c.emptyLocked(f)
	c.hungryLocked(f)
}

// restart has a feed begin anew behind what was complete.
func (c *feedConn) restart(f *feed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restartLocked(f)
}

// restartLocked has the feed begin anew behind what was complete, since nobody tells what
// has come into the store. What it holds goes: an event between, of a revision below others,
// may be in none of it.
func (c *feedConn) restartLocked(f *feed) {
	if f.mode == feedEnded {
		return
	}
	c.emptyLocked(f)
	c.setPageLocked(f, nil)
	f.mode = feedBehind
	f.cursor, f.missed, f.near = feedPlace{rev: f.sent + 1}, feedPlace{}, false
	f.epoch++
	c.hungryLocked(f)
}

// ended ends a feed behind what it holds.
func (c *feedConn) ended(f *feed, err *kverror.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(f, err)
}

func (c *feedConn) endLocked(f *feed, err *kverror.Error) {
	if f.mode == feedEnded {
		return
	}
	if f.mode != feedLive {
		// What it holds does not follow what was sent.
		c.emptyLocked(f)
		c.setPageLocked(f, nil)
	}
	f.mode, f.end = feedEnded, err
	c.readyLocked(f)
}

// emptyLocked takes everything out of a feed's queue.
func (c *feedConn) emptyLocked(f *feed) {
	c.bytes -= f.bytes
	f.queue, f.bytes = nil, 0
}

// setPageLocked gives a feed a page that waits to be sent, or takes it away.
func (c *feedConn) setPageLocked(f *feed, page *feedBlock) {
	if f.page != nil {
		c.pageBytes -= f.page.bytes
		kick(c.wakeRead)
	}
	if f.page = page; page != nil {
		c.pageBytes += page.bytes
	}
}

func (c *feedConn) readyLocked(f *feed) {
	if !f.ready && !c.closed {
		f.ready = true
		c.ready = append(c.ready, f)
		kick(c.wakeSend)
	}
}

// hungryLocked has the reader look after the feed, unless it does or a page is to be
// sent first.
func (c *feedConn) hungryLocked(f *feed) {
	if !f.hungry && !f.reading && f.page == nil && !c.closed {
		f.hungry = true
		c.hungry = append(c.hungry, f)
		kick(c.wakeRead)
	}
}

func kick(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// close ends the connection: no replica gives it anything any more.
func (c *feedConn) close() {
	c.mu.Lock()
	c.closed = true
	feeds := c.feeds
	c.feeds, c.ready, c.hungry = nil, nil, nil
	c.mu.Unlock()
	for _, f := range feeds {
		if f.r != nil {
			f.r.removeFeed(f)
		}
	}
}

// next takes what the first of the ready feeds has.
func (c *feedConn) next() (f *feed, blocks []*feedBlock, end *kverror.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.ready) > 0 && f == nil {
		f = c.ready[0]
		c.ready[0] = nil
		c.ready = c.ready[1:]
		f.ready = false
		if f.page != nil {
			blocks = append(blocks, f.page)
			f.sent = max(f.sent, f.page.complete)
			c.setPageLocked(f, nil)
		}
		switch f.mode {
		case feedLive, feedEnded:
			blocks = append(blocks, f.queue...)
			if n := len(f.queue); n > 0 {
				f.sent = max(f.sent, f.queue[n-1].complete)
			}
			c.emptyLocked(f)
			end = f.end
			if end != nil {
				delete(c.feeds, f.id)
			}
		case feedBehind, feedJoining:
			c.hungryLocked(f)
		}
		if len(blocks) == 0 && end == nil {
			f = nil
		}
	}
	return f, blocks, end
}

// read reads history for the feeds that are behind until the connection ends.
func (c *feedConn) read(ctx context.Context) {
	for {
		c.mu.Lock()
		var f *feed
		if len(c.hungry) > 0 && c.pageBytes < c.bounds.conn {
			f = c.hungry[0]
			c.hungry[0] = nil
			c.hungry = c.hungry[1:]
			f.hungry, f.reading = false, true
		}
		c.mu.Unlock()
		if f != nil {
			c.readPage(f)
			continue
		}
		select {
		case <-c.wakeRead:
		case <-ctx.Done():
			return
		}
	}
}

// readPage brings a feed that is behind a page further. What is published goes past it,
// so it reads no further than to where the range is complete: above that a transaction
// may yet leave a version below what was read. Once a page has come to there the feed
// joins: what is published from then on is queued, and all that was applied by then it
// takes from the store; then it is live. A page may end within a revision.
func (c *feedConn) readPage(f *feed) {
	from, until, epoch, view, err := c.pageBounds(f)
	var events []rangeapi.Event
	next := from
	if err == nil && from.rev <= until {
		o := mvcc.HistoryOptions{Span: view.span, From: from.rev, To: until, MaxBytes: c.bounds.page}
		events, next, err = f.r.history(f.generation, o, historyWant{fromKey: from.key})
	}
	page := &feedBlock{complete: min(next.rev-1, view.complete)}
	if len(events) > 0 {
		b := &eventBlock{count: len(events)}
		for i := range events {
			b.bytes = rangeapi.AppendEvent(b.bytes, &events[i])
		}
		page.events, page.bytes = []*eventBlock{b}, int64(len(b.bytes))
	}
	if err != nil {
		f.r.removeFeed(f)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f.reading = false
	switch {
	case f.mode == feedEnded:
		return
	case err != nil:
		c.endLocked(f, kverror.Of(err))
		return
	case f.epoch != epoch:
		c.hungryLocked(f)
		return
	}
	f.cursor, f.near = next, next.rev > until
	if f.near && f.mode == feedJoining {
		f.mode, page.mark = feedLive, view.mark
	}
	c.setPageLocked(f, page)
	c.readyLocked(f)
}

// pageBounds says what the feed's next page is to hold, and what it goes by. The feed
// joins with the page after one that reached all that was complete: that one is short.
// From then on it goes by how the replica was when it joined: of what has come since, and
// may be below what is read, the queue tells, which is sent behind the pages.
func (c *feedConn) pageBounds(f *feed) (from feedPlace, until keyspace.Revision, epoch int, v historyView, err error) {
	f.r.mu.Lock()
	defer f.r.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	// What it has missed until now the store shows by now.
	if f.missed.rev != 0 && f.missed.before(f.cursor) {
		f.cursor = f.missed
	}
	f.missed = feedPlace{}
	from, epoch = f.cursor, f.epoch
	if v, err = f.r.viewHistoryLocked(f.generation, from.rev); err != nil {
		return from, 0, epoch, v, err
	}
	if f.mode == feedBehind && f.near {
		f.mode, f.joined = feedJoining, v
	}
	if f.mode == feedJoining {
		return from, f.joined.last, epoch, f.joined, nil
	}
	return from, v.complete, epoch, v, nil
}
