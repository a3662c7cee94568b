// Package placement is the placement group on one node. The group is the raft group that holds
// the range map, the node table, the id blocks, the settings and the ceiling of revisions. Its
// leader is the sequencer too, and decides what changes in the cluster. Every node has the client
// side.
//
//	shard, router, etcdapi, node
//	      │ Sequence, RangeMap, ReportDescriptors, Compact, Members …
//	   Client ──────────── bus (methods 32 to 36), or a function call ─────┐
//	                                                                       Service
//	               driver ── operations ──┐                                │
//	               sequencer ── ceiling ──┴──▶ machine (fsm.State) ◀───────┘
//	                    │ lease, ReadIndex        ▲
//	                    └───────── raftgroup ─────┘
//
// A node has one Client and one Service. The Service of a node with a replica of the placement
// group has a machine, which applies entries to the replicated state. The Service of the leader
// has a sequencer that serves and a driver that decides. Every other Service refuses with
// NotLeader and names the leader that it knows.
//
// Package fsm is the replicated state, sequencer the allocation of revisions, driver the decisions and their execution. This package joins them to raft, to the
// engine and to the bus.
//
// # What it guarantees
//
// P1. A revision is allocated once, and revisions do not step back in real time (see sequencer).
//
// P2. Without failures every revision is used, also over a transfer of leadership and a stop of
// one node after the other.
//
// P3. A node uses only the answer to its current batch, from the call that it is waiting for.
//
// P4. The range map covers the keyspace exactly once, at every applied index (see fsm).
//
// P5. The compacted revision is committed and visible to every later allocation before Compact
// answers: every later request for a revision is told of it.
//
// P6. For every revision, FollowLog tells in order which ranges got it, or that nobody knows any
// more. Once a part of a later term has come, no part of an earlier term follows.
//
// P7. Once a change that takes rights from users is acknowledged, no node goes by rights from before:
// each has taken the change in, or its view lease has run out. The change that begins the checks is
// acknowledged by every started node.
//
// P8. A user's command was permitted at some index. If rights were taken after that index, the command
// changes nothing.
//
// # What if …
//
// … the leader dies? Clients find the next one by the hints of refusals, by raft, or by asking
// all nodes in turn. They repeat unanswered batches with the same content.
//
// … a member of the group must go, perhaps the leader itself? An operation on fsm.OwnGroup executes
// like one on a range: learner first, then one joint configuration. A leader that must go ends its
// allocations, lowers the ceiling and hands over before. The next leader starts from the ceiling
// in its applied state, also where a snapshot brought it.
//
// … a node's replica is no member any more? The replica lifecycle removes it and notes its id.
// That id never comes back: a replica that began anew without its log could complete a quorum
// that never existed.
//
// … a node was away while all nodes that it knows left the group? Any node tells it the map, with
// the members and the addresses of all nodes, and the leader.
//
// # What it does not do
//
// It moves no data and opens no replicas of ranges: RangeControl, Mover and Merger do, wired by
// node. It does not know what keys mean, and it does not route requests.
//
// # Locks
//
// Service.mu comes before the locks of the sequencer package, before machine.mu and before
// Client.mu. No lock is held over a call to another node or over a proposal.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	client_log.go         allocations as they are made, for who follows them
//	client.go             Client: start and stop
//	client_report.go      what this node says of itself and of the ranges that it leads
//	service.go            Service: start and stop, the duties of a leader
//	own.go                the placement group as the driver sees it
//	create.go             the ranges of the bootstrap are created on their nodes
//	bootstrap.go          the bootstrap state is written
//	client_setting.go     settings by which placement decides
//	client_node.go        rows of nodes
//	client_map.go         the map follows the leader, ranges' descriptors are reported
//	client_register.go    registrations of spans with leases, in batches
//	client_lease.go       requests about leases, renewals in batches
//	client_sequence.go    requests for revisions, in batches
//	client_load.go        the load of a new cluster: its steps, and how far it is
//	client_alarm.go       alarms: what is raised, and raised and ended by clients
//	client_hold.go        holds: made, renewed, moved up and ended
//	client_access.go      users and roles: changes of them, and what a login is compared with
//	client_admin.go       everything else that a node asks for
//	client_ask.go         who is asked, and how often
//	handle.go             handlers of the bus, answers of the leader
//	access.go             answers about users and roles
//	alarm.go              answers about alarms
//	hold.go               answers about holds
//	loading.go            answers about the load of a new cluster
//	handover.go           the leadership is handed over, also by a node that stops
//	feed.go               parts of the map for nodes that follow it
//	lease_serve.go        answers about leases
//	offline.go            the state of a node that does not run
//	replica_lifecycle.go  the replica comes and goes
//	request.go            requests and responses of method 33
//	lease_wire.go         those about leases
//	replica.go            what a Service knows of its replica and of the leader
//	machine.go            the replicated state joined to raft and to the engine
//	mapcache.go           the newest map of this node
//	table.go              the node table as bytes
//	metrics.go            metrics
package placement
