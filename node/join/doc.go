// Package join brings a node into a cluster. A [Joiner] finds out which node of which cluster a
// directory is. An [Admitter] on a running node gives a new node its row of the node table. An
// [Admission] has the peers check a node with an empty directory before it takes part.
//
// # What is guaranteed
//
//   - A node that has lost its disk is not admitted under its old id. It has forgotten its votes
//     and what it acknowledged; with its id it could make the others lose both (trap 47).
//
//   - One row of the node table belongs to one directory: the first that comes. A second machine
//     with the same name and peer URLs is refused.
//
//   - A node may crash anywhere before its first start is complete. With the same name, peer URLs
//     and directory it gets the same id again.
//
//   - A cluster is bootstrapped once, by a majority of the founders, all without knowledge of an
//     earlier run, or by the only founder.
//
//   - A node that was removed is never admitted again under its id.
//
//   - A refusal names the operator's next step. A failure that may pass by itself is tried again
//     until ctx ends.
//
// # The way in
//
//	directory               --join                     --initial-cluster-state existing   founder
//	   │                      │                               │                              │
//	   │ has an identity      │ Ask: JoinNode                 │ PeerTable: who am I?         │
//	   │                      ▼                               ▼                              │
//	   │                  Admitter: row in the         row that MemberAdd                    │
//	   │                  node table, unstarted        has added                             │
//	   ▼                      ▼                               ▼                              ▼
//	Membership ◀──────────────┴───────────────────────────────┴──────────────────────────────┘
//	   │
//	   ▼  the node opens its directories; the bus speaks
//	Admission.Request ── Check ──▶ every peer: Admission.Answer ──▶ node table, by a quorum
//	   │        ▲                                                        │
//	   │        └── Known, Removed, Other, Absent: refused ◀─────────────┤
//	   │ admitted ◀── Member: its row is claimed for the directory ◀─────┘
//	   │          ◀── a majority of the founders knows nothing
//	   ▼
//	Announce: the row has client URLs; from now on an empty directory is refused (Known)
//
// # What if
//
//   - Nobody answers: the node asks again, and logs this less and less often. A founder without
//     peers cannot tell a new cluster from one in which it has lost its disk.
//
//   - The peers have no quorum: they answer Unsure, and are asked again.
//
//   - The peer is itself not admitted yet: it answers nothing, or Unsure if it knows of an earlier
//     run.
//
//   - The only founder has lost its disk: it listens for aloneTimeout. If a later node connects,
//     the founder refuses to bootstrap.
//
//   - A founder comes late, and the placement group has other members by now (Moved): the node
//     deletes its bootstrap state (UndoBootstrap).
//
//   - The node asked by --join hears no quorum: it answers within quorumTimeout. The joiner asks
//     the next one.
//
//   - Another node is added between the read of the node table and the write: the table is read
//     again, and decides.
//
//   - The directory belongs to another cluster, or to a removed node: the start is refused if any
//     node of --join answers. Otherwise the node stops once it hears its cluster.
//
// # Locks
//
// The flags of an Admission are atomic. The mutexes in askAll and askOthers guard one call's
// results and are leaves; nothing is called while they are held.
//
// # Files
//
//   - joiner.go: the membership of a directory
//
//   - existing.go: of --initial-cluster-state existing
//
//   - admission.go: the question of a node with an empty directory
//
//   - check.go: its answer
//
//   - admit.go: the row of a new node
//
//   - ask.go: the question to --join and its answer
package join
