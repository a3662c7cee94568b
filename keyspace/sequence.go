package keyspace

import "time"

// SequenceRequest asks the sequencer for revisions for one range.
type SequenceRequest struct {
	Range      RangeID
	Generation Generation
	// Count is the number of revisions wanted; 0 asks only for the current one.
	Count int
	// Also lists further ranges of the one revision, if Count is 1: those of a
	// transaction over several ranges, at most MaxRevisionRanges including the first.
	Also []RangeAt
	// Permit is the oldest of the requests that the revisions are for.
	Permit Permit
	// Direct says that the answer may come within the call. It does where this node is the sequencer and
	// can answer at once: no other goroutine is woken then.
	Direct bool
}

// RangeAt is a range at a generation.
type RangeAt struct {
	Range      RangeID
	Generation Generation
}

// MaxRevisionRanges bounds the ranges that one revision concerns. A transaction may
// involve that many ranges, including those that it only reads or compares.
const MaxRevisionRanges = 1024

// SequenceAnswer is the sequencer's answer to one SequenceRequest.
type SequenceAnswer struct {
	// First is the first of Count consecutive revisions that now belong to the requester,
	// or 0 if none were requested.
	First Revision
	// Term is the sequencer's. The next sequencer has a higher one.
	Term uint64
	// Current is the last revision allocated up to and including this answer.
	Current Revision
	// Compacted is the cluster's compacted revision. It is -1 before the first
	// compaction, because that may be at 0.
	Compacted Revision
	// Settings is the revision of settings, users, roles and alarms.
	Settings Revision
	// Access is the access index at the answer. A request whose permit ended before got nothing:
	// its Err is AccessChanged.
	Access AccessIndex
	// Took is how long the requester waited, queue included; 0 where nobody measured it.
	Took time.Duration
	// Err is set if nothing was allocated to the requester, and states the fate.
	// Revisions that may have been allocated are then never used.
	Err error
}
