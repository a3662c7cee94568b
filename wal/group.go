package wal

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

const (
	// runRecords and runBytes bound a run: finding an entry in it reads at most that many
	// records, from the last one backwards.
	runRecords = 16
	runBytes   = 64 << 10
)

// run is a sequence of entries of one term whose records lie in one segment, each naming
// the previous one. In memory it stands for up to runRecords records.
type run struct {
	first, last, term uint64
	seg               *segment
	// off and len are those of the run's last record, which may hold entries above
	// last that were overwritten.
	off, len uint32
	records  uint32
	bytes    uint32
}

// GroupLog is the log of one group: a view of the newest submitted state, even before it
// is durable. All methods may be called from many goroutines. It is valid until
// Batch.Forget of the group.
type GroupLog struct {
	log *Log
	id  keyspace.GroupID

	// mu guards everything below except the pin links. Every index in (base, last] is in
	// a chunk or in a run; chunks take precedence.
	mu      sync.Mutex
	exists  bool
	removed bool
	hasHard bool
	// version counts the changes that invalidate entries already read.
	version uint32
	base    position
	last    uint64
	hard    hardState
	// runs are in the order of index. They are in the order of the log too, except that
	// rewritten ones lie behind those that are not yet rewritten.
	runs   []run
	chunks []*chunk
	// oldest is the oldest segment with a run; nil if that is to be computed again.
	oldest *segment
	// moveBelow is the segment below which the group's entries may be rewritten whatever
	// their size. See Move.
	moveBelow uint64
	// newest is the segment with the group's newest written record, which holds the
	// group's small state.
	newest *segment

	// pinned is guarded by mu, the links by pins.mu.
	pinned           *segment
	pinPrev, pinNext *GroupLog
}

// ID returns the group's id.
func (g *GroupLog) ID() keyspace.GroupID { return g.id }

// Exists reports whether the group has state: something was stored since it was unknown
// or removed.
func (g *GroupLog) Exists() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.exists
}

// Removed says whether the group has a tombstone.
func (g *GroupLog) Removed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.removed
}

// Base returns the position behind which the log begins: that of the last compaction or
// reset.
func (g *GroupLog) Base() (index, term uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.base.index, g.base.term
}

// FirstIndex returns the index of the first entry that is or will be in the log.
func (g *GroupLog) FirstIndex() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.base.index + 1
}

// LastIndex returns the index of the last entry, or of the base in an empty log.
func (g *GroupLog) LastIndex() uint64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last
}

// HardState returns a copy of the hard state, or nil where none was stored.
func (g *GroupLog) HardState() *raftpb.HardState {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.hasHard {
		return nil
	}
	h := g.hard
	return &raftpb.HardState{Term: &h.term, Vote: &h.vote, Commit: &h.commit}
}

// Term returns the term of the entry at index i, from memory. It returns
// raft.ErrCompacted below the base and raft.ErrUnavailable above the log's end.
func (g *GroupLog) Term(i uint64) (uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case i < g.base.index:
		return 0, raft.ErrCompacted
	case i > g.last:
		return 0, raft.ErrUnavailable
	}
	return g.termLocked(i), nil
}

func (g *GroupLog) termLocked(i uint64) uint64 {
	if i == g.base.index {
		return g.base.term
	}
	if c := g.chunkLocked(i); c != nil {
		return c.ents[i-c.first].GetTerm()
	}
	return g.runs[g.runLocked(i)].term
}

// chunkLocked returns the chunk with the entry at i, or nil.
func (g *GroupLog) chunkLocked(i uint64) *chunk {
	if at := g.chunkFromLocked(i); at < len(g.chunks) && g.chunks[at].first <= i {
		return g.chunks[at]
	}
	return nil
}

// chunkFromLocked returns the position of the first chunk that ends at or above i.
func (g *GroupLog) chunkFromLocked(i uint64) int {
	at, _ := slices.BinarySearchFunc(g.chunks, i, func(c *chunk, i uint64) int {
		if c.last() < i {
			return -1
		}
		return 1
	})
	return at
}

// chunkOfLocked finds the chunk of a record. Chunks are in the order of submission and of
// index.
func (g *GroupLog) chunkOfLocked(no uint64) (at int, ok bool) {
	return slices.BinarySearchFunc(g.chunks, no, func(c *chunk, no uint64) int { return cmp.Compare(c.no, no) })
}

// runLocked returns the position of the run with the entry at i, which is in no chunk.
func (g *GroupLog) runLocked(i uint64) int {
	at, _ := slices.BinarySearchFunc(g.runs, i, func(r run, i uint64) int {
		if r.last < i {
			return -1
		}
		return 1
	})
	if at == len(g.runs) || g.runs[at].first > i {
		panic(fmt.Sprintf("wal: group %s: entry %d of (%d, %d] is in no chunk or run", g.id, i, g.base.index, g.last))
	}
	return at
}

// EntriesCached is Entries from memory only. ok is false if one of the entries is not in
// memory, or if the range is not in the log.
func (g *GroupLog) EntriesCached(lo, hi, maxBytes uint64) (_ []*raftpb.Entry, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.checkLocked(lo, hi) != nil {
		return nil, false
	}
	b := entryBuilder{maxBytes: maxBytes}
	for i := lo; i < hi && !b.full; {
		if i = g.cachedLocked(&b, i, hi); i < hi && !b.full && g.chunkLocked(i) == nil {
			return nil, false
		}
	}
	return b.ents, true
}

func (g *GroupLog) checkLocked(lo, hi uint64) error {
	if lo <= g.base.index {
		return raft.ErrCompacted
	}
	if hi < lo || hi > g.last+1 {
		return raft.ErrUnavailable
	}
	return nil
}

// cachedLocked adds entries from chunks and returns the next index.
func (g *GroupLog) cachedLocked(b *entryBuilder, i, hi uint64) uint64 {
	for i < hi && !b.full {
		c := g.chunkLocked(i)
		if c == nil {
			return i
		}
		for ; i < hi && i <= c.last() && b.add(c.ents[i-c.first]); i++ {
		}
	}
	return i
}

// entryBuilder collects entries up to a size, but at least one.
type entryBuilder struct {
	maxBytes, bytes uint64
	ents            []*raftpb.Entry
	full            bool
}

func (b *entryBuilder) add(e *raftpb.Entry) bool {
	n := messageBytes(e)
	if len(b.ents) > 0 && b.bytes+n > b.maxBytes {
		b.full = true
		return false
	}
	b.bytes += n
	b.ents = append(b.ents, e)
	return true
}

// messageBytes is the size of an entry as a message. Raft bounds by it what it asks for.
// proto.Size returns the same, but walks over the type: that takes as long as all else here.
func messageBytes(e *raftpb.Entry) (n uint64) {
	field := func(varint uint64) { n += 1 + uint64(protowire.SizeVarint(varint)) }
	if e.Type != nil {
		field(uint64(*e.Type))
	}
	if e.Term != nil {
		field(*e.Term)
	}
	if e.Index != nil {
		field(*e.Index)
	}
	if e.Data != nil {
		field(uint64(len(e.Data)))
		n += uint64(len(e.Data))
	}
	return n
}

// submit applies an op to the view and writes the resulting state into the op's record.
// It also runs under Log.mu, so the order of submission is the order of everything.
func (g *GroupLog) submit(o *op, rec []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch o.kind {
	case kindAppend:
		g.reviveLocked()
		g.submitAppendLocked(o)
	case kindCompact:
		if !g.exists || o.at.index <= g.base.index {
			o.skip = true
			return
		}
		if o.at.index > g.last {
			panic(fmt.Sprintf("wal: group %s: compaction to %d above the last index %d", g.id, o.at.index, g.last))
		}
		g.base = position{o.at.index, g.termLocked(o.at.index)}
		g.dropFrontLocked()
	case kindReset:
		g.reviveLocked()
		g.cutLocked(0)
		g.base, g.last = o.at, o.at.index
		g.submitHardLocked(o)
	case kindRewrite:
		g.submitRewriteLocked(o)
	case kindRemove:
		g.clearLocked()
		g.removed = true
	case kindForget:
		if o.skip = !g.removed; !o.skip {
			g.clearLocked()
		}
	default:
		panic(fmt.Sprintf("wal: op of kind %d", o.kind))
	}
	g.repinLocked()
	rec[16] = byte(o.kind)
	putState(rec, g.base, g.hard, g.hasHard)
	o.g = g
}

func (g *GroupLog) submitAppendLocked(o *op) {
	if len(o.ents) > 0 {
		first := o.ents[0].GetIndex()
		if first <= g.base.index || first > g.last+1 {
			panic(fmt.Sprintf("wal: group %s: append from %d does not fit (%d, %d]", g.id, first, g.base.index, g.last))
		}
		if first <= g.last {
			g.cutLocked(first)
		}
		g.last = o.ents[len(o.ents)-1].GetIndex()
		c := newChunk(g, o.no, o.ents)
		g.chunks = append(g.chunks, c)
		g.log.cache.add(c)
	}
	g.submitHardLocked(o)
}

func (g *GroupLog) submitHardLocked(o *op) {
	if o.hasHard {
		g.hard, g.hasHard = o.hard, true
	}
	if g.hard.commit > g.last {
		panic(fmt.Sprintf("wal: group %s: commit index %d above the last index %d", g.id, g.hard.commit, g.last))
	}
}

// submitRewriteLocked skips a rewrite if its entries may have been overwritten since they
// were read. Entries compacted meanwhile do no harm: the record's base is the current one.
func (g *GroupLog) submitRewriteLocked(o *op) {
	if o.version != g.version || !(g.exists || g.removed) {
		o.skip = true
		return
	}
	if g.removed {
		o.kind = kindRemove
	}
}

func (g *GroupLog) reviveLocked() {
	if !g.exists {
		g.clearLocked()
		g.exists = true
	}
}

// clearLocked makes the group unknown.
func (g *GroupLog) clearLocked() {
	g.cutLocked(0)
	g.exists, g.removed, g.hasHard = false, false, false
	g.base, g.last, g.hard = position{}, 0, hardState{}
}

// cutLocked forgets the entries at or above first.
func (g *GroupLog) cutLocked(first uint64) {
	g.version++
	for n := len(g.chunks); n > 0; n-- {
		c := g.chunks[n-1]
		if c.last() < first {
			break
		}
		if c.first < first {
			c.ents = c.ents[:first-c.first]
			break
		}
		g.log.cache.drop(c)
		g.chunks[n-1] = nil
		g.chunks = g.chunks[:n-1]
	}
	g.cutRunsLocked(first)
	g.tidyLocked()
}

func (g *GroupLog) cutRunsLocked(first uint64) {
	n := len(g.runs)
	for n > 0 && g.runs[n-1].first >= first {
		n--
		g.log.churn.Add(int64(g.runs[n].bytes))
	}
	if n < len(g.runs) {
		clear(g.runs[n:])
		g.runs, g.oldest = g.runs[:n], nil
	}
	if n > 0 && g.runs[n-1].last >= first {
		g.runs[n-1].last = first - 1
	}
}

// dropFrontLocked forgets runs and chunks that lie entirely at or below the base.
func (g *GroupLog) dropFrontLocked() {
	n := 0
	for ; n < len(g.chunks) && g.chunks[n].last() <= g.base.index; n++ {
		g.log.cache.drop(g.chunks[n])
	}
	clear(g.chunks[:n])
	g.chunks = g.chunks[n:]
	g.dropFrontRunsLocked()
	g.tidyLocked()
}

func (g *GroupLog) dropFrontRunsLocked() {
	n := 0
	for n < len(g.runs) && g.runs[n].last <= g.base.index {
		g.log.churn.Add(int64(g.runs[n].bytes))
		n++
	}
	if n > 0 {
		g.runs, g.oldest = slices.Delete(g.runs, 0, n), nil
	}
}

// tidyLocked frees memory that an idle group does not need.
func (g *GroupLog) tidyLocked() {
	g.runs = shrink(g.runs)
	g.chunks = shrink(g.chunks)
}

func shrink[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	if cap(s) > 8 && cap(s) > 4*len(s) {
		return slices.Clone(s)
	}
	return s
}

// dropChunk takes an evicted chunk out of the view, if it is still there.
func (g *GroupLog) dropChunk(c *chunk) {
	g.mu.Lock()
	defer g.mu.Unlock()
	i, ok := g.chunkOfLocked(c.no)
	switch {
	case !ok || g.chunks[i] != c:
	case i == 0:
		// The common case, and there may be very many chunks.
		g.chunks[0] = nil
		g.chunks = g.chunks[1:]
		g.tidyLocked()
	default:
		g.chunks = slices.Delete(g.chunks, i, i+1)
	}
}

// termSpan is a sequence of entries of one term within a record.
type termSpan struct{ first, last, term uint64 }

func appendTerm(spans []termSpan, index, term uint64) []termSpan {
	if n := len(spans); n > 0 && spans[n-1].term == term {
		spans[n-1].last = index
		return spans
	}
	return append(spans, termSpan{index, index, term})
}

// spansOf returns the terms of entries. few keeps the common case off the heap.
func spansOf(few []termSpan, ents []*raftpb.Entry) []termSpan {
	for _, e := range ents {
		few = appendTerm(few, e.GetIndex(), e.GetTerm())
	}
	return few
}

// lastRun returns the newest run of written entries.
func (g *GroupLog) lastRun() (run, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.runs) == 0 {
		return run{}, false
	}
	return g.runs[len(g.runs)-1], true
}

// follows reports whether a record with these entries may be chained to the run.
func (r *run) follows(seg *segment, s termSpan, length int64) bool {
	return r.seg == seg && r.term == s.term && r.last+1 == s.first &&
		r.records < runRecords && int64(r.bytes)+length <= runBytes
}

// locate tells the group where one of its records was written. Records are located in the
// order of submission. Later submissions that cut entries from the view have already cut
// them from the chunks and runs.
func (g *GroupLog) locate(o *op, seg *segment, off, length int64, prevOff, prevLen uint32) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.newest = seg
	var few [2]termSpan
	switch {
	case len(o.ents) == 0:
	case o.kind == kindRewrite:
		// A later submission has overwritten, compacted or removed the entries that are in
		// no run any more.
		if n := len(g.runs); n > 0 {
			begin := o.ents[0].GetIndex()
			from, to := max(g.runs[0].first, begin), min(g.runs[n-1].last, o.ents[len(o.ents)-1].GetIndex())
			if from <= to {
				g.replaceRunsLocked(seg, off, length, spansOf(few[:0], o.ents[from-begin:to+1-begin]))
				g.dropFrontRunsLocked()
				g.tidyLocked()
			}
		}
	default:
		// A later submission has overwritten, compacted or removed the entries that the
		// chunk no longer has.
		if i, ok := g.chunkOfLocked(o.no); ok {
			spans := spansOf(few[:0], g.chunks[i].ents)
			if g.extendLocked(seg, off, length, prevOff, prevLen, spans[0]) {
				spans = spans[1:]
			}
			g.addRunsLocked(seg, off, length, spans)
		}
	}
	g.repinLocked()
}

// extendLocked adds a record to the last run if the record is chained to the run's last
// one, so a run is never longer than its chain.
func (g *GroupLog) extendLocked(seg *segment, off, length int64, prevOff, prevLen uint32, s termSpan) bool {
	n := len(g.runs)
	if n == 0 || prevLen == 0 {
		return false
	}
	r := &g.runs[n-1]
	if r.seg != seg || r.off != prevOff || r.len != prevLen || r.last+1 != s.first || r.term != s.term {
		return false
	}
	r.extend(off, length, s.last)
	return true
}

func (g *GroupLog) addRunsLocked(seg *segment, off, length int64, spans []termSpan) {
	for _, s := range spans {
		g.runs = append(g.runs, newRun(seg, off, length, s))
	}
}

// replaceRunsLocked says that the entries of the spans are in another record from now on.
func (g *GroupLog) replaceRunsLocked(seg *segment, off, length int64, spans []termSpan) {
	first, last := spans[0].first, spans[len(spans)-1].last
	from, _ := slices.BinarySearchFunc(g.runs, first, func(r run, i uint64) int { return cmp.Compare(r.last, i) })
	to := from
	for to < len(g.runs) && g.runs[to].first <= last {
		to++
	}
	var runs []run
	if from < to && g.runs[from].first < first {
		runs = append(runs, g.runs[from].part(g.runs[from].first, first-1))
	}
	for _, s := range spans {
		runs = append(runs, newRun(seg, off, length, s))
	}
	if from < to && g.runs[to-1].last > last {
		runs = append(runs, g.runs[to-1].part(last+1, g.runs[to-1].last))
	}
	g.runs, g.oldest = slices.Replace(g.runs, from, to, runs...), nil
}

// part returns the run with a part of its entries. The reader finds them by the same
// records.
func (r run) part(first, last uint64) run {
	r.bytes = uint32(uint64(r.bytes) * (last + 1 - first) / (r.last + 1 - r.first))
	r.first, r.last = first, last
	return r
}

func newRun(seg *segment, off, length int64, s termSpan) run {
	return run{
		first: s.first, last: s.last, term: s.term, seg: seg,
		off: uint32(off), len: uint32(length), records: 1, bytes: uint32(length),
	}
}

func (r *run) extend(off, length int64, last uint64) {
	r.off, r.len, r.last = uint32(off), uint32(length), last
	r.records++
	r.bytes += uint32(length)
}

// repinLocked lists the group at the oldest segment that it needs.
func (g *GroupLog) repinLocked() {
	var to *segment
	switch {
	case !g.exists && !g.removed:
	case len(g.runs) > 0:
		if g.oldest == nil {
			g.oldest = slices.MinFunc(g.runs, func(a, b run) int { return cmp.Compare(a.seg.seq, b.seg.seq) }).seg
		}
		to = g.oldest
	default:
		to = g.newest
	}
	g.log.pins.move(g, to)
}

// runsInLocked returns the entries [first, end) of the first runs in the segment that lie
// together, without those that are compacted.
func (g *GroupLog) runsInLocked(s *segment) (first, end uint64, ok bool) {
	at := slices.IndexFunc(g.runs, func(r run) bool { return r.seg == s })
	if at < 0 {
		return 0, 0, false
	}
	first = max(g.runs[at].first, g.base.index+1)
	for ; at < len(g.runs) && g.runs[at].seg == s; at++ {
		end = g.runs[at].last + 1
	}
	return first, end, true
}

// Move says that the layer above cannot compact the entries that the log now has of the
// group. So they may be rewritten when the log exceeds its target, whatever their size.
func (g *GroupLog) Move() {
	if mutation.Is(mutation.TailsKept) {
		return
	}
	head := g.log.head()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.moveBelow = head
}

// tailBytesLocked returns the size of the records with the group's written entries.
func (g *GroupLog) tailBytesLocked() int64 {
	var n int64
	for i := range g.runs {
		n += int64(g.runs[i].bytes)
	}
	return n
}

// bytesInLocked returns the size of the records with the group's entries in the segment.
func (g *GroupLog) bytesInLocked(s *segment) int64 {
	var n int64
	for i := range g.runs {
		if g.runs[i].seg == s {
			n += int64(g.runs[i].bytes)
		}
	}
	return n
}

// replay applies a record found on disk, in the order of the log.
func (g *GroupLog) replay(r *record, seg *segment) error {
	switch r.kind {
	case kindRemove, kindForget:
		g.clearLocked()
		g.removed = r.kind == kindRemove
		g.newest = seg
		return nil
	case kindReset:
		g.reviveLocked()
		g.cutLocked(0)
		g.last = r.base.index
	default:
		g.reviveLocked()
	}
	g.base, g.hard, g.hasHard = r.base, r.hard, r.flags&flagHardState != 0
	g.newest = seg
	if r.count > 0 {
		if err := g.replayEntries(r, seg); err != nil {
			return err
		}
	}
	g.last = max(g.last, g.base.index)
	g.dropFrontRunsLocked()
	return nil
}

func (g *GroupLog) replayEntries(r *record, seg *segment) error {
	var few [2]termSpan
	spans, rest := few[:0], r.entries
	for i := r.first; i <= r.last(); i++ {
		e, tail, err := cutEntry(rest)
		if err != nil {
			return err
		}
		spans, rest = appendTerm(spans, i, e.term), tail
	}
	if r.kind == kindRewrite {
		g.last = max(g.last, r.last())
		g.replaceRunsLocked(seg, r.off, r.len, spans)
		return nil
	}
	g.cutRunsLocked(r.first)
	g.last = r.last()
	if g.extendLocked(seg, r.off, r.len, r.prevOff, r.prevLen, spans[0]) {
		spans = spans[1:]
	}
	g.addRunsLocked(seg, r.off, r.len, spans)
	return nil
}

// finishRecovery checks a recovered group and lists it at its oldest segment.
func (g *GroupLog) finishRecovery() error {
	next := g.base.index + 1
	for i := range g.runs {
		r := &g.runs[i]
		if i == 0 && r.first <= next {
			next = r.first
		}
		if r.first != next {
			return fmt.Errorf("group %s: entries %d to %d are missing", g.id, next, r.first-1)
		}
		next = r.last + 1
	}
	if next != g.last+1 {
		return fmt.Errorf("group %s: entries %d to %d are missing", g.id, next, g.last)
	}
	if g.hard.commit > g.last {
		return fmt.Errorf("group %s: commit index %d above the last index %d", g.id, g.hard.commit, g.last)
	}
	g.tidyLocked()
	g.repinLocked()
	return nil
}
