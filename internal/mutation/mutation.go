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

// The bugs. Each comment says what goes wrong and where.
const (
	// None is the normal case.
	None Bug = iota
	// FsyncSkipped: the wal acknowledges records that it has not synced.
	FsyncSkipped
	// AcknowledgedBeforeQuorum: a range answers writes when it has proposed them.
	AcknowledgedBeforeQuorum
	// LeaseByTicks: a leader compares its lease with the moment of its last tick.
	LeaseByTicks
	// PromiseForgotten: a voter forgets its promise together with its leader.
	PromiseForgotten
	// AllocatedWithoutLease: the sequencer allocates revisions without checking its lease.
	AllocatedWithoutLease
	// OtherTerm: a node proposes in a new term a batch that it has evaluated in an older
	// one.
	OtherTerm
	// AppliedTwice: an opening replica applies its last entry again, and does not
	// compare its hash with the leader's.
	AppliedTwice
	// SnapshotNotDurable: a snapshot is acknowledged before it is durable.
	SnapshotNotDurable
	// NoopFromOverlay: a request without changes is answered although it has seen
	// unapplied data.
	NoopFromOverlay
	// LiveRemoved: compaction removes what is still alive at its revision.
	LiveRemoved
	// CompactionUnseen: nobody is told of compactions.
	CompactionUnseen
	// LockLeftBehind: nobody asks for the outcome of a transaction whose coordinator is
	// gone.
	LockLeftBehind
	// TxnHalfVisible: reads do not wait for the locks of transactions over several ranges.
	TxnHalfVisible
	// EventLostAtSplit: a gateway begins the feeds of a split range's heirs at its place
	// in the allocation log, not at the resolved revision of the range's own feed.
	EventLostAtSplit
	// ReleasedTooEarly: a gateway delivers events above a revision that is still
	// pending.
	ReleasedTooEarly
	// VoidDespiteLock: a leader declares revisions void that a transaction whose lock it
	// holds may still get.
	VoidDespiteLock
	// ResolvedDespiteLock: a replica reports a resolved revision above a lock's possible
	// write.
	ResolvedDespiteLock
	// AllocationsIgnored: a gateway does not ask for the allocations of an earlier
	// sequencer.
	AllocationsIgnored
	// ProgressTooEarly: a gateway sends progress up to its place in the allocation log.
	ProgressTooEarly
	// ProgressBehindEvent: a stream sends progress below an event that one of its
	// watchers has received.
	ProgressBehindEvent
	// LeaseCountedOn: a node that leads placement again resumes the times of leases
	// where it stopped.
	LeaseCountedOn
	// AttachedWhileEnding: spans are registered with a lease whose end is decided.
	AttachedWhileEnding
	// LeaseGrantedTwice: an existing lease is granted to whoever asks for its id.
	LeaseGrantedTwice
	// LocksLostAtSplit: the upper half of a split forgets the locks on its keys.
	LocksLostAtSplit
	// NeverRemoved: a replica that is no member any more is not removed.
	NeverRemoved
	// HandedOverInFlight: placement's leader hands over without ending its allocations.
	HandedOverInFlight
	// DeadCountedAlive: placement's leader counts silent nodes as alive.
	DeadCountedAlive
	// OperationForgotten: a new leader of placement does not continue existing
	// operations.
	OperationForgotten
	// FreezeForgotten: a frozen range goes on serving.
	FreezeForgotten
	// LocksLostAtMerge: a range that absorbs its neighbour does not take over its locks.
	LocksLostAtMerge
	// ResolvedByOneHalf: a range that has absorbed its neighbour bounds its resolved
	// revision by its own locks alone, not by the neighbour's.
	ResolvedByOneHalf
	// AbsorbedStaysMapped: the commit of a merge leaves the absorbed range in the map.
	AbsorbedStaysMapped
	// VersionLostInCopy: a copy of a replica omits one of its versions.
	VersionLostInCopy
	// EmptyAdmitted: a node that has lost its disk is admitted under its old id.
	EmptyAdmitted
	// JoinerUnknown: nodes do not speak to nodes that joined after their start.
	JoinerUnknown
	// RowGivenTwice: the row of one directory is given to the next one that comes.
	RowGivenTwice
	// ZonesIgnored: the moves before a merge do not respect zones.
	ZonesIgnored
	// OldSequencerBelieved: ranges take revisions of a sequencer that has a successor.
	OldSequencerBelieved
	// LeasesKept: a host keeps its leases although its machine may have been paused.
	LeasesKept
	// NoWayAround: the bus asks no relay.
	NoWayAround
	// UnheardCountsDead: a node that only others hear counts as dead.
	UnheardCountsDead
	// RotServed: a replica with a bad table goes on, and is not put in quarantine.
	RotServed
	// QuarantineUntold: a node does not tell placement of its replicas in quarantine.
	QuarantineUntold
	// QuarantinedCounts: placement counts a replica in quarantine as a healthy one.
	QuarantinedCounts
	// LeadKeptUnheard: a leader that does not hear a quorum keeps the lead although others can
	// lead.
	LeadKeptUnheard
	// BootsForgotten: a node that starts again and again never counts as silent.
	BootsForgotten
	// PrevFromFed: a gateway that asks a feed for the versions before events trusts that it has
	// them from the feed's own place on.
	PrevFromFed
	// RemovedCounted: nodes that were removed count among those that a node must hear.
	RemovedCounted
	// GrownKeepsThree: the placement group of a cluster that grows keeps its number of voters.
	GrownKeepsThree
	// VersionUnnoted: a node writes in a raised version that its directories do not name.
	VersionUnnoted
	// TailsKept: the wal does not move the entries that a group cannot cut off.
	TailsKept
	// CommitForEver: a coordinator repeats a commit that is refused for good.
	CommitForEver
	// EmbargoKept: the embargo after a start stays as long as the longest election timeout ever.
	EmbargoKept
	// RelayRelays: a relay without a session with the receiver asks the next relay.
	RelayRelays
	// ViewLeaseIgnored: a node that is cut off goes on by the rights that it knows.
	ViewLeaseIgnored
	// PermitsUnseen: the sequencer gives revisions also where rights were taken away since.
	PermitsUnseen
	// RefusedCounted: the sequencer counts the revisions that it refuses as given.
	RefusedCounted
	// RightsUnknownFirst: a new sequencer answers its first batch without knowing what was taken away.
	RightsUnknownFirst
	// WatchersKept: a node says that it goes by new rights while its watchers have events by old ones.
	WatchersKept
	// HashesTold: the feed of users carries the hashes of their passwords.
	HashesTold
	// AlarmUnseen: an alarm that a client raises does not end the permits of before.
	AlarmUnseen
	// AlarmEndUnseen: a node refuses writes by an alarm that was ended since it heard of it.
	AlarmEndUnseen
	// AlarmOfNobody: the alarms of a member stay when it is removed.
	AlarmOfNobody
	// HashedTwice: a key between two parts of a hash is in both.
	HashedTwice
	// RangeUnhashed: the hash of everything ends with its first range.
	RangeUnhashed
	// DifferenceKept: a replica that differs from two others goes on.
	DifferenceKept
	// QuotaUnseen: a node does not notice that its store is above its quota.
	QuotaUnseen
	// CursorNotDurable: a replica does not store how far its range has taken a load.
	CursorNotDurable
	// CutTooEarly: a range gives a page of a cut before everything up to the cut's revision is applied.
	CutTooEarly
	// HoldIgnored: ranges are compacted whatever is held.
	HoldIgnored
	// CutOfCompacted: a range gives a page of a cut that needs versions which it may have removed.
	CutOfCompacted
	// LoadRepeated: a range takes versions of a load again that it has.
	LoadRepeated
	// LoadUnchecked: a load finishes although the cluster has something else than its source.
	LoadUnchecked
	// LoadedUnleased: keys that a load brings are not attached to their leases.
	LoadedUnleased
	// LoadCursorLost: the upper half of a split does not know how far the range has taken a load.
	LoadCursorLost

	// The last ones lie between a node and its machine, where sim puts them. A request
	// reaches its range twice. A disk's syncs of the wal soon do nothing. A clock nearly
	// stands still while its node is cut off.
	RequestTwice
	DiskLies
	ClockFreezes

	end
)

var names = [end]string{
	"none", "fsync skipped", "acknowledged before quorum", "lease trusted by ticks", "promise forgotten",
	"allocation under a lost lease", "batch proposed in another term", "entry applied twice",
	"snapshot acknowledged before it is durable", "no-op answered from the overlay",
	"live version removed", "compaction not seen through another node",
	"lock left behind by a dead coordinator", "transaction half visible",
	"event lost at a split", "event released before a lower one", "void declared with a lock pending",
	"resolved revision above a pending lock", "allocations of the last sequencer ignored", "progress sent before an event",
	"progress behind an event",
	"lease expired early after a pause", "key attached while its lease expires", "lease granted twice",
	"locks lost at a split",
	"departed replica never removed", "leadership handed over amid allocations",
	"lost node counted as alive", "operation of the last leader forgotten",
	"frozen range goes on", "locks lost at a merge", "resolved by one half of a merge",
	"absorbed range left in the map", "version lost in a copy", "node admitted with an empty disk", "joining node not spoken to", "row of a node given to another directory",
	"replicas gathered into one zone", "old sequencer believed",
	"leases kept after a pause", "no way around a broken link", "unheard node counted as dead",
	"rotten replica goes on", "quarantine not told", "replica in quarantine counted",
	"lead kept without hearing a quorum", "boots in a row forgotten", "version before an event missing",
	"removed nodes counted", "grown cluster keeps three voters", "raised version not noted", "tails of the log stay",
	"refused commit repeated for ever", "embargo never shrinks", "relay asks a relay", "view lease ignored",
	"permits unseen by the sequencer", "refused revisions counted", "first batch of a term by old rights", "watchers kept without rights",
	"hashes of passwords told", "raised alarm unseen", "ended alarm goes on", "alarm of a removed member stays",
	"key hashed twice", "range left out of a hash", "replica that differs goes on", "full quota unseen", "cursor of a load not durable",
	"page of a cut too early", "hold ignored", "cut of removed versions",
	"load taken twice", "incomplete load finishes", "loaded key without its lease",
	"cursor of a load lost at a split",
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
