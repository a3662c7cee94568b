// Package node makes one Skein node of its parts. A Core is the directories, the wal, the
// engine, the bus, the raft host, the placement service and client, the replicas and the
// router. A Node is a Core with the ports for clients and operators.
//
// # Start
//
//	directories → wal → engine → bus (bound, silent) → raft host → placement → replicas →
//	handlers → bus (speaks) → admission, on the first start → raft host and placement group →
//	clients of placement → ports
//
// Nothing is served before everything below it stands. A start that fails undoes its steps in
// reverse order.
//
// # Stop
//
//	/readyz fails; --shutdown-delay → ports close, requests under way end → pipelines of the ranges close, leaderships are handed
//	over → the ceiling of revisions is lowered, placement is handed over → clients, replicas,
//	raft host → engine flushed → wal → bus → directories
//
// Each step stops waiting by itself, also when the disk does not move: requests under way and
// the hand-over of leaderships get 5 s each. The process watches the stages all the same (node/process).
// If one takes longer than 30 s, the log names it with the stacks of all goroutines, and the
// process exits without it, as after a crash. If the log hangs too, the process exits 5 s
// later. After a second signal it exits at once, which costs only a replay.
//
// # Memory
//
// The flag --memory-budget-bytes (by default a quarter of the memory that there is) is divided by [Budget]. The parts add up to
// it. Some hold at least four of the largest requests.
//
//	block cache    8 %, and what others have no use for  the engine's blocks; also what the memtables do not take
//	memtables      20 %, 256 MiB at most                 unflushed data of the engine, over four memtables
//	proposals      10 %                                  entries of this node's leaders that are not applied yet
//	bus queues     10 %, at least 16 of the largest      over all peers: half to be sent, the rest for calls being served and QUIC
//	requests       6 %, at least four of the largest     client requests being evaluated, with their overlays
//	transactions   2 %, at least four of the largest     transactions over several ranges, at their gateway
//	locks          2 %, at least four of the largest     keys and writes locked by such transactions
//	pipes          1 %, at least four of the largest     parts of large transactions that have come by pipes
//	scans          3 %                                   what requests to a node's replicas hold of their reads
//	reads          4 %                                   answers to reads of spans, until clients have taken them
//	watchers       6 %                                   events: held back, recent, or pages of history
//	version cache  8 %                                   the newest versions of keys written or read lately
//	inbound        8 %                                   received entries that no worker has taken in
//	wal cache      6 %, 128 MiB at most                  entries kept in memory for followers
//	wal queue      6 %                                   entries to be written to the wal
//
// Connections, pipes, watchers and replicas at rest have parts beside these ([Standing]). A node rarely has
// both kinds full:
//
//	connections    15 %      of clients; a further one is closed
//	pipes          3.125 %   of clients, 4,096 at most; a further one is refused
//	watchers       6.25 %    a further one is refused
//	replicas       43.75 %   with the rows of the range map; a node takes no further one and splits none
//
// One request at a time may exceed scans, up to a quarter of the whole budget, and one answer
// reads, up to half of it. So what etcd answers in one message is answered here up to 512 MiB
// with a budget of 1 GiB. A larger answer is refused with ResourceExhausted and a text that names the ways
// out: a limit, or RangeStream. Answers that are filtered, or sorted by anything but the key, are
// put together at the gateway whatever their limit, within the same bound. There each key counts
// 160 bytes more.
//
// Reads, and transactions over several ranges, wait for room in scans, reads and transactions
// until their deadline, in the order in which they began (package internal/budget). A client
// without a deadline waits until it goes away. An answer gives its bytes back as they are sent.
// Watchers have their own share, and wait for none of these. A transaction that reads spans waits
// before it begins. Later it counts what it reads and does not wait, because others may wait for
// its locks.
//
// All else that is full means ResourceExhausted for a client's request and a dropped and reported
// message on the bus, never an endless wait. The process sets Go's memory limit to a quarter above
// the budget.
// Package process paces the collector: garbage is what is allocated in some seconds, within a part of
// the budget. A node that has not collected for a minute collects then and returns the memory. Tables
// have 16 MiB at most (Pebble's default is 128), and those of copies have older versions beside
// the newest ones. Otherwise the written part of a table would stay in memory until it is
// whole, at eight times its size.
//
// # What if
//
//   - The disk lies or fails an fsync, or the log or the node's own records rot: the node stops.
//     The state of the disk is unknown. The error is that of wal or engine.
//
//   - A table with user data rots: the replicas whose keys it may hold go into quarantine, and the
//     node goes on.
//
//   - The disk is full: the node refuses puts to the ranges that it leads, with etcd's error, and
//     has the alarm NOSPACE. Reads and deletes go on, and the alarm ends once there is room.
//     The node flushes its memory at the beginning. The wal then takes no new file from the
//     reserve, and no snapshot is received. If even the wal's reserve is used up, the disk counts
//     as hanging.
//
//   - The store is above --quota-backend-bytes: the same for clients. The node compacts its store.
//
//   - The process can open no more files: the same as a full disk. It should not come to that: the
//     limit is divided at the start, and clients beyond their part are refused.
//
//   - A disk hangs, the wal's or the engine's: the node falls silent, and others lead its ranges
//     within two or three election timeouts. When the disk comes back the node takes part again.
//
//   - Either the log or the engine is lost: the node refuses to start and names the directory. As
//     a new node it would have forgotten its votes.
//
//   - The directory is empty, but the cluster knows this node: the peers say so at the admission,
//     and the node refuses to start. A node that has forgotten its votes must not vote again.
//
//   - A recovery plan was applied to the directory: at its next start the node has no session and runs no group
//     until it has heard that all survivors of the plan have applied it. One that has not might go on by the old
//     members of a group, beside the new ones.
//
//   - The bus reaches nobody: the node waits. It serves once there is a quorum.
//
// It decides nothing: no request, no placement. Package operate executes operators' commands,
// and package join brings nodes in. Package embed starts Nodes; the simulator opens Cores.
//
// # Rights of users
//
// A node takes each change of users and roles in from the map, in this order: the gate knows it, watchers
// that it does not cover are cancelled, and placement is told. Only then the change is acknowledged.
//
// Writes and linearizable reads ask the sequencer, which knows all that was acknowledged. The rest, as
// serializable reads and events, is served under the view lease. It counts from each question whether the
// rights still hold, for three election timeouts, and an idle node asks once per third. A change that takes
// rights is acknowledged without a node whose leases of earlier rights have run out. A machine that was
// paused drops its lease, together with those of its leaders.
//
// While rights are not checked, the lease lasts for ever, and no node asks. So the change that begins the
// checks is acknowledged by every node. Before it says so, a node makes a durable note: from an older disk
// it would serve everybody again.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	node.go        Node: its ports, start and stop
//	foreign.go     refuses a directory of etcd
//	permission.go  what a lack of permission says of the directory
//	admin.go       the backend of the admin service
//	console.go     the console, if there is to be one
//	etcd.go        what etcd's services ask of the node itself
//	snapshot.go    etcd's database files of the store, for etcd's Snapshot
//	snapshot_heap.go  how much garbage they leave
//	alarm.go       alarms of all members, and what this node observes of itself
//	open.go        Open: a Core from its directories up
//	membership.go  the first start, and what the directory says of the cluster
//	recovered.go   the first start behind a recovery plan
//	questions.go   questions of other nodes, and those to them
//	watchers.go    the watchers of all nodes
//	series.go      what all nodes have measured of themselves, for charts
//	callbacks.go   what parts call of parts that are made after them
//	scrub.go       replicas are compared as the disks have them
//	compact.go     how a compaction waits for reads on all nodes
//	lease.go       the time of leases, for placement
//	measure.go     the measures of this node, for placement
//	processors.go  how much processor time the process has used
//	quorum.go      what the node tells of quorums and leaders
//	trouble.go     what troubles the node, and since when
//	restarts.go    how often other nodes have started again
//	core.go        Core, Options, Stop, Crash
//	access.go      the rights of users as this node knows them, and for how long they count
//	version.go     the version in which the node writes
//	names.go       names of nodes beside their ids in the log
//	table.go       the node table on disk, and the bus's peers
//	budget.go      how the memory is divided
//	files.go       how the files that the process may open are divided
//	nosync.go      a file system that never waits for the disk (--unsafe-no-fsync)
package node
