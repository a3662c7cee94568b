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
// # How a node joins
//
//  1. Ask. The joiner asks a running node, by the admin service (--join), to admit it. That
//     node adds a row to the node table by an entry of placement. The row is unstarted and has
//     an id made of the peer URLs and the time, as in etcd. No other row may have its name or
//     peer URLs. The answer is the cluster's id, the joiner's id and the node table. If etcd's
//     MemberAdd has made the row, the joiner may ask the peer URLs of the others instead, by a
//     question on the bus that needs no identity. Of several answers the one with the newest
//     node table counts. A refusal counts only when it has come several times.
//  2. Identity. The joiner's directory has an instance: a random number, durable before the
//     joiner asks. The row names it. If two machines come with one name and one peer URL, the
//     first is admitted, and the other is told what to do. A row of MemberAdd has no instance
//     until the first machine comes. An entry claims the row for that machine before it is
//     admitted. The joiner then writes its identity into its directories. After a crash before
//     this, the same directory, name and peer URLs get the same answer again. After a later
//     crash the directory says who it is, and the node asks what became of it.
//  3. Admission. All nodes learn of the row by the feed of the map and let the joiner speak to
//     them. It asks them whether it may come with an empty directory. A node that has served
//     and lost its disk may not. A removed node never may. A joiner waits until somebody
//     vouches for it by what a quorum says. This answer and the node table are durable before
//     the joiner does anything else.
//  4. Serve. The joiner follows the map's feed and serves clients, and holds nothing yet. It
//     publishes itself by an entry, which is refused to any directory but the row's. Then its
//     row is serving, and only from then on it gets replicas. A node that loses its disk before
//     that has promised nothing to anybody.
//  5. Restart. Each node stores the node table, so that it knows its peers when it starts. A
//     removed node is told so when it comes, and stops.
//
// # Founders
//
// Founders know each other by their configuration. A founder with an empty directory cannot
// tell a new cluster from one in which it has lost its disk. It asks the others, and a node
// table that a quorum has decides. If nobody has one, it bootstraps the cluster once a majority
// of the founders runs, itself among them, and none of them objects. A founder objects if it knows
// the asker as a node that has served, or knows by its state, its table or its logs that the
// cluster has run. A node that is no founder is a sign of that too. Otherwise the founder waits
// and says for whom. So a founder without its disk does not come back while its peers are out
// of reach, and a new cluster serves as soon as a majority is up, as with etcd. A single
// founder has nobody to ask: it listens for a moment. Nodes that have joined since knock at it many times
// within that, and it then waits for them. It bootstraps nothing if one of them comes. One that comes
// later, since it was down too, ends a cluster that is younger than a minute: it is a second one.
//
// Two cases are open: docs/decisions/0017-what-founders-cannot-see.md has them.
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
//   - The only founder has lost its disk: it listens for aloneTimeout, or for knockedTimeout where there are no knocks. If a later node knocks, it
//     listens on for knockedTimeout behind the last knock. If one connects, the founder refuses to
//     bootstrap.
//
//   - That node was down too and connects within youngTime (MindStrangers): a quorum says that it was never
//     added, so the founder gives up and its directory is refused from then on. What was written meanwhile
//     stays in it. After youngTime the founder goes on, and the log says that two clusters run under one id.
//
//   - Somebody knocks who never proves to be of the cluster: the founder waits as long as that one knocks, and
//     the log says so.
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
//   - discovery.go: the founders that SRV records name
//
//   - admission.go: the question of a node with an empty directory
//
//   - check.go: its answer
//
//   - admit.go: the row of a new node
//
//   - ask.go: the question to --join and its answer
package join
