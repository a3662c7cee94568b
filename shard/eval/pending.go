package eval

import (
	"fmt"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/command"
)

// Batch is what transactions get their revisions and their entry with. Its owner guards it.
type Batch struct {
	// Owner is the owner's own batch, which has who waits for this one.
	Owner any
	order uint64
	// applied says that the batch was applied. ended is closed when it was applied or
	// discarded, nil until somebody waits for it.
	applied bool
	ended   chan struct{}
}

// NewBatch returns the batch of a replica with the number, which rises from batch to batch.
func NewBatch(order uint64, owner any) Batch { return Batch{Owner: owner, order: order} }

// Order returns the batch's number among those of the replica.
func (b *Batch) Order() uint64 { return b.order }

// Applied says whether the batch is applied.
func (b *Batch) Applied() bool { return b.applied }

// End wakes all who wait for the batch, which was applied or discarded.
func (b *Batch) End(applied bool) {
	b.applied = applied
	if b.ended != nil {
		close(b.ended)
	}
}

// Ended returns a channel that is closed when the batch is applied or discarded.
func (b *Batch) Ended() <-chan struct{} {
	if b.ended == nil {
		b.ended = make(chan struct{})
	}
	return b.ended
}

// newerBatch returns the younger of two batches, either of which may be nil.
func newerBatch(a, b *Batch) *Batch {
	if a == nil || b != nil && b.order > a.order {
		return b
	}
	return a
}

// PendingTxn is an evaluated transaction that changes something. The sequencer's answer for
// its batch brings its revision.
type PendingTxn struct {
	// Batch is the one that the transaction travels with; nil once it is applied or
	// discarded. The overlay's owner guards it.
	Batch *Batch
	// Floor is the highest revision that the node had heard of when the transaction
	// was evaluated. Its own will be above (S4).
	Floor keyspace.Revision
	// revision is 0 while unknown.
	revision atomic.Int64
}

// SetRevision gives the transaction its revision.
func (t *PendingTxn) SetRevision(rev keyspace.Revision) { t.revision.Store(int64(rev)) }

// Ref is a revision: a number, or that of a transaction which may not have one yet.
type Ref struct {
	rev keyspace.Revision
	txn *PendingTxn
}

// known returns the revision if there is one.
func (f Ref) known() (keyspace.Revision, bool) {
	if f.txn == nil {
		return f.rev, true
	}
	rev := keyspace.Revision(f.txn.revision.Load())
	return rev, rev != 0
}

// must returns a revision that is known by the order of things.
func (f Ref) must() keyspace.Revision {
	rev, ok := f.known()
	if !ok {
		panic(fmt.Sprintf("eval: a revision above %d is needed before it was allocated", f.txn.Floor))
	}
	return rev
}

// Except returns the revision, which is known, or 0 if it is the transaction's own.
func (f Ref) Except(own *PendingTxn) keyspace.Revision {
	if f.txn == own {
		return 0
	}
	return f.must()
}

// fixed returns f without its transaction if the number is known, so that
// nothing keeps the transaction alive.
func (f Ref) fixed() Ref {
	if rev, ok := f.known(); ok {
		return Ref{rev: rev}
	}
	return f
}

// compare compares the revision with a number: -1, 0 or 1. A revision that is not
// known is greater than every number at or below its floor; with a number above
// the floor decided is false.
func (f Ref) compare(number int64) (result int, decided bool) {
	if rev, ok := f.known(); ok {
		return compareInt64(int64(rev), number), true
	}
	if number <= int64(f.txn.Floor) {
		return 1, true
	}
	return 0, false
}

// mayBeAtOrBelow says whether the revision is, or may turn out to be, <= at.
func (f Ref) mayBeAtOrBelow(at keyspace.Revision) bool {
	if rev, ok := f.known(); ok {
		return rev <= at
	}
	return f.txn.Floor < at
}

func compareInt64(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// PendingVersion is a version in the overlay. It does not change once it is there.
type PendingVersion struct {
	Key   []byte
	value []byte
	Txn   *PendingTxn
	// create is the key's create revision, version its version.
	create  Ref
	version int64
	// leases are the key's now and before, nil where there are none.
	leases *leasePair
	// Tombstone says that the key is deleted, Lived that it was alive before the
	// transaction.
	Tombstone bool
	Lived     bool
	// replaced says that a later write of the transaction has replaced this one.
	replaced bool
	// sub is the number of the operation, for a transaction over several ranges; within
	// one it is the version's place among the others.
	sub uint32
}

// leasePair is the lease that a version attaches its key to, and the one that the key was
// attached to before the transaction; 0 is none.
type leasePair struct{ to, from keyspace.LeaseID }

func (v *PendingVersion) mod() Ref { return Ref{txn: v.Txn} }

// Lease is the one that the version attaches its key to, 0 for none.
func (v *PendingVersion) Lease() keyspace.LeaseID {
	if v.leases == nil {
		return 0
	}
	return v.leases.to
}

// Prior is what the key was before the transaction.
func (v *PendingVersion) Prior() command.Prior {
	if v.replaced {
		return command.Prior{Replaced: true}
	}
	p := command.Prior{Lived: v.Lived}
	if v.leases != nil {
		p.Lease = v.leases.from
	}
	return p
}

// Bytes is about what the version takes in memory and in an entry.
func (v *PendingVersion) Bytes() int { return len(v.Key) + len(v.value) + command.VersionOverheadBytes }

// Stored returns the version as it will be stored, with its place among those of its
// transaction. Its revisions are known.
func (v *PendingVersion) Stored(sub uint32) mvcc.Version {
	s := mvcc.Version{Key: v.Key, Mod: v.mod().must(), Sub: sub, Tombstone: v.Tombstone}
	if !v.Tombstone {
		s.Create, s.Version, s.Lease, s.Value = v.create.must(), v.version, v.Lease(), v.value
	}
	return s
}

// Cached returns the version as the version cache has it. Its revisions are known.
func (v *PendingVersion) Cached() CachedVersion {
	mod := v.mod().must()
	if v.Tombstone {
		return CachedVersion{Mod: mod}
	}
	return CachedVersion{Alive: true, Version: v.version, Lease: v.Lease(), Mod: mod, Create: v.create.must(), Value: v.value}
}

// Intent returns the version as a lock has it. Revisions other than the transaction's own
// are known.
func (v *PendingVersion) Intent() command.Intent {
	i := command.Intent{Before: v.Prior()}
	i.V.Key, i.V.Sub, i.V.Tombstone = v.Key, v.sub, v.Tombstone
	if !v.Tombstone {
		i.V.Create, i.V.Version, i.V.Lease, i.V.Value = v.create.Except(v.Txn), v.version, v.Lease(), v.value
	}
	return i
}

// liveChange is the change of the number of living keys by a version of a key that lived
// before, or did not.
func liveChange(lived bool, v *PendingVersion) (n int64) {
	if !v.Tombstone {
		n++
	}
	if lived {
		n--
	}
	return n
}
