package sim

// Fault is one kind of trouble.
type Fault string

// The faults. Each lasts a while and is healed.
const (
	// CrashOne, CrashTwo and CrashAll cut the power: unsynced data are partly lost.
	CrashOne Fault = "crash one"
	CrashTwo Fault = "crash two"
	CrashAll Fault = "crash all"
	// CrashLoop cuts the power of one node again and again while it starts.
	CrashLoop Fault = "crash loop"
	// SyncError makes a sync of the wal fail: the node must give up by itself.
	SyncError Fault = "sync error"
	// Isolate cuts a node off, IsolateLeader the sequencer's node or a range leader's.
	// OneWay cuts one direction between two nodes.
	Isolate       Fault = "isolate"
	IsolateLeader Fault = "isolate leader"
	OneWay        Fault = "one way"
	// DeafLeader is a leader that receives nothing and is received. MuteLeader is one
	// that receives everything and is not received.
	DeafLeader Fault = "deaf leader"
	MuteLeader Fault = "mute leader"
	// Blink cuts a leader off for about as long as its lease lasts, a few times in a
	// row.
	Blink Fault = "blink"
	// Apart cuts both directions between two nodes that the others still reach.
	Apart Fault = "apart"
	// TwoApart cuts two such links at a time.
	TwoApart Fault = "two apart"
	// Pause stops a node's timers and its bus, while its clock runs on. PauseLeader does
	// so to a leader.
	Pause       Fault = "pause"
	PauseLeader Fault = "pause leader"
	// Suspend pauses a leader's machine as a host pauses a virtual machine: its clock stands
	// still too, and nobody sets its wall clock afterwards. It is for runs with NoLeaseReads.
	// SuspendSeen is the same with a wall clock that is right when the machine goes on, and is
	// looked at before anybody asks the node.
	Suspend     Fault = "suspend"
	SuspendSeen Fault = "suspend, seen"
	// SuspendSequencer suspends the sequencer's machine, with a wall clock that nobody sets. It
	// leads no range then: what an old leader of a range answers is another fault.
	SuspendSequencer Fault = "suspend sequencer"
	// Drift changes the rates of the clocks. ClockStep moves wall clocks by up to an
	// hour.
	Drift     Fault = "drift"
	ClockStep Fault = "clock step"
	// Stall makes a disk's syncs hang. SickLeader is a leader whose disk hangs and which
	// stops receiving, but not sending, at about the time when it gives up.
	Stall      Fault = "stall"
	SickLeader Fault = "sick leader"
	// Flaky is a network that loses, delays, repeats and reorders messages and breaks
	// connections. Slow only delays, by another amount in each direction.
	Flaky Fault = "flaky"
	Slow  Fault = "slow"
	// CutOff isolates a node until the others' logs no longer reach back to it, and cuts
	// its power soon after it has begun to catch up.
	CutOff Fault = "cut off"
	// Transfer moves the sequencer to another node, in order. It is no failure.
	Transfer Fault = "transfer"
	// Overtake cuts one node off from the sequencer's node alone and moves the sequencer
	// to a third node meanwhile. Nobody tells the first node of the allocations in
	// between.
	Overtake Fault = "overtake"
	// Restart stops a node in order and starts it again. It is no failure: no revision
	// stays unused.
	Restart Fault = "restart"
	// Split splits ranges. It goes on all the time, and is no failure.
	Split Fault = "split"
	// SelfSplit is a split by a range's leader itself.
	SelfSplit Fault = "split by itself"
	// SelfMerge is a merge that placement's leader decides by itself.
	SelfMerge Fault = "merge by itself"
	// Move moves replicas and leaders. It goes on all the time if Config.Moves says so,
	// and is no failure.
	Move Fault = "move"
	// Merge has ranges absorb their neighbours. It goes on all the time if Config.Merges
	// says so, and is no failure.
	Merge Fault = "merge"
	// Lose loses machines for good. It happens beside the others if Config.Lose says so.
	Lose Fault = "lose"
	// Killed is a loader that ends in the middle of a load, which another one goes on with.
	Killed Fault = "loader killed"
	// FullCut reads everything at one revision, as a full backup does, and Increment all versions since the last
	// time. It goes on all the time if Config.Cuts says so, and is no failure.
	FullCut   Fault = "full cut"
	Increment Fault = "increment"
	// Compact compacts. It goes on all the time if Config.Compactions says so.
	Compact Fault = "compact"
)

// AllFaults are all of them that hit any nodes and need nothing else.
var AllFaults = []Fault{
	CrashOne, CrashTwo, CrashAll, CrashLoop, SyncError, Isolate, IsolateLeader, OneWay, DeafLeader, MuteLeader, Blink, Apart, TwoApart,
	Pause, PauseLeader, SuspendSeen, Drift, ClockStep, Stall, SickLeader, Flaky, Slow, CutOff, Restart, Transfer, Overtake,
}
