package operate

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/router"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/shard/load/heat"
)

// Admin answers operators' questions about the whole cluster, and executes their commands.
// With the join of nodes, which package join serves, it implements adminapi.Backend.
type Admin struct{ o Options }

// Options are what an Admin is made of. All of them are required.
type Options struct {
	// Self is this node.
	Self  keyspace.NodeID
	Clock clock.Clock
	// Election and Heartbeat are the node's election timeout and raft tick.
	Election, Heartbeat time.Duration
	Logger              *zap.Logger

	Placement Placement
	Replicas  Replicas
	Routes    Routes
	Peers     Peers
	Served    Served
}

// New returns an Admin.
func New(o Options) *Admin { return &Admin{o: o} }

// Placement is the access to the placement group; *placement.Client implements it.
type Placement interface {
	NodeTable
	NodeChanges
	RangeMap
	Operations
	Settings
	Group
	Upgrades
	Holds
}

// NodeTable reads the node table. With linearizable a quorum answers, else the newest copy
// that this node knows.
type NodeTable interface {
	// Members returns the nodes that were not removed.
	Members(ctx context.Context, linearizable bool) ([]fsm.Node, error)
	// NodeTable returns all nodes, removed ones included.
	NodeTable(ctx context.Context, linearizable bool) ([]fsm.Node, error)
}

// NodeChanges changes the node table. A change whose precondition fails is refused with
// kverror.BadRequest.
type NodeChanges interface {
	AddNode(ctx context.Context, n fsm.Node) error
	SetPeerURLs(ctx context.Context, node keyspace.NodeID, urls []string) error
	// SetNodeState changes a node's state, if it is in the state from and no other nodes
	// leave than those in beside.
	SetNodeState(ctx context.Context, node keyspace.NodeID, from, to fsm.NodeState, beside ...keyspace.NodeID) error
	// LeaveNode decommissions a node and removes it once it holds nothing, under the
	// conditions of SetNodeState.
	LeaveNode(ctx context.Context, node keyspace.NodeID, from fsm.NodeState, beside ...keyspace.NodeID) error
	// RemoveNode removes a node that holds nothing.
	RemoveNode(ctx context.Context, node keyspace.NodeID) error
}

// RangeMap reads this node's copy of the range map, which may be old.
type RangeMap interface {
	// Map returns the map; it waits until there is one.
	Map(ctx context.Context) (*fsm.Map, error)
	// WatchMap returns the map, nil before there is one, and a channel that the next one closes.
	WatchMap() (*fsm.Map, <-chan struct{})
	// RangeMap returns the descriptors of all ranges in the order of their keys.
	RangeMap(ctx context.Context) ([]keyspace.Descriptor, error)
}

// Operations begins operations and lists those under way.
type Operations interface {
	BeginOperation(ctx context.Context, o fsm.Operation) (fsm.Operation, error)
	// Operations asks a quorum, LastOperations one replica of the placement group.
	Operations(ctx context.Context) ([]fsm.Operation, error)
	LastOperations(ctx context.Context) ([]fsm.Operation, error)
	SetPaused(ctx context.Context, paused bool) error
	// KeepBorder has a range begin at the key until it is merged by command.
	KeepBorder(ctx context.Context, key []byte) error
}

// Settings reads and changes the cluster's settings.
type Settings interface {
	// Settings asks a quorum, LastSettings one replica of the placement group.
	Settings(ctx context.Context) ([]fsm.Setting, keyspace.Revision, error)
	LastSettings(ctx context.Context) ([]fsm.Setting, error)
	SetReplication(ctx context.Context, factor int) error
	SetMergeAfter(ctx context.Context, after time.Duration) error
	UnsetMergeAfter(ctx context.Context) error
}

// Group tells of the placement group itself.
type Group interface {
	// Leader returns the group's leader as far as this node knows, 0 for none.
	Leader() keyspace.NodeID
	// PlacementGroup asks a quorum, Status one replica of the group.
	PlacementGroup(ctx context.Context) (placement.Status, error)
	Status(ctx context.Context) (placement.Status, error)
	TransferLeader(ctx context.Context, to keyspace.NodeID) error
}

// Holds tells of holds of old versions, and ends them.
type Holds interface {
	// KnownHolds returns all holds by this node's copy of the range map.
	KnownHolds() []fsm.Hold
	// EndHold ends a hold. One that has ended already is no error.
	EndHold(ctx context.Context, id fsm.HoldID) error
}

// Replicas asks the replicas on a node; *shard.AdminClient implements it.
type Replicas interface {
	// List returns a summary of each replica of the node.
	List(ctx context.Context, node keyspace.NodeID) ([]shard.Summary, error)
	// Show returns the state of one replica.
	Show(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (*shard.Status, error)
	// Look returns the replica's descriptor and the leader it knows, 0 for none.
	Look(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error)
	// Split has the range's leader split it at the key, if it has that generation.
	Split(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, gen keyspace.Generation, key []byte) ([]keyspace.Descriptor, error)
	// TransferTo has the range's leader hand over to another node.
	TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error
}

// Routes is this node's range cache; *router.Router implements it.
type Routes interface {
	Locate(ctx context.Context, span keyspace.Span) ([]router.Located, error)
	// Present returns the current revision and the compacted one.
	Present(ctx context.Context) (current, compacted keyspace.Revision, err error)
	Learn(descs ...keyspace.Descriptor)
	Led(id keyspace.RangeID, leader keyspace.NodeID)
}

// Peers tells of the nodes what this one observes; the node implements it.
type Peers interface {
	// Alive reports whether this node receives the node's liveness messages. It is always
	// true of this node.
	Alive(keyspace.NodeID) bool
	// Reached reports whether placement counts on the node: it is alive, or at least half of the others hear it.
	Reached(keyspace.NodeID) bool
	// SilentFor returns for how long a node that is not alive has been silent; 0 where that is not known.
	SilentFor(keyspace.NodeID) time.Duration
	// Central reports whether the node hears at least half of the others.
	Central(keyspace.NodeID) bool
	// Report returns what a node, this one included, says of itself.
	Report(ctx context.Context, node keyspace.NodeID) (Report, error)
}

// Served tells what nodes have served, this one included; the node implements it.
type Served interface {
	// Heat returns the heat map of what a node has served.
	Heat(ctx context.Context, node keyspace.NodeID, q heat.Query) (*heat.Grid, error)
	// Slow returns the last slow requests of a node, in no order.
	Slow(ctx context.Context, node keyspace.NodeID) ([]stages.Slow, error)
}

// Report is what a node says of itself. Nodes send it to one another as JSON.
type Report struct {
	// Bytes is what its store and its log take.
	Bytes int64
	// Capacity and Used are the bytes of the disk with its data, 0 where the file system
	// does not say.
	Capacity, Used int64
	// Isolated says that it has heard fewer than half of the other nodes for a while, and hands
	// over its leaderships. Only the node's own word counts: its liveness messages change for a
	// moment with each start.
	Isolated bool `json:"Lonely"`
	// Hears are the other nodes that it hears.
	Hears []keyspace.NodeID
	// Quarantined are its replicas in quarantine.
	Quarantined []Quarantined
	// NoMemory says that it has no memory for another replica.
	NoMemory bool
	// NoSpace and Corrupt say that it has a cause for these alarms of etcd's.
	NoSpace, Corrupt bool
	// FsyncP99 is the 99th percentile of its log's last fsyncs.
	FsyncP99 time.Duration
	// FsyncSlow is for how long that has been high, and Full for how long the node has taken no writes for lack of room; 0 while
	// that is not so. FullWhy says what it lacks. These are ages, as are those below, because clocks differ.
	FsyncSlow, Full time.Duration
	FullWhy         string
	// Lag says which watchers do not keep up.
	Lag Lag
	// Certificate is the file of its certificate that is to be renewed first, "" without one; the hosts that it holds for; for how long it
	// is still valid, and for how long in all.
	Certificate                      string
	CertificateHosts                 []string
	CertificateLeft, CertificateLife time.Duration
	// ClockStep is by how much its wall clock was last set forward, and ClockStepped how long ago; 0 if it was not lately.
	ClockStep, ClockStepped time.Duration
	// Restarts counts how often it has heard other nodes in another boot than before, within adminapi.RestartsKept.
	Restarts map[keyspace.NodeID]int
	// Wall is what its wall clock shows; 0 in the report of a build that does not say.
	Wall fsm.UnixMillis
}

// Lag says which watchers of a node get their events from history, because they began in the past or their clients do not take what
// there is.
type Lag struct {
	Watchers int
	// For how long there have been some; who was furthest behind when that was last looked for, and by how many revisions. Client is
	// empty before that.
	For    time.Duration
	Client string
	Behind uint64
}

// Quarantined is a replica that its node keeps closed until it is replaced.
type Quarantined struct {
	Range   keyspace.RangeID
	Replica keyspace.ReplicaID
	Reason  string
	Since   fsm.UnixMillis
}
