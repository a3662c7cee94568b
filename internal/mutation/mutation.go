// Package mutation names the bugs that the build tag planted compiles into Skein, to show
// that the checkers of packages sim and chaos find them.
//
// Without the tag Is always reports false and the compiler removes the code that depends
// on it: a released binary holds no mutation. With the tag one mutation at a time is active
// in the process; Set or the environment variable that Variable names chooses it. The code
// under test calls Is; only the rigs of sim and chaos call Set.
package mutation

// Bug is one of the bugs.
type Bug uint32

// The bugs. Each says what goes wrong and where.
const (
	// None is the usual case.
	None Bug = iota
	// FsyncSkipped: the wal answers for records that it has not synced.
	FsyncSkipped
	// AcknowledgedBeforeQuorum: a range answers writes when it has proposed them.
	AcknowledgedBeforeQuorum
	// LeaseByTicks: a leader compares its lease with the moment of its last tick.
	LeaseByTicks
	// PromiseForgotten: a voter forgets its promise together with its leader.
	PromiseForgotten
	// HandOutWithoutLease: the sequencer hands out without looking at its lease.
	HandOutWithoutLease
	// OtherTerm: a batch that a lost leadership has evaluated is proposed by the next
	// one of the same node.
	OtherTerm
	// AppliedTwice: a replica that opens applies its last entry again, and does not compare
	// its hash with the leader's.
	AppliedTwice
	// SnapshotNotDurable: a snapshot is acknowledged before it is durable.
	SnapshotNotDurable
	// NoopFromOverlay: what changes nothing is answered though it has seen what is not
	// applied.
	NoopFromOverlay
	// LiveRemoved: compaction removes what is still alive at its revision.
	LiveRemoved
	// CompactionUnseen: nobody is told of compactions.
	CompactionUnseen
	// LockLeftBehind: nobody asks what became of a transaction whose coordinator is gone.
	LockLeftBehind
	// TxnHalfVisible: reads do not wait for the locks of transactions over several ranges.
	TxnHalfVisible
	// EventLostAtSplit: a gateway begins the feeds of the heirs of a range where the hand-out
	// log is, not where the range's own feed was complete.
	EventLostAtSplit
	// ReleasedTooEarly: a gateway delivers what has come, also above what it still waits for.
	ReleasedTooEarly
	// VoidDespiteLock: a leader calls revisions void that a transaction whose lock it holds
	// may turn out to have.
	VoidDespiteLock
	// CompleteDespiteLock: a replica calls its range complete above what a lock may leave.
	CompleteDespiteLock
	// HandOutsIgnored: a gateway asks nobody for what an earlier sequencer handed out.
	HandOutsIgnored
	// ProgressTooEarly: a gateway tells progress up to where the hand-out log is.
	ProgressTooEarly
	// ProgressBehindEvent: a stream is told progress below an event that one of its watchers
	// was told.
	ProgressBehindEvent
	// LeaseCountedOn: a node that comes to lead placement again, after it was paused or not,
	// counts leases on from where it stopped.
	LeaseCountedOn
	// AttachedWhileEnding: spans are registered with a lease whose end is decided.
	AttachedWhileEnding
	// LeaseGrantedTwice: a lease that is there is granted to whoever asks for its id.
	LeaseGrantedTwice
	// LocksLostAtSplit: the upper half of a split forgets the locks on its keys.
	LocksLostAtSplit
	// NeverRemoved: a replica that is no member any more stays where it is.
	NeverRemoved
	// HandedOverInFlight: placement's leader hands over without ending its hand-outs.
	HandedOverInFlight
	// DeadCountedAlive: who leads placement hears nodes that say nothing any more.
	DeadCountedAlive
	// OperationForgotten: a new leader of placement does not go on with the operations that it
	// finds.
	OperationForgotten
	// FreezeForgotten: a range that is frozen goes on as if it were not.
	FreezeForgotten
	// LocksLostAtMerge: a range that absorbs its neighbour does not take over its locks.
	LocksLostAtMerge
	// CompleteByOneHalf: a range that has absorbed its neighbour calls itself complete as far
	// as its own locks allow, whatever the neighbour's may leave.
	CompleteByOneHalf
	// AbsorbedStaysMapped: the commit of a merge leaves the absorbed range in the map.
	AbsorbedStaysMapped
	// VersionLostInCopy: a copy of a replica leaves out one of its versions.
	VersionLostInCopy
	// EmptyLetIn: a node that has lost its disk is let in with its old id.
	EmptyLetIn
	// NewcomerUnknown: nodes do not speak to those that have joined since they started.
	NewcomerUnknown
	// RowGivenTwice: a row that is one directory's is given to the next one that comes.
	RowGivenTwice
	// ZonesIgnored: what brings the replicas of two ranges together that are to merge does not
	// look at zones.
	ZonesIgnored

	// The last ones are between a node and its machine, where sim puts them: a request
	// that reaches its range twice, a disk whose syncs of the wal soon do nothing, and a
	// clock that nearly stands still while its node is cut off.
	RequestTwice
	DiskLies
	ClockFreezes

	end
)

var names = [end]string{
	"none", "fsync skipped", "acknowledged before quorum", "lease trusted by ticks", "promise forgotten",
	"hand-out under a lost lease", "batch proposed in another term", "entry applied twice",
	"snapshot acknowledged before it is durable", "no-op answered from the overlay",
	"live version removed", "compaction not seen through another node",
	"lock left behind by a dead coordinator", "transaction half visible",
	"event lost at a split", "event released before a lower one", "void declared with a lock pending",
	"complete called with a lock pending", "hand-outs of the sequencer before ignored", "progress sent before an event",
	"progress behind an event",
	"lease expired early after a pause", "key attached while its lease expires", "lease granted twice",
	"locks lost at a split",
	"replica that left never removed", "leadership handed over amid hand-outs",
	"lost node counted as alive", "operation of the leader before forgotten",
	"range goes on though it is frozen", "locks lost at a merge", "complete by one half of a merge",
	"absorbed range left in the map", "version lost in a copy", "node let in with an empty disk", "node that joins not spoken to", "row of a node given to another directory",
	"replicas gathered into one zone",
	"request run twice", "disk that lies", "clock that freezes",
}

// String says in a few words what goes wrong.
func (b Bug) String() string { return names[b] }

// All returns every bug but None.
func All() []Bug {
	var all []Bug
	for b := None + 1; b < end; b++ {
		all = append(all, b)
	}
	return all
}
