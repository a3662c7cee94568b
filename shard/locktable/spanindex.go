package locktable

import (
	"bytes"
	"slices"

	"github.com/google/btree"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// spanIndex has spans of keys and whose they are. Most are of one key and found by it;
// the others are few and looked at one by one. The zero value is an empty one.
type spanIndex[T comparable] struct {
	keys  *btree.BTreeG[*indexedKey[T]]
	spans []indexedSpan[T]
	// probe and end are what keys are searched with, so that a search takes no memory: fn
	// of one search does not begin another one in the same index.
	probe, end indexedKey[T]
}

// indexedKey is one key with all whose it is.
type indexedKey[T comparable] struct {
	key []byte
	of  []indexed[T]
}

type indexed[T comparable] struct {
	who  T
	mode command.LockMode
}

type indexedSpan[T comparable] struct {
	indexed[T]
	span keyspace.Span
}

// add adds a span. It keeps the keys.
func (x *spanIndex[T]) add(s keyspace.Span, who T, mode command.LockMode) {
	if !s.IsSingle() {
		x.spans = append(x.spans, indexedSpan[T]{indexed[T]{who, mode}, s})
		return
	}
	if x.keys == nil {
		x.keys = btree.NewG(16, func(a, b *indexedKey[T]) bool { return bytes.Compare(a.key, b.key) < 0 })
	}
	k := x.get(s.Start)
	if k == nil {
		k = &indexedKey[T]{key: s.Start}
		x.keys.ReplaceOrInsert(k)
	}
	k.of = append(k.of, indexed[T]{who, mode})
}

// remove takes away all that somebody has of exactly this span.
func (x *spanIndex[T]) remove(s keyspace.Span, who T) {
	if !s.IsSingle() {
		x.spans = slices.DeleteFunc(x.spans, func(o indexedSpan[T]) bool { return o.who == who && o.span.Equal(s) })
		return
	}
	k := x.get(s.Start)
	if k == nil {
		return
	}
	k.of = slices.DeleteFunc(k.of, func(o indexed[T]) bool { return o.who == who })
	if len(k.of) == 0 {
		x.keys.Delete(k)
	}
}

func (x *spanIndex[T]) get(key []byte) *indexedKey[T] {
	if x.keys == nil {
		return nil
	}
	x.probe.key = key
	k, _ := x.keys.Get(&x.probe)
	x.probe.key = nil
	return k
}

// visit calls fn with everybody who has something of the span until it returns false, and
// with the key where it is a single one.
func (x *spanIndex[T]) visit(s keyspace.Span, fn func(who T, mode command.LockMode, key []byte) bool) {
	if s.IsSingle() {
		x.visitKey(s.Start, fn)
		return
	}
	for i := range x.spans {
		if o := &x.spans[i]; o.span.Overlaps(s) && !fn(o.who, o.mode, nil) {
			return
		}
	}
	if x.keys == nil {
		return
	}
	each := func(k *indexedKey[T]) bool { return k.visit(fn) }
	x.probe.key, x.end.key = s.Start, s.End
	if len(s.End) == 0 {
		x.keys.AscendGreaterOrEqual(&x.probe, each)
	} else {
		x.keys.AscendRange(&x.probe, &x.end, each)
	}
	x.probe.key, x.end.key = nil, nil
}

// visitKey is visit of one key.
func (x *spanIndex[T]) visitKey(key []byte, fn func(who T, mode command.LockMode, key []byte) bool) {
	for i := range x.spans {
		if o := &x.spans[i]; o.span.Contains(key) && !fn(o.who, o.mode, nil) {
			return
		}
	}
	if k := x.get(key); k != nil {
		k.visit(fn)
	}
}

func (k *indexedKey[T]) visit(fn func(who T, mode command.LockMode, key []byte) bool) bool {
	for _, o := range k.of {
		if !fn(o.who, o.mode, k.key) {
			return false
		}
	}
	return true
}
