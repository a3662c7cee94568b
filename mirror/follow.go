package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/spool"
	"github.com/skeindb/skein/mvcc"
)

// A batch is brought to the target when nothing more waits in the spool, so that no revision
// waits for others. Under load it is bounded by these.
const (
	batchRevisions = 1000
	batchBytes     = 4 << 20
	batchKeys      = 4000
)

// noteEvery is how often the sum of what the target must have is written, and with that what the
// next start reads again.
const noteEvery = time.Second

// eventBytes is about the memory of an event beside its key and value.
const eventBytes = 96

// followAndVerify is the last step: it applies, compares, and ends with a cut-over.
func (m *Mirror) followAndVerify(ctx context.Context) error {
	var pos keyspace.Revision
	err := m.retry(ctx, "ask the target for its position", func() error {
		phase, rev, err := m.o.Target.State(ctx, m.state.Nonce)
		if err == nil && phase != TargetLoading {
			err = stopf("the target is %s, and it should be loading", phase)
		}
		pos = rev
		return err
	})
	if err != nil {
		return err
	}
	m.at(pos)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// What freezes the target says how that ends.
		if err := m.apply(ctx, pos); !errors.Is(err, errDone) {
			return err
		}
		return nil
	})
	g.Go(func() error { return m.verify(ctx) })
	g.Go(func() error { return m.sweepLeases(ctx) })
	g.Go(func() error { return m.cutover(ctx) })
	return g.Wait()
}

// applier brings revisions from the spool to the target.
type applier struct {
	m *Mirror
	r *spool.Reader
	// position is the revision at which the target can be read. counted is the one up to which the
	// sum has everything: after a start it is below, and what lies between is only counted.
	position, counted keyspace.Revision
	// pending is the sum of versions above counted.
	pending Sum
	noted   clock.Time
	// versions are what the batch brings, of whole revisions up to upTo.
	versions  []mvcc.Version
	bytes     int
	revisions int
	upTo      keyspace.Revision
	fold      folder
}

// apply brings everything above pos to the target, for ever.
func (m *Mirror) apply(ctx context.Context, pos keyspace.Revision) error {
	counted := m.state.Counted
	if counted > pos {
		return stopf("the target is at revision %d and has been at revision %d", pos, counted)
	}
	r, err := m.spool.NewReader(counted)
	if err != nil {
		return stopf("%v", err)
	}
	defer r.Close()
	a := &applier{m: m, r: r, position: pos, counted: counted, upTo: counted, noted: m.o.Clock.Now()}
	for {
		if err := a.revision(ctx); err != nil {
			return err
		}
		if a.revisions < batchRevisions && a.bytes < batchBytes && len(a.versions) < batchKeys && r.Ready() {
			continue
		}
		if err := a.flush(ctx); err != nil {
			return err
		}
		if now := m.o.Clock.Now(); now.Sub(a.noted) >= noteEvery {
			if err := m.retry(ctx, "note the sum", func() error { return m.note(ctx) }); err != nil {
				return err
			}
			if err := m.spool.Drop(a.counted); err != nil {
				return err
			}
			a.noted = now
		}
	}
}

// note writes the sum. The spool may drop what is in it.
func (m *Mirror) note(ctx context.Context) error {
	if err := m.bringing(ctx); err != nil {
		return err
	}
	defer m.follow.unlock()
	return writeJSON(m.o.FS, m.o.Dir, stateName, m.state)
}

// revision reads one revision into the batch. One that is larger than a batch is brought to
// the target in parts.
func (a *applier) revision(ctx context.Context) error {
	a.fold.reset()
	var events []mvcc.Version
	size := 0
	for {
		rec, err := a.r.Next(ctx)
		if err != nil {
			return err
		}
		if rec.End {
			a.upTo = rec.Revision
			a.revisions++
			break
		}
		for i := range rec.Events {
			a.fold.note(&rec.Events[i])
		}
		if size > batchBytes {
			continue // only to know which keys come again
		}
		for i := range rec.Events {
			events = append(events, rec.Events[i].Clone())
			size += len(rec.Events[i].Key) + len(rec.Events[i].Value) + eventBytes
		}
		if size > batchBytes {
			events = nil
		}
	}
	if size > batchBytes {
		return a.large(ctx)
	}
	for i := range events {
		a.add(events[i])
	}
	return nil
}

// large brings the revision that was read last to the target in parts. It becomes visible
// with the last one.
func (a *applier) large(ctx context.Context) error {
	revision := a.upTo
	a.upTo = revision - 1
	if err := a.flush(ctx); err != nil {
		return err
	}
	a.r.Rewind()
	for {
		rec, err := a.r.Next(ctx)
		if err != nil {
			return err
		}
		if rec.End {
			a.upTo = revision
			return a.flush(ctx)
		}
		for i := range rec.Events {
			a.add(rec.Events[i].Clone())
			if a.bytes >= batchBytes || len(a.versions) >= batchKeys {
				if err := a.flush(ctx); err != nil {
					return err
				}
			}
		}
	}
}

// add takes an event into the batch.
func (a *applier) add(e mvcc.Version) {
	if v, whole := a.fold.take(e); whole {
		a.versions = append(a.versions, v)
		for w := &v; w != nil; w = w.Earlier {
			a.bytes += len(w.Key) + len(w.Value) + eventBytes
		}
	}
}

// flush checks the batch and brings it to the target.
func (a *applier) flush(ctx context.Context) error {
	if len(a.versions) == 0 && a.upTo == a.counted {
		return nil
	}
	first := sort.Search(len(a.versions), func(i int) bool { return a.versions[i].Mod > a.position })
	b := Batch{Versions: a.versions[first:], UpTo: a.upTo}
	if len(b.Versions) > 0 || b.UpTo > a.position {
		if err := a.bring(ctx, b); err != nil {
			return err
		}
	}
	if err := a.m.bringing(ctx); err != nil {
		return err
	}
	defer a.m.follow.unlock()
	for i := range a.versions {
		a.pending.Add(&a.versions[i])
	}
	if a.counted < a.upTo {
		a.m.count(a.upTo, a.pending)
		a.counted, a.pending = a.upTo, Sum{}
	}
	a.versions, a.bytes, a.revisions = a.versions[:0], 0, 0
	return nil
}

// count takes the sum of the versions up to a revision in.
func (m *Mirror) count(upTo keyspace.Revision, s Sum) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.Counted = upTo
	m.state.Sum.Versions += s.Versions
	m.state.Sum.Hashes += s.Hashes
}

// bring brings a batch to the target.
func (a *applier) bring(ctx context.Context, b Batch) error {
	m := a.m
	ids := leasesOf(b.Versions)
	if err := m.bringing(ctx); err != nil {
		return err
	}
	defer m.follow.unlock()
	// No lease is taken back between the look at it and the batch that attaches keys to it.
	err := m.retry(ctx, "look up leases at the source", func() (err error) {
		if b.Leases, err = m.lookupLeases(ctx, ids); err != nil || len(b.Leases) == len(ids) {
			return err
		}
		return m.checkEnded(ctx, b.Versions, b.Leases)
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.spare(ids)
	m.mu.Unlock()
	err = m.retry(ctx, "bring a batch to the target", func() error { return m.o.Target.Follow(ctx, m.state.Nonce, b) })
	if status.Code(err) == codes.DataLoss {
		return stopf("the target refuses a batch: %v", err)
	}
	if err != nil {
		return err
	}
	a.position = b.UpTo
	m.at(a.position)
	return nil
}

// leasesOf returns the leases to which versions are attached.
func leasesOf(versions []mvcc.Version) (ids []keyspace.LeaseID) {
	for i := range versions {
		if id := versions[i].Lease; id != 0 {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// A folder joins the writes of one key within a revision: the last one carries the earlier
// ones. It needs memory only for the keys that the revision puts; etcd deletes a key again
// only after a put.
type folder struct {
	last map[string]uint32
	held map[string]*mvcc.Version
}

func (f *folder) reset() { f.last, f.held = map[string]uint32{}, map[string]*mvcc.Version{} }

// note takes note of an event. All events of a revision are noted before any is taken.
func (f *folder) note(e *mvcc.Version) {
	if _, put := f.last[string(e.Key)]; put || !e.Tombstone {
		f.last[string(e.Key)] = e.Sub
	}
}

// take returns the version that an event makes, and whether it is the last write of its key.
func (f *folder) take(e mvcc.Version) (v mvcc.Version, whole bool) {
	last, put := f.last[string(e.Key)]
	if !put {
		return e, true
	}
	e.Earlier = f.held[string(e.Key)]
	if e.Sub < last {
		f.held[string(e.Key)] = &e
		return v, false
	}
	if e.Sub > last {
		panic(fmt.Sprintf("mirror: event %d of key %q in revision %d, of which number %d is the last", e.Sub, e.Key, e.Mod, last))
	}
	delete(f.held, string(e.Key))
	return e, true
}
