package eval

import (
	"bytes"
	"fmt"

	"github.com/google/btree"

	"github.com/skeindb/skein/keyspace"
)

// Overlay is what a leader has evaluated and not yet applied, by key. Its owner guards it.
type Overlay struct {
	keys *btree.BTreeG[*overlayKey]
	// free holds removed nodes for reuse, so that a steady load allocates none.
	free  *btree.FreeListG[*overlayKey]
	probe overlayKey
	// discarded counts the versions that were taken out without being applied.
	discarded uint64
}

// overlayKey is one key with its pending versions, the oldest first. Their
// revisions rise.
type overlayKey struct {
	key      []byte
	versions []*PendingVersion
	// first is the memory of versions for as long as there is one only.
	first [1]*PendingVersion
}

// NewOverlay returns an empty overlay.
func NewOverlay() *Overlay {
	free := btree.NewFreeListG[*overlayKey](32)
	return &Overlay{keys: newOverlayTree(free), free: free}
}

func newOverlayTree(free *btree.FreeListG[*overlayKey]) *btree.BTreeG[*overlayKey] {
	less := func(a, b *overlayKey) bool { return bytes.Compare(a.key, b.key) < 0 }
	return btree.NewWithFreeListG(16, less, free)
}

func (o *Overlay) find(key []byte) *overlayKey {
	o.probe.key = key
	k, _ := o.keys.Get(&o.probe)
	o.probe.key = nil
	return k
}

// Newest returns the key's newest pending version, nil where there is none.
func (o *Overlay) Newest(key []byte) *PendingVersion {
	k := o.find(key)
	if k == nil {
		return nil
	}
	return k.versions[len(k.versions)-1]
}

// at returns the key's newest pending version with a revision <= rev, nil if
// there is none. If a version's revision is not known and may be <= rev, it returns that
// version as wait.
func (k *overlayKey) at(rev keyspace.Revision) (found, wait *PendingVersion) {
	for _, v := range k.versions {
		r, ok := v.mod().known()
		switch {
		case ok && r <= rev:
			found = v
		case ok || v.Txn.Floor >= rev:
			return found, nil
		default:
			return nil, v
		}
	}
	return found, nil
}

// Add puts a version on top of its key's others.
func (o *Overlay) Add(v *PendingVersion) {
	if k := o.find(v.Key); k != nil {
		k.versions = append(k.versions, v)
		return
	}
	k := &overlayKey{key: v.Key, first: [1]*PendingVersion{v}}
	k.versions = k.first[:]
	o.keys.ReplaceOrInsert(k)
}

// Remove takes out a version that is applied: the oldest of its key.
func (o *Overlay) Remove(v *PendingVersion) {
	k := o.find(v.Key)
	if k == nil || k.versions[0] != v {
		panic(fmt.Sprintf("eval: applied version of %q at %d is not the oldest of the overlay", v.Key, v.Txn.revision.Load()))
	}
	if len(k.versions) == 1 {
		o.keys.Delete(k)
		return
	}
	k.versions[0] = nil
	k.versions = k.versions[1:]
}

// Discard takes out a version that will not be applied: the newest of its key.
func (o *Overlay) Discard(v *PendingVersion) {
	k := o.find(v.Key)
	if k == nil || k.versions[len(k.versions)-1] != v {
		panic(fmt.Sprintf("eval: discarded version of %q is not the newest of the overlay", v.Key))
	}
	o.discarded++
	if len(k.versions) == 1 {
		o.keys.Delete(k)
		return
	}
	k.versions[len(k.versions)-1] = nil
	k.versions = k.versions[:len(k.versions)-1]
}

// visit calls fn with the keys of the span in order until it returns false.
func (o *Overlay) visit(s keyspace.Span, fn func(*overlayKey) bool) {
	from := &overlayKey{key: s.Start}
	if len(s.End) == 0 {
		o.keys.AscendGreaterOrEqual(from, fn)
		return
	}
	o.keys.AscendRange(from, &overlayKey{key: s.End}, fn)
}

// liveChange is the change of the number of living keys of the span by all pending versions.
func (o *Overlay) liveChange(s keyspace.Span) (n int64) {
	o.visit(s, func(k *overlayKey) bool {
		n += k.liveChange()
		return true
	})
	return n
}

func (k *overlayKey) liveChange() int64 {
	return liveChange(k.versions[0].Lived, k.versions[len(k.versions)-1])
}

// NewestBatch returns the newest batch with a version of the span that is, or may
// turn out to be, at or below the revision; nil where there is none.
func (o *Overlay) NewestBatch(s keyspace.Span, at keyspace.Revision) *Batch {
	var b *Batch
	if o.keys.Len() == 0 {
		return nil
	}
	o.visit(s, func(k *overlayKey) bool {
		for i := len(k.versions) - 1; i >= 0; i-- {
			v := k.versions[i]
			if v.mod().mayBeAtOrBelow(at) {
				b = newerBatch(b, v.Txn.Batch)
				break
			}
		}
		return true
	})
	return b
}

// Len returns the number of keys with pending versions.
func (o *Overlay) Len() int { return o.keys.Len() }
