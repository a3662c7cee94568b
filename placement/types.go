package placement

import (
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
)

// What is replicated is package fsm's. These are the names by which the other packages
// know it, so that they import placement alone.
type (
	// Map is an unchanging copy of the range map, the node table and the placement group's
	// members.
	Map = fsm.Map
	// Range is one row of the range map.
	Range = fsm.Range
	// Node is one row of the node table (etcd: a member).
	Node = fsm.Node
	// NodeState is what a node is to the cluster.
	NodeState = fsm.NodeState
	// Attribute is something that an operator says of a node, as zone=a.
	Attribute = fsm.Attribute
	// UnixMillis is a time of a wall clock.
	UnixMillis = fsm.UnixMillis
	// Operation is a change of a range's replicas that placement executes.
	Operation = fsm.Operation
	// OperationKind is what an Operation does.
	OperationKind = fsm.OperationKind
	// MergePhase says how far a merge is.
	MergePhase = fsm.MergePhase
	// Lease is the record of one lease.
	Lease = fsm.Lease
	// LeaseRef names one lease among those that have had its id.
	LeaseRef = fsm.LeaseRef
	// LeaseChange is an applied change of a lease's record.
	LeaseChange = fsm.LeaseChange
	// Mover changes who holds and leads ranges.
	Mover = driver.Mover
	// Merger has nodes take the steps of merges.
	Merger = driver.Merger
	// Measure is what a node says of a range that it leads.
	Measure = driver.Measure
	// Measurer tells what placement decides by of its own node.
	Measurer = driver.Measurer
	// Setting is one of the cluster's settings.
	Setting = fsm.Setting
	// Allocation is one entry of the allocation log: revisions that a range got.
	Allocation = sequencer.Allocation
	// AllocationLog is the list of which range got which revision, on the sequencer.
	AllocationLog = sequencer.AllocationLog
	// LogPart is a piece of the allocation log, as FollowLog brings it.
	LogPart = sequencer.LogPart
	// LogPosition is how far a follower knows the allocation log.
	LogPosition = sequencer.LogPosition
	// Bootstrap is what every founder of a cluster knows alike: its configuration.
	Bootstrap = fsm.Bootstrap
)

// The states of a node.
const (
	NodeUnstarted        = fsm.NodeUnstarted
	NodeServing          = fsm.NodeServing
	NodeDraining         = fsm.NodeDraining
	NodeDecommissioned   = fsm.NodeDecommissioned
	NodeRemoved          = fsm.NodeRemoved
	NodeUnstartedLearner = fsm.NodeUnstartedLearner
	NodeLearner          = fsm.NodeLearner
)

// The kinds of operations.
const (
	OperationMove     = fsm.OperationMove
	OperationAdd      = fsm.OperationAdd
	OperationRemove   = fsm.OperationRemove
	OperationTidy     = fsm.OperationTidy
	OperationTransfer = fsm.OperationTransfer
	OperationMerge    = fsm.OperationMerge
)

// The phases of a merge.
const (
	MergePreparing = fsm.MergePreparing
	MergeBinding   = fsm.MergeBinding
	MergeCommitted = fsm.MergeCommitted
	MergeAborted   = fsm.MergeAborted
)

// Settings of the cluster by which placement decides.
const (
	SettingPaused      = fsm.SettingPaused
	SettingReplication = fsm.SettingReplication
	SettingMergeAfter  = fsm.SettingMergeAfter
	MergeOff           = fsm.MergeOff
	MinMergeAfter      = fsm.MinMergeAfter
)

const (
	// OwnGroup stands for the placement group itself where an Operation names a range.
	OwnGroup = fsm.OwnGroup
	// OwnLeast is how many voters of the placement group are kept where no other node can take
	// the place of one that goes.
	OwnLeast = driver.OwnLeast
	// MaxLeaseTTL is the longest TTL that a lease can be granted, in seconds.
	MaxLeaseTTL = fsm.MaxLeaseTTL
)

// ParseAttributes reads attributes of the form KEY=VALUE,KEY=VALUE. They come out in the
// order of their keys.
func ParseAttributes(text string) ([]Attribute, error) { return fsm.ParseAttributes(text) }
