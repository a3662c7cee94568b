package locktable

import (
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/shard/command"
)

// The ages from which on a leader asks what became of a lock's transaction.
const (
	// pushAfter is that of a lock. A transaction that is not disturbed takes a tenth of it at
	// most. It is also the pause between two questions.
	pushAfter = 500 * time.Millisecond
	// pushUrgent is that of a lock for which all watchers of the range wait.
	pushUrgent = 100 * time.Millisecond
	// finishAfter is that of a commit record.
	finishAfter = time.Second
)

// pushBatch is how many locks Due returns at most.
const pushBatch = 16

// pushState is when something was last asked about.
type pushState struct {
	last clock.Time
	// running says that somebody asks now, failed that the last question was in vain.
	running, failed bool
}

func (s *pushState) due(now, first clock.Time) bool {
	return !s.running && now >= first && (s.last == 0 || now.Sub(s.last) >= pushAfter)
}

// Due is a lock whose transaction is to be asked about, or a record whose locks are to end.
type Due struct {
	Lock   *command.Lock
	Record *command.CommitRecord
	state  *pushState
}

// Failed says whether the last question was in vain. It needs no guard: nothing writes it
// between Due and Done.
func (d *Due) Failed() bool { return d.state.failed }

// Done notes that the question was asked, and whether it was in vain.
func (d *Due) Done(failed bool) { d.state.running, d.state.failed = false, failed }

// Skip makes it due again at once: it was not asked.
func (d *Due) Skip() { d.state.running, d.state.last = false, 0 }

// Due returns locks and records that are old enough to be asked about: those of which
// the last question failed, or all others. The caller calls Done or Skip of each; until then
// they are not due again.
//
// Failed ones come one at a time, the one that has waited longest first. So each has its
// turn, however many cannot be decided. The others are shared by the given number of workers
// and come at most pushBatch at a time: they wait for those before them in the batch.
func (t *Table) Due(now clock.Time, failed bool, workers int) (due []Due) {
	if t.set == nil {
		return nil
	}
	defer func() {
		for _, d := range due {
			d.state.last, d.state.running = now, true
		}
	}()
	wants := func(s *pushState, first clock.Time) bool {
		return s.failed == failed && s.due(now, first) && (!failed || len(due) == 0 || s.last < due[0].state.last)
	}
	enough := min(pushBatch, 1+(len(t.set.all)+len(t.set.records))/workers)
	take := func(d Due) (full bool) {
		if failed {
			due = due[:0]
		}
		due = append(due, d)
		return !failed && len(due) == enough
	}
	for h := range t.set.all {
		// Also where its record is here: the end of a transaction goes through the ranges of
		// all its locks, one of which may be without a leader. What is known here waits for
		// nobody.
		if !h.Pending && wants(&h.push, h.since.Add(h.pushAge())) && take(Due{Lock: h.Lock, state: &h.push}) {
			return due
		}
	}
	for _, r := range t.set.records {
		if wants(&r.push, r.since.Add(finishAfter)) && take(Due{Record: r.CommitRecord, state: &r.push}) {
			return due
		}
	}
	return due
}

// pushAge is the age from which on the lock is asked about.
func (h *Held) pushAge() time.Duration {
	if h.Urgent {
		return pushUrgent
	}
	return pushAfter
}
