// Package operate answers operators' questions about the whole cluster and carries out their
// commands: it lists nodes and ranges, splits, moves and merges ranges, drains, decommissions and
// removes nodes, and changes etcd's members. Each node has an [Admin]; any of them serves any
// command.
//
// # What is guaranteed
//
//   - A command that would never come to its end is refused, with the reason and the next step,
//     as an adminapi.Refusal. A drain is refused if stopping the node then, beside all others
//     that are silent or leaving, would cost any group its quorum. A decommission is refused if
//     the node's replicas have nowhere to go.
//   - Unknown is not "none": a drain or a decommission is refused while some keys have no known
//     range, while the placement group is unknown, and while a node may lead something and has
//     not answered.
//   - Of two changes of nodes at the same moment, each allowed alone, only one is made. Placement
//     compares which nodes leave, and the other command decides anew.
//   - Every question is answered by the deadline of its context. Without a quorum the answer is
//     what somebody knew last, and says so (Stale).
//   - A list covers each key exactly once: by a range, or by a span whose range is unknown.
//   - A command may be repeated. A split names the range's generation, so that several attempts
//     split once.
//
// It moves nothing itself. Placement begins and drives operations, by the states of nodes that
// this package writes; package decide says what may be moved where.
//
// # How it works
//
//	adminapi ──▶ Admin             etcdapi ──▶ Members, MoveLeader
//	               │                              │
//	   view ◀──────┼── may it change? ────────────┘
//	    │          │
//	    │          └──▶ Placement: states of nodes, operations, settings
//	    ▼
//	 node table, operations, settings ◀── Placement: a quorum, or what one replica knows
//	 ranges and leaders               ◀── Replicas: each node's list, all at the same time
//	 hears, isolated, disk            ◀── Peers: each node's report
//
// A clusterView is what all nodes say at about one moment. Nodes answer at slightly different
// moments, so their lists may contradict one another behind a split or a merge. cover puts them
// together by generation and finds the keys that no answer covers; completeView asks again while
// there are any, for a while. mayDrain and mayDecommission are functions of a view alone.
//
// # What if
//
//   - a node does not answer: it is listed without replicas. If this node or another hears it,
//     or others take it for a leader, it is "unsure", and is neither drained nor decommissioned.
//   - a node hears fewer than half of the others: it is isolated. Nobody counts on it to lead or
//     to take a replica, unless all nodes that answer are isolated.
//   - there is no quorum: lists are stale; changes are refused with kverror.NoLeader.
//   - the range's leader is cut off and takes a split or a transfer that it cannot finish:
//     atLeader looks beside it for a leader that says so itself, and gives the first one up.
//   - nobody knows whether a split happened: it is tried again. If the range begins at the key by
//     then, the split has succeeded.
//   - placement is paused: drains and decommissions are refused, since nothing would move.
//   - MemberRemove takes longer than the client waits: the member goes on leaving, and is removed
//     once it is empty. The same request again waits for that.
//
// # Locks
//
// An Admin has no state and no lock of its own. The mutexes in ask and showAll guard one call's
// results and are leaves; nothing is called while they are held.
//
// # Files
//
//   - admin.go: what an Admin is made of and needs
//   - members.go: etcd's members
//   - nodes.go: the states of nodes
//   - placement.go: the placement group
//   - replication.go: the number of voters
//   - drain.go: what a node may become
//   - decider.go: a view as package decide has it
//   - lists.go: nodes and ranges
//   - show.go: one range
//   - split.go: splits
//   - leader.go: transfers, and the leader beside one that is cut off
//   - move.go: moves, merges and operations
//   - view.go: what all nodes say at about one moment
//   - cover.go: which ranges there are, of what nodes say
//   - table.go: what placement says
//   - rows.go: nodes, ranges and operations as operators see them
package operate
