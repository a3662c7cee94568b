package eval

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
)

// VersionCache remembers the newest applied version of keys that this node's leaders have
// written or read lately. A read, update or compare of such a key needs no lookup in the
// engine, the dearest step of an evaluation and of a read. It is a bounded cache and no
// index: other keys are looked up. It is safe for concurrent use.
//
// An entry belongs to a [KeyEpoch]. During an epoch a replica applies entries of its own
// pipeline only, and the pipeline keeps the cache true. Anything else that changes the
// replica's state (another leader's entry, a snapshot, a split) ends the epoch, and with it
// all of the replica's entries at once. During an epoch the range's span only grows: a range
// that absorbs its neighbour takes over the neighbour's epochs, see [KeyEpochs].
type VersionCache struct {
	seed   maphash.Seed
	parts  [cacheParts]cachePart
	epochs atomic.Uint64
}

// cacheParts divides the cache, so that evaluating and applying goroutines seldom
// wait for each other.
const cacheParts = 16

// cacheOverheadBytes is about what an entry takes beside its key: the slot, and its
// share of an index that is half full.
const cacheOverheadBytes = 160

// KeyEpoch names the entries of one replica that are true.
type KeyEpoch uint64

// KeyEpochs are those of a replica's keys, in the order of the keys. A range that has absorbed
// neighbours has several. Without the neighbours' epochs it would look up each of their keys
// once, just when all callers that have waited for the merge arrive. The owner guards them.
type KeyEpochs []epochFrom

// epochFrom is the epoch of the keys from start on, to where the next one begins.
type epochFrom struct {
	start []byte
	epoch KeyEpoch
}

// MaxKeyEpochs bounds the epochs of a replica, its own with those of its former neighbours.
const MaxKeyEpochs = 16

// NewKeyEpochs returns the epochs of a replica of which nothing is known.
func NewKeyEpochs(c *VersionCache) KeyEpochs { return KeyEpochs{{epoch: c.begin()}} }

// Of returns the epoch of a key.
func (r KeyEpochs) Of(key []byte) KeyEpoch {
	i := len(r) - 1
	for i > 0 && bytes.Compare(key, r[i].start) < 0 {
		i--
	}
	return r[i].epoch
}

// only returns the epoch if all keys have the same.
func (r KeyEpochs) only() (KeyEpoch, bool) { return r[0].epoch, len(r) == 1 }

// End ends all of them: the one that begins is without entries.
func (r *KeyEpochs) End(c *VersionCache) { *r = append((*r)[:0], epochFrom{epoch: c.begin()}) }

// Absorb takes over those of the right neighbour, whose keys begin at border; nil where none
// are known. Nobody else may use them any more.
func (r *KeyEpochs) Absorb(c *VersionCache, border []byte, right KeyEpochs) {
	if len(right) == 0 {
		right = NewKeyEpochs(c)
	}
	if len(*r)+len(right) > MaxKeyEpochs {
		r.End(c)
		return
	}
	right[0].start = border
	*r = append(*r, right...)
}

// CachedVersion is a version. A large value is left out: Whole says that the value is there.
type CachedVersion struct {
	// Alive says that the key is there; otherwise only Mod is set.
	Alive, Whole bool
	Version      int64
	Lease        keyspace.LeaseID
	Mod, Create  keyspace.Revision
	Value        []byte
}

// MaxCachedValueBytes bounds a value that is kept. Most values of a store like this are
// smaller, and a few large ones would take the room of many.
const MaxCachedValueBytes = 2 << 10

// maxCachedKeyBytes bounds a key that is remembered.
const maxCachedKeyBytes = 2 << 10

// keep returns the version without a value that is too large.
func (v CachedVersion) keep() CachedVersion {
	v.Whole = v.Alive && len(v.Value) <= MaxCachedValueBytes
	if !v.Whole {
		v.Value = nil
	}
	return v
}

// cachePart is a second-chance (clock) cache.
type cachePart struct {
	mu    sync.Mutex
	index slotIndex
	slots []cacheSlot
	// free are the slots without an entry.
	free []int32
	hand int
	// bytes is what the entries take, at most max.
	bytes, max int64
}

type cacheSlot struct {
	// key is the epoch in eight bytes, and the key; empty for a free slot.
	key     string
	hash    uint32
	version CachedVersion
	// used says that the entry was read since the hand last passed it.
	used bool
}

// NewVersionCache returns an empty cache that takes about maxBytes at most.
func NewVersionCache(maxBytes int64) *VersionCache {
	c := &VersionCache{seed: maphash.MakeSeed()}
	for i := range c.parts {
		c.parts[i].max = maxBytes / cacheParts
	}
	return c
}

// begin returns an epoch without entries.
func (c *VersionCache) begin() KeyEpoch { return KeyEpoch(c.epochs.Add(1)) }

// cacheKey appends the name of an entry to dst.
func cacheKey(dst []byte, e KeyEpoch, key []byte) []byte {
	return append(binary.BigEndian.AppendUint64(dst, uint64(e)), key...)
}

// part returns where a name belongs, and its hash there.
func (c *VersionCache) part(name []byte) (p *cachePart, hash uint32) {
	h := maphash.Bytes(c.seed, name)
	return &c.parts[h%cacheParts], uint32(h >> 32)
}

// findLocked returns the slot of a name, nil for none.
func (p *cachePart) findLocked(hash uint32, name []byte) *cacheSlot {
	for i, b := p.index.find(hash, int(hash)); i >= 0; i, b = p.index.find(hash, b+1) {
		if s := &p.slots[i]; s.key == string(name) {
			return s
		}
	}
	return nil
}

// Get returns what is known of the key.
func (c *VersionCache) Get(e KeyEpoch, key []byte) (found CachedVersion, ok bool) {
	var short [128]byte
	name := cacheKey(short[:0], e, key)
	p, hash := c.part(name)
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.findLocked(hash, name)
	if s == nil {
		return CachedVersion{}, false
	}
	s.used = true
	return s.version, true
}

// Put notes what the key's newest applied version is. The cache keeps the value:
// nobody may change it any more.
func (c *VersionCache) Put(e KeyEpoch, key []byte, v CachedVersion) {
	if len(key) > maxCachedKeyBytes {
		return
	}
	var short [128]byte
	name := cacheKey(short[:0], e, key)
	p, hash := c.part(name)
	p.mu.Lock()
	defer p.mu.Unlock()
	v = v.keep()
	if s := p.findLocked(hash, name); s != nil {
		p.bytes -= s.bytes()
		s.version = v
		p.bytes += s.bytes()
		for p.bytes > p.max {
			p.evictLocked()
		}
		return
	}
	s := cacheSlot{hash: hash, version: v}
	cost := int64(len(name)) + s.bytes()
	if cost > p.max {
		return
	}
	for p.bytes+cost > p.max {
		p.evictLocked()
	}
	if len(p.free) == 0 {
		p.free = append(p.free, int32(len(p.slots)))
		p.slots = append(p.slots, cacheSlot{})
	}
	i := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	s.key = string(name)
	p.slots[i] = s
	p.index.add(hash, i)
	p.bytes += cost
}

// evictLocked takes out one entry that was not read for a whole turn of the hand.
// There must be one at all.
func (p *cachePart) evictLocked() {
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

func (p *cachePart) removeLocked(i int32) {
	s := &p.slots[i]
	p.index.remove(s.hash, i)
	p.bytes -= s.bytes()
	p.free = append(p.free, i)
	*s = cacheSlot{}
}

// bytes is about what the entry takes.
func (s *cacheSlot) bytes() int64 {
	return int64(len(s.key)+len(s.version.Value)) + cacheOverheadBytes
}
