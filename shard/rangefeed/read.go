package rangefeed

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// read reads history for the feeds that are behind until ctx ends.
func (c *conn) read(ctx context.Context) {
	for {
		if f := c.nextHungry(); f != nil {
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

// readPage reads a feed's next page of history. A feed that is behind is not given what is
// published, so its pages end at the resolved revision. Above it, a transaction may yet leave
// a version below what was read. When a page has reached the resolved revision, the
// feed joins: it queues what is published from then on, and reads from the store all that
// was applied by then. After that it is live. A page may end within a revision.
func (c *conn) readPage(f *feed) {
	from, until, epoch, view, err := c.pageBounds(f)
	var events []rangeapi.Event
	next := from
	if err == nil && from.rev <= until {
		o := mvcc.HistoryOptions{Span: view.Span, From: from.rev, To: until, MaxBytes: c.s.bounds.page}
		events, next, err = f.src.history(f.generation, o, pageOptions{fromKey: from.key})
	}
	page := &block{resolved: min(next.rev-1, view.Resolved)}
	if len(events) > 0 {
		e := &Events{count: len(events)}
		for i := range events {
			e.bytes = rangeapi.AppendEvent(e.bytes, &events[i])
		}
		page.events, page.bytes = []*Events{e}, int64(len(e.bytes))
	}
	if err != nil {
		f.src.remove(f)
	}
	c.pageRead(f, epoch, page, next, next.rev > until, view.Position, err)
}

// pageBounds returns where the feed's next page begins and ends, and the state of the range
// that it belongs to. The page after one that reached the resolved revision is short, and
// with it the feed begins to join. While a feed joins, its pages belong to the state at that
// moment. Later events, even below a page, are in the queue, which is sent behind the pages.
func (c *conn) pageBounds(f *feed) (from place, until keyspace.Revision, epoch int, v View, err error) {
	f.src.mu.Lock()
	defer f.src.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	// By now the store shows what the feed has missed.
	if f.missed.rev != 0 && f.missed.before(f.cursor) {
		f.cursor = f.missed
	}
	f.missed = place{}
	from, epoch = f.cursor, f.epoch
	if v, err = f.src.src.View(f.generation, from.rev); err != nil {
		return from, 0, epoch, v, err
	}
	if f.mode == behind && f.near {
		f.mode, f.joined = joining, v
	}
	if f.mode == joining {
		return from, f.joined.Last, epoch, f.joined, nil
	}
	return from, v.Resolved, epoch, v, nil
}
