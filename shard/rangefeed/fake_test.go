package rangefeed

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/rangefeed/feedtest"
	"github.com/skeindb/skein/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeRange is range 1 of generation 1, a Source without a replica. The test is its log.
type fakeRange struct {
	t      *testing.T
	engine *engine.Engine
	server *Server
	feeds  Feeds

	mu sync.Mutex
	// The fields below are guarded by mu. locks are revisions that transactions have and
	// have not used yet. Nothing at or above the lowest of them is resolved.
	last, compacted keyspace.Revision
	resolved        keyspace.Revision
	number          uint64
	locks           []keyspace.Revision
	why             *kverror.Error

	// next is the next revision, heads the newest version of each key.
	next  keyspace.Revision
	heads map[string]mvcc.Version
}

// onRange runs a test with an empty range whose next revision is 2.
func onRange(t *testing.T, test func(t *testing.T, w *fakeRange)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		e, err := engine.Open(engine.Options{FS: vfs.NewMem(), Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1})
		if err != nil {
			t.Fatal(err)
		}
		w := &fakeRange{t: t, engine: e, next: 2, heads: map[string]mvcc.Version{}, compacted: -1}
		w.server = NewServer(Config{
			Clock: clock.Virtual(), Engine: e, Log: zap.NewNop(), Metrics: NewMetrics(nil),
			Find: func(id keyspace.RangeID) (*Feeds, error) {
				if id != 1 {
					return nil, kverror.New(kverror.RangeNotHere, "range %s", id)
				}
				return &w.feeds, nil
			},
		})
		w.feeds.Init(w.server, 1, &w.mu, w)
		test(t, w)
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// View implements Source.
func (w *fakeRange) View(g keyspace.Generation, from keyspace.Revision) (View, error) {
	switch {
	case w.why != nil:
		return View{}, w.why
	case g != 1:
		return View{}, kverror.New(kverror.WrongRange, "generation %d", g)
	case from < w.compacted:
		return View{}, &kverror.Error{Kind: kverror.Compacted, CompactRevision: w.compacted}
	}
	return View{Last: w.last, Resolved: w.resolved, Position: rangeapi.FeedPosition{Term: 1, Number: w.number}}, nil
}

// StillShows implements Source.
func (w *fakeRange) StillShows(g keyspace.Generation, from keyspace.Revision) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.View(g, from)
	return err
}

// Compacted implements Source.
func (w *fakeRange) Compacted(g keyspace.Generation) (keyspace.Revision, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := w.View(g, keyspace.MaxRevision)
	return w.compacted, err
}

func (w *fakeRange) gateway() *feedtest.Gateway {
	return feedtest.New(w.t, func(ctx context.Context, first []byte, st transport.Stream) error {
		return w.server.Serve(ctx, 9, first, st)
	})
}

// version makes a version of a key at a revision.
func (w *fakeRange) version(key, value string, at keyspace.Revision, tombstone bool) mvcc.Version {
	v := mvcc.Version{Key: []byte(key), Mod: at, Tombstone: tombstone}
	if old, ok := w.heads[key]; !tombstone {
		v.Value, v.Create, v.Version = []byte(value), at, 1
		if ok && !old.Tombstone {
			v.Create, v.Version = old.Create, old.Version+1
		}
	}
	w.heads[key] = v
	return v
}

// apply applies a batch. A batch that is not published comes as by a snapshot.
func (w *fakeRange) apply(published bool, versions ...mvcc.Version) {
	w.t.Helper()
	var events *Events
	if w.feeds.Active() {
		events = Capture(versions)
	}
	b := w.engine.NewBatch()
	for i := range versions {
		if err := mvcc.Put(b, &versions[i]); err != nil {
			w.t.Fatal(err)
		}
	}
	if err := b.Commit(); err != nil {
		w.t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	lowest := keyspace.MaxRevision
	for _, v := range versions {
		w.last = max(w.last, v.Mod)
		w.locks = slices.DeleteFunc(w.locks, func(l keyspace.Revision) bool { return l == v.Mod })
	}
	for _, l := range w.locks {
		lowest = min(lowest, l-1)
	}
	w.resolved = max(w.resolved, min(w.last, lowest))
	w.number++
	if !published {
		w.feeds.Restart()
		return
	}
	var p Publication
	p.Add(events, w.resolved, rangeapi.FeedPosition{Term: 1, Number: w.number})
	w.feeds.Publish(&p)
}

// put writes a key at the next revision.
func (w *fakeRange) put(key, value string) {
	w.t.Helper()
	w.apply(true, w.version(key, value, w.next, false))
	w.next++
}

// lock gives the next revision to a transaction, which uses it later.
func (w *fakeRange) lock() keyspace.Revision {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.locks = append(w.locks, w.next)
	w.next++
	return w.next - 1
}

// order is an order of a feed of the range.
func order(id rangeapi.FeedID, from keyspace.Revision) rangeapi.FeedOrder {
	return rangeapi.FeedOrder{ID: id, Range: 1, Generation: 1, From: from}
}
