package locktable

import (
	"bytes"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// Waiter is a request that may have to wait. Waiters are compared by ==.
type Waiter interface {
	// Asks returns the request of a client, or else the command of a transaction.
	Asks() (op proto.Message, cmd rangeapi.TxnCommand)
	// Bytes is what the waiter holds of its owner's budgets.
	Bytes() int64
	// Ticket is where the table keeps the waiter's number among those that ever waited, 0
	// before.
	Ticket() *uint32
}

// Meeting is a lock in the way of a request; Held is nil where there is none.
type Meeting struct {
	Held *Held
	// key is the key at which they meet, if the lock holds it as one; nil otherwise.
	key []byte
	// writes says that the request may write the key.
	writes bool
}

// group are waiters for the end of one lock, in their order. In a group with a key (L4) one
// waiter has its turn; once it has locked the key, the others wait for it without being
// looked at. In a group without a key each waiter is looked at.
type group struct {
	key []byte
	// writes says that they write the key: a lock that only compares it is in their way too.
	writes bool
	// on is the lock, nil while they have their turn.
	on      *Held
	waiters []Waiter
}

// waiting is who waits for whom.
type waiting struct {
	// blocked are the waiters and their groups, those that have their turn included.
	blocked map[Waiter]*group
	// woken are the groups that have their turn.
	woken []*group
	// wanted has the spans that waiters may write, revokers those that revoke a lease.
	wanted   spanIndex[Waiter]
	revokers map[keyspace.LeaseID][]Waiter
	// tickets counts those that had to wait.
	tickets uint32
	bytes   int64
}

// Wait adds a waiter for the end or change of the lock that it meets.
func (w *waiting) Wait(c Waiter, m Meeting) {
	if t := c.Ticket(); *t == 0 {
		w.tickets++
		*t = w.tickets
	}
	if _, cmd := c.Asks(); cmd != nil && !patient(cmd) {
		// It may wait for younger transactions only: whoever comes next may be older.
		m.key = nil
	}
	g := m.Held.groupAt(m.key, m.writes)
	g.waiters = append(g.waiters, c)
	if w.blocked == nil {
		w.blocked = map[Waiter]*group{}
	}
	w.blocked[c] = g
	w.bytes += c.Bytes()
	visitWrites(c, func(s keyspace.Span) { w.wanted.add(s, c, command.Exclusive) })
	if lease := revokesLease(c); lease != 0 {
		if w.revokers == nil {
			w.revokers = map[keyspace.LeaseID][]Waiter{}
		}
		w.revokers[lease] = append(w.revokers[lease], c)
	}
}

// groupAt returns the group that waits at the key.
func (h *Held) groupAt(key []byte, writes bool) *group {
	for _, g := range h.waiters {
		if (g.key == nil) == (key == nil) && (key == nil || g.writes == writes) && bytes.Equal(g.key, key) {
			return g
		}
	}
	g := &group{key: key, writes: writes, on: h}
	h.waiters = append(h.waiters, g)
	return g
}

// Waiters returns those who wait.
func (h *Held) Waiters() (all []Waiter) {
	for _, g := range h.waiters {
		all = append(all, g.waiters...)
	}
	return all
}

// Blocked returns how many wait or have their turn.
func (w *waiting) Blocked() int { return len(w.blocked) }

// BlockedBytes returns what those take that wait or have their turn.
func (w *waiting) BlockedBytes() int64 { return w.bytes }

// HasWoken says whether Next may return a waiter.
func (w *waiting) HasWoken() bool { return len(w.woken) > 0 }

// Leave takes away a waiter that waits or has its turn.
func (w *waiting) Leave(c Waiter) {
	g := w.blocked[c]
	i := slices.Index(g.waiters, c)
	g.waiters = slices.Delete(g.waiters, i, i+1)
	w.unblock(c)
}

func (w *waiting) unblock(c Waiter) {
	delete(w.blocked, c)
	w.bytes -= c.Bytes()
	visitWrites(c, func(s keyspace.Span) { w.wanted.remove(s, c) })
	if lease := revokesLease(c); lease != 0 {
		rest := slices.DeleteFunc(w.revokers[lease], func(o Waiter) bool { return o == c })
		if w.revokers[lease] = rest; len(rest) == 0 {
			delete(w.revokers, lease)
		}
	}
}

// Wake gives a turn to all who wait for the lock, which has ended or changed. It says whether
// there are any.
func (w *waiting) Wake(h *Held) bool {
	h.Deciding = false
	if h.ended != nil {
		close(h.ended)
		h.ended = nil
	}
	if len(h.waiters) == 0 {
		return false
	}
	for _, g := range h.waiters {
		g.on = nil
	}
	w.woken = append(w.woken, h.waiters...)
	h.waiters = nil
	return true
}

// Next takes the first of the waiters that have their turn, nil if there is none. Waiters
// whose key is locked again go on waiting.
func (t *Table) Next() Waiter {
	for len(t.woken) > 0 {
		i := t.firstWoken()
		g := t.woken[i]
		if len(g.waiters) > 0 {
			h := t.set.holder(g.key, g.writes).Held
			if h == nil {
				c := g.waiters[0]
				g.waiters[0] = nil
				g.waiters = g.waiters[1:]
				t.unblock(c)
				return c
			}
			g.on = h
			h.waiters = append(h.waiters, g)
		}
		t.woken = slices.Delete(t.woken, i, i+1)
	}
	return nil
}

// firstWoken returns which of the woken groups is empty or begins with the waiter that came
// first.
func (w *waiting) firstWoken() (first int) {
	for i, g := range w.woken {
		if len(g.waiters) == 0 {
			return i
		}
		if *g.waiters[0].Ticket() < *w.woken[first].waiters[0].Ticket() {
			first = i
		}
	}
	return first
}

// TakeWoken takes all that have their turn.
func (w *waiting) TakeWoken() (all []Waiter) {
	for _, g := range w.woken {
		for _, c := range g.waiters {
			w.unblock(c)
			all = append(all, c)
		}
	}
	w.woken = nil
	return all
}

// wantedBy looks for a waiter that will write in the span, and is an older transaction or holds
// nothing. It returns the lock for which that one waits. A transaction that only compares
// there waits for the same lock, behind it: one after the other, those would keep it out for
// ever (L3).
func (w *waiting) wantedBy(s keyspace.Span, name rangeapi.TxnName) (found *Held) {
	w.wanted.visit(s, func(c Waiter, _ command.LockMode, _ []byte) bool {
		if p := prepareOf(c); p == nil || p.Name.Compare(name.TxnID) < 0 {
			if h := w.blocked[c].on; h != nil && h.Lock != nil && h.Name != name {
				found = h
			}
		}
		return found == nil
	})
	return found
}

// wantedLease is wantedBy of a lease: transactions that attach keys one after the other would
// keep an older revoke out for ever.
func (w *waiting) wantedLease(lease keyspace.LeaseID, name rangeapi.TxnName) *Held {
	for _, c := range w.revokers[lease] {
		on := w.blocked[c].on
		if on == nil || on.Lock == nil || on.Name == name {
			continue
		}
		if p := prepareOf(c); p == nil || p.Name.Compare(name.TxnID) < 0 {
			return on
		}
	}
	return nil
}

// meetsLeases calls meet with locks in the way of what a Prepare does with leases.
func (t *Table) meetsLeases(op *rangeapi.Prepare, meet func(h *Held)) {
	if t.set == nil || len(t.set.leases) == 0 {
		return
	}
	for _, h := range t.set.leases[op.Revoke] {
		if h.Name != op.Name {
			meet(h)
		}
	}
	for i := range op.Writes {
		if h := t.set.revokes(op.Writes[i].Op); h != nil && h.Name != op.Name {
			meet(h)
		}
		visitLeases(op.Writes[i].Op, func(lease keyspace.LeaseID) {
			if h := t.wantedLease(lease, op.Name); h != nil {
				meet(h)
			}
		})
	}
}

// prepareOf returns the waiter's Prepare, nil if it asks for something else.
func prepareOf(c Waiter) *rangeapi.Prepare {
	_, cmd := c.Asks()
	p, _ := cmd.(*rangeapi.Prepare)
	return p
}

// visitWrites calls fn with every span that a waiter may write, if it is a client's request
// or a Prepare.
func visitWrites(c Waiter, fn func(s keyspace.Span)) {
	touch := func(key, end []byte, writes bool) {
		if s, ok := keyspace.FromEtcd(key, end); ok && writes {
			fn(s)
		}
	}
	op, cmd := c.Asks()
	if cmd == nil {
		visitKeys(op, touch)
	} else if p, ok := cmd.(*rangeapi.Prepare); ok {
		p.Keys(touch)
	}
}

// revokesLease returns the lease that a waiter revokes, 0 for none.
func revokesLease(c Waiter) keyspace.LeaseID {
	_, cmd := c.Asks()
	switch op := cmd.(type) {
	case *rangeapi.Prepare:
		return op.Revoke
	case *rangeapi.Revoke:
		return op.Lease
	}
	return 0
}

// patient says whether a command may wait for older transactions.
func patient(cmd rangeapi.TxnCommand) bool {
	p, ok := cmd.(*rangeapi.Prepare)
	return ok && p.WaitForOlder
}
