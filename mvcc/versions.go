package mvcc

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Selection says which versions of a key a cut through the store takes; the numbers are on the wire. Cut.After
// means something else for each of them.
type Selection uint8

const (
	// SelectLatest takes the newest version at or below the cut, unless it is a tombstone. After is 0.
	SelectLatest Selection = iota + 1
	// SelectKept takes what the compaction rule keeps for the compacted revision After.
	SelectKept
	// SelectChanges takes the newest version at or below the cut if it is above After, also a tombstone.
	SelectChanges
	// SelectAll takes all versions above After.
	SelectAll
)

// String returns the selection's name.
func (s Selection) String() string {
	switch s {
	case SelectLatest:
		return "latest"
	case SelectKept:
		return "history"
	case SelectChanges:
		return "changes"
	case SelectAll:
		return "versions"
	}
	return fmt.Sprintf("selection %d", uint8(s))
}

// Cut says which versions are wanted: those up to a revision that a selection takes.
type Cut struct {
	Select Selection
	// At is the revision of the cut. Nothing above it is taken.
	At    keyspace.Revision
	After keyspace.Revision
}

// Check refuses a cut that makes no sense.
func (c Cut) Check() error {
	switch {
	case c.Select < SelectLatest || c.Select > SelectAll:
		return fmt.Errorf("mvcc: a cut with %s", c.Select)
	case c.After < 0 || c.At < c.After || c.At >= keyspace.MaxRevision || c.Select == SelectLatest && c.After != 0:
		return fmt.Errorf("mvcc: a cut of %s at revision %d after %d", c.Select, c.At, c.After)
	}
	return nil
}

// Lowest returns the highest compacted revision by which nothing is removed that the cut takes.
func (c Cut) Lowest() keyspace.Revision {
	switch c.Select {
	case SelectLatest:
		return c.At
	case SelectKept:
		return c.After
	case SelectChanges, SelectAll:
	}
	return c.After + 1 // what compaction at a revision keeps at it and above is everything
}

// VersionCursor is a place among versions in the order of keys, those of a key newest first: before the first
// version of Key that is below Below, or before all of Key where Below is 0.
type VersionCursor struct {
	Key   []byte
	Below keyspace.Revision
}

// CutOptions select the versions of one call.
type CutOptions struct {
	Cut
	// From and End bound them. An empty End is the end of all keys.
	From VersionCursor
	End  []byte
	// MaxBytes ends the call before the version by which keys and stored values would exceed it. At least one
	// version is delivered. 0 is no bound.
	MaxBytes int64
	// MaxVisits ends the call after so many versions were read, whatever it has found. 0 is no bound.
	MaxVisits int64
}

// StoredVersion is a version as it is stored.
type StoredVersion struct {
	Key   []byte
	Mod   keyspace.Revision
	Value []byte
}

// Decode decodes it into v, whose Value and Key refer to the stored ones.
func (s *StoredVersion) Decode(v *Version) error {
	v.Key, v.Mod = s.Key, s.Mod
	return v.DecodeValue(s.Value)
}

// Versions calls fn with the versions of a cut, in the order of keys, and those of a key newest first. What fn
// gets is valid during the call. next is where the next call goes on, nil at the end. Calls may read different
// states of the store, if everything up to the cut's revision is there and nothing above Cut.Lowest is
// compacted in each. Memory does not grow with the span.
func Versions(r engine.Reader, o CutOptions, fn func(*StoredVersion) error) (next *VersionCursor, err error) {
	b := engine.VersionedSpan(keyspace.Span{Start: o.From.Key, End: o.End})
	io := engine.IterOptions{Lower: b.Lower, Upper: b.Upper}
	if o.Select == SelectChanges || o.Select == SelectAll {
		if o.At == o.After {
			return nil, nil
		}
		// What it hides is not wanted: a version in question is never hidden.
		io.Revisions = engine.NewRevisionFilter(o.After+1, o.At)
	}
	it, err := r.NewIter(io)
	if err != nil {
		return nil, fmt.Errorf("mvcc: versions from %q: %w", o.From.Key, err)
	}
	w := cutWalk{o: o, it: it, fn: fn}
	defer func() { err = errors.Join(err, it.Close()) }()
	valid := false
	if o.From.Below > 0 {
		valid = it.SeekGE(engine.AppendVersionedKey(nil, o.From.Key, o.From.Below-1))
	} else {
		valid = it.First()
	}
	for valid {
		if valid, err = w.step(); err != nil || w.next != nil {
			return w.next, err
		}
	}
	if err := it.Error(); err != nil {
		return nil, fmt.Errorf("mvcc: versions from %q: %w", o.From.Key, err)
	}
	return nil, nil
}

// cutWalk is one call of Versions.
type cutWalk struct {
	o    CutOptions
	it   *engine.Iterator
	fn   func(*StoredVersion) error
	next *VersionCursor

	v             StoredVersion
	prefix, seek  []byte
	visits, bytes int64
}

// step looks at the version at the iterator's position and moves on.
func (w *cutWalk) step() (valid bool, err error) {
	prefix, rev, err := engine.SplitVersionedKey(w.it.Key())
	if err != nil {
		return false, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	w.visits++
	if w.o.MaxVisits > 0 && w.visits > w.o.MaxVisits {
		return false, w.end(prefix, rev)
	}
	switch {
	case rev > w.o.At:
		return w.skip(prefix), nil
	case w.o.Select != SelectLatest && w.o.Select != SelectKept && rev <= w.o.After:
		return w.it.NextPrefix(), nil
	}
	value, err := w.it.ValueAndErr()
	if err != nil {
		return false, fmt.Errorf("mvcc: versions: %w", err)
	}
	dead, err := isTombstone(value)
	if err != nil {
		return false, err
	}
	wanted := !dead || w.o.Select != SelectLatest && (w.o.Select != SelectKept || rev >= w.o.After)
	if wanted {
		size := int64(len(prefix) + len(value))
		if w.o.MaxBytes > 0 && w.bytes > 0 && w.bytes+size > w.o.MaxBytes {
			return false, w.end(prefix, rev)
		}
		w.bytes += size
		if w.v.Key, err = engine.AppendUserKey(w.v.Key[:0], prefix); err != nil {
			return false, fmt.Errorf("%w: %w", ErrCorrupt, err)
		}
		w.v.Mod, w.v.Value = rev, value
		if err := w.fn(&w.v); err != nil {
			return false, err
		}
	}
	if w.o.Select == SelectLatest || w.o.Select == SelectChanges || w.o.Select == SelectKept && rev <= w.o.After {
		return w.it.NextPrefix(), nil
	}
	return w.it.Next(), nil
}

// skip moves beyond the version at the iterator's position, which is above the cut. After one step in vain a seek
// is cheaper than steps through the versions of a hot key.
func (w *cutWalk) skip(prefix []byte) (valid bool) {
	if !bytes.Equal(prefix, w.prefix) {
		w.prefix = append(w.prefix[:0], prefix...)
		return w.it.Next()
	}
	w.seek = engine.AppendRevision(append(w.seek[:0], prefix...), w.o.At)
	return w.it.SeekGE(w.seek)
}

// end has the next call begin with the version at the iterator's position.
func (w *cutWalk) end(prefix []byte, rev keyspace.Revision) error {
	key, err := engine.AppendUserKey([]byte{}, prefix)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	w.next = &VersionCursor{Key: key, Below: rev + 1}
	return nil
}

// Behind returns the place behind a version that the cut has taken.
func (c Cut) Behind(key []byte, mod keyspace.Revision) VersionCursor {
	if c.Select == SelectLatest || c.Select == SelectChanges || c.Select == SelectKept && mod <= c.After {
		return VersionCursor{Key: keyspace.Next(key)} // it takes no other one of the key
	}
	return VersionCursor{Key: bytes.Clone(key), Below: mod}
}
