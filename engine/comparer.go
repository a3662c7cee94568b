package engine

import (
	"bytes"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"

	"github.com/skeindb/skein/keyspace"
)

// comparer orders physical keys as bytes.Compare does. It tells Pebble where the user key
// of a versioned key ends, for bloom filters, seeks by prefix and prefix compression of
// blocks.
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

// splitKey returns the length of the part of key before the revision, or the whole length
// of keys without a revision. It does not scan the key: the bytes escape terminator occur
// only at the end of a user key. So before the last eight bytes they can only be that
// end.
func splitKey(key []byte) int {
	n := len(key) - revisionBytes
	if n >= minVersionedKeyBytes-revisionBytes && key[0] == prefixVersioned &&
		key[n-2] == escape && key[n-1] == terminator {
		return n
	}
	return len(key)
}

// separator appends a short key in [a, b). It shortens only prefixes, because the
// versions of one user key offer nothing to shorten.
func separator(dst, a, b []byte) []byte {
	ap, bp := a[:splitKey(a)], b[:splitKey(b)]
	if bytes.Equal(ap, bp) {
		return append(dst, a...)
	}
	n := len(dst)
	dst = pebble.DefaultComparer.Separator(dst, ap, bp)
	if bytes.Equal(dst[n:], ap) {
		// The prefix alone sorts before its versions.
		return append(dst[:n], a...)
	}
	return dst
}

// immediateSuccessor appends the smallest prefix above prefix. For a user key that is not
// the prefix plus a zero byte, which would sort before the versions.
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

// revisionProperty names the block property that records which revisions a block, an
// index block or a table contains.
const revisionProperty = "skein.revision"

func newRevisionCollector() pebble.BlockPropertyCollector {
	return sstable.NewBlockIntervalCollector(revisionProperty, revisionMapper{}, nil)
}

// revisionMapper maps each versioned key to its revision. The deletion of a version
// counts like the version, so a filter that admits a version also admits its deletion.
type revisionMapper struct{}

// MapPointKey implements sstable.IntervalMapper.
func (revisionMapper) MapPointKey(key pebble.InternalKey, _ []byte) (sstable.BlockInterval, error) {
	if k := key.UserKey; len(k) == 0 || k[0] != prefixVersioned {
		// Revision filters are never used on it.
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

// RevisionFilter lets an iterator skip blocks and tables without a version in an interval
// of revisions. Since it skips whole blocks, the iterator may still show other versions.
// A filter serves one iterator.
type RevisionFilter struct {
	f *sstable.BlockIntervalFilter
}

// NewRevisionFilter returns a filter for the revisions in [from, to].
func NewRevisionFilter(from, to keyspace.Revision) *RevisionFilter {
	return &RevisionFilter{sstable.NewBlockIntervalFilter(revisionProperty, uint64(from), uint64(to)+1, nil)}
}

// Narrow sets a smaller interval while the iterator is in use, which then skips more of
// what it has not loaded yet. Call it between calls of the iterator. Every admitted
// version keeps its deletion, because both have the same revision.
func (f *RevisionFilter) Narrow(from, to keyspace.Revision) {
	f.f.SetInterval(uint64(from), uint64(to)+1)
}
