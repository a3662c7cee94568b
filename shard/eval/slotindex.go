package eval

// slotIndex finds the slots of a cachePart by the hashes of their names. It is a table with open addressing and linear probing, at
// most half full, so that a search touches one line of the processor's cache, nearly always. Go's map touched three, and
// was a sixth of the processor's time where all keys are new. The zero value is empty.
type slotIndex struct {
	// buckets have a hash in their upper half, and the slot's number plus one in the lower one; 0 is free.
	buckets []uint64
	n       int
}

// minBuckets is a power of two, as are all sizes of the table.
const minBuckets = 16

// find returns the first slot with the hash at or behind a bucket, and its bucket. It is -1 where there is none. Names with the
// same hash are told apart by the caller, who begins at the bucket of the hash's own number and goes on behind.
func (x *slotIndex) find(hash uint32, from int) (slot int32, bucket int) {
	if len(x.buckets) == 0 {
		return -1, 0
	}
	for b := from; ; b++ {
		switch e := x.buckets[b&(len(x.buckets)-1)]; {
		case e == 0:
			return -1, b
		case uint32(e>>32) == hash:
			return int32(uint32(e) - 1), b
		}
	}
}

// add adds a slot.
func (x *slotIndex) add(hash uint32, slot int32) {
	if 2*(x.n+1) > len(x.buckets) {
		old := x.buckets
		x.buckets = make([]uint64, max(minBuckets, 2*len(old)))
		for _, e := range old {
			if e != 0 {
				x.place(e)
			}
		}
	}
	x.place(uint64(hash)<<32 | uint64(slot+1))
	x.n++
}

func (x *slotIndex) place(e uint64) {
	mask := len(x.buckets) - 1
	b := int(e>>32) & mask
	for x.buckets[b] != 0 {
		b = (b + 1) & mask
	}
	x.buckets[b] = e
}

// remove takes a slot out. What stands behind it moves up, as far as its search would not pass it otherwise.
func (x *slotIndex) remove(hash uint32, slot int32) {
	mask := len(x.buckets) - 1
	b := int(hash) & mask
	for x.buckets[b] != uint64(hash)<<32|uint64(slot+1) {
		b = (b + 1) & mask
	}
	for next := (b + 1) & mask; x.buckets[next] != 0; next = (next + 1) & mask {
		if home := int(x.buckets[next]>>32) & mask; (next-home)&mask >= (next-b)&mask {
			x.buckets[b] = x.buckets[next]
			b = next
		}
	}
	x.buckets[b] = 0
	x.n--
}
