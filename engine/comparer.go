package engine

import (
	"bytes"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"

	"github.com/skeindb/skein/keyspace"
)

// comparer orders physical keys as bytes.Compare does and tells Pebble where the
// user key of a versioned key ends, for its bloom filters, for seeks by prefix
// and for the shared-prefix compression of its blocks.
var comparer = &pebble.Comparer{
	Name:                 "skein.v1",
	Compare:              bytes.Compare,
	Equal:                bytes.Equal,
	ComparePointSuffixes: bytes.Compare,
	CompareRangeSuffixes: bytes.Compare,
	AbbreviatedKey:       pebble.DefaultComparer.AbbreviatedKey,
	Split:                splitKey,
	Separator:            separator,
	Successor:            pebble.DefaultComparer.Successor,
	ImmediateSuccessor:   immediateSuccessor,
	FormatKey:            func(key []byte) fmt.Formatter { return formattedKey(key) },
}

// splitKey returns the length of the part of key before the revision; that of
// keys without a revision is their whole length. It does not scan the key: escape
// terminator occurs nowhere but at the end of a user key, so that these two bytes
// at their place before the last eight can only be the end of one.
func splitKey(key []byte) int {
	n := len(key) - revisionBytes
	if n >= minVersionedKeyBytes-revisionBytes && key[0] == prefixVersioned &&
		key[n-2] == escape && key[n-1] == terminator {
		return n
	}
	return len(key)
}

// separator appends a short key in [a, b). Only prefixes are shortened: within
// the versions of one user key there is nothing to gain.
func separator(dst, a, b []byte) []byte {
	ap, bp := a[:splitKey(a)], b[:splitKey(b)]
	if bytes.Equal(ap, bp) {
		return append(dst, a...)
	}
	n := len(dst)
	dst = pebble.DefaultComparer.Separator(dst, ap, bp)
	if bytes.Equal(dst[n:], ap) {
		// The prefix alone sorts below its versions.
		return append(dst[:n], a...)
	}
	return dst
}

// immediateSuccessor appends the smallest prefix above prefix. That of a user key
// is not the prefix with a zero byte, which would sort before the versions.
func immediateSuccessor(dst, prefix []byte) []byte {
	dst = append(dst, prefix...)
	if n := len(prefix); n >= 3 && prefix[0] == prefixVersioned &&
		prefix[n-2] == escape && prefix[n-1] == terminator {
		dst[len(dst)-1] = afterTerm
		return dst
	}
	return append(dst, 0)
}

type formattedKey []byte

// Format implements fmt.Formatter.
func (k formattedKey) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, FormatKey(k)) }

// revisionProperty is the name of the block property that says which revisions a
// block, an index block or a table holds.
const revisionProperty = "skein.revision"

func newRevisionCollector() pebble.BlockPropertyCollector {
	return sstable.NewBlockIntervalCollector(revisionProperty, revisionMapper{}, nil)
}

// revisionMapper maps each versioned key to its revision. Deletions of a version
// count as the version does, so that a filter which lets a version pass also lets
// its deletion pass.
type revisionMapper struct{}

// MapPointKey implements sstable.IntervalMapper.
func (revisionMapper) MapPointKey(key pebble.InternalKey, _ []byte) (sstable.BlockInterval, error) {
	if k := key.UserKey; len(k) == 0 || k[0] != prefixVersioned {
		// No filter by revision is ever used on it.
		return sstable.BlockInterval{}, nil
	}
	_, rev, err := SplitVersionedKey(key.UserKey)
	if err != nil {
		return sstable.BlockInterval{}, nil
	}
	return sstable.BlockInterval{Lower: uint64(rev), Upper: uint64(rev) + 1}, nil
}

// MapRangeKeys implements sstable.IntervalMapper. Range keys are not used.
func (revisionMapper) MapRangeKeys(sstable.Span) (sstable.BlockInterval, error) {
	return sstable.BlockInterval{}, nil
}

// RevisionFilter lets an iterator skip the blocks and tables without a version in
// an interval of revisions. It skips by blocks: the iterator may still show other
// versions. A filter serves one iterator.
type RevisionFilter struct {
	f *sstable.BlockIntervalFilter
}

// NewRevisionFilter returns a filter for the revisions in [from, to].
func NewRevisionFilter(from, to keyspace.Revision) *RevisionFilter {
	return &RevisionFilter{sstable.NewBlockIntervalFilter(revisionProperty, uint64(from), uint64(to)+1, nil)}
}

// Narrow sets a smaller interval while the iterator is in use, which then skips
// more of what it has not loaded yet. Between its calls only. Nothing that the
// smaller interval lets pass is lost: a version and its deletion have one revision.
func (f *RevisionFilter) Narrow(from, to keyspace.Revision) {
	f.f.SetInterval(uint64(from), uint64(to)+1)
}
