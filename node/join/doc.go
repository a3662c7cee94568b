// Package join brings a node into a cluster: a [Joiner] finds out which node of which cluster a
// directory is, an [Admitter] on a running node gives a new node its row of the node table, and an
// [Admission] has the peers check a node with an empty directory before it takes part.
//
// # What is guaranteed
//
//   - A node that has lost its disk is not admitted under its old id. It has forgotten its votes
//     and what it acknowledged; with its id it could make the others lose both (trap 47).
//   - One row of the node table belongs to one directory: the first that comes. A second machine
//     with the same name and peer URLs is refused.
//   - A node that crashes anywhere between its first question and its first start, and starts
//     again with the same name, peer URLs and directory, gets the same id.
//   - A cluster is bootstrapped once: by a majority of the founders that all know nothing of an
//     earlier run, or by the only founder.
//   - A node that was removed is never admitted again under its id.
//   - A refusal says what the operator can do. What may pass by itself is asked again until ctx
//     ends.
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
//   - nobody answers: the node asks again, and logs what it waits for less and less often. A
//     founder that hears nobody cannot tell a new cluster from one that has lost it.
//   - the peers have no quorum: they answer Unsure, and are asked again.
//   - the peer is itself not admitted yet: it knows nothing, or Unsure if it has heard that the
//     cluster has run.
//   - the only founder has lost its disk: it listens for aloneTimeout. A node that has joined
//     since connects, and the founder refuses to bootstrap.
//   - a founder comes so late that the placement group has other members (Moved): what it wrote
//     as a founder is taken back (UndoBootstrap).
//   - the node asked by --join hears no quorum: it answers within quorumTimeout, and the joiner
//     asks the next one.
//   - another node is added between the read of the node table and the write: the table is read
//     again, and decides.
//   - the directory belongs to another cluster, or to a removed node: refused at the start if any
//     node of --join answers, else when the node hears its cluster.
//
// # Locks
//
// The flags of an Admission are atomic. The mutexes in askAll and askOthers guard one call's
// results and are leaves; nothing is called while they are held.
//
// # Files
//
//   - joiner.go: the membership of a directory
//   - existing.go: of --initial-cluster-state existing
//   - admission.go: the question of a node with an empty directory
//   - check.go: its answer
//   - admit.go: the row of a new node
//   - ask.go: the question to --join and its answer
package join
