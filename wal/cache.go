package wal

import (
	"sync"

	"go.etcd.io/raft/v3/raftpb"
)

// chunkOverhead is the cost of a chunk beyond its entries, entryOverhead that of an entry
// beyond its data.
const (
	chunkOverhead = 128
	entryOverhead = 144
)

// chunk holds the entries of one submitted record in memory. Until the record is written
// they are the only copy and are not evicted; afterwards they are cache.
type chunk struct {
	g *GroupLog
	// no is the record's number in the order of submission.
	no uint64
	// first and ents are guarded by g.mu. ents shrinks when its tail is overwritten,
	// before or after it is written; in g.chunks it is never empty.
	first uint64
	ents  []*raftpb.Entry
	bytes int64
	// Guarded by cache.mu.
	prev, next *chunk
	listed     bool
}

func newChunk(g *GroupLog, no uint64, ents []*raftpb.Entry) *chunk {
	c := &chunk{g: g, no: no, first: ents[0].GetIndex(), ents: ents, bytes: chunkOverhead}
	for _, e := range ents {
		c.bytes += entryOverhead + int64(len(e.GetData()))
	}
	return c
}

func (c *chunk) last() uint64 { return c.first + uint64(len(c.ents)) - 1 }

// cache lists all chunks in the order of submission. It evicts the oldest: followers and
// apply ask for the newest entries.
type cache struct {
	mu    sync.Mutex
	root  chunk // ring
	bytes int64
	limit int64
}

func newCache(limit int64) *cache {
	c := &cache{limit: limit}
	c.root.prev, c.root.next = &c.root, &c.root
	return c
}

func (c *cache) add(ch *chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch.prev, ch.next = c.root.prev, &c.root
	ch.prev.next, ch.next.prev = ch, ch
	ch.listed = true
	c.bytes += ch.bytes
}

func (c *cache) drop(ch *chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unlinkLocked(ch)
}

func (c *cache) unlinkLocked(ch *chunk) {
	if !ch.listed {
		return
	}
	ch.prev.next, ch.next.prev = ch.next, ch.prev
	ch.prev, ch.next, ch.listed = nil, nil, false
	c.bytes -= ch.bytes
}

// evict removes the oldest written chunks until the cache is within its limit. It returns
// them, to be dropped from their groups' views.
func (c *cache) evict(written uint64) (out []*chunk) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.bytes > c.limit && c.root.next != &c.root && c.root.next.no <= written {
		ch := c.root.next
		c.unlinkLocked(ch)
		out = append(out, ch)
	}
	return out
}

func (c *cache) size() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
