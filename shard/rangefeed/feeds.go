package rangefeed

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// Source is the replica whose events its Feeds tell.
type Source interface {
	// View returns the applied state, for events of the generation from the revision on, or
	// a kverror why this replica cannot tell them. The replica's lock is held.
	View(g keyspace.Generation, from keyspace.Revision) (View, error)
	// StillShows returns nil if whoever has just read the store from the revision on has seen
	// every event of the generation there, else why not. The replica's lock is not held.
	StillShows(g keyspace.Generation, from keyspace.Revision) error
	// Compacted returns the highest compacted revision that is known here, also of a snapshot
	// whose tables may be in the store. It fails if the range is not of the generation any more,
	// or if the replica has ended: data may be going. The replica's lock is not held.
	Compacted(g keyspace.Generation) (keyspace.Revision, error)
}

// View is the applied state of a range.
type View struct {
	// Last is the last applied revision.
	Last keyspace.Revision
	// Resolved is the resolved revision: every event at or below it that there will ever be,
	// on any replica, is applied here.
	Resolved keyspace.Revision
	// Position is the range's place in the order of application. It is not zero.
	Position rangeapi.FeedPosition
	Span     keyspace.Span
}

// Feeds are the feeds of one replica. The replica's lock guards them: the exported methods
// are called with it, but for Active and History.
type Feeds struct {
	s   *Server
	mu  *sync.Mutex
	src Source
	id  keyspace.RangeID

	// active says that there are feeds.
	active atomic.Bool
	// feeds is guarded by mu.
	feeds []*feed
}

// Init prepares the feeds of a replica, which mu guards.
func (fs *Feeds) Init(s *Server, id keyspace.RangeID, mu *sync.Mutex, src Source) {
	fs.s, fs.id, fs.mu, fs.src = s, id, mu, src
}

// Active says whether there are feeds. It needs no lock.
func (fs *Feeds) Active() bool { return fs.active.Load() }

// Publish gives the feeds what was applied, now that the store shows it, and empties the
// publication.
func (fs *Feeds) Publish(p *Publication) {
	if len(fs.feeds) == 0 || p.block == nil && !p.missed {
		return
	}
	if p.missed {
		fs.Restart()
	} else {
		for _, f := range fs.feeds {
			f.conn.offer(f, p.block)
		}
	}
	*p = Publication{}
}

// Restart makes all feeds read the store again from behind their resolved revision. It
// follows a change of the store that was not published.
func (fs *Feeds) Restart() {
	for _, f := range fs.feeds {
		f.conn.restart(f)
	}
}

// End ends all feeds behind what was published.
func (fs *Feeds) End(err *kverror.Error) {
	for _, f := range fs.feeds {
		f.conn.ended(f, err)
		fs.s.cfg.Metrics.feeds.Dec()
	}
	fs.feeds = nil
	fs.active.Store(false)
}

// add gives a feed what is published from now on, and what the store has from revision
// from on. The lock is not held.
func (fs *Feeds) add(f *feed, from keyspace.Revision) error {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	v, err := fs.src.View(f.generation, from)
	if err != nil {
		return err
	}
	fs.feeds = append(fs.feeds, f)
	fs.active.Store(true)
	fs.s.cfg.Metrics.feeds.Inc()
	f.conn.started(f, from, &block{resolved: v.Resolved, position: v.Position}, from > v.Last)
	return nil
}

// remove forgets a feed, if it is there. The lock is not held.
func (fs *Feeds) remove(f *feed) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if i := slices.Index(fs.feeds, f); i >= 0 {
		fs.feeds = slices.Delete(fs.feeds, i, i+1)
		fs.s.cfg.Metrics.feeds.Dec()
	}
	fs.active.Store(len(fs.feeds) > 0)
}
