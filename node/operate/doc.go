// Package operate answers operators' questions about the whole cluster and executes their
// commands. It lists nodes and ranges; it splits, moves and merges ranges; it drains,
// decommissions and removes nodes, and changes etcd's members. Each node has an [Admin], and any
// of them serves any command.
//
// # What is guaranteed
//
//   - A command that could never finish is refused with the reason and the next step, as an
//     adminapi.Refusal. A drain is refused if some group would lose its quorum once the node and
//     all silent and leaving nodes are stopped. A decommission is refused if the node's replicas
//     have nowhere to go.
//
//   - Unknown is not "none". A drain or a decommission is refused while some keys have no known
//     range, while the placement group is unknown, or while the node has not answered and may
//     lead something.
//
//   - Of two changes of nodes at the same moment, each allowed alone, only one is made. Placement
//     compares which nodes leave, and the other command decides anew.
//
//   - Every question is answered by the deadline of its context. Without a quorum the answer is
//     the last known state, and is marked as stale.
//
//   - A list covers each key exactly once, by a range or by a span without a known range.
//
//   - A command may be repeated. A split names the range's generation, so that several attempts
//     split once.
//
// It moves nothing itself: it writes the states of nodes, and placement begins and drives the
// operations. Package decide knows which replica may go where.
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
//	 heat, slow requests              ◀── Served: each node
//
// A clusterView holds the answers of all nodes from about one moment. Shortly after a split or a
// merge these may contradict one another. cover merges them by generation, and finds the keys
// that no answer covers. While there are such keys, completeView asks again for a while. mayDrain
// and mayDecommission are functions of a view alone.
//
// # Changes of a node's state
//
// Package fsm has the states of a node, and who changes them.
//
// Before a change begins, the asked node checks whether it can be completed, by package decide
// on the answers of all nodes at that moment. It looks at whether they hear others, at quorums
// without drained nodes, and at the placement group. If the change cannot be completed, it is
// refused with the next step. The command names the other nodes that were leaving at that
// moment. If more have begun to leave since, the entry changes nothing when it is applied, and
// the node checks again. So of two drains at the same instant each is checked with the other.
//
// A node that has not answered in time and is not down (it is heard, or others take it for a
// leader) may lead anything. A change of such a node does not begin, and a waiting drain does
// not count as finished. Later obstacles are shown by node show, and by the waiting command
// while nothing is under way for the node. For a decommissioned node they include the silent
// nodes that its ranges wait for. A drained node hands its leaderships over at once, even if
// another replica is silent or has nowhere to go.
//
// # What if
//
//   - A node does not answer: it is listed without replicas. If any node hears it, or takes it
//     for a leader, it is "unsure": it can be neither drained nor decommissioned.
//
//   - A node hears fewer than half of the others: it is isolated. Nobody counts on it to lead or
//     to take a replica, unless all nodes that answer are isolated.
//
//   - There is no quorum: lists are stale; changes are refused, and the refusal names the silent nodes that it is for, and those with
//     replicas in quarantine. Once the silent ones have been so for a while, nobody is asked any more.
//
//   - Replicas are in quarantine: they have no vote. A look for what has no quorum asks the nodes that have the alarm CORRUPT which
//     ones, once in ten seconds, and only if they could cost a quorum together with the silent nodes. While one of these does not
//     answer, nothing that was told counts as over. A replica counts until its range has it no more, whoever ends the alarm. While the
//     placement group has no leader nobody records an alarm: then each node knows its own replicas, and those it knew before.
//
//   - The range's leader is cut off and accepts a split or a transfer without being able to finish
//     it: atLeader asks the other replicas for their leader. If that one confirms it, the first
//     one is given up.
//
//   - The fate of a split is unknown: it is tried again. If the range begins at the key by then,
//     the split has succeeded.
//
//   - Placement is paused: drains and decommissions are refused, since nothing would move.
//
//   - MemberRemove takes longer than the client waits: the member goes on leaving, and is removed
//     once it is empty. The same request again waits for that.
//
// # Locks
//
// An Admin has no state and no lock of its own. The mutexes in ask, livingReports and showAll guard one call's
// results and are leaves; nothing is called while they are held.
//
// # Files
//
//   - admin.go: what an Admin is made of and needs
//
//   - survey.go: everything at a glance
//
//   - heat.go: the heat map of all nodes
//
//   - slow.go: slow requests
//
//   - members.go: etcd's members
//
//   - nodes.go: the states of nodes
//
//   - placement.go: the placement group
//
//   - replication.go: the number of voters
//
//   - cluster.go: the cluster version
//
//   - holds.go: holds of old versions
//
//   - drain.go: what a node may become
//
//   - decider.go: a view as package decide has it
//
//   - lists.go: nodes and ranges
//
//   - show.go: one range
//
//   - split.go: splits
//
//   - leader.go: transfers, and the leader beside one that is cut off
//
//   - move.go: moves, merges and operations
//
//   - view.go: what all nodes say at about one moment
//
//   - cover.go: which ranges there are, of what nodes say
//
//   - table.go: what placement says
//
//   - quorum.go: what has no quorum, and for whom it waits
//
//   - reports.go: what nodes say of themselves
//
//   - rows.go: nodes, ranges and operations as operators see them
package operate
