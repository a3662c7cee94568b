package rangefeed

import (
	"context"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// errNoBefore says that the versions before a feed's events cannot be found. It concerns that feed
// alone.
var errNoBefore = errors.New("rangefeed: look for the versions before events")

// writer makes messages of what the feeds of a connection have.
type writer struct {
	c   *conn
	msg []byte
	// events are those of the next part so far, encoded; there are count of them.
	events []byte
	count  int
}

// send sends what feeds have until ctx ends.
func (c *conn) send(ctx context.Context) error {
	w := &writer{c: c}
	for {
		f, blocks, end := c.next()
		if f != nil {
			if err := w.write(ctx, f, blocks, end); err != nil {
				return err
			}
			continue
		}
		if err := w.flush(ctx); err != nil {
			return err
		}
		select {
		case <-c.wakeSend:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// write adds a feed's blocks to the message, and its end, if it has one.
func (w *writer) write(ctx context.Context, f *feed, blocks []*block, end *kverror.Error) error {
	for _, b := range blocks {
		if err := w.block(ctx, f, b); errors.Is(err, errNoBefore) {
			w.cut(f, err, end)
			return nil
		} else if err != nil {
			return err
		}
	}
	if end != nil {
		w.beginMessage()
		w.msg = rangeapi.AppendPart(w.msg, &rangeapi.FeedPart{ID: f.id, Err: end})
	}
	if int64(len(w.msg)) >= w.c.s.bounds.message {
		return w.flush(ctx)
	}
	return nil
}

// cut ends a feed in front of an event whose version before cannot be found. The gateway opens
// another feed behind what is resolved. end is the feed's end if it has been taken already.
func (w *writer) cut(f *feed, err error, end *kverror.Error) {
	if w.count > 0 {
		w.part(f, f.told, rangeapi.FeedPosition{})
	}
	f.src.remove(f)
	w.c.cut(f, kverror.Of(err))
	if end != nil {
		w.beginMessage()
		w.msg = rangeapi.AppendPart(w.msg, &rangeapi.FeedPart{ID: f.id, Err: end})
	}
}

func (w *writer) beginMessage() {
	if len(w.msg) == 0 {
		w.msg = append(w.msg, rangeapi.FeedVersion)
	}
}

// flush sends the message, if there is anything in it.
func (w *writer) flush(ctx context.Context) error {
	if len(w.msg) == 0 {
		return nil
	}
	err := w.c.st.Send(ctx, w.msg)
	if w.msg = w.msg[:0]; int64(cap(w.msg)) > 2*w.c.s.bounds.message {
		w.msg = nil // one event was large
	}
	return err
}

// block adds a block, in several parts if it does not fit into one message. Only the last
// part has the block's resolved revision.
func (w *writer) block(ctx context.Context, f *feed, b *block) error {
	fits := !f.prev && b.bytes <= w.c.s.bounds.message
	if fits && int64(len(w.msg))+b.bytes > w.c.s.bounds.message {
		if err := w.flush(ctx); err != nil {
			return err
		}
	}
	for _, e := range b.events {
		w.c.s.cfg.Metrics.sent.Add(float64(e.count))
		if fits {
			w.events = append(w.events, e.bytes...)
			w.count += e.count
		} else if err := w.oneByOne(ctx, f, e); err != nil {
			return err
		}
	}
	w.part(f, b.resolved, b.position)
	f.told = b.resolved
	return nil
}

// part adds the events that were collected to the message, as a part of the feed.
func (w *writer) part(f *feed, resolved keyspace.Revision, at rangeapi.FeedPosition) {
	w.beginMessage()
	w.msg = rangeapi.AppendPartHead(w.msg, f.id, resolved, at, w.count)
	w.msg = append(w.msg, w.events...)
	w.events, w.count = w.events[:0], 0
	if int64(cap(w.events)) > 2*w.c.s.bounds.message {
		w.events = nil // one event was large
	}
}

// oneByOne adds events one by one and sends a message whenever it is full. If the feed
// wants the versions before them, it looks for no more of those than fit into a message.
func (w *writer) oneByOne(ctx context.Context, f *feed, e *Events) error {
	events := make([]rangeapi.Event, e.count)
	rest, err := e.bytes, error(nil)
	for i := range events {
		if rest, err = rangeapi.DecodeEvent(rest, &events[i]); err != nil {
			return err
		}
	}
	for len(events) > 0 {
		n := len(events)
		if f.prev {
			if n, err = f.src.lookBefore(f.generation, events, 0, w.c.s.bounds.message); err != nil {
				return fmt.Errorf("%w: %w", errNoBefore, err)
			}
		}
		for i := range events[:n] {
			if size := events[i].Bytes(); int64(len(w.msg)+len(w.events))+size > w.c.s.bounds.message {
				if w.count > 0 {
					w.part(f, f.told, rangeapi.FeedPosition{})
				}
				if err := w.flush(ctx); err != nil {
					return err
				}
			}
			w.events = rangeapi.AppendEvent(w.events, &events[i])
			w.count++
		}
		clear(events[:n])
		events = events[n:]
	}
	return nil
}
