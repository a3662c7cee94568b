package sequencer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/skeindb/skein/keyspace"
)

// A revision that belongs to several ranges is read wholly or not at all.
func TestAllocationLogDividesNoRevision(t *testing.T) {
	l := newAllocationLog(8)
	l.restart(7, 100)
	l.append(Allocation{First: 101, Count: 2, Range: 1, Generation: 1})
	for id := range keyspace.RangeID(3) {
		l.used++
		*l.entry(l.used - 1) = Allocation{First: 103, Count: 1, Range: 1 + id, Generation: 1}
	}
	l.last = 103
	l.append(Allocation{First: 104, Count: 1, Range: 9, Generation: 1})
	for size, want := range map[int]string{3: "1@102 3@103 1@104", 4: "4@103 1@104", 5: "5@104", 8: "5@104"} {
		dst, got := make([]Allocation, size), []string(nil)
		for at := keyspace.Revision(100); at < 104; {
			n, last, err := l.Read(7, at, dst)
			if err != nil || last <= at {
				t.Fatalf("read after %d: up to %d, %v", at, last, err)
			}
			got = append(got, fmt.Sprintf("%d@%d", n, last))
			at = last
		}
		if g := strings.Join(got, " "); g != want {
			t.Errorf("%d at a time: %s, want %s", size, g, want)
		}
	}
}

// More records are read than are sent, so that later builds can send more.
func TestDecodeLogPartsLargerThanSent(t *testing.T) {
	for records, read := range map[int]bool{sentLogRecords: true, 4096: true, 4097: false} {
		p := LogPart{Term: 7, After: 100, Last: 100 + keyspace.Revision(records)}
		for i := range records {
			p.Records = append(p.Records, Allocation{First: 101 + keyspace.Revision(i), Count: 1, Range: 1, Generation: 1})
		}
		got, err := DecodeLogPart(p.encode())
		if (err == nil) != read || read && !slices.Equal(got.Records, p.Records) {
			t.Errorf("a part of %d records: %d are read, %v", records, len(got.Records), err)
		}
	}
}

// A revision of several ranges comes in one part, also where the first of them was handed
// those before it, and however many ranges it has.
func TestLogPartOfSeveralRanges(t *testing.T) {
	synctest.Test(t, logPartOfSeveralRanges)
}

func logPartOfSeveralRanges(t *testing.T) {
	t.Helper()
	also := make([]keyspace.RangeAt, keyspace.MaxRevisionRanges-1)
	for i := range also {
		also[i] = keyspace.RangeAt{Range: keyspace.RangeID(2 + i), Generation: 3}
	}
	for _, n := range []int{1, 2, len(also)} {
		l := newAllocationLog(4096)
		served(t, l)
		l.restart(7, 100)
		l.append(Allocation{First: 101, Count: 2, Range: 1, Generation: 1})
		l.append(Allocation{First: 103, Count: 1, Range: 1, Generation: 1}, also[:n]...)
		l.append(Allocation{First: 104, Count: 1, Range: also[n-1].Range, Generation: 3})
		ctx, cancel := context.WithCancel(t.Context())
		s := &sink{}
		done := make(chan error)
		go func() { done <- ServeLog(ctx, l, LogPosition{Term: 7, Last: 102}, s) }()
		owners := map[keyspace.Revision]int{}
		for part, at := 0, keyspace.Revision(102); at < 104; part++ {
			p, err := DecodeLogPart(s.part(part))
			if err != nil || p.After != at {
				t.Fatalf("part behind %d: %+v, %v", at, p, err)
			}
			for i := range p.Records {
				if h := &p.Records[i]; h.Count != 1 || h.First <= at || h.Last() > p.Last {
					t.Errorf("a record of (%d, %d] is %+v", at, p.Last, h)
				}
				owners[p.Records[i].First]++
			}
			at = p.Last
		}
		if owners[103] != n+1 || owners[104] != 1 {
			t.Errorf("with %d further ranges revision 103 has %d, the next %d", n, owners[103], owners[104])
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the stream ended with %v", err)
		}
		if p := (LogPart{Term: 7, After: 100, Last: 103, Records: slices.Clone(l.ring[:n+1])}); true {
			if got, err := DecodeLogPart(p.encode()); err != nil || !slices.Equal(got.Records, p.Records) {
				t.Errorf("%d records became %d, %v", n+1, len(got.Records), err)
			}
		}
	}
}

// An allocation costs no memory, whether somebody follows the log or not.
func TestAllocationLogAllocatesNothing(t *testing.T) {
	for _, followed := range []bool{false, true} {
		l := newAllocationLog(16)
		l.restart(1, 0)
		if followed {
			l.parts.join()
		}
		at := keyspace.Revision(0)
		n := testing.AllocsPerRun(100, func() {
			at++
			l.append(Allocation{First: at, Count: 1, Range: keyspace.RangeID(at % 3), Generation: 1})
			l.tell()
		})
		if n != 0 {
			t.Errorf("followed %t: %v allocations", followed, n)
		}
	}
}

// Followers are woken once for a batch, when all of it is in the log.
func TestAllocationLogTellsOfBatches(t *testing.T) {
	l := newAllocationLog(16)
	c := newAllocator(l)
	c.lead(6, 1)
	_, leave := l.parts.join()
	defer leave()
	changed := l.parts.changed
	l.append(Allocation{First: 2, Count: 1, Range: 1, Generation: 1})
	if len(changed) > 0 {
		t.Error("a single allocation wakes the followers")
	}
	c.last = 2
	batch := Batch{Boot: 1, Number: 1, Items: []Item{{Range: 1, Generation: 1, Count: 2}, {Range: 2, Generation: 1, Count: 1}, {Range: 3, Generation: 1}}}
	c.arrive(&waitingBatch{from: Process{Node: 1, Boot: 1}, Batch: batch})
	if out := c.advance(true); out.raise == 0 || len(changed) > 0 {
		t.Fatalf("a first ceiling up to %d is wanted, woken %d times", out.raise, len(changed))
	}
	c.ceilingApplied(6, 100)
	if out := c.advance(true); len(out.answers) != 1 || len(changed) != 1 {
		t.Errorf("%d answers, woken %d times", len(out.answers), len(changed))
	}
	<-changed
	batch.Number, batch.Items = 2, batch.Items[2:]
	c.arrive(&waitingBatch{from: Process{Node: 1, Boot: 1}, Batch: batch})
	if out := c.advance(true); len(out.answers) != 1 || len(changed) > 0 {
		t.Errorf("a batch of reads: %d answers, woken %d times", len(out.answers), len(changed))
	}
}
