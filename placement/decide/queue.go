package decide

import "math/rand/v2"

// queue is the ranges with one need. A round looks at a bounded number of them, going on
// where the round before has stopped, so that each has its turn.
type queue struct {
	items []*rng
	next  int
}

// add puts the range at a random place. Ranges that become urgent together, as those of a lost
// node, are often led by the same few nodes. In order they would wait for those nodes while
// others are idle.
func (q *queue) add(r *rng, random *rand.Rand) {
	q.items = append(q.items, r)
	last := len(q.items) - 1
	at := random.IntN(len(q.items))
	q.items[at], q.items[last] = q.items[last], q.items[at]
	q.items[last].needPos = last
	q.items[at].needPos = at
}

func (q *queue) remove(r *rng) {
	if r.needPos < 0 {
		return
	}
	last := q.items[len(q.items)-1]
	q.items[r.needPos], last.needPos = last, r.needPos
	q.items[len(q.items)-1] = nil
	q.items = q.items[:len(q.items)-1]
	r.needPos = -1
}

// setNeed moves the range to the queue of its need.
func (c *Cluster) setNeed(r *rng, need Reason) {
	if r.need == need {
		return
	}
	if r.need != None {
		c.queues[r.need].remove(r)
	}
	r.need = need
	if need != None {
		c.queues[need].add(r, c.random)
	}
}
