package wal

import (
	"fmt"
	"slices"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Batch is a list of changes to groups that become durable together. One goroutine builds
// it and submits it once; then the log owns it.
//
// A batch of up to a third of a segment is atomic across crashes. A larger one is split
// between records into parts that are atomic and in order.
type Batch struct {
	log  *Log
	buf  []byte
	ops  []op
	sync bool

	// Set by Submit.
	done func(error)
	at   clock.Time
	// next is the first op not yet taken by the writer.
	next int
	// rewrite says that these are existing records, rewritten.
	rewrite bool
	// probe requests a real fsync even if there is nothing to sync.
	probe bool
}

// op is one record of a batch: buf[from:to] holds it, except what Submit and the writer
// fill in.
type op struct {
	kind    kind
	from    int
	to      int
	group   keyspace.GroupID
	at      position // of Compact (index only) and Reset
	ents    []*raftpb.Entry
	hard    hardState
	hasHard bool
	unitEnd bool
	skip    bool
	// Set by Submit: the record's group and its number in the order of submission.
	g  *GroupLog
	no uint64
	// version is that of the log from which a rewrite was read.
	version uint32
	// off is where the writer puts the record; prevOff and prevLen name the record to
	// which it is chained.
	off     int64
	prevOff uint32
	prevLen uint32
}

// NewBatch returns an empty batch that will be synced.
func (l *Log) NewBatch() *Batch {
	b := &Batch{log: l, sync: true}
	if buf, ok := l.bufs.Get().(*[]byte); ok {
		b.buf = (*buf)[:0]
	}
	return b
}

// recycleBytes is the largest buffer kept for another batch. One pass of a busy node over
// all of its groups makes batches of some MiB, and to grow a new buffer for each costs more
// than to write it. The pool gives up what nobody uses.
const recycleBytes = 4 << 20

// recycle keeps the buffer of a written batch.
func (l *Log) recycle(b *Batch) {
	buf := b.buf
	b.buf = nil
	if cap(buf) <= recycleBytes {
		l.bufs.Put(&buf)
	}
}

// SetSync sets whether the batch needs an fsync before its completion. Use false only
// for hard states that change nothing but the commit index. The batch is then written in
// order with all others and completes without an fsync of its own; a crash may lose it
// together with the batches behind it.
func (b *Batch) SetSync(sync bool) { b.sync = sync }

// Len returns the number of records.
func (b *Batch) Len() int { return len(b.ops) }

// Bytes returns the size that the batch will have in the log.
func (b *Batch) Bytes() int64 { return int64(len(b.buf)) }

// Append stores entries and a hard state of g in one record. It replaces the log's tail
// from the first entry's index on. A nil hs keeps the stored one. A group that was
// unknown or removed is created empty.
//
// The entries must have consecutive indexes and follow the log without a gap. The hard
// state's commit index must not be above the log's end. Anything else is a bug of the
// caller and panics, at Submit at the latest. The log keeps the entries, so nobody may
// change them afterwards.
func (b *Batch) Append(g keyspace.GroupID, hs *raftpb.HardState, ents []*raftpb.Entry) {
	if hs == nil && len(ents) == 0 {
		return
	}
	for i, e := range ents {
		if want := ents[0].GetIndex() + uint64(i); e.GetIndex() != want || want == 0 {
			panic(fmt.Sprintf("wal: group %s: entry %d of an append has index %d, want %d", g, i, e.GetIndex(), want))
		}
	}
	// A record is never larger than a unit; the last one carries the hard state.
	for {
		n := b.entriesThatFit(g, ents)
		part := op{kind: kindAppend, group: g, ents: slices.Clone(ents[:n])}
		ents = ents[n:]
		if len(ents) == 0 && hs != nil {
			part.hard, part.hasHard = hardStateOf(hs), true
		}
		b.add(part)
		if len(ents) == 0 {
			return
		}
	}
}

func (b *Batch) entriesThatFit(g keyspace.GroupID, ents []*raftpb.Entry) int {
	size, room := int64(recordLen), b.log.opts.unitBytes()
	for i, e := range ents {
		size += entryLen + int64(len(e.GetData()))
		if size > room && i > 0 {
			return i
		}
		if size > room {
			panic(fmt.Sprintf("wal: group %s: entry %d of %d bytes, at most %d fit", g, e.GetIndex(), len(e.GetData()), room))
		}
	}
	return len(ents)
}

// Compact says that entries at or below index are no longer needed. The term at index
// stays known. It does nothing below the current base or for an unknown group, and panics
// at Submit above the end of the log.
func (b *Batch) Compact(g keyspace.GroupID, index uint64) {
	b.add(op{kind: kindCompact, group: g, at: position{index: index}})
}

// Reset makes the log of g empty behind (index, term), for a new replica or a snapshot. A
// nil hs keeps the stored hard state. A group that was unknown or removed is created. A
// commit index above index panics at Submit.
func (b *Batch) Reset(g keyspace.GroupID, index, term uint64, hs *raftpb.HardState) {
	o := op{kind: kindReset, group: g, at: position{index, term}}
	if hs != nil {
		o.hard, o.hasHard = hardStateOf(hs), true
	}
	b.add(o)
}

// Remove writes a tombstone: the group has no state, and counts as removed until it is
// created again or forgotten.
func (b *Batch) Remove(g keyspace.GroupID) { b.add(op{kind: kindRemove, group: g}) }

// Forget ends the tombstone of a removed group. Call it once the deletion of the
// replica's data is durable in the engine. Before that, a crash brings the data back, and
// only the tombstone says that the data belong to no replica. It does nothing for a group
// that is not removed.
func (b *Batch) Forget(g keyspace.GroupID) { b.add(op{kind: kindForget, group: g}) }

func (b *Batch) add(o op) {
	o.from = len(b.buf)
	var first uint64
	size := recordLen
	for _, e := range o.ents {
		size += entryLen + len(e.GetData())
	}
	if len(o.ents) > 0 {
		first = o.ents[0].GetIndex()
	}
	b.buf = slices.Grow(b.buf, size)
	b.buf = beginRecord(b.buf, o.kind, o.group, first, len(o.ents))
	for _, e := range o.ents {
		b.buf = appendEntry(b.buf, e)
	}
	b.buf = endRecord(b.buf)
	o.to = len(b.buf)
	b.ops = append(b.ops, o)
}

// cutUnits marks the ends of the atomic units, once it is known which records are
// skipped, and returns the size of the others.
func (b *Batch) cutUnits(unitBytes int64) (total int64) {
	var size int64
	last := -1
	for i := range b.ops {
		o := &b.ops[i]
		if o.skip {
			continue
		}
		n := int64(o.to - o.from)
		if last >= 0 && size+n > unitBytes {
			b.ops[last].unitEnd = true
			size = 0
		}
		size += n
		total += n
		last = i
	}
	if last >= 0 {
		b.ops[last].unitEnd = true
	}
	return total
}

// unit returns the end and the size of the next unit, from b.next on.
func (b *Batch) unit() (end int, size int64) {
	for end = b.next; end < len(b.ops); end++ {
		o := &b.ops[end]
		if o.skip {
			continue
		}
		size += int64(o.to - o.from)
		if o.unitEnd {
			end++
			break
		}
	}
	// Skipped records at the end belong to the last unit.
	for end < len(b.ops) && b.ops[end].skip {
		end++
	}
	return end, size
}
