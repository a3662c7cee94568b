package shard

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// A feed is one range's applied events on their way to one gateway. What is applied is
// a fact: any replica can feed, it needs no lease, and the range may sleep meanwhile.

// eventBlock holds the events of one applied batch, encoded once for all feeds.
type eventBlock struct {
	bytes []byte
	count int
	// lowest is where in bytes the lowest event begins, in the order of (revision, key).
	lowest int
}

// feedBlock is what a replica publishes to its feeds at a time. It is shared by them
// and not changed.
type feedBlock struct {
	events   []*eventBlock
	bytes    int64
	complete keyspace.Revision
	// mark is where the replica was behind it, zero where not all up to there is sent.
	mark rangeapi.FeedPosition
}

// feedMode says where a feed takes its events from.
type feedMode uint8

const (
	// feedLive: from what the replica publishes.
	feedLive feedMode = iota
	// feedBehind: from the store; what is published goes past it.
	feedBehind
	// feedJoining: from the store up to what was published when it began to join;
	// what has been published since is queued.
	feedJoining
	// feedEnded: it has an end, behind what is queued.
	feedEnded
)

// feed is a feed in its replica and its connection. The fields below conn are guarded
// by conn's mu.
type feed struct {
	id         rangeapi.FeedID
	r          *Replica
	generation keyspace.Generation
	prev       bool
	conn       *feedConn

	mode  feedMode
	queue []*feedBlock
	bytes int64
	// sent is up to where all has been sent.
	sent keyspace.Revision
	// cursor is from where on the store is to be read: what it shows below that was sent or
	// is in page, but for what was published from missed on, which the feed was not given.
	// near says that a page has reached all that was complete: with the next one the feed
	// begins to join, and joined is then how the replica was. epoch counts how often it
	// began anew behind sent.
	cursor, missed feedPlace
	joined         historyView
	near           bool
	epoch          int
	// page is a page of history that waits to be sent.
	page *feedBlock
	// ready says that the feed is in conn.ready, hungry that it is in conn.hungry,
	// reading that the connection's reader has it.
	ready, hungry, reading bool
	end                    *kverror.Error

	// told is the last complete revision that was sent. It is the sender's.
	told keyspace.Revision
}

// advance says anew up to where the range is complete, as far as the applied state alone
// tells: every version at or below it that will ever be, on any replica, is applied.
// locks says that the locks have changed.
//
// It is the last revision of all that is applied, or below the lowest floor of the locks
// that will leave versions behind. For what may come later is one of three:
//
//   - A batch of the range itself. It is evaluated behind what is applied, by a leader
//     who asks for its revisions after every step that was put before it got its own; so
//     its revisions are above all that is applied when its turn comes, which stands asserts.
//   - The end, or the sweep, of a lock that is held now. Its revision is above the lock's
//     floor, which above asserts, and may be far below the last one: it was handed out long
//     ago, perhaps, and what was handed out after it to others is here (traps 64 and 74).
//   - The same of a lock that is not here yet. Its transaction asks for a revision when
//     all its locks are applied, later than this; what is applied here had its own by now,
//     and the sequencer hands out nothing lower in real time.
//
// What was once true stays so: a lock that comes with a floor below what was complete
// takes nothing back, since its revision is above it all the same.
//
// It is one number for all keys of the range, so it may say too little and never too much: a
// key that no lock touches is complete up to the last revision, and its watchers wait for the
// lowest lock all the same. That is lag and no hole, whatever they go by (feeds, pages of
// history, serializable reads, what is handed on at a split or merge): nothing is told to be
// complete above the number, and what is told below it is there. The lag ends with the lock,
// which whoever is asked for the void asks about after a second: a transaction of a
// coordinator that is gone is ended at its anchor then. It lasts for as long as the anchor's
// range has no quorum: nobody can tell before what became of the revision, and a number for
// each span would set free only the watchers of other keys.
func (s *applyState) advance(locks bool) {
	if locks {
		s.lowest = keyspace.MaxRevision
		for _, l := range s.txns.Locks {
			if l.Leaves() && !mutation.Is(mutation.CompleteDespiteLock) {
				s.lowest = min(s.lowest, l.Floor)
			}
		}
	}
	s.complete = max(s.complete, min(s.rec.LastRevision, s.lowest))
}

// addFeed lets the feed have what is published from now on, and what the store has
// from revision from on.
func (r *Replica) addFeed(f *feed, from keyspace.Revision) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.feedsLocked(f.generation); err != nil {
		return err
	}
	if err := r.keptLocked(from); err != nil {
		return err
	}
	r.feeds = append(r.feeds, f)
	r.feeding.Store(true)
	f.conn.started(f, from, &feedBlock{complete: r.complete, mark: r.markLocked()}, from > r.rec.LastRevision)
	return nil
}

// feedsLocked says whether this replica can tell of the range at the generation.
func (r *Replica) feedsLocked(g keyspace.Generation) error {
	switch {
	case r.stopped:
		return r.ended
	case r.rec.Generation == 0:
		return kverror.New(kverror.RangeNotHere, "range %s is empty on node %s", r.id, r.node.cfg.Self)
	case g > r.rec.Generation:
		return r.errorLocked(kverror.Busy, fmt.Sprintf("range %s has generation %d yet", r.id, r.rec.Generation))
	case g < r.rec.Generation:
		return r.errorLocked(kverror.WrongRange, fmt.Sprintf("range %s has generation %d", r.id, r.rec.Generation))
	}
	return nil
}

// keptLocked says whether all events from the revision on are still in the store: of
// those below the compacted revision some are not, if there are any.
func (r *Replica) keptLocked(from keyspace.Revision) error { return kept(&r.rec, from) }

func kept(rec *command.Record, from keyspace.Revision) error {
	if from >= rec.Compacted || from > rec.LastRevision {
		return nil
	}
	return &kverror.Error{
		Kind: kverror.Compacted, CompactRevision: rec.Compacted,
		Detail: fmt.Sprintf("range %s is asked for events from revision %d on", rec.RangeID, from),
	}
}

// removeFeed forgets a feed, if it is there.
func (r *Replica) removeFeed(f *feed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.feeds, f); i >= 0 {
		r.feeds = slices.Delete(r.feeds, i, i+1)
		r.node.metrics.feeds.Dec()
	}
	r.feeding.Store(len(r.feeds) > 0)
}

// captureEvents encodes the versions of a batch in their order, if anybody is fed. It
// is called before they are put into the order of the store.
func (s *applyState) captureEvents() *eventBlock {
	b := &eventBlock{count: len(s.versions)}
	size := 0
	for i := range s.versions {
		size += int(s.versions[i].Size()) + command.VersionOverheadBytes
	}
	b.bytes = make([]byte, 0, size)
	lowest := lowestOf(s.versions)
	for i := range s.versions {
		if i == lowest {
			b.lowest = len(b.bytes)
		}
		e := rangeapi.Event{Version: s.versions[i]}
		b.bytes = rangeapi.AppendEvent(b.bytes, &e)
	}
	return b
}

// publication collects what is to be published of one call of Applied.
type publication struct {
	block *feedBlock
	// missed says that a batch was applied of which no events were captured: the first
	// feed came after that.
	missed bool
}

func (p *publication) add(o *outcome) {
	switch {
	case !o.ok:
	case o.events == nil:
		p.missed = true
	default:
		if p.block == nil {
			p.block = &feedBlock{}
		}
		p.block.events = append(p.block.events, o.events)
		p.block.bytes += int64(len(o.events.bytes))
		p.block.complete, p.block.mark = o.complete, rangeapi.FeedPosition(o.link)
	}
}

// publishLocked gives the feeds what was applied, now that the store shows it.
func (r *Replica) publishLocked(p *publication) {
	if len(r.feeds) == 0 || p.block == nil && !p.missed {
		return
	}
	if p.missed {
		r.feedsBehindLocked()
	} else {
		for _, f := range r.feeds {
			f.conn.offer(f, p.block)
		}
	}
	*p = publication{}
}

// feedsBehindLocked has all feeds go on from the store.
func (r *Replica) feedsBehindLocked() {
	for _, f := range r.feeds {
		f.conn.restart(f)
	}
}

// endFeedsLocked ends all feeds, behind what was published.
func (r *Replica) endFeedsLocked(err *kverror.Error) {
	for _, f := range r.feeds {
		f.conn.ended(f, err)
		r.node.metrics.feeds.Dec()
	}
	r.feeds = nil
	r.feeding.Store(false)
}

// endFeedsAtSplitLocked ends all feeds at a split, behind what was applied before it:
// parent and child are other ranges now, which begin where this one ended.
func (r *Replica) endFeedsAtSplitLocked(p *publication, sp *appliedSplit) {
	r.publishLocked(p)
	err := r.errorLocked(kverror.WrongRange, "the range was split")
	err.Descriptors = append(err.Descriptors, sp.descriptor())
	r.endFeedsLocked(err)
}

// feedsAfterSnapshotLocked has the feeds go on from the store, which has leapt, or ends
// them where the range has changed.
func (r *Replica) feedsAfterSnapshotLocked(old keyspace.Generation) {
	if r.rec.Generation != old {
		r.endFeedsLocked(r.errorLocked(kverror.WrongRange, "a snapshot brought another generation"))
		return
	}
	r.feedsBehindLocked()
}

// historyView is what a reading of history goes by: the last applied revision, up to
// where the range is complete, and the mark of what is applied.
type historyView struct {
	last, complete keyspace.Revision
	mark           rangeapi.FeedPosition
	span           keyspace.Span
}

// viewHistory says up to where the store can be read for who wants events from a
// revision on.
func (r *Replica) viewHistory(g keyspace.Generation, from keyspace.Revision) (historyView, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.viewHistoryLocked(g, from)
}

func (r *Replica) viewHistoryLocked(g keyspace.Generation, from keyspace.Revision) (historyView, error) {
	if err := r.feedsLocked(g); err != nil {
		return historyView{}, err
	}
	if err := r.keptLocked(from); err != nil {
		return historyView{}, err
	}
	return historyView{last: r.rec.LastRevision, complete: r.complete, mark: r.markLocked(), span: r.rec.Span}, nil
}

// historyWant says what is wanted of history beside mvcc.HistoryOptions: with fromKey, to
// go on there within revision From; with prev, the versions before, where the revision
// before is not below compacted.
type historyWant struct {
	fromKey   []byte
	prev      bool
	compacted keyspace.Revision
}

// history reads events of the span from the store, in the order of revisions. It ends
// where they are as large as is allowed, with the versions before them: within a
// revision only where there is nothing but that one. Afterwards it makes sure that the range
// was this one and that nothing was removed under it.
func (r *Replica) history(g keyspace.Generation, o mvcc.HistoryOptions, w historyWant) (events []rangeapi.Event, next feedPlace, err error) {
	next.rev, next.key, err = mvcc.Pieces(r.node.cfg.Engine, o, w.fromKey, func(v *mvcc.Version) error {
		events = append(events, rangeapi.Event{Version: *v})
		return nil
	})
	if err == nil && w.prev {
		events, next, err = r.historyBefore(events, next, o.MaxBytes, w.compacted)
	}
	if err != nil {
		return nil, feedPlace{}, fmt.Errorf("shard: range %s: %w", r.id, err)
	}
	r.node.metrics.historyEvents.Add(float64(len(events)))
	return events, next, r.stillShows(g, o.From)
}

// stillShows says why what was read of the store may not be all that the range had from the
// revision on, nil if it is. The tables of a snapshot are in the store before the replica hears
// of it: what the snapshot has compacted is known by its record.
func (r *Replica) stillShows(g keyspace.Generation, from keyspace.Revision) error {
	r.mu.Lock()
	_, err := r.viewHistoryLocked(g, from)
	receiving := r.receiving
	r.mu.Unlock()
	if err != nil || !receiving {
		return err
	}
	rec, _, err := r.node.record(r.id)
	switch {
	case err != nil:
		return fmt.Errorf("shard: range %s: the record that a snapshot may have replaced: %w", r.id, err)
	case rec.Generation != g:
		return kverror.New(kverror.Busy, "range %s: a snapshot brings generation %d", r.id, rec.Generation)
	}
	return kept(&rec, from)
}

// historyBefore finds the versions before the events of a page, which then ends earlier
// if that makes it too large.
func (r *Replica) historyBefore(events []rangeapi.Event, next feedPlace, maxBytes int64, compacted keyspace.Revision) ([]rangeapi.Event, feedPlace, error) {
	slices.SortFunc(events, func(a, b rangeapi.Event) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), bytes.Compare(a.Key, b.Key))
	})
	n, err := r.lookBefore(events, compacted, maxBytes)
	if err == nil && n < len(events) {
		n, err = r.wholeKey(events, n, compacted)
	}
	if err != nil || n == len(events) {
		return events, next, err
	}
	next = feedPlace{rev: events[n].Mod, key: events[n].Key}
	if events[0].Mod != next.rev {
		n = slices.IndexFunc(events, func(e rangeapi.Event) bool { return e.Mod == next.rev })
		next.key = nil
	}
	return events[:n:n], next, nil
}

// wholeKey moves the end of a page, which the first n events fill, from between the events
// of one key and revision: before them, or behind them where they are the first. A page
// goes on at a key.
func (r *Replica) wholeKey(events []rangeapi.Event, n int, compacted keyspace.Revision) (int, error) {
	one := func(a, b *rangeapi.Event) bool { return a.Mod == b.Mod && bytes.Equal(a.Key, b.Key) }
	start := n
	for start > 0 && one(&events[start-1], &events[n]) {
		start--
	}
	if start > 0 {
		return start, nil
	}
	end := n
	for end < len(events) && one(&events[0], &events[end]) {
		end++
	}
	_, err := r.lookBefore(events[n:end], compacted, math.MaxInt64)
	return end, err
}

// lookBefore finds the version before each of the first n events, as etcd does: none for one
// that creates its key, and none where the revision before is compacted, by what is known
// here or by whoever asks. With those they are at most maxBytes, or one.
func (r *Replica) lookBefore(events []rangeapi.Event, compacted keyspace.Revision, maxBytes int64) (n int, err error) {
	known := compacted
	compacted = r.compactedBeyond(known)
	g, err := mvcc.NewGetter(r.node.cfg.Engine)
	if err != nil {
		return 0, err
	}
	size := int64(0)
	for ; n < len(events); n++ {
		e := &events[n]
		if err := before(g, e, compacted); err != nil {
			_ = g.Close() // the first error says more
			return 0, err
		}
		if size += e.Bytes(); size > maxBytes && n > 0 {
			e.Looked, e.Prev = false, nil
			break
		}
	}
	if err := r.endedMeanwhile(); err != nil {
		_ = g.Close() // the first error says more
		return 0, err
	}
	// Of what was compacted meanwhile an older version may have been found instead.
	compacted = r.compactedBeyond(known)
	for i := range events[:n] {
		if events[i].Mod-1 < compacted {
			events[i].Prev = nil
		}
	}
	return n, g.Close()
}

// endedMeanwhile says why the replica has ended, nil if it has not: what was read of its
// data may be of what was being deleted.
func (r *Replica) endedMeanwhile() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return r.ended
	}
	return nil
}

// before finds the version before an event.
func before(g *mvcc.Getter, e *rangeapi.Event, compacted keyspace.Revision) error {
	e.Looked = true
	if !e.Tombstone && e.Create == e.Mod || e.Mod-1 < compacted {
		return nil
	}
	v, ok, err := g.Get(e.Key, e.Mod-1)
	if ok && err == nil && !v.Tombstone {
		prev := v.Clone()
		e.Prev = &prev
	}
	return err
}

// compactedBeyond returns the highest compacted revision known here, or the given one.
func (r *Replica) compactedBeyond(rev keyspace.Revision) keyspace.Revision {
	r.mu.Lock()
	defer r.mu.Unlock()
	return max(rev, r.compactedLocked(r.node.Compacted()))
}
