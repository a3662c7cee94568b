package lease

import (
	"container/heap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Deadlines is a set of leases with a moment for each. The zero value is empty. It has
// no lock and reads no clock.
type Deadlines struct {
	queue queue
	items map[keyspace.LeaseID]*item
}

type item struct {
	id keyspace.LeaseID
	at clock.Time
	// index is the place in the queue.
	index int
}

// Len returns the number of leases in the set.
func (d *Deadlines) Len() int { return len(d.queue) }

// Set puts the lease into the set, or gives it another moment.
func (d *Deadlines) Set(id keyspace.LeaseID, at clock.Time) {
	if it, ok := d.items[id]; ok {
		it.at = at
		heap.Fix(&d.queue, it.index)
		return
	}
	if d.items == nil {
		d.items = map[keyspace.LeaseID]*item{}
	}
	it := &item{id: id, at: at}
	d.items[id] = it
	heap.Push(&d.queue, it)
}

// Remove takes the lease out of the set, if it is in it.
func (d *Deadlines) Remove(id keyspace.LeaseID) {
	if it, ok := d.items[id]; ok {
		heap.Remove(&d.queue, it.index)
		delete(d.items, id)
	}
}

// At returns the lease's moment.
func (d *Deadlines) At(id keyspace.LeaseID) (at clock.Time, ok bool) {
	it, ok := d.items[id]
	if !ok {
		return 0, false
	}
	return it.at, true
}

// Next returns the first moment of all.
func (d *Deadlines) Next() (at clock.Time, ok bool) {
	if len(d.queue) == 0 {
		return 0, false
	}
	return d.queue[0].at, true
}

// TakeDue takes out of the set, in the order of their moments, the leases whose moment has
// come: limit at most.
func (d *Deadlines) TakeDue(now clock.Time, limit int) []keyspace.LeaseID {
	var ids []keyspace.LeaseID
	for len(ids) < limit && len(d.queue) > 0 && d.queue[0].at <= now {
		it := heap.Pop(&d.queue).(*item)
		delete(d.items, it.id)
		ids = append(ids, it.id)
	}
	return ids
}

// queue is a heap by moment, and by id where two are the same, so that the order does not
// depend on the course of things.
type queue []*item

// Len implements heap.Interface.
func (q queue) Len() int { return len(q) }

// Less implements heap.Interface.
func (q queue) Less(i, j int) bool {
	if q[i].at != q[j].at {
		return q[i].at < q[j].at
	}
	return q[i].id < q[j].id
}

// Swap implements heap.Interface.
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	it := x.(*item)
	it.index = len(*q)
	*q = append(*q, it)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	it := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	return it
}
