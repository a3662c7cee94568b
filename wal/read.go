package wal

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"go.etcd.io/raft/v3/raftpb"
)

// Entries returns the entries [lo, hi), as many as fit into maxBytes of protobuf but at
// least one. It returns raft.ErrCompacted if lo is at or below the base and
// raft.ErrUnavailable if hi is beyond the log's end. It reads entries that are not in
// memory from the disk and verifies them; damage is a *CorruptionError. The entries must
// not be changed; the slice belongs to the caller.
func (g *GroupLog) Entries(lo, hi, maxBytes uint64) ([]*raftpb.Entry, error) {
	b := entryBuilder{maxBytes: maxBytes}
	var version uint32
	for i := lo; ; {
		g.mu.Lock()
		if len(b.ents) == 0 || version != g.version {
			// A tail was overwritten between two reads, and what was read may be part of
			// it.
			b, i, version = entryBuilder{maxBytes: maxBytes}, lo, g.version
		}
		if err := g.checkLocked(i, hi); err != nil {
			g.mu.Unlock()
			return nil, err
		}
		i = g.cachedLocked(&b, i, hi)
		if i == hi || b.full {
			g.mu.Unlock()
			return b.ents, nil
		}
		r := g.runs[g.runLocked(i)]
		end := min(r.last+1, hi)
		if at, ok := g.nextChunkLocked(i); ok {
			end = min(end, at)
		}
		r.seg.readers.Add(1)
		g.mu.Unlock()
		err := g.readRun(&b, r, i, end)
		r.seg.readers.Add(-1)
		if err != nil {
			return nil, fmt.Errorf("wal: group %s: read entries [%d, %d): %w", g.id, i, end, err)
		}
		if b.full {
			return b.ents, nil
		}
		i = end
	}
}

// nextChunkLocked returns the first index above i that is in memory.
func (g *GroupLog) nextChunkLocked(i uint64) (uint64, bool) {
	// i itself is in no chunk.
	if at := g.chunkFromLocked(i); at < len(g.chunks) {
		return g.chunks[at].first, true
	}
	return 0, false
}

// readRun adds the entries [lo, hi) of a run. It walks back from the run's last record to
// the one that contains lo. A record whose entries begin at or above those of a later one was
// overwritten as a whole, in the same term: the run was cut before the later one was chained to it.
func (g *GroupLog) readRun(b *entryBuilder, r run, lo, hi uint64) error {
	g.log.files.RLock()
	defer g.log.files.RUnlock()
	if g.log.filesClosed {
		return ErrClosed
	}
	var chain []record
	off, length, below := r.off, r.len, hi
	for {
		rec, err := r.seg.readRecord(int64(off), int64(length))
		if err != nil {
			return err
		}
		g.log.metrics.diskReads.Inc()
		if rec.group != g.id || rec.count == 0 {
			return &CorruptionError{r.seg.path, int64(off), fmt.Sprintf("record of group %s, want one of %s", rec.group, g.id)}
		}
		if rec.first < below {
			chain = append(chain, rec)
			below = rec.first
		}
		if rec.first <= lo {
			break
		}
		if off, length = rec.prevOff, rec.prevLen; length == 0 || int64(off) >= rec.off {
			return &CorruptionError{r.seg.path, rec.off, fmt.Sprintf("no record with entry %d before this one", lo)}
		}
	}
	next := lo
	for i, rec := range slices.Backward(chain) {
		end := hi
		if i > 0 {
			end = min(end, chain[i-1].first)
		}
		if err := rec.entriesInto(b, next, end, r.term); err != nil {
			return &CorruptionError{r.seg.path, rec.off, err.Error()}
		}
		if b.full {
			return nil
		}
		next = end
	}
	return nil
}

// readRecord reads and verifies one record.
func (s *segment) readRecord(off, length int64) (record, error) {
	b := make([]byte, length)
	if n, err := s.file.ReadAt(b, off); err != nil && !(errors.Is(err, io.EOF) && int64(n) == length) {
		return record{}, fmt.Errorf("%s at offset %d: %w", s.path, off, err)
	}
	raw, err := verify(b, s.segmentHeader, off)
	if err != nil {
		return record{}, &CorruptionError{s.path, off, err.Error()}
	}
	rec, err := decodeRecord(raw, off)
	if err != nil {
		return record{}, &CorruptionError{s.path, off, err.Error()}
	}
	return rec, nil
}

// entriesInto adds the record's entries [lo, hi), all of the given term.
func (r *record) entriesInto(b *entryBuilder, lo, hi, term uint64) error {
	if hi > r.last()+1 || lo < r.first {
		return fmt.Errorf("entries [%d, %d] do not hold [%d, %d)", r.first, r.last(), lo, hi)
	}
	rest := r.entries
	for i := r.first; i < hi; i++ {
		e, tail, err := cutEntry(rest)
		if err != nil {
			return err
		}
		if rest = tail; i < lo {
			continue
		}
		if e.term != term {
			return fmt.Errorf("entry %d has term %d, want %d", i, e.term, term)
		}
		if !b.add(e.entry(i)) {
			return nil
		}
	}
	return nil
}

func (e encodedEntry) entry(index uint64) *raftpb.Entry {
	ent := &raftpb.Entry{Term: &e.term, Index: &index, Type: &e.typ}
	if len(e.data) > 0 {
		// One entry must not keep a whole record in memory.
		ent.Data = slices.Clone(e.data)
	}
	return ent
}
