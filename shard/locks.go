package shard

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/locktable"
)

// The calls of a replica are the waiters of its lock table.
var _ locktable.Waiter = (*call)(nil)

// Asks implements locktable.Waiter.
func (c *call) Asks() (proto.Message, rangeapi.TxnCommand) {
	if c.cmd != nil {
		return nil, c.cmd.op
	}
	return c.req.Op, nil
}

// Bytes implements locktable.Waiter.
func (c *call) Bytes() int64 { return c.bytes }

// Ticket implements locktable.Waiter.
func (c *call) Ticket() *uint32 { return &c.ticket }

// callOf returns the waiter as the call that it is.
func callOf(w locktable.Waiter) *call {
	return w.(*call) //nolint:forcetypeassert // a replica's waiters are its calls
}

// blockLocked lets a call wait until the lock has ended or changed.
func (r *Replica) blockLocked(c *call, m locktable.Meeting) {
	c.moveTo(placeBlocked, nil)
	r.locks.Wait(c, m)
	r.node.metrics.lockWaits.Inc()
}

// leaveLocked takes a call whose caller has given up away from the lock for which it waits.
func (r *Replica) leaveLocked(c *call, err error, out *answers) {
	if c.place != placeBlocked {
		return
	}
	r.locks.Leave(c)
	out.add(c, kverror.Of(err))
}

// wokenLocked has the pool evaluate those who have their turn, if there are any.
func (r *Replica) wokenLocked(woken bool) {
	if woken {
		r.node.pool.schedule(r)
	}
}

// queueWokenLocked puts the calls that have their turn back to the front of the queue.
func (r *Replica) queueWokenLocked() {
	if !r.locks.HasWoken() {
		return
	}
	var calls []*call
	for _, w := range r.locks.TakeWoken() {
		c := callOf(w)
		c.moveTo(placeQueue, nil)
		r.queueBytes += c.bytes
		calls = append(calls, c)
	}
	r.queue = slices.Insert(r.queue, 0, calls...)
}

// publishTxnsLocked takes over what an applied entry has done to locks, records and marks.
func (r *Replica) publishTxnsLocked(changes []lockChange) {
	now := r.node.cfg.Clock.Now()
	for i := range changes {
		ch := &changes[i]
		if ch.mark.Lease != 0 {
			r.publishMarkLocked(ch.mark)
			continue
		}
		r.wokenLocked(r.locks.Apply(&ch.Change, now))
	}
}

// forgetLocks drops the locks of a replica that is gone from the node's budget.
func (r *Replica) forgetLocks() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.locks.Forget()
}

// loadTableLocked makes the table of a replica whose state was read from the engine.
func (r *Replica) loadTableLocked(s *command.TxnState) {
	r.locks.Forget()
	r.marks = maps.Clone(s.Attachments)
	changes := make([]lockChange, 0, len(s.Locks)+len(s.Records))
	for _, l := range s.Locks {
		changes = append(changes, lockChange{Change: locktable.Change{Added: l}})
	}
	for _, t := range s.Records {
		changes = append(changes, lockChange{Change: locktable.Change{Record: t}})
	}
	r.publishTxnsLocked(changes)
}
