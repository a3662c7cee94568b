package rangefeed

import (
	"context"
	"sync"

	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// maxFeeds bounds the feeds of one gateway on one node.
const maxFeeds = 1 << 20

// conn is one gateway's stream of feeds from this node. One goroutine takes orders, one
// sends what the replicas publish, one reads history for feeds that are behind.
type conn struct {
	s  *Server
	st transport.Stream

	mu sync.Mutex
	// The fields below are guarded by mu. ready are feeds with something to send, hungry
	// those that want a page of history, both in the order in which they came.
	feeds         map[rangeapi.FeedID]*feed
	ready, hungry []*feed
	// bytes are those of all queues, pageBytes those of all pages.
	bytes, pageBytes int64
	closed           bool

	wakeSend, wakeRead wake.Signal
}

// mode says where a feed takes its events from.
type mode uint8

const (
	// live: from what the replica publishes.
	live mode = iota
	// behind: from the store; the feed is not given what is published.
	behind
	// joining: from the store up to what was published when it began to join. What is
	// published since is queued.
	joining
	// ended: it has an end, behind what is queued.
	ended
)

// feed is a feed in its range and its connection. The connection's mu guards the fields
// below conn.
type feed struct {
	id         rangeapi.FeedID
	src        *Feeds
	generation keyspace.Generation
	prev       bool
	conn       *conn

	mode  mode
	queue []*block
	bytes int64
	// sent is the resolved revision behind what has been sent.
	sent keyspace.Revision
	// cursor is where the reading of the store goes on. All that the store shows below it
	// was sent or is in page, but for what was published from missed on.
	cursor, missed place
	// near says that a page has reached the resolved revision. With the next page the feed
	// begins to join; joined is the range's state at that moment.
	near   bool
	joined View
	// epoch counts how often the feed began anew behind sent.
	epoch int
	// page is a page of history that waits to be sent.
	page *block
	// ready: the feed is in conn.ready; hungry: it is in conn.hungry; reading: the connection's
	// reader has it.
	ready, hungry, reading bool
	end                    *kverror.Error

	// told is the resolved revision that was last sent. It is the sender's.
	told keyspace.Revision
}

// obey takes orders until the stream ends.
func (c *conn) obey(ctx context.Context, first []byte) error {
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

// open begins a feed, or its end.
func (c *conn) open(o *rangeapi.FeedOrder) error {
	src, err := c.s.cfg.Find(o.Range)
	f := &feed{id: o.ID, generation: o.Generation, prev: o.Prev, conn: c, src: src}
	c.mu.Lock()
	if c.feeds[o.ID] != nil || len(c.feeds) >= maxFeeds {
		c.mu.Unlock()
		return rangeapi.BadRequest("feed %d is there already, or is one of more than %d", o.ID, maxFeeds)
	}
	c.feeds[o.ID] = f
	c.mu.Unlock()
	if err == nil {
		err = src.add(f, o.From)
	}
	if err != nil {
		c.ended(f, kverror.Of(err))
	}
	return nil
}

// forget ends a feed that the gateway no longer wants.
func (c *conn) forget(id rangeapi.FeedID) {
	if f := c.drop(id); f != nil && f.src != nil {
		f.src.remove(f)
	}
}

// close ends the connection: no replica gives it anything any more.
func (c *conn) close() {
	for _, f := range c.dropAll() {
		if f.src != nil {
			f.src.remove(f)
		}
	}
}
