package shard

import (
	"bytes"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// meeting is a lock that is in a call's way.
type meeting struct {
	h *held
	// key is the key at which they meet, where the lock holds it as one; nil otherwise.
	key []byte
	// writes says that the call may write the key.
	writes bool
}

// waiters are calls that wait for the end of one lock, in their order.
// Those with a key may all wait for whoever else holds it next: once one of them has had
// its turn and has locked the key, the others need not be looked at to wait for that. All
// others are looked at one by one.
type waiters struct {
	key []byte
	// writes says that they write the key, so that also who only compares it is in their way.
	writes bool
	// on is the lock, nil while they have their turn.
	on    *held
	calls []*call
}

// blockLocked lets a call wait until the lock has ended or changed.
func (r *Replica) blockLocked(c *call, m meeting) {
	c.moveTo(placeBlocked, nil)
	if c.ticket == 0 {
		r.tickets++
		c.ticket = r.tickets
	}
	if c.step != nil && !c.step.patient() {
		// It may wait for younger transactions alone: who comes next may be older.
		m.key = nil
	}
	g := m.h.waitersAt(m.key, m.writes)
	g.calls = append(g.calls, c)
	if r.blocked == nil {
		r.blocked = map[*call]*waiters{}
	}
	r.blocked[c] = g
	r.blockedBytes += c.bytes
	c.writtenSpans(func(s keyspace.Span) { r.wanted.add(s, c, command.Exclusive) })
	if lease := c.revokes(); lease != 0 {
		if r.revokers == nil {
			r.revokers = map[keyspace.LeaseID][]*call{}
		}
		r.revokers[lease] = append(r.revokers[lease], c)
	}
	r.node.metrics.lockWaits.Inc()
}

// waitersAt returns the waiters of the key.
func (h *held) waitersAt(key []byte, writes bool) *waiters {
	for _, g := range h.waiters {
		if (g.key == nil) == (key == nil) && (key == nil || g.writes == writes) && bytes.Equal(g.key, key) {
			return g
		}
	}
	g := &waiters{key: key, writes: writes, on: h}
	h.waiters = append(h.waiters, g)
	return g
}

// unblockLocked takes a call from those that are blocked.
func (r *Replica) unblockLocked(c *call) {
	delete(r.blocked, c)
	r.blockedBytes -= c.bytes
	c.writtenSpans(func(s keyspace.Span) { r.wanted.remove(s, c) })
	if lease := c.revokes(); lease != 0 {
		rest := slices.DeleteFunc(r.revokers[lease], func(o *call) bool { return o == c })
		if r.revokers[lease] = rest; len(rest) == 0 {
			delete(r.revokers, lease)
		}
	}
}

// leaveLocked takes a call whose caller has given up away from the lock for which it waits.
func (r *Replica) leaveLocked(c *call, err error, out *answers) {
	if c.place != placeBlocked {
		return
	}
	g := r.blocked[c]
	i := slices.Index(g.calls, c)
	g.calls = slices.Delete(g.calls, i, i+1)
	r.unblockLocked(c)
	out.add(c, kverror.Of(err))
}

// wakeLocked gives everybody a turn who waits for the lock.
func (r *Replica) wakeLocked(h *held) {
	h.deciding = false
	if h.ended != nil {
		close(h.ended)
		h.ended = nil
	}
	if len(h.waiters) == 0 {
		return
	}
	for _, g := range h.waiters {
		g.on = nil
	}
	r.woken = append(r.woken, h.waiters...)
	h.waiters = nil
	r.node.pool.schedule(r)
}

// nextWokenLocked takes the call that came first of those that have their turn, nil where
// there is none. Those whose key somebody has locked again go on waiting.
func (r *Replica) nextWokenLocked() *call {
	for len(r.woken) > 0 {
		i := r.firstWokenLocked()
		g := r.woken[i]
		if len(g.calls) > 0 {
			h := r.locks.holder(g.key, g.writes).h
			if h == nil {
				c := g.calls[0]
				g.calls[0] = nil
				g.calls = g.calls[1:]
				r.unblockLocked(c)
				return c
			}
			g.on = h
			h.waiters = append(h.waiters, g)
		}
		r.woken = slices.Delete(r.woken, i, i+1)
	}
	return nil
}

// firstWokenLocked returns which of the woken is empty or begins with the call that came
// first.
func (r *Replica) firstWokenLocked() (first int) {
	for i, g := range r.woken {
		if len(g.calls) == 0 {
			return i
		}
		if g.calls[0].ticket < r.woken[first].calls[0].ticket {
			first = i
		}
	}
	return first
}

// queueWokenLocked has those who have their turn wait like everybody else.
func (r *Replica) queueWokenLocked() {
	var w []*call
	for _, g := range r.woken {
		for _, c := range g.calls {
			r.unblockLocked(c)
			c.moveTo(placeQueue, nil)
			r.queueBytes += c.bytes
			w = append(w, c)
		}
	}
	r.woken = nil
	r.queue = slices.Insert(r.queue, 0, w...)
}

// wantedLocked returns the lock that keeps another call from writing in the span, which
// holds nothing or is an older transaction's. Who only compares there waits for the same
// lock, behind it: one after the other they would keep it out for ever.
func (r *Replica) wantedLocked(s keyspace.Span, name rangeapi.TxnName) (found *held) {
	r.wanted.visit(s, func(c *call, _ command.LockMode, _ []byte) bool {
		if c.step == nil || c.step.op.(*rangeapi.Prepare).Name.Compare(name.TxnID) < 0 {
			if h := r.blocked[c].on; h != nil && h.Lock != nil && h.Name != name {
				found = h
			}
		}
		return found == nil
	})
	return found
}

// writtenSpans calls fn with every span that the call may write, if it is a client's
// request or a Prepare.
func (c *call) writtenSpans(fn func(s keyspace.Span)) {
	touch := func(key, end []byte, writes bool) {
		if s, ok := keyspace.FromEtcd(key, end); ok && writes {
			fn(s)
		}
	}
	if c.step == nil {
		touchedKeys(c.req.Op, touch)
	} else if p, ok := c.step.op.(*rangeapi.Prepare); ok {
		p.Keys(touch)
	}
}

// revokes returns the lease that the call revokes, 0 for none.
func (c *call) revokes() keyspace.LeaseID {
	if c.step == nil {
		return 0
	}
	switch op := c.step.op.(type) {
	case *rangeapi.Prepare:
		return op.Revoke
	case *rangeapi.Revoke:
		return op.Lease
	}
	return 0
}

// patient says whether the step may wait for older transactions.
func (s *step) patient() bool {
	p, ok := s.op.(*rangeapi.Prepare)
	return ok && p.Patient
}
