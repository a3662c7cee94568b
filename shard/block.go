package shard

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// blockLocked lets a call wait until the lock has ended or changed.
func (r *Replica) blockLocked(c *call, h *held) {
	c.moveTo(placeBlocked, nil)
	c.blocked = h
	h.waiters = append(h.waiters, c)
	r.wanting = append(r.wanting, c)
	r.blockedBytes += c.bytes
	r.node.metrics.lockWaits.Inc()
}

// leaveLocked takes a call whose caller has given up away from the lock for which it waits.
func (r *Replica) leaveLocked(c *call, err error, out *answers) {
	if c.place != placeBlocked {
		return
	}
	h := c.blocked
	is := func(o *call) bool { return o == c }
	h.waiters, r.wanting = slices.DeleteFunc(h.waiters, is), slices.DeleteFunc(r.wanting, is)
	c.blocked = nil
	r.blockedBytes -= c.bytes
	out.add(c, kverror.Of(err))
}

// wakeLocked has everybody look again who waits for the lock, in the order in which they
// came.
func (r *Replica) wakeLocked(h *held) {
	h.deciding = false
	if h.ended != nil {
		close(h.ended)
		h.ended = nil
	}
	if len(h.waiters) == 0 {
		return
	}
	w := h.waiters
	h.waiters = nil
	r.wanting = slices.DeleteFunc(r.wanting, func(c *call) bool { return c.blocked == h })
	for _, c := range w {
		c.blocked = nil
		c.moveTo(placeQueue, nil)
		r.blockedBytes -= c.bytes
		r.queueBytes += c.bytes
	}
	r.queue = slices.Insert(r.queue, 0, w...)
	r.node.pool.schedule(r)
}

// wantedLocked returns the lock that keeps another call from writing in the span, which
// holds nothing or is an older transaction's. Who only compares there waits for the same
// lock, behind it: one after the other they would keep it out for ever.
func (r *Replica) wantedLocked(s keyspace.Span, name TxnName) *held {
	for _, c := range r.wanting {
		wants := false
		touch := func(key, end []byte, writes bool) {
			if k, ok := keyspace.FromEtcd(key, end); ok && writes {
				wants = wants || k.Overlaps(s)
			}
		}
		if c.step == nil {
			touchedKeys(c.req.Op, touch)
		} else if p, ok := c.step.op.(*Prepare); ok && p.Name.Compare(name.TxnID) < 0 {
			p.keys(touch)
		}
		if wants && c.blocked.name != name {
			return c.blocked
		}
	}
	return nil
}
