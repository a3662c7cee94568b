package decide

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// emit decides the operation.
func (c *Cluster) emit(r *rng, op Operation) {
	op.Range, op.Bytes = r.Descriptor.Range, 0
	r.was = pace{r.movedAt, r.left, r.ledAt, r.evened, r.mate}
	if op.copies() {
		op.Bytes = r.Bytes
		r.movedAt, r.left = max(c.now, 1), 0
		if op.Reason >= Zones {
			r.left = op.From // not to and fro; a node that was lost or left itself may come back
		}
	}
	if op.Reason == None {
		op.Reason = r.need
	}
	if op.Reason == Load || op.Reason == Leaders || op.Reason == Cold && op.Kind != Merge {
		r.ledAt, r.evened = max(c.now, 1), 0
	}
	if op.Reason == Leaders {
		r.evened = op.Lead
	}
	op.Requires.Ranges = append(op.Requires.Ranges, r.is())
	var other *rng
	if op.Kind == Merge {
		other = c.ranges[op.Other]
		op.Requires.Ranges = append(op.Requires.Ranges, other.is())
	}
	for _, id := range []keyspace.NodeID{op.To, op.Lead} {
		if id != 0 && !slices.Contains(op.Requires.Live, id) && !slices.Contains(op.Requires.Heard, id) {
			op.Requires.Live = append(op.Requires.Live, id)
		}
	}
	c.attach(r, other, &op)
	c.round = append(c.round, op)
	c.reindex()
}

// is pins the range as it is.
func (r *rng) is() RangeIs {
	d := &r.Descriptor
	return RangeIs{d.Range, d.Generation, d.ConfIndex, d.Replicas}
}
