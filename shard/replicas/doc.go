// Package replicas decides which replicas of ranges a node has: it makes, opens and removes them,
// and keeps two of them from holding one span. It knows no replica but by [Replica] and no
// pipeline; package shard owns the open ones ([Owner]). The rules that ranges share with the
// placement group are package raftgroup/lifecycle's.
//
//	order to create ─▶ Create ──────────────▶ first record, durable ─┐
//	split applied ───▶ BootstrapChild ──────▶ first record ──────────┤ claim
//	start ───────────▶ Open ────────────────▶ stored record ─────────┤
//	                                                                 ▼
//	peer speaks ─────▶ lifecycle ─▶ no record: Ask ─▶ empty ─────▶ Owner.Open ─▶ open
//	                                                   snapshot: Claim             │ Check, sweep
//	                                                                               ▼
//	gone ◀── Owner.Drop ◀── data, log, tombstone ◀── Expel ◀───── not a member, or merged away
//
// # Claims
//
// A range claims a span before it holds it. Snapshots that are being received claim, ranges that
// are being created, and children of applied splits until they are open. The claim keeps all others
// out until a replica of the range is open and holds the span itself. Two logs over one span would
// undo each other's deletes. A claim is set before the replicas are looked at, and given up after
// its replica holds the span: of two claims that overlap, one sees the other. While the data of a
// replica is being deleted, its span is refused to all others. A deletion that finds a claim in its
// way is put off instead. Both are tried again.
//
// # What it guarantees
//
//  1. No two ranges hold one key on one node, except a frozen range and the one that absorbs it.
//  2. A record that no log makes again after a crash is durable before its replica is opened: a
//     replica that had voted and lost its first record would be another one.
//  3. A replica is removed only after it has applied all that it knows to be committed. One of
//     these entries may be a split: without this log nothing would make the child here, and the
//     child's own log may be in the wal since before a crash.
//  4. A replica that was merged away is removed only when a crash cannot take the target back to
//     where it needs the replica again.
//  5. A removal deletes no key that another replica here holds by now. Replicas that are removed
//     hold nothing any more.
//  6. What package raftgroup/lifecycle guarantees.
//
// # What if …
//
//   - A child is here already when its parent's split is applied: It stays as it is. After a crash
//     the parent's log is replayed, and what the child has by then may be newer.
//
//   - A child was moved away before its parent came to the split here: Only its data is deleted.
//
//   - A snapshot carries a parent past its split: Nobody makes the child here. Its leader speaks
//     to this node, and an empty replica is opened.
//
//   - A peer speaks to a child whose parent has not applied the split here: Some replica here still
//     holds the span, so nothing is opened. The split makes the child.
//
//   - An order to create a range comes after a snapshot of its child: The claim is refused and the
//     order skipped. What the order was for comes by snapshot.
//
//   - A node goes down between a change of the members and the removal: At the start the record is
//     without this node. The replica is not opened, its span stays claimed, and it is removed.
//
//   - There is no memory for another replica: One that is new to the node is not taken. Those that
//     are stored are opened all the same, and so are children of splits, which their leader does not
//     begin without room on its own node.
//
//   - The first campaign of a new range is lost, or meets followers that do not have the range
//     yet: It campaigns again after a pause while it knows no leader, a few times.
//
// # Locks
//
// making is held while a replica is opened from its record, unheld while a span is kept from all
// replicas. mu guards claims and the queue of children; it is a leaf. The owner is called with none of
// them but for Owner.Open, which may be called under making or unheld, and Owner.Replicas under unheld.
//
// # Files
//
//	manager.go  the start, and what the owner calls
//	create.go   ranges that are created by order
//	child.go    children of splits, and first campaigns
//	unknown.go  replicas that peers speak to
//	stored.go   replicas that are opened from their records
//	remove.go   replicas that are no members any more
//	claim.go    who is about to hold which span
//	badtable.go tables with a bad block, which are dropped once nobody has data in them
//	data.go     the deletion of what a removed replica leaves
//	state.go    the Manager and what it needs; the state of a replica
package replicas
