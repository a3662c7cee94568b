package sequencer

import (
	"errors"
	"fmt"
	"sync"

	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Allocation is one entry of the allocation log: Count consecutive revisions from First
// on were given to a range, which asked for them as of Generation.
type Allocation struct {
	First      keyspace.Revision
	Count      uint32
	Range      keyspace.RangeID
	Generation keyspace.Generation
}

// Last returns the last of the entry's revisions.
func (h *Allocation) Last() keyspace.Revision { return h.First + keyspace.Revision(h.Count) - 1 }

// allocationLogEntries bounds the allocation log: 2 MiB.
const allocationLogEntries = 1 << 16

// ErrLogGone says that the allocation log does not reach back to what was asked for:
// it was overwritten, or allocated by an earlier sequencer, or this node is not
// the sequencer. The asker must learn what became of those revisions from the
// ranges themselves.
var ErrLogGone = errors.New("placement: allocation log does not reach back that far")

// AllocationLog is the list, in order, of which range got which revision: those of
// the last while, from one sequencer in one term. A new sequencer's log starts
// anew, since it cannot know what the old one allocated last (trap 80).
//
// The log has no holes: it holds every revision in (After, Last]. A revision that
// belongs to several ranges has an entry for each, one behind the other. It may be
// read by many goroutines.
type AllocationLog struct {
	mu sync.Mutex
	// Guarded by mu. term is 0 while this node is not the sequencer.
	term uint64
	// after is the last revision that the log does not hold, last the last it does.
	after, last keyspace.Revision
	// ring has room for entries allocations from the first term on in which this node leads.
	ring    []Allocation
	entries int
	// head is the index of the oldest entry, used the number of entries.
	head, used int

	// parts is the log for those who follow it.
	parts logParts
}

func newAllocationLog(entries int) *AllocationLog {
	return &AllocationLog{entries: entries, parts: logParts{changed: wake.New()}}
}

// restart empties the log: it now belongs to the term and holds what comes after
// the revision. Term 0 ends it.
func (l *AllocationLog) restart(term uint64, after keyspace.Revision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.term, l.after, l.last, l.head, l.used = term, after, after, 0, 0
	if term != 0 && l.ring == nil {
		l.ring = make([]Allocation, l.entries)
	}
	l.tell()
}

// tell has the followers woken behind what was appended. It is called once for a batch.
func (l *AllocationLog) tell() {
	if l.parts.followed.Load() {
		l.parts.changed.Set()
	}
}

// append adds the revisions that follow the last ones. Revisions that go to one
// range one after the other share an entry. The followers hear of them by tell.
//
// also are further ranges of the one revision. Each has an entry behind that of the
// first one, and nothing is added to those.
func (l *AllocationLog) append(h Allocation, also ...keyspace.RangeAt) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.First != l.last+1 || h.Count == 0 {
		panic(fmt.Sprintf("placement: allocation of %d revisions from %d on follows revision %d", h.Count, h.First, l.last))
	}
	l.last = h.Last()
	l.joinLocked(h)
	for _, a := range also {
		l.pushLocked(Allocation{First: h.First, Count: 1, Range: a.Range, Generation: a.Generation})
	}
}

// joinLocked adds revisions to the last entry where it is the same range's alone.
func (l *AllocationLog) joinLocked(h Allocation) {
	if l.used > 0 && !l.sharedLocked() {
		e := l.entry(l.used - 1)
		if e.Range == h.Range && e.Generation == h.Generation && e.Count <= CeilingBlock {
			e.Count += h.Count
			return
		}
	}
	l.pushLocked(h)
}

// sharedLocked says whether the last entry is one of several with the same revision.
func (l *AllocationLog) sharedLocked() bool {
	return l.used > 1 && l.entry(l.used-2).Last() == l.entry(l.used-1).Last()
}

func (l *AllocationLog) pushLocked(h Allocation) {
	if l.used == len(l.ring) {
		l.after = l.entry(0).Last()
		l.head = (l.head + 1) % len(l.ring)
		l.used--
	}
	l.used++
	*l.entry(l.used - 1) = h
}

func (l *AllocationLog) entry(i int) *Allocation { return &l.ring[(l.head+i)%len(l.ring)] }

// Bounds returns the sequencer's term and the revisions that the log holds: those
// above after, up to last. Term 0 says that this node is not the sequencer.
func (l *AllocationLog) Bounds() (term uint64, after, last keyspace.Revision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.term, l.after, l.last
}

// Read copies entries with revisions above after into dst, in order and without a hole. It
// returns their number and a last revision: every revision in (after, last] was allocated, and
// only to the ranges of the entries. Where last is after, there are none above it yet. The
// first entry may begin at or below after. A revision is never divided: dst has room for at
// least keyspace.MaxRevisionRanges entries. Read returns ErrLogGone where the log does not hold
// after+1 of that term.
func (l *AllocationLog) Read(term uint64, after keyspace.Revision, dst []Allocation) (n int, last keyspace.Revision, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term == 0 || term != l.term || after < l.after {
		return 0, 0, fmt.Errorf("read from revision %d of term %d, kept is (%d, %d] of term %d: %w",
			after, term, l.after, l.last, l.term, ErrLogGone)
	}
	lo, hi := 0, l.used
	for lo < hi {
		mid := (lo + hi) / 2
		if l.entry(mid).Last() > after {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	for n < len(dst) && lo+n < l.used {
		dst[n] = *l.entry(lo + n)
		n++
	}
	if lo+n == l.used {
		return n, max(l.last, after), nil
	}
	for n > 0 && dst[n-1].Last() == l.entry(lo+n).Last() {
		n-- // its other ranges found no room
	}
	if n == 0 {
		panic(fmt.Sprintf("placement: revision %d has more ranges than the %d that a reader takes", l.entry(lo).First, len(dst)))
	}
	return n, dst[n-1].Last(), nil
}
