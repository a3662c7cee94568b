package etcdfile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// ReadOptions say which versions are read, and what that may take.
type ReadOptions struct {
	// Latest leaves out what a compaction at the file's revision would remove: the state
	// without its history.
	Latest bool
	// MaxVersionBytes bounds key and value of a version together; 0 is no bound. If any that
	// would be read is larger, Versions returns a [TooLargeVersionsError] and reads none.
	MaxVersionBytes int64
	// TempDir and RunBytes are those of the [Sorter].
	TempDir  string
	RunBytes int64
}

// Versions are the versions of a file in the order of their keys, a key's newest first. They
// are used by one goroutine.
type Versions struct {
	info      *Info
	compacted keyspace.Revision
	sorter    *Sorter

	key []byte
	// settled says that the key's newest version at or below the compacted revision has come.
	begun, settled bool
	newest         bool
	current        *mvcc.Version

	stats ReadStats
}

// ReadStats say what was read of the file.
type ReadStats struct {
	// Records and their Bytes of keys and values were sorted; what the compaction rule leaves
	// out of them is not returned.
	Records, Bytes int64
	// Empty are records with an empty key, which etcdutl snapshot restore --bump-revision
	// writes. They are no versions of a key, but their revision counts.
	Empty int64
	// TempBytes is the size of the temporary file, 0 for none.
	TempBytes int64
}

// TooLargeVersionsError lists versions that the reader of a file cannot take.
type TooLargeVersionsError struct {
	MaxBytes int64
	// Versions are by revision, at most maxTooLarge.
	Versions []TooLargeVersion
	// More says that there are more.
	More bool
}

// TooLargeVersion is a version whose key and value are too large.
type TooLargeVersion struct {
	Key      []byte
	Revision keyspace.Revision
	Bytes    int64
}

// maxNamedKeys bounds the keys in the text of an error.
const maxNamedKeys = 20

// Error names the keys.
func (e *TooLargeVersionsError) Error() string {
	var b strings.Builder
	switch {
	case e.More:
		fmt.Fprintf(&b, "more than %d versions are larger than %d bytes with their keys", len(e.Versions), e.MaxBytes)
	case len(e.Versions) == 1:
		fmt.Fprintf(&b, "1 version is larger than %d bytes with its key", e.MaxBytes)
	default:
		fmt.Fprintf(&b, "%d versions are larger than %d bytes with their keys", len(e.Versions), e.MaxBytes)
	}
	separator := ":"
	for i := range e.Versions {
		if i == maxNamedKeys {
			b.WriteString(" and others")
			break
		}
		v := &e.Versions[i]
		fmt.Fprintf(&b, "%s %.200q at revision %d has %d bytes", separator, v.Key, v.Revision, v.Bytes)
		separator = ","
	}
	return b.String()
}

// Versions reads and sorts all versions. The context ends the reading.
func (db *File) Versions(ctx context.Context, o ReadOptions) (*Versions, error) {
	v := &Versions{info: &db.info, compacted: db.info.Compacted}
	if o.Latest {
		v.compacted = db.info.Revision
	}
	v.sorter = NewSorter(SorterOptions{Order: ByKey, TempDir: o.TempDir, RunBytes: o.RunBytes})
	if err := v.read(ctx, db, o.MaxVersionBytes); err != nil {
		v.sorter.Close()
		return nil, fmt.Errorf("read etcd's database %s: %w", db.path, err)
	}
	return v, nil
}

func (v *Versions) read(ctx context.Context, db *File, maxBytes int64) error {
	b, ok, err := db.pages.bucket(bucketKey)
	if err != nil || !ok {
		return err
	}
	large := tooLarge{max: maxBytes, compacted: v.compacted, byKey: map[string][]TooLargeVersion{}}
	var w mvcc.Version
	err = db.pages.walk(b, func(e element) error {
		if v.stats.Records%ctxEvery == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if e.bucket {
			return fmt.Errorf("%w: a bucket %q within it", ErrCorrupt, e.key)
		}
		if err := decodeRecord(&w, e.key, e.value); err != nil {
			return err
		}
		if len(w.Key) == 0 {
			v.stats.Empty++
			return nil
		}
		v.stats.Records++
		v.stats.Bytes += w.Size()
		if err := large.add(&w); err != nil {
			return err
		}
		return v.sorter.Add(&w)
	})
	if err == nil {
		err = large.err(false)
	}
	if errors.Is(err, ErrCorrupt) {
		err = fmt.Errorf("bucket %q: %w", bucketKey, err)
	}
	return err
}

// tooLarge collects the versions that are too large, without those that the compaction rule
// leaves out.
type tooLarge struct {
	max       int64
	compacted keyspace.Revision
	byKey     map[string][]TooLargeVersion
	n         int
}

// maxTooLarge bounds how many are collected.
const maxTooLarge = 10_000

// add looks at the next version by revision.
func (t *tooLarge) add(v *mvcc.Version) error {
	if v.Mod <= t.compacted && len(t.byKey) > 0 { // it replaces all before it
		if old := t.byKey[string(v.Key)]; old != nil {
			t.n -= len(old)
			delete(t.byKey, string(v.Key))
		}
	}
	if t.max <= 0 || v.Size() <= t.max {
		return nil
	}
	key := slices.Clone(v.Key)
	t.byKey[string(key)] = append(t.byKey[string(key)], TooLargeVersion{Key: key, Revision: v.Mod, Bytes: v.Size()})
	if t.n++; t.n > maxTooLarge {
		return t.err(true)
	}
	return nil
}

func (t *tooLarge) err(more bool) error {
	if t.n == 0 {
		return nil
	}
	e := &TooLargeVersionsError{MaxBytes: t.max, More: more}
	for _, vs := range t.byKey {
		e.Versions = append(e.Versions, vs...)
	}
	slices.SortFunc(e.Versions, func(a, b TooLargeVersion) int { return int(a.Revision - b.Revision) })
	return e
}

// Next returns the next version, valid until the next call; io.EOF is the end. It applies
// the compaction rule of package mvcc for the compacted revision. As etcd's compaction does,
// it drops the earlier writes of a version at or below that revision.
func (v *Versions) Next() (*mvcc.Version, error) {
	for {
		w, err := v.sorter.Next()
		if err != nil {
			return nil, err
		}
		v.newest = !v.begun || string(w.Key) != string(v.key)
		if v.newest {
			v.begun, v.settled = true, false
			v.key = append(v.key[:0], w.Key...)
		}
		if v.settled {
			continue
		}
		if w.Mod <= v.compacted {
			v.settled, w.Earlier = true, nil
			if w.Tombstone && w.Mod < v.compacted {
				continue
			}
		}
		v.current = w
		return w, nil
	}
}

// Attached says whether the version that Next returned last attaches its key to a lease: it
// is the key's newest, names a lease, and the file has the lease's record. The lease of any
// other version is shown to clients and has no effect.
func (v *Versions) Attached() bool {
	return v.newest && v.current.Lease != 0 && v.info.HasLease(v.current.Lease)
}

// Compacted is the compacted revision of what is returned: the file's, or its revision if
// only the latest state is read.
func (v *Versions) Compacted() keyspace.Revision { return v.compacted }

// Stats say what was read.
func (v *Versions) Stats() ReadStats {
	s := v.stats
	s.TempBytes = v.sorter.TempBytes()
	return s
}

// Close frees memory and the temporary file.
func (v *Versions) Close() { v.sorter.Close() }
