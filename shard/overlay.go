package shard

import (
	"bytes"
	"fmt"
	"sync/atomic"

	"github.com/google/btree"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// pendingTxn is an evaluated transaction that changes something. Its revision
// becomes known when the sequencer has answered for its batch.
type pendingTxn struct {
	// batch is the one that the transaction travels with; nil once it is applied or
	// discarded. Guarded by the replica's mu.
	batch *batch
	// floor is the highest revision that the node had heard of when the transaction
	// was evaluated. Its own will be above.
	floor keyspace.Revision
	// revision is 0 while unknown.
	revision atomic.Int64
}

// ref is a revision: a number, or that of a transaction which may not have one yet.
type ref struct {
	rev keyspace.Revision
	txn *pendingTxn
}

// known returns the revision if there is one.
func (f ref) known() (keyspace.Revision, bool) {
	if f.txn == nil {
		return f.rev, true
	}
	rev := keyspace.Revision(f.txn.revision.Load())
	return rev, rev != 0
}

// must returns a revision that is known by the order of things.
func (f ref) must() keyspace.Revision {
	rev, ok := f.known()
	if !ok {
		panic(fmt.Sprintf("shard: a revision above %d is needed before it was handed out", f.txn.floor))
	}
	return rev
}

// fixed returns f without its transaction where the number is known, so that
// nothing keeps the transaction alive.
func (f ref) fixed() ref {
	if rev, ok := f.known(); ok {
		return ref{rev: rev}
	}
	return f
}

// compare compares the revision with a number: -1, 0 or 1. A revision that is not
// known is greater than every number at or below its floor; with a number above
// the floor decided is false.
func (f ref) compare(number int64) (result int, decided bool) {
	if rev, ok := f.known(); ok {
		return compareInt64(int64(rev), number), true
	}
	if number <= int64(f.txn.floor) {
		return 1, true
	}
	return 0, false
}

// mayBeAtOrBelow says whether the revision is, or may turn out to be, <= at.
func (f ref) mayBeAtOrBelow(at keyspace.Revision) bool {
	if rev, ok := f.known(); ok {
		return rev <= at
	}
	return f.txn.floor < at
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

// pendingVersion is a version in the overlay. It is not changed once it is there.
type pendingVersion struct {
	key     []byte
	value   []byte
	txn     *pendingTxn
	create  ref
	version int64
	// leases are the key's now and before, nil where there are none.
	leases *leasePair
	// tombstone says that the key is deleted; lived that it was alive before the
	// transaction.
	tombstone bool
	lived     bool
	// replaced says that a later write of the transaction has replaced this one.
	replaced bool
	// sub is the number of the operation, for a transaction over several ranges; within
	// one it is the version's place among the others.
	sub uint32
}

// leasePair is the lease that a version attaches its key to, and the one that the key was
// attached to before the transaction; 0 is none.
type leasePair struct{ to, from keyspace.LeaseID }

// lease is the one that the version attaches its key to, 0 for none.
func (v *pendingVersion) lease() keyspace.LeaseID {
	if v.leases == nil {
		return 0
	}
	return v.leases.to
}

// prior is what the key was before the transaction.
func (v *pendingVersion) prior() command.Prior {
	if v.replaced {
		return command.Prior{Replaced: true}
	}
	p := command.Prior{Lived: v.lived}
	if v.leases != nil {
		p.Lease = v.leases.from
	}
	return p
}

// bytes is about what the version takes in memory and in an entry.
func (v *pendingVersion) bytes() int { return len(v.key) + len(v.value) + command.VersionOverheadBytes }

// overlay is what a leader has evaluated and not yet applied, by key. It has no
// lock; the replica's mu guards it.
type overlay struct {
	keys *btree.BTreeG[*overlayKey]
	// free holds removed nodes for reuse, so that a steady load allocates none.
	free  *btree.FreeListG[*overlayKey]
	probe overlayKey
}

// overlayKey is one key with its pending versions, the oldest first. Their
// revisions rise.
type overlayKey struct {
	key      []byte
	versions []*pendingVersion
	// first is the memory of versions for as long as there is one only.
	first [1]*pendingVersion
}

func newOverlay() *overlay {
	free := btree.NewFreeListG[*overlayKey](32)
	return &overlay{keys: newOverlayTree(free), free: free}
}

func newOverlayTree(free *btree.FreeListG[*overlayKey]) *btree.BTreeG[*overlayKey] {
	less := func(a, b *overlayKey) bool { return bytes.Compare(a.key, b.key) < 0 }
	return btree.NewWithFreeListG(16, less, free)
}

func (o *overlay) find(key []byte) *overlayKey {
	o.probe.key = key
	k, _ := o.keys.Get(&o.probe)
	o.probe.key = nil
	return k
}

// newest returns the key's newest pending version, nil where there is none.
func (o *overlay) newest(key []byte) *pendingVersion {
	k := o.find(key)
	if k == nil {
		return nil
	}
	return k.versions[len(k.versions)-1]
}

// at returns the key's newest pending version with a revision <= rev, nil where
// there is none, or in wait a version of which that is not known yet.
func (k *overlayKey) at(rev keyspace.Revision) (found, wait *pendingVersion) {
	for _, v := range k.versions {
		r, ok := ref{txn: v.txn}.known()
		switch {
		case ok && r <= rev:
			found = v
		case ok || v.txn.floor >= rev:
			return found, nil
		default:
			return nil, v
		}
	}
	return found, nil
}

// add puts a version on top of its key's others.
func (o *overlay) add(v *pendingVersion) {
	if k := o.find(v.key); k != nil {
		k.versions = append(k.versions, v)
		return
	}
	k := &overlayKey{key: v.key, first: [1]*pendingVersion{v}}
	k.versions = k.first[:]
	o.keys.ReplaceOrInsert(k)
}

// remove takes out a version that is applied: the oldest of its key.
func (o *overlay) remove(v *pendingVersion) {
	k := o.find(v.key)
	if k == nil || k.versions[0] != v {
		panic(fmt.Sprintf("shard: applied version of %q at %d is not the oldest of the overlay", v.key, v.txn.revision.Load()))
	}
	if len(k.versions) == 1 {
		o.keys.Delete(k)
		return
	}
	k.versions[0] = nil
	k.versions = k.versions[1:]
}

// discard takes out a version that will not be applied: the newest of its key.
func (o *overlay) discard(v *pendingVersion) {
	k := o.find(v.key)
	if k == nil || k.versions[len(k.versions)-1] != v {
		panic(fmt.Sprintf("shard: discarded version of %q is not the newest of the overlay", v.key))
	}
	if len(k.versions) == 1 {
		o.keys.Delete(k)
		return
	}
	k.versions[len(k.versions)-1] = nil
	k.versions = k.versions[:len(k.versions)-1]
}

// visit calls fn with the keys of the span in order until it returns false.
func (o *overlay) visit(s keyspace.Span, fn func(*overlayKey) bool) {
	from := &overlayKey{key: s.Start}
	if len(s.End) == 0 {
		o.keys.AscendGreaterOrEqual(from, fn)
		return
	}
	o.keys.AscendRange(from, &overlayKey{key: s.End}, fn)
}

// newestBatch returns the newest batch with a version of the span that is, or may
// turn out to be, at or below the revision; nil where there is none.
func (o *overlay) newestBatch(s keyspace.Span, at keyspace.Revision) *batch {
	var b *batch
	if o.keys.Len() == 0 {
		return nil
	}
	o.visit(s, func(k *overlayKey) bool {
		for i := len(k.versions) - 1; i >= 0; i-- {
			v := k.versions[i]
			if (ref{txn: v.txn}).mayBeAtOrBelow(at) {
				b = newerBatch(b, v.txn.batch)
				break
			}
		}
		return true
	})
	return b
}

// len returns the number of keys with pending versions.
func (o *overlay) len() int { return o.keys.Len() }
