package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sort"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// DefaultLiveCountSteps is how many changes a LiveCount keeps separately: 16 KiB.
const DefaultLiveCountSteps = 1024

// LiveCount knows how many live keys a span has at each revision from a base on. It is
// not safe for concurrent use. The zero value knows nothing: Known is false.
//
// It gets each applied change, in any order of revisions, since a transaction's write may
// be applied after later ones. Its memory is bounded: if there are too many steps, the
// oldest are merged into the base. A count at a revision below the base requires a scan.
type LiveCount struct {
	known bool
	base  keyspace.Revision
	count int64 // live keys at base
	steps []liveStep
	max   int
}

// liveStep is the number of live keys from a revision on.
type liveStep struct {
	rev   keyspace.Revision
	count int64
}

// NewLiveCount returns the count of a span that has n live keys at the revision. It keeps
// at most maxSteps revisions separately; 0 is DefaultLiveCountSteps.
func NewLiveCount(base keyspace.Revision, n int64, maxSteps int) *LiveCount {
	if maxSteps <= 0 {
		maxSteps = DefaultLiveCountSteps
	}
	return &LiveCount{known: true, base: base, count: n, max: maxSteps}
}

// Known reports whether there is a count.
func (c *LiveCount) Known() bool { return c.known }

// Forget makes the count unknown, for example after a split until the halves are counted.
func (c *LiveCount) Forget() { *c = LiveCount{max: c.max} }

// Base returns the lowest revision at which the count is known.
func (c *LiveCount) Base() keyspace.Revision { return c.base }

// Add records that the transaction at the revision made delta more keys live, or fewer if
// delta is negative. A revision may have several calls. A change below the base adds to
// the base, so the caller must add each applied change exactly once.
func (c *LiveCount) Add(rev keyspace.Revision, delta int64) {
	if !c.known || delta == 0 {
		return
	}
	i := sort.Search(len(c.steps), func(i int) bool { return c.steps[i].rev >= rev })
	if rev <= c.base {
		c.count, i = c.count+delta, 0
	} else if i == len(c.steps) || c.steps[i].rev != rev {
		before := c.count
		if i > 0 {
			before = c.steps[i-1].count
		}
		c.steps = slices.Insert(c.steps, i, liveStep{rev, before})
	}
	for j := i; j < len(c.steps); j++ {
		c.steps[j].count += delta
	}
	if len(c.steps) > c.max {
		// Half at once, so that the rest is rarely moved.
		c.fold(len(c.steps) - c.max/2)
	}
	if n := c.newest(); n < 0 {
		panic(fmt.Sprintf("mvcc: %d live keys at revision %d", n, rev))
	}
}

// fold merges the first n steps into the base.
func (c *LiveCount) fold(n int) {
	if n == 0 {
		return
	}
	c.base, c.count = c.steps[n-1].rev, c.steps[n-1].count
	c.steps = slices.Delete(c.steps, 0, n)
}

func (c *LiveCount) newest() int64 {
	if n := len(c.steps); n > 0 {
		return c.steps[n-1].count
	}
	return c.count
}

// Advance raises the base to the compacted revision, at or below which no count is needed
// any more.
func (c *LiveCount) Advance(rev keyspace.Revision) {
	if !c.known || rev <= c.base {
		return
	}
	c.fold(sort.Search(len(c.steps), func(i int) bool { return c.steps[i].rev > rev }))
	c.base = rev
}

// At returns the number of live keys at the revision; ok is false if it is not known.
func (c *LiveCount) At(rev keyspace.Revision) (n int64, ok bool) {
	if !c.known || rev < c.base {
		return 0, false
	}
	i := sort.Search(len(c.steps), func(i int) bool { return c.steps[i].rev > rev })
	if i == 0 {
		return c.count, true
	}
	return c.steps[i-1].count, true
}

// Newest returns the number of live keys after all changes; ok is false if it is not
// known.
func (c *LiveCount) Newest() (n int64, ok bool) { return c.newest(), c.known }

// liveCountVersion is the first byte of an encoded count.
const liveCountVersion = 1

// ErrBadLiveCount says that bytes are not a count of a known version.
var ErrBadLiveCount = errors.New("mvcc: malformed live count")

// AppendNewest appends the encoding of the newest count, as of the revision, for a record
// of its range (docs/format/mvcc.md). It also encodes an unknown count.
func (c *LiveCount) AppendNewest(dst []byte, rev keyspace.Revision) []byte {
	dst = append(dst, liveCountVersion)
	if !c.known {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(rev))
	return binary.AppendUvarint(dst, uint64(c.newest()))
}

// DecodeLiveCount decodes what AppendNewest encoded. The count's base is the revision given
// to AppendNewest.
func DecodeLiveCount(b []byte, maxSteps int) (*LiveCount, error) {
	r := wire.NewReader(b)
	if err := keyspace.CheckVersion("key count", uint64(r.Byte()), liveCountVersion); err != nil && r.OK() {
		return nil, fmt.Errorf("%w: %w", ErrBadLiveCount, err)
	}
	c := NewLiveCount(0, 0, maxSteps)
	if r.OK() && r.Len() == 0 {
		c.Forget()
		return c, nil
	}
	rev, n := r.Uvarint(), r.Uvarint()
	if rev > uint64(keyspace.MaxRevision) || n > 1<<62 {
		r.Failf("%d keys at revision %d", n, rev)
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadLiveCount, err)
	}
	c.base, c.count = keyspace.Revision(rev), int64(n)
	return c, nil
}
