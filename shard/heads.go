package shard

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
)

// heads remembers the newest applied version of keys that this node's leaders have
// written or read lately. To read such a key, to update it or to compare it then costs
// no lookup in the engine, which is the dearest step of an evaluation and of a read. It
// is a bounded cache and no index: what is not in it is looked up.
//
// An entry belongs to a reign: the time in which all that was applied to a replica
// came from its own pipeline, which keeps the entries true. Anything else that changes
// the replica's state (another leader's entry, a snapshot, a split) ends the reign, and
// with it all of the replica's entries at once. Within a reign the span grows alone: a range
// that absorbs its neighbour takes over what is known of the neighbour's keys, see reigns.
type heads struct {
	seed   maphash.Seed
	parts  [headParts]headPart
	reigns atomic.Uint64
}

// headParts divides the cache, so that evaluating and applying goroutines seldom
// wait for each other.
const headParts = 16

// headOverheadBytes is about what an entry takes beside its key: the slot, and its
// share of a map that is half full.
const headOverheadBytes = 160

// reign names the entries of one replica that are true.
type reign uint64

// reigns are those of a replica's keys, in the order of the keys: more than one where it has
// absorbed neighbours. Of keys that nobody knew it would have to look up each one once, just
// when all who have waited for the merge come at the same time.
type reigns []reignFrom

// reignFrom is the reign of the keys from start on, to where the next one begins.
type reignFrom struct {
	start []byte
	reign reign
}

// maxReigns bounds the reigns of a replica, its own with those of its former neighbours.
const maxReigns = 16

// of returns the reign of a key.
func (r reigns) of(key []byte) reign {
	i := len(r) - 1
	for i > 0 && bytes.Compare(key, r[i].start) < 0 {
		i--
	}
	return r[i].reign
}

// end ends all of them: the one that begins is without entries.
func (r *reigns) end(h *heads) { *r = append((*r)[:0], reignFrom{reign: h.begin()}) }

// absorb takes over those of the right neighbour, whose keys begin at border; nil where none
// are known. Nobody else may use them any more.
func (r *reigns) absorb(h *heads, border []byte, right reigns) {
	if len(right) == 0 {
		right = reigns{{reign: h.begin()}}
	}
	if len(*r)+len(right) > maxReigns {
		r.end(h)
		return
	}
	right[0].start = border
	*r = append(*r, right...)
}

// head is a version. A large value is left out: whole says that the value is there.
type head struct {
	alive, whole bool
	version      int64
	lease        keyspace.LeaseID
	mod, create  keyspace.Revision
	value        []byte
}

// maxHeadValueBytes bounds a value that is kept. Most values of a store like this are
// smaller, and a few large ones would take the room of many.
const maxHeadValueBytes = 2 << 10

// maxHeadKeyBytes bounds a key that is remembered.
const maxHeadKeyBytes = 2 << 10

// keep returns the version without a value that is too large.
func (h head) keep() head {
	h.whole = h.alive && len(h.value) <= maxHeadValueBytes
	if !h.whole {
		h.value = nil
	}
	return h
}

// headPart is a second-chance (clock) cache.
type headPart struct {
	mu    sync.Mutex
	index map[string]int32
	slots []headSlot
	// free are the slots without an entry.
	free []int32
	hand int
	// bytes is what the entries take, at most max.
	bytes, max int64
}

type headSlot struct {
	// key is the reign in eight bytes, and the key; empty for a free slot.
	key  string
	head head
	// used says that the entry was read since the hand last passed it.
	used bool
}

func newHeads(maxBytes int64) *heads {
	h := &heads{seed: maphash.MakeSeed()}
	for i := range h.parts {
		h.parts[i] = headPart{index: make(map[string]int32), max: maxBytes / headParts}
	}
	return h
}

// begin returns a reign without entries.
func (h *heads) begin() reign { return reign(h.reigns.Add(1)) }

// headKey appends the name of an entry to dst.
func headKey(dst []byte, r reign, key []byte) []byte {
	return append(binary.BigEndian.AppendUint64(dst, uint64(r)), key...)
}

func (h *heads) part(name []byte) *headPart {
	return &h.parts[maphash.Bytes(h.seed, name)%headParts]
}

// get returns what is known of the key.
func (h *heads) get(r reign, key []byte) (found head, ok bool) {
	var short [128]byte
	name := headKey(short[:0], r, key)
	p := h.part(name)
	p.mu.Lock()
	defer p.mu.Unlock()
	i, ok := p.index[string(name)]
	if !ok {
		return head{}, false
	}
	s := &p.slots[i]
	s.used = true
	return s.head, true
}

// put notes what the key's newest applied version is. The cache keeps the value:
// nobody may change it any more.
func (h *heads) put(r reign, key []byte, v head) {
	if len(key) > maxHeadKeyBytes {
		return
	}
	var short [128]byte
	name := headKey(short[:0], r, key)
	p := h.part(name)
	p.mu.Lock()
	defer p.mu.Unlock()
	v = v.keep()
	if i, ok := p.index[string(name)]; ok {
		s := &p.slots[i]
		p.bytes -= s.bytes()
		s.head = v
		p.bytes += s.bytes()
		for p.bytes > p.max {
			p.evictLocked()
		}
		return
	}
	s := headSlot{head: v}
	cost := int64(len(name)) + s.bytes()
	if cost > p.max {
		return
	}
	for p.bytes+cost > p.max {
		p.evictLocked()
	}
	if len(p.free) == 0 {
		p.free = append(p.free, int32(len(p.slots)))
		p.slots = append(p.slots, headSlot{})
	}
	i := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	s.key = string(name)
	p.slots[i] = s
	p.index[s.key] = i
	p.bytes += cost
}

// evictLocked takes out one entry that was not read for a whole turn of the hand.
// There must be one at all.
func (p *headPart) evictLocked() {
	for ; ; p.hand++ {
		if p.hand >= len(p.slots) {
			p.hand = 0
		}
		s := &p.slots[p.hand]
		if s.key == "" {
			continue
		}
		if s.used {
			s.used = false
			continue
		}
		p.removeLocked(int32(p.hand))
		// The slot is the next entry's, which is not to be the next victim.
		p.hand++
		return
	}
}

func (p *headPart) removeLocked(i int32) {
	s := &p.slots[i]
	delete(p.index, s.key)
	p.bytes -= s.bytes()
	p.free = append(p.free, i)
	*s = headSlot{}
}

// bytes is about what the entry takes.
func (s *headSlot) bytes() int64 {
	return int64(len(s.key)+len(s.head.value)) + headOverheadBytes
}
