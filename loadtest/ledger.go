package loadtest

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

const (
	// ledgerStripes is the number of locks of a ledger. Two clients rarely meet.
	ledgerStripes = 256
	// maxUnknown bounds the puts of unknown fate that a ledger remembers. A run with
	// more of them reports that it cannot be verified.
	maxUnknown = 1 << 20
	// maxViolations bounds the violations that are described; all are counted.
	maxViolations = 20
)

// ledger remembers the servers' promises. Its memory depends on the number of keys, not
// of operations.
type ledger struct {
	values *values
	// newest is the highest revision in any answer.
	newest atomic.Int64

	stripes  [ledgerStripes]ledgerStripe
	unknowns atomic.Int64 // puts of unknown fate, including those not remembered

	findings
}

// findings are broken promises.
type findings struct {
	mu    sync.Mutex
	count int64
	told  []string // the first maxViolations
}

// ledgerStripe guards the keys whose number is its own modulo ledgerStripes.
type ledgerStripe struct {
	sync.Mutex
	acked   []ackedPut        // of key i at i / ledgerStripes
	unknown map[uint64][]opID // by number of the key
}

// ackedPut is the acknowledged put of a key with the highest revision; revision 0 means
// none.
type ackedPut struct {
	revision int64
	op       opID
}

func newLedger(keys int, v *values) *ledger {
	l := &ledger{values: v}
	for i := range l.stripes {
		l.stripes[i].acked = make([]ackedPut, (keys+ledgerStripes-1)/ledgerStripes)
		l.stripes[i].unknown = map[uint64][]opID{}
	}
	return l
}

func (l *ledger) stripe(key uint64) (*ledgerStripe, uint64) {
	return &l.stripes[key%ledgerStripes], key / ledgerStripes
}

// violation records a broken promise.
func (f *findings) violation(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
	if len(f.told) < maxViolations {
		f.told = append(f.told, fmt.Sprintf(format, args...))
	}
}

// floor is the lower bound for an operation on a key, taken before it is sent.
type floor struct {
	newest int64    // a put's revision is above, a get's not below
	acked  ackedPut // the least that a get must see
}

// begin takes the floor of an operation on a key.
func (l *ledger) begin(key uint64) floor {
	s, i := l.stripe(key)
	s.Lock()
	acked := s.acked[i]
	s.Unlock()
	return floor{l.newest.Load(), acked}
}

// saw raises the newest revision.
func (l *ledger) saw(revision int64) {
	for {
		old := l.newest.Load()
		if revision <= old || l.newest.CompareAndSwap(old, revision) {
			return
		}
	}
}

// acknowledged records an acknowledged put.
func (l *ledger) acknowledged(key uint64, op opID, f floor, revision int64) {
	if revision <= f.newest {
		l.violation("key %d: put %x got revision %d although revision %d had been answered before it was sent",
			key, op, revision, f.newest)
	}
	s, i := l.stripe(key)
	s.Lock()
	old := s.acked[i]
	if revision > old.revision {
		s.acked[i] = ackedPut{revision, op}
	}
	s.Unlock()
	if revision == old.revision {
		l.violation("key %d: puts %x and %x were both acknowledged at revision %d", key, old.op, op, revision)
	}
	l.saw(revision)
}

// unknownFate records a put that may have been applied, or may be later.
func (l *ledger) unknownFate(key uint64, op opID) {
	if l.unknowns.Add(1) > maxUnknown {
		return
	}
	s, _ := l.stripe(key)
	s.Lock()
	s.unknown[key] = append(s.unknown[key], op)
	s.Unlock()
}

// read checks the answer of a linearizable get; kv is nil if the key is absent.
func (l *ledger) read(key uint64, f floor, revision int64, kv *mvccpb.KeyValue) {
	if revision < f.newest {
		l.violation("key %d: a get answered at revision %d although revision %d had been answered before it was sent",
			key, revision, f.newest)
	}
	switch {
	case kv == nil && f.acked.revision > 0:
		l.violation("key %d: a get found nothing although put %x was acknowledged at revision %d before it was sent",
			key, f.acked.op, f.acked.revision)
	case kv != nil && kv.ModRevision < f.acked.revision:
		l.violation("key %d: a get found revision %d although put %x was acknowledged at revision %d before it was sent",
			key, kv.ModRevision, f.acked.op, f.acked.revision)
	case kv != nil && kv.ModRevision > revision:
		l.violation("key %d: a get at revision %d found revision %d", key, revision, kv.ModRevision)
	}
	if kv != nil {
		if op, ours, intact := l.values.recognise(kv.Value); ours && !intact {
			l.violation("key %d: the value of put %x came back changed", key, op)
		}
	}
	l.saw(revision)
}

// final checks the content of a key after all operations have ended; kv is nil if the
// key is absent. It says whether an acknowledged put of the run had to be there.
func (l *ledger) final(key uint64, kv *mvccpb.KeyValue) (acknowledged bool) {
	s, i := l.stripe(key)
	s.Lock()
	acked, unknown := s.acked[i], s.unknown[key]
	s.Unlock()
	promised := acked.revision > 0
	if kv == nil {
		if promised {
			l.violation("key %d: absent; put %x was acknowledged at revision %d", key, acked.op, acked.revision)
		}
		return promised
	}
	op, ours, intact := l.values.recognise(kv.Value)
	switch {
	case !ours:
		if promised {
			l.violation("key %d: holds a value that this run did not write (revision %d); put %x was acknowledged at revision %d",
				key, kv.ModRevision, acked.op, acked.revision)
		}
	case !intact:
		l.violation("key %d: the value of put %x has changed (revision %d)", key, op, kv.ModRevision)
	case promised && op == acked.op:
		if kv.ModRevision != acked.revision {
			l.violation("key %d: put %x was acknowledged at revision %d and is stored at revision %d",
				key, op, acked.revision, kv.ModRevision)
		}
	case !slices.Contains(unknown, op) && promised:
		l.violation("key %d: holds put %x (revision %d), which was overwritten or refused; the last acknowledged one is put %x at revision %d",
			key, op, kv.ModRevision, acked.op, acked.revision)
	case !slices.Contains(unknown, op):
		l.violation("key %d: holds put %x (revision %d), which was refused or never sent", key, op, kv.ModRevision)
	case kv.ModRevision <= acked.revision:
		l.violation("key %d: holds put %x of unknown fate at revision %d; put %x was acknowledged later, at revision %d",
			key, op, kv.ModRevision, acked.op, acked.revision)
	}
	return promised
}

// violations returns the number of broken promises and describes the first of them.
func (f *findings) violations() (int64, []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count, slices.Clone(f.told)
}
