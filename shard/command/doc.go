// Package command is the form of a range's log and of its applied state: commands, the
// items of transactions within them, locks, commit records, and the range's record. It
// decides nothing: package shard makes these values on the leader and applies them on
// every replica.
//
//	entry   = Header { kind, term, generation } + body
//	body    = Batch ─▶ versions of each transaction, then TxnItems
//	        | Split | MergeCommand (bind, freeze, absorb, release) | a number (compact, count)
//	        | Load ─▶ finished versions
//	applied = Record          in the applied record of the raft group
//	        + TxnState        locks, commit records, attachments of leases; keys of their own
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	text.go     prints entries
//	stored.go   locks, commit records and attachments in the engine
//	txnitem.go  items of transactions in an entry
//	record.go   the range's applied record
//	merge.go    commands and state of a merge
//	load.go     finished versions for a new cluster, and how far a range has taken them
//	entry.go    headers, batches, splits
//	lock.go     what a transaction holds of a range
//
// # What holds
//
// An entry applied in another term or generation than its header says does nothing. A batch
// names the batch before it ([Link]) and the range's hash, so that a batch is applied on
// exactly the state on which it was evaluated. All replicas have the same Record and the
// same TxnState at the same index. A Lock does not change once its entry is made.
//
// docs/format/shard.md has the bytes, testdata/format the golden files. A decoder refuses
// another version and keeps nothing of its input unless it says so.
package command
