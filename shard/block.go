package shard

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// blockedCall is a call that waits for the end of a lock. It knows nothing of that itself:
// a call has the size that it has without locks.
type blockedCall struct {
	c  *call
	on *held
}

// blockLocked lets a call wait until the lock has ended or changed.
func (r *Replica) blockLocked(c *call, h *held) {
	c.moveTo(placeBlocked, nil)
	h.waiters = append(h.waiters, c)
	r.blocked = append(r.blocked, blockedCall{c, h})
	r.blockedBytes += c.bytes
	r.node.metrics.lockWaits.Inc()
}

// leaveLocked takes a call whose caller has given up away from the lock for which it waits.
func (r *Replica) leaveLocked(c *call, err error, out *answers) {
	if c.place != placeBlocked {
		return
	}
	i := slices.IndexFunc(r.blocked, func(o blockedCall) bool { return o.c == c })
	h := r.blocked[i].on
	r.blocked = slices.Delete(r.blocked, i, i+1)
	h.waiters = slices.DeleteFunc(h.waiters, func(o *call) bool { return o == c })
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
	r.blocked = slices.DeleteFunc(r.blocked, func(o blockedCall) bool { return o.on == h })
	for _, c := range w {
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
	for _, o := range r.blocked {
		c, wants := o.c, false
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
		if wants && o.on.name != name {
			return o.on
		}
	}
	return nil
}
