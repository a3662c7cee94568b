package rangefeed

import (
	"bytes"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// started begins a new feed. The replica's lock is held. now is the range's state without
// events; fresh says that the feed wants no event that is applied already.
func (c *conn) started(f *feed, from keyspace.Revision, now *block, fresh bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.sent = max(from-1, 0)
	if !fresh {
		c.restartLocked(f)
		return
	}
	f.queue = append(f.queue, now)
	c.readyLocked(f)
}

// offer gives a feed what was published. The replica's lock is held.
func (c *conn) offer(f *feed, b *block) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case f.mode == ended:
		return
	case f.mode == behind:
		f.miss(b)
		return
	case f.bytes > 0 && (f.bytes+b.bytes > c.s.bounds.queue || c.bytes+b.bytes > c.s.bounds.conn):
		c.s.cfg.Metrics.behind.Inc()
		c.behindLocked(f, b)
		return
	}
	f.queue = append(f.queue, b)
	f.bytes += b.bytes
	c.bytes += b.bytes
	if f.mode == live {
		c.readyLocked(f)
	}
}

// behindLocked makes a feed go on from the store, because it cannot queue block b. A live
// feed goes on at the lowest event of its queue and b. A joining feed goes on at its
// cursor, or at that lowest event if it is lower. Pages that were read stay read: while an
// old lock keeps the resolved revision down, a feed that began again behind it would have
// more to read each time, and no end.
func (c *conn) behindLocked(f *feed, b *block) {
	for _, o := range f.queue {
		f.miss(o)
	}
	f.miss(b)
	if f.mode == live {
		f.cursor, f.missed = f.missed, place{}
	}
	f.mode, f.near = behind, false
	c.emptyLocked(f)
	c.hungryLocked(f)
}

// miss notes the lowest event of a block that the feed was not given.
func (f *feed) miss(b *block) {
	for _, e := range b.events {
		if e.count == 0 {
			continue
		}
		if at := e.lowestPlace(); f.missed.rev == 0 || at.before(f.missed) {
			f.missed = place{at.rev, bytes.Clone(at.key)}
		}
	}
}

// restart makes a feed begin again behind its resolved revision. The replica's lock is
// held.
func (c *conn) restart(f *feed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restartLocked(f)
}

// restartLocked makes the feed begin again behind its resolved revision: nobody tells what
// has come into the store. The feed loses its queue and its page, since an event that came
// in between may be in neither.
func (c *conn) restartLocked(f *feed) {
	if f.mode == ended {
		return
	}
	c.emptyLocked(f)
	c.setPageLocked(f, nil)
	f.mode = behind
	f.cursor, f.missed, f.near = place{rev: f.sent + 1}, place{}, false
	f.epoch++
	c.hungryLocked(f)
}

// ended ends a feed behind what it holds.
func (c *conn) ended(f *feed, err *kverror.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(f, err)
}

func (c *conn) endLocked(f *feed, err *kverror.Error) {
	if f.mode == ended {
		return
	}
	if f.mode != live {
		// What the feed holds does not follow what was sent.
		c.emptyLocked(f)
		c.setPageLocked(f, nil)
	}
	f.mode, f.end = ended, err
	c.readyLocked(f)
}

// cut ends a feed in front of what it holds, unless it has ended.
func (c *conn) cut(f *feed, err *kverror.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.emptyLocked(f)
	c.setPageLocked(f, nil)
	c.endLocked(f, err)
}

// drop takes a feed off the connection and returns it, or nil if there is none.
func (c *conn) drop(id rangeapi.FeedID) *feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.feeds[id]
	if f != nil {
		delete(c.feeds, id)
		c.emptyLocked(f)
		c.setPageLocked(f, nil)
		f.mode, f.end = ended, nil
	}
	return f
}

// dropAll closes the connection and returns its feeds.
func (c *conn) dropAll() map[rangeapi.FeedID]*feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	feeds := c.feeds
	c.closed = true
	c.feeds, c.ready, c.hungry = nil, nil, nil
	return feeds
}

// emptyLocked takes everything out of a feed's queue.
func (c *conn) emptyLocked(f *feed) {
	c.bytes -= f.bytes
	f.queue, f.bytes = nil, 0
}

// setPageLocked gives a feed a page that waits to be sent, or takes it away.
func (c *conn) setPageLocked(f *feed, page *block) {
	if f.page != nil {
		c.pageBytes -= f.page.bytes
		c.wakeRead.Set()
	}
	if f.page = page; page != nil {
		c.pageBytes += page.bytes
	}
}

func (c *conn) readyLocked(f *feed) {
	if !f.ready && !c.closed {
		f.ready = true
		c.ready = append(c.ready, f)
		c.wakeSend.Set()
	}
}

// hungryLocked has the reader look after the feed, unless it does already or a page is to
// be sent first.
func (c *conn) hungryLocked(f *feed) {
	if !f.hungry && !f.reading && f.page == nil && !c.closed {
		f.hungry = true
		c.hungry = append(c.hungry, f)
		c.wakeRead.Set()
	}
}

// next takes what the first ready feed has to send. f is nil if nobody has anything.
func (c *conn) next() (f *feed, blocks []*block, end *kverror.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.ready) > 0 && f == nil {
		f = c.ready[0]
		c.ready[0] = nil
		c.ready = c.ready[1:]
		f.ready = false
		if f.page != nil {
			blocks = append(blocks, f.page)
			f.sent = max(f.sent, f.page.resolved)
			c.setPageLocked(f, nil)
		}
		switch f.mode {
		case live, ended:
			blocks = append(blocks, f.queue...)
			if n := len(f.queue); n > 0 {
				f.sent = max(f.sent, f.queue[n-1].resolved)
			}
			c.emptyLocked(f)
			end = f.end
			if end != nil {
				delete(c.feeds, f.id)
			}
		case behind, joining:
			c.hungryLocked(f)
		}
		if len(blocks) == 0 && end == nil {
			f = nil
		}
	}
	return f, blocks, end
}

// nextHungry takes the first feed that wants a page of history, nil if there is none or
// the connection holds as much as it may.
func (c *conn) nextHungry() *feed {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.hungry) == 0 || c.pageBytes >= c.s.bounds.conn {
		return nil
	}
	f := c.hungry[0]
	c.hungry[0] = nil
	c.hungry = c.hungry[1:]
	f.hungry, f.reading = false, true
	return f
}

// pageRead gives a feed the page that the reader has read in the feed's epoch. The next page
// begins at next. reached says that this page came to the end of its bounds; at is the
// range's position there. err ends the feed.
func (c *conn) pageRead(f *feed, epoch int, page *block, next place, reached bool, at rangeapi.FeedPosition, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f.reading = false
	switch {
	case f.mode == ended:
		return
	case err != nil:
		c.endLocked(f, kverror.Of(err))
		return
	case f.epoch != epoch:
		c.hungryLocked(f)
		return
	}
	f.cursor, f.near = next, reached
	if f.near && f.mode == joining {
		f.mode, page.position = live, at
	}
	c.setPageLocked(f, page)
	c.readyLocked(f)
}
