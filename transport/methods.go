package transport

import "strconv"

// Method names what a message is for. Numbers are part of the wire format: they
// are never reused for another meaning.
type Method uint16

// The methods of the bus. The comment names the package that owns the payload's format.
const (
	// MethodRaft carries raft messages with entries and what stays behind them, packed (raftgroup).
	MethodRaft Method = 1
	// MethodRaftControl carries votes, heartbeats, sleep notices and node liveness
	// (raftgroup).
	MethodRaftControl Method = 2
	// MethodRaftSnapshot is the stream of one snapshot (raftgroup).
	MethodRaftSnapshot Method = 3
	// MethodRaftCall is raftgroup's calls beside raft.
	MethodRaftCall Method = 4
	// MethodShardRequest is a request to a range (shard).
	MethodShardRequest Method = 16
	// MethodShardAdmin is an administrative request to a replica (shard).
	MethodShardAdmin Method = 17
	// MethodShardTxn is a command of a transaction over several ranges, at one of them
	// (shard).
	MethodShardTxn Method = 18
	// MethodRouterTxn asks a node whether it runs an attempt of a transaction (router).
	MethodRouterTxn Method = 20
	// MethodShardFeed is the stream of applied events of the ranges on a node (shard).
	MethodShardFeed Method = 21
	// MethodShardWatch is a gateway's question to a range about events that its watchers
	// wait for (shard).
	MethodShardWatch Method = 22
	// MethodShardTxnEnd is a command that ends locks (shard). It has a method of its own
	// so that the many calls that wait for those locks cannot keep it out.
	MethodShardTxnEnd Method = 23
	// MethodShardPage is one page of a large read of a range (shard).
	MethodShardPage Method = 24
	// MethodRouterReads asks a node whether transactions that it coordinates may read
	// below a revision (router).
	MethodRouterReads Method = 25
	// MethodShardVersions is one page of the versions of a cut through a range (shard).
	MethodShardVersions Method = 27
	// MethodShardLoad brings versions to a range of a cluster that is being loaded (shard).
	MethodShardLoad Method = 26
	// MethodPlacementSequence asks the sequencer for revisions (placement).
	MethodPlacementSequence Method = 32
	// MethodPlacementRequest is every other request to placement.
	MethodPlacementRequest Method = 33
	// MethodPlacementFeed is the stream of changes of the range map (placement).
	MethodPlacementFeed Method = 34
	// MethodPlacementLog is the stream of the allocation log (placement).
	MethodPlacementLog Method = 35
	// MethodPlacementReport is a node's report on itself to placement's leader
	// (placement).
	MethodPlacementReport Method = 36
	// MethodNodeAdmin is node's own.
	MethodNodeAdmin Method = 48
)

// methods is the table of the bus: name and class of each method.
var methods = map[Method]struct {
	name  string
	class Class
}{
	MethodRaft:              {"raft", ClassRaft},
	MethodRaftControl:       {"raft-control", ClassControl},
	MethodRaftSnapshot:      {"raft-snapshot", ClassBulk},
	MethodRaftCall:          {"raft-call", ClassRequest},
	MethodShardRequest:      {"shard-request", ClassRequest},
	MethodShardAdmin:        {"shard-admin", ClassRequest},
	MethodShardTxn:          {"shard-txn", ClassRequest},
	MethodShardTxnEnd:       {"shard-txn-end", ClassRequest},
	MethodShardPage:         {"shard-page", ClassRequest},
	MethodShardVersions:     {"shard-versions", ClassRequest},
	MethodRouterTxn:         {"router-txn", ClassRequest},
	MethodRouterReads:       {"router-reads", ClassRequest},
	MethodShardFeed:         {"shard-feed", ClassRequest},
	MethodShardWatch:        {"shard-watch", ClassRequest},
	MethodShardLoad:         {"shard-load", ClassRequest},
	MethodPlacementSequence: {"placement-sequence", ClassRequest},
	MethodPlacementRequest:  {"placement-request", ClassRequest},
	MethodPlacementFeed:     {"placement-feed", ClassRequest},
	MethodPlacementLog:      {"placement-log", ClassRequest},
	MethodPlacementReport:   {"placement-report", ClassRequest},
	MethodNodeAdmin:         {"node-admin", ClassRequest},
}

// String returns the method's name in logs.
func (m Method) String() string {
	if d, ok := methods[m]; ok {
		return d.name
	}
	return "method-" + strconv.FormatUint(uint64(m), 10)
}
