package node

import "runtime/metrics"

const (
	// snapshotTidyBytes is after how many bytes of keys and values, or of the file, garbage is collected again at the
	// earliest, and snapshotGarbageBytes how much more must be on the heap then.
	snapshotTidyBytes    = 8 << 20
	snapshotGarbageBytes = 16 << 20
)

// A tidyHeap bounds the garbage of a snapshot. A node lets garbage grow up to a part of its memory budget, and a
// snapshot allocates a few times what the store has: one of 50 MiB had a node at rest grow by 320 MiB. One goroutine at
// a time uses it.
type tidyHeap struct {
	heap    func() uint64
	collect func()
	base    uint64 // the least that was on the heap since garbage was collected, or since the snapshot began
	since   int64  // bytes that have passed since garbage was collected
}

func newTidyHeap(heap func() uint64, collect func()) *tidyHeap {
	return &tidyHeap{heap: heap, collect: collect, base: heap()}
}

// heapBytes is how many bytes are on the heap, garbage among them.
func heapBytes() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// passed counts what was read or written, and collects garbage where much of it may have come since.
func (t *tidyHeap) passed(bytes int64) {
	if t.since += bytes; t.since < snapshotTidyBytes {
		return
	}
	t.since = 0
	now := t.heap()
	if t.base = min(t.base, now); now >= t.base+snapshotGarbageBytes {
		t.collect()
		// What is left is no garbage: the block cache fills meanwhile, and other requests have what is theirs.
		t.base = t.heap()
	}
}
