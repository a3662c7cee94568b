package stages

import (
	"time"

	"github.com/skeindb/skein/keyspace"
)

// Threshold is from when on a leader says where the time of a request went without being asked.
const Threshold = 50 * time.Millisecond

// Stage is one place of a request on its way. Its numbers stand on the bus.
type Stage uint8

// The stages of a request at the leader of a range.
const (
	// Queued requests wait for their evaluation: others of the range come first, or the range changes.
	Queued Stage = iota
	// Evaluation is what the request does and answers; reads of the store are part of it.
	Evaluation
	// Parked requests wait for the revision of a write before them, to be evaluated again. What was Held before the
	// leader asked a quorum counts here too.
	Parked
	// Blocked requests wait for a lock of a transaction over several ranges, or for the registration of a lease.
	Blocked
	// Batch is after the evaluation, until the batch before has its revisions.
	Batch
	// Revision is the question to the sequencer.
	Revision
	// Held requests have seen a write that is not applied.
	Held
	// Confirming leaders ask a quorum whether they still lead.
	Confirming
	// Quorum is from the proposal until it is committed.
	Quorum
	// Disk is from the commit until the leader's own log has the entry.
	Disk
	// Apply is from there until the entry is applied and the client has its answer.
	Apply
	// Count is the number of stages.
	Count
)

// String returns the name that operators see.
func (s Stage) String() string {
	names := [...]string{
		"queued", "evaluation", "parked", "blocked", "batch", "revision", "held", "confirming", "quorum", "disk", "apply",
	}
	if int(s) >= len(names) {
		return "unknown"
	}
	return names[s]
}

// Record is how a leader of a range spent the time of one request.
type Record struct {
	Range keyspace.RangeID
	// Node is the one that led.
	Node keyspace.NodeID
	// Took is from the request's arrival to its answer, and the sum of Spent.
	Took  time.Duration
	Spent [Count]time.Duration
	// Lock names the transaction whose lock the request met last, if Spent has Blocked. It is empty if that was the
	// registration of a lease.
	Lock string
	// Last is the node whose answer made the quorum, 0 where that is not known.
	Last keyspace.NodeID
	// Turns counts how often the request was put back to be evaluated again.
	Turns uint32
}

// Longest returns the stage that took longest.
func (r *Record) Longest() Stage {
	longest := Queued
	for s := range Count {
		if r.Spent[s] > r.Spent[longest] {
			longest = s
		}
	}
	return longest
}

// Times are the stages of a request at a leader, while it has it.
type Times struct {
	// since and all readings count from one moment of the process; stage is the present one.
	since time.Duration
	spent [Count]time.Duration
	stage Stage
}

// Begin starts the first stage.
func (t *Times) Begin(s Stage, at time.Duration) { *t = Times{since: at, stage: s} }

// Enter ends the present stage and begins another. A reading from before the stage began counts as its begin: calls
// share readings, and the order of those who take them is not that of the clock.
func (t *Times) Enter(s Stage, at time.Duration) {
	if at > t.since {
		t.spent[t.stage] += at - t.since
		t.since = at
	}
	t.stage = s
}

// Split gives a part of the time in one stage to another: at most what there is.
func (r *Record) Split(from, to Stage, part time.Duration) {
	part = max(0, min(part, r.Spent[from]))
	r.Spent[from] -= part
	r.Spent[to] += part
}

// Record returns the record of a request that ends now.
func (t *Times) Record(at time.Duration) *Record {
	t.Enter(t.stage, at)
	r := &Record{Spent: t.spent}
	for _, spent := range r.Spent {
		r.Took += spent
	}
	return r
}
