// Package fsm is what the placement group replicates: its state, the commands that change
// it, and the bytes of both. It is a pure function of the first state and the commands
// applied since. It knows no clock, no network, no goroutine, no disk and no raft.
//
//	entry ──decode──▶ Command ──▶ State.Apply ──▶ Result       to whoever proposed it
//	                                  │
//	                                  ├─ State.Flush ──▶ records   in the batch that applies
//	                                  └─ State.View ──▶ View       to readers, unchanging
//
// Package placement joins it to raft and to the engine: its machine calls Apply for each
// entry, Flush once for each batch, and View before anybody is answered.
//
// # State
//
//	record   holds                                                         key
//	meta     cluster id, ceiling, compacted revision, next ids, versions    m
//	Range    one range: descriptor, preferred leader, whether it is kept    r + range id
//	Node     one node: names, URLs, NodeState, attributes, directory        n + node id
//	Setting  one setting of the cluster                                     s + name
//	Lease    one lease: TTL, incarnation, spans of its keys                 l + lease id
//	Operation  one change of a range's replicas that is under way           o + range id
//	User     one user: roles, hash of the password                          u + name
//	Role     one role: permissions                                          p + name
//	Alarm    one alarm of a member: whether a client has raised it          w + type + member
//	Hold     one hold: owner, revision, expiry                              h + hold id
//	Loading  the load of a new cluster: phase, source, loader, position     d
//	access   whether rights are checked, and since when; the tokens' secret a
//
// The members of the placement group are raft's: the applied record has them, and the
// state shows them without storing them.
//
// # What it guarantees
//
// F1. Apply depends on the state, the entry's index and the command alone. All replicas
// have the same state after the same entry, byte for byte in their records.
//
// F2. Apply never fails. A refused command changes nothing, and its Result says why: the
// same on every replica.
//
// F3. The ranges cover the keyspace exactly once after each command. Reported descriptors
// enter only where they tile the span of the rows that they replace (see fit).
//
// F4. A key's generation only grows, whichever ranges hold the key. A report that is older
// than the map changes nothing.
//
// F5. No id of a range, of a replica or of a removed node is ever given out again.
//
// F6. A range has at most one operation under way. An operation names the generation and the
// configuration of its decision, and is refused if either has changed.
//
// F7. A merge is either committed or aborted, never both. The commit replaces two rows by one
// in a single command.
//
// F8. Compact refuses a revision above the ceiling, and RaiseCeiling and LowerCeiling move the
// ceiling in their own direction only.
//
// F9. A guarded command changes nothing if rights were taken from anybody after its permit.
//
// F10. A new hold names no compacted revision, and none goes down. A hold ends only by its owner's command,
// or by the leader's that names the time at which it had expired.
//
// F11. A load begins only in an empty cluster, and only its loader goes on with it. While it lasts no
// revision is allowed, and no client's command takes effect.
//
// # States of a node
//
// A node's state stands in its row of the node table, which only entries of the placement group
// change. Whether the node is alive is another question. The state machine refuses every
// transition that is not here:
//
//	from                                          to                            by
//	(no row)                                      unstarted, unstarted learner  an operator, who adds a node that is to come
//	unstarted                                     serving                       the node, which publishes itself
//	unstarted learner                             learner                       the node, which publishes itself
//	learner                                       serving, decommissioned       an operator, who promotes or removes it
//	serving                                       draining, decommissioned      an operator
//	draining                                      serving, decommissioned       an operator
//	decommissioned                                serving                       an operator
//	unstarted, unstarted learner, decommissioned  removed                       an operator, where the node holds nothing
//
// Founders serve from the bootstrap on. Draining is temporary: the node gives up its leaders.
// Decommissioned is permanent: it gives up its replicas too. Only a serving node gets replicas
// by operations.
//
// A node is removed only while it holds nothing: no replica in the range map or of the placement
// group, and no operation on its way there. This is checked when the entry is applied. A node that
// an operator has decommissioned by command stays until somebody removes it. A node that etcd's
// MemberRemove has decommissioned leaves: its row, skein node list and skein node show say so.
// Decisions empty it like any other, with room and zones considered. Placement's leader removes it
// once it holds nothing. If every serving node already has a replica of a range, or of the placement
// group, that one goes on with one replica less. A skein node decommission that waits meanwhile
// succeeds: the node has left. Id and name stay in the row of a removed node. Its id is never
// admitted again, neither with an empty directory nor with its old one: such a node stops when it
// publishes itself. The rows of the last maxRemovedRows removed nodes are kept. A node without a row
// is refused in the same way, because each node has a row before it has a directory.
//
// # What a command may do
//
// A command may read the state and its own fields. A time that goes into a row stands in the
// command, by the proposer's clock, and only people read it. A command that was proposed in
// another term than its entry's does nothing: package placement checks that before Apply. A
// command may be proposed again after an answer was lost, so each one either takes effect
// twice without harm (range ids that nobody uses) or recognizes that it was applied before.
//
// # Formats
//
// FormatVersion leads every command and record; docs/format/placement.md describes them byte
// by byte. The golden file in testdata holds one of each. Reader and the Append functions
// are the elements of these forms; the other packages of placement build their messages on
// the bus from the same elements.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	command.go      commands: an entry of the group
//	bootstrap.go    the first state of a cluster
//	recover.go      what a lost majority leaves
//	access_rows.go  users and roles as rows, for copies of the whole store
//	state.go        State: Apply, Flush, Load, and View
//	begin.go        an operation begins and ends
//	mergestate.go   the phases of a merge
//	loading.go      the load of a new cluster
//	loading_access.go  users and roles of a load
//	lease.go        leases: records, commands, their spans
//	operation.go    Operation: what is under way on a range
//	version.go      the cluster version
//	access_view.go  an unchanging copy of them, and what is told of it to other nodes
//	access.go       users, roles and permissions: records and commands; what they mean is package rights'
//	alarm.go        alarms: records, commands, the list
//	hold.go         holds: records, commands, the list
//	node.go         nodes: rows, commands, states
//	setting.go      settings by which placement decides
//	answer.go       the head of an answer on the bus
//	record.go       records in the group's space of the engine
//	group.go        the placement group as a range
//	map.go          Map: an unchanging copy
//	codec.go        the elements of all forms
//	rangemap.go     how reports fit in
//	change.go       changes of rows, noted for Flush
//	rows.go         rows by key, by range, and by their last change
package fsm
