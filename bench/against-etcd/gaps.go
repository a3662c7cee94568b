package main

import (
	"slices"
	"sync"
	"time"
)

// gap is a time without an acknowledged write.
type gap struct {
	Begin  time.Duration `json:"begin_ns"` // of the last write before it, since the load began
	Length time.Duration `json:"length_ns"`
}

// longestGap returns the longest time between neighbouring acknowledgements that ends
// after from and begins before to. If the last acknowledgement is before to, the time
// up to to counts as a gap; the time before the first one does not. acks ascend.
func longestGap(acks []time.Duration, from, to time.Duration) gap {
	var longest gap
	// The first one after from ends the gap in which from lies.
	i, _ := slices.BinarySearch(acks, from+1)
	i = max(i, 1)
	for ; i <= len(acks); i++ {
		begin, end := acks[i-1], to
		if i < len(acks) {
			end = acks[i]
		}
		if begin >= to {
			break
		}
		if end-begin > longest.Length {
			longest = gap{begin, end - begin}
		}
	}
	if len(acks) == 0 {
		longest = gap{from, to - from}
	}
	return longest
}

// ledger records when writes of one range were acknowledged.
type ledger struct {
	mu    sync.Mutex
	acks  []time.Duration // since the load began; guarded by mu
	wrong map[string]int  // errors by text; guarded by mu
}

func (l *ledger) ack(at time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acks = append(l.acks, at)
}

func (l *ledger) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wrong == nil {
		l.wrong = map[string]int{}
	}
	l.wrong[err.Error()]++
}

// gap returns the longest gap of the range; see longestGap.
func (l *ledger) gap(from, to time.Duration) gap {
	l.mu.Lock()
	defer l.mu.Unlock()
	// Two answers may be recorded in reverse order.
	slices.Sort(l.acks)
	return longestGap(l.acks, from, to)
}
