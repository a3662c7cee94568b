package eval

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// loadEntryBytes bounds the versions of one entry. A version that is alone may have more.
const loadEntryBytes = rangeapi.MaxLoadBytes

// LoadWriter writes the versions of one entry of a load.
type LoadWriter struct {
	Record  *command.Record
	Request *rangeapi.LoadRequest
	// Limit is how many bytes an entry may have.
	Limit int
	// Versions leaves Count versions in Body. More says that others do not fit in.
	Body  []byte
	Count int
	More  bool
	// newest are the versions of the entry that are the newest of their keys; only for a range that follows.
	newest map[string]mvcc.Version
}

// Versions takes in those that the range does not have. Nothing changes the range meanwhile. Errors are of package
// kverror, or of the store.
func (l *LoadWriter) Versions(store engine.Reader) (err error) {
	var before *mvcc.Getter
	if l.Request.Stage == rangeapi.LoadFollow {
		if before, err = mvcc.NewGetter(store); err != nil {
			return err
		}
		defer func() {
			if cerr := before.Close(); err == nil {
				err = cerr
			}
		}()
		l.newest = map[string]mvcc.Version{}
	}
	from := l.Record.Load.LoadCursor
	if from.Stage != l.Request.Stage {
		from = rangeapi.LoadCursor{Stage: l.Request.Stage}
	}
	if mutation.Is(mutation.LoadRepeated) {
		from = rangeapi.LoadCursor{Stage: l.Request.Stage}
	}
	b, at := l.Request.Versions, from
	// Before each version come its flags, and rarely more.
	l.Body = make([]byte, 0, min(len(b)+l.Request.Count, loadEntryBytes))
	for i := range l.Request.Count {
		var v mvcc.Version
		if b, err = rangeapi.DecodeStoredVersion(b, &v); err != nil {
			return rangeapi.BadRequest("version %d of a load: %v", i, err)
		}
		if from.Passed(&v) {
			continue
		}
		if err := l.fits(&v, &at, i); err != nil {
			return err
		}
		prior := command.LoadPrior{Old: l.Request.Stage == rangeapi.LoadBulk && bytes.Equal(v.Key, at.Key)}
		if !prior.Old {
			if _, alive := slices.BinarySearch(l.Request.Alive, v.Lease); alive {
				prior.Attach = v.Lease != 0 && !mutation.Is(mutation.LoadedUnleased)
			}
			if before != nil {
				if err := l.prior(before, &v, &prior); err != nil {
					return err
				}
			}
		}
		if err := l.add(&v, prior); l.More || err != nil {
			return err
		}
		at = l.Request.Stage.At(&v)
	}
	if len(b) > 0 {
		return rangeapi.BadRequest("%d bytes behind %d versions of a load", len(b), l.Request.Count)
	}
	return nil
}

// add writes a version, or says that there is more than one entry takes.
func (l *LoadWriter) add(v *mvcc.Version, prior command.LoadPrior) error {
	before := len(l.Body)
	l.Body = command.AppendLoadVersion(l.Body, v, prior)
	switch size := len(l.Body); {
	case l.Count == 0 && size > l.Limit:
		return kverror.New(kverror.RequestTooLarge, "key %q at revision %d takes %d bytes, more than the %d of an entry", v.Key, v.Mod, size, l.Limit)
	case l.Count > 0 && size > min(loadEntryBytes, l.Limit):
		l.Body, l.More = l.Body[:before], true
		return nil
	}
	l.Count++
	return nil
}

// fits says why the i-th version cannot come behind the one at.
func (l *LoadWriter) fits(v *mvcc.Version, at *rangeapi.LoadCursor, i int) error {
	switch {
	case !l.Record.Span.Contains(v.Key):
		return rangeapi.BadRequest("key %q of a load is outside of %s", v.Key, l.Record.Span)
	case at.Passed(v):
		return rangeapi.BadRequest("key %q at revision %d, operation %d, of a load is not behind %s", v.Key, v.Mod, v.Sub, at)
	case i == 0 && l.Request.Stage == rangeapi.LoadBulk && len(l.Request.After.Key) > 0 && l.Record.Span.Contains(l.Request.After.Key) &&
		!at.Passed(&mvcc.Version{Key: l.Request.After.Key, Mod: l.Request.After.Revision}):
		return rangeapi.BadRequest("a load goes on behind key %q at revision %d, and the range %s is at %s: ask for its state and go on from there", l.Request.After.Key, l.Request.After.Revision, l.Record.RangeID, at)
	}
	return nil
}

// prior finds what the key was before a version that follows.
func (l *LoadWriter) prior(store *mvcc.Getter, v *mvcc.Version, prior *command.LoadPrior) error {
	was, known := l.newest[string(v.Key)]
	if !known {
		w, ok, err := store.Get(v.Key, keyspace.MaxRevision)
		if err != nil {
			return err
		}
		if known = ok; ok {
			was = mvcc.Version{Create: w.Create, Mod: w.Mod, Version: w.Version, Tombstone: w.Tombstone, Lease: w.Lease}
		}
	}
	if known && was.Mod >= v.Mod {
		return rangeapi.BadRequest("key %q has revision %d already, and a load brings revision %d", v.Key, was.Mod, v.Mod)
	}
	if err := follows(was, v); err != nil {
		return err
	}
	prior.Lived = known && !was.Tombstone
	if prior.Lease = was.Lease; prior.Attach && prior.Lease == v.Lease {
		prior.Lease = 0 // it stays attached; writing that once more does no harm
	}
	l.newest[string(v.Key)] = mvcc.Version{Create: v.Create, Mod: v.Mod, Version: v.Version, Tombstone: v.Tombstone, Lease: v.Lease}
	return nil
}

// follows says why a version, with its earlier writes, cannot be the next of a key. was is the one before, the zero one
// for a key that was never there.
func follows(was mvcc.Version, v *mvcc.Version) error {
	if v.Earlier != nil {
		if err := follows(was, v.Earlier); err != nil {
			return err
		}
		was = *v.Earlier
	}
	create, version := was.Create, was.Version+1
	if was.Tombstone || was.Mod == 0 {
		create, version = v.Mod, 1
	}
	switch {
	case v.Tombstone && (was.Tombstone || was.Mod == 0):
		return kverror.New(kverror.NotNext, "key %q: revision %d of a load deletes it, and there is no such key", v.Key, v.Mod)
	case !v.Tombstone && (v.Create != create || v.Version != version):
		return kverror.New(kverror.NotNext, "key %q: revision %d of a load is version %d since revision %d, and would be version %d since revision %d here",
			v.Key, v.Mod, v.Version, v.Create, version, create)
	}
	return nil
}

// maxUnusedBytes is about how many bytes of leases one entry takes away.
const maxUnusedBytes = 64 << 10

// UnusedLeases returns those of the attached leases, ascending, that have no key in the span: as many as an entry of
// maxEntryBytes takes. more says that there are others. A lease can have ended at the source while versions
// followed: its keys went, one by one, and the attachment stays. It must go. Who is granted a lease of the same id
// later would attach keys here, and the lease's record would not list the range.
func UnusedLeases(store engine.Reader, attached []keyspace.LeaseID, span keyspace.Span, maxEntryBytes int) (unused []keyspace.LeaseID, more bool, err error) {
	limit := max(1, min(min(maxUnusedBytes, maxEntryBytes)/binary.MaxVarintLen64, rangeapi.MaxLoadLeases))
	newest, err := mvcc.NewGetter(store)
	if err != nil {
		return nil, false, err
	}
	for _, lease := range attached {
		used, uerr := leaseUsed(store, newest, lease, span)
		if err = uerr; err != nil {
			break
		}
		if used {
			continue
		}
		if more = len(unused) == limit; more {
			break
		}
		unused = append(unused, lease)
	}
	return unused, more, errors.Join(err, newest.Close())
}

// errFound stops a search.
var errFound = errors.New("eval: found")

// leaseUsed says whether a key of the span is attached to the lease: its newest version says so, and not the
// index alone.
func leaseUsed(store engine.Reader, newest *mvcc.Getter, lease keyspace.LeaseID, span keyspace.Span) (bool, error) {
	err := mvcc.Attached(store, lease, span, func(key []byte) error {
		v, ok, err := newest.Get(key, keyspace.MaxRevision)
		if err == nil && ok && !v.Tombstone && v.Lease == lease {
			err = errFound
		}
		return err
	})
	if errors.Is(err, errFound) {
		return true, nil
	}
	return false, err
}
