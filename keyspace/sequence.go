package keyspace

// SequenceRequest asks the sequencer for revisions on behalf of one range.
type SequenceRequest struct {
	Range      RangeID
	Generation Generation
	// Count is how many revisions are wanted; 0 asks only for the current one.
	Count int
	// Also are further ranges that the one revision concerns, where Count is 1: those of a
	// transaction over several ranges, at most MaxRevisionRanges with the first one.
	Also []RangeAt
}

// RangeAt is a range as of a generation.
type RangeAt struct {
	Range      RangeID
	Generation Generation
}

// MaxRevisionRanges bounds the ranges that one revision concerns. A transaction may
// speak to that many, those that it only reads or compares included.
const MaxRevisionRanges = 1024

// SequenceAnswer is the sequencer's answer to one SequenceRequest.
type SequenceAnswer struct {
	// First is the first of Count consecutive revisions that now belong to the
	// asker; 0 where none were asked for.
	First Revision
	// Current is the last revision handed out up to and with this answer's place in
	// the order of hand-outs.
	Current Revision
	// Compacted is the cluster's compacted revision, -1 before the first compaction,
	// which may be one at 0.
	Compacted Revision
	// Settings is the revision of settings, users, roles and alarms.
	Settings Revision
	// Err is set where nothing was handed out to the asker. It says with which
	// fate; numbers that may have been handed out are never used then.
	Err error
}
