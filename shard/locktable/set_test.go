package locktable

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// A set of locks finds what a list of everything that is held has.
func TestLockTableEqualsAList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var total atomic.Int64
	table := newLockSet(&total)
	var all []*Held
	key := func() []byte { return []byte{byte('a' + rng.IntN(6))} }
	span := func() keyspace.Span {
		a, b := key(), key()
		switch {
		case rng.IntN(2) == 0:
			return keyspace.Single(a)
		case bytes.Compare(a, b) < 0:
			return keyspace.Span{Start: a, End: b}
		}
		return keyspace.Span{Start: a}
	}
	for step := range 5000 {
		if len(all) > 0 && rng.IntN(2) == 0 {
			i := rng.IntN(len(all))
			table.remove(all[i])
			all = slices.Delete(all, i, i+1)
		} else if len(all) < 12 {
			l := &command.Lock{ID: rangeapi.LockID{Range: keyspace.RangeID(step)}, Floor: keyspace.Revision(rng.IntN(10))}
			l.Name.Counter = uint64(rng.IntN(4))
			for range 1 + rng.IntN(3) {
				l.Spans = append(l.Spans, command.LockSpan{Span: span(), Mode: command.LockMode(rng.IntN(3))})
			}
			all = append(all, &Held{Lock: l})
			table.add(all[len(all)-1])
		}
		s, self, at := span(), rangeapi.TxnName{TxnID: rangeapi.TxnID{Counter: uint64(rng.IntN(4))}}, keyspace.Revision(rng.IntN(10))
		writes := rng.IntN(2) == 0
		conflict, reader := false, false
		for _, h := range all {
			for _, p := range h.Spans {
				if p.Span.Overlaps(s) && h.Name != self {
					conflict = conflict || writes || p.Mode != command.Shared
					reader = reader || p.Mode != command.Shared && h.Floor < at
				}
			}
		}
		if got := table.conflict(s, writes, self); (got.Held != nil) != conflict {
			t.Fatalf("step %d: conflict %v at %s, want %t", step, got, s, conflict)
		}
		if got := table.reader(s, at, self); (got != nil) != reader {
			t.Fatalf("step %d: reader %v at %s, want %t", step, got, s, reader)
		}
	}
	for _, h := range all {
		table.remove(h)
	}
	if !table.empty() || table.spans.keys.Len() != 0 || len(table.spans.spans) != 0 || total.Load() != 0 {
		t.Fatalf("left over: %+v", table)
	}
}
