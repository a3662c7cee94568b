package shard

import (
	"bytes"
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// feedPlace is a place among the events in the order of (revision, key): before that of the
// key, and all behind it. The zero place is none.
type feedPlace struct {
	rev keyspace.Revision
	key []byte
}

func (p feedPlace) before(o feedPlace) bool {
	return p.rev < o.rev || p.rev == o.rev && bytes.Compare(p.key, o.key) < 0
}

// miss notes the lowest of the events that the feed was not given.
func (f *feed) miss(b *feedBlock) {
	for _, e := range b.events {
		if e.count == 0 {
			continue
		}
		var low rangeapi.Event
		if _, err := rangeapi.DecodeEvent(e.bytes[e.lowest:], &low); err != nil {
			panic("shard: an event that was encoded here: " + err.Error())
		}
		if at := (feedPlace{low.Mod, low.Key}); f.missed.rev == 0 || at.before(f.missed) {
			f.missed = feedPlace{at.rev, bytes.Clone(at.key)}
		}
	}
}

// lowestOf returns which of the versions is the lowest in the order of places.
func lowestOf(vs []mvcc.Version) (at int) {
	for i := range vs {
		if (feedPlace{vs[i].Mod, vs[i].Key}).before(feedPlace{vs[at].Mod, vs[at].Key}) {
			at = i
		}
	}
	return at
}

// feedWriter makes messages of what the feeds of a connection have.
type feedWriter struct {
	c   *feedConn
	msg []byte
	// events are the next part's so far, encoded, count of them.
	events []byte
	count  int
}

// send sends what feeds have until the connection ends.
func (c *feedConn) send(ctx context.Context) error {
	w := &feedWriter{c: c}
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
func (w *feedWriter) write(ctx context.Context, f *feed, blocks []*feedBlock, end *kverror.Error) error {
	for _, b := range blocks {
		if err := w.block(ctx, f, b); err != nil {
			return err
		}
	}
	if end != nil {
		w.beginMessage()
		w.msg = rangeapi.AppendPart(w.msg, &rangeapi.FeedPart{ID: f.id, Err: end})
	}
	if int64(len(w.msg)) >= w.c.bounds.message {
		return w.flush(ctx)
	}
	return nil
}

func (w *feedWriter) beginMessage() {
	if len(w.msg) == 0 {
		w.msg = append(w.msg, rangeapi.FeedVersion)
	}
}

// flush sends the message, if there is anything in it.
func (w *feedWriter) flush(ctx context.Context) error {
	if len(w.msg) == 0 {
		return nil
	}
	err := w.c.st.Send(ctx, w.msg)
	if w.msg = w.msg[:0]; int64(cap(w.msg)) > 2*w.c.bounds.message {
		w.msg = nil // one event was large
	}
	return err
}

// block adds a block, in several parts where it does not fit into one message: only the
// last one says how far the block brings the feed.
func (w *feedWriter) block(ctx context.Context, f *feed, b *feedBlock) error {
	fits := !f.prev && b.bytes <= w.c.bounds.message
	if fits && int64(len(w.msg))+b.bytes > w.c.bounds.message {
		if err := w.flush(ctx); err != nil {
			return err
		}
	}
	for _, e := range b.events {
		w.c.n.metrics.fedEvents.Add(float64(e.count))
		if fits {
			w.events = append(w.events, e.bytes...)
			w.count += e.count
		} else if err := w.pieces(ctx, f, e); err != nil {
			return err
		}
	}
	w.part(f, b.complete, b.mark)
	f.told = b.complete
	return nil
}

// part adds what has come together to the message, as a part of the feed.
func (w *feedWriter) part(f *feed, complete keyspace.Revision, m rangeapi.FeedPosition) {
	w.beginMessage()
	w.msg = rangeapi.AppendPartHead(w.msg, f.id, complete, m, w.count)
	w.msg = append(w.msg, w.events...)
	w.events, w.count = w.events[:0], 0
	if int64(cap(w.events)) > 2*w.c.bounds.message {
		w.events = nil // one event was large
	}
}

// pieces adds events one by one, with the versions before them if the feed wants those,
// and sends a message whenever it is full. It looks for no more of them than fit into one.
func (w *feedWriter) pieces(ctx context.Context, f *feed, b *eventBlock) error {
	events := make([]rangeapi.Event, b.count)
	rest, err := b.bytes, error(nil)
	for i := range events {
		if rest, err = rangeapi.DecodeEvent(rest, &events[i]); err != nil {
			return err
		}
	}
	for len(events) > 0 {
		n := len(events)
		if f.prev {
			if n, err = f.r.lookBefore(events, 0, w.c.bounds.message); err != nil {
				return err
			}
		}
		for i := range events[:n] {
			if size := events[i].Bytes(); int64(len(w.msg)+len(w.events))+size > w.c.bounds.message {
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

// feedsFailedEvery is how often a node says at most that it could not send feeds.
const feedsFailedEvery = 10 * time.Second

// feedsFailed notes that what feeds have could not be sent to a gateway, which opens all of
// them anew: if that is for the size of a message it goes on for ever.
func (n *Node) feedsFailed(peer keyspace.NodeID, err error) {
	if errors.Is(err, transport.ErrTooLarge) {
		n.metrics.feedsTooLarge.Inc()
	}
	n.metrics.feedsFailed.Inc()
	last, now := n.feedsFailedAt.Load(), int64(n.cfg.Clock.Now())
	if last != 0 && now-last < int64(feedsFailedEvery) || !n.feedsFailedAt.CompareAndSwap(last, now) {
		return
	}
	n.log.Warn("cannot send feeds", zap.Stringer("peer", peer), zap.Error(err))
}
