package watch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// world plays a cluster of three nodes: sequencer, allocation log, ranges with leaders and lagging
// replicas, feeds, questions, history. What it does is right. When it does it, and what is lost,
// depends on its seed. Node 1 is the hub's.
type world struct {
	rng *rand.Rand
	wg  sync.WaitGroup

	mu sync.Mutex
	// Everything below is guarded by mu.
	rev, compacted keyspace.Revision
	// The log of the sequencer's term begins behind after.
	term    uint64
	after   keyspace.Revision
	log     []sequencer.Allocation
	moved   chan struct{}
	logDown bool
	// mapDown says that the range map does not answer.
	mapDown bool
	// cache is the range map as the gateway's router has it.
	cache   []router.Located
	former  map[[2]uint64]keyspace.Span
	ranges  []*worldRange
	nextID  keyspace.RangeID
	down    map[keyspace.NodeID]bool
	streams map[*worldStream]struct{}
	// versions is the number of versions of each key.
	versions map[string]int64
	// slowest bounds the delays; answer is the additional delay of a leader's answer.
	slowest, answer time.Duration
	asked           map[keyspace.RangeID]int
	// lossless says that nothing fails by chance: no batch, transaction, replica or stream. lose
	// has the next batch or transaction fail all the same.
	lossless, lose bool
	// puts says that nothing is deleted.
	puts     bool
	pageRevs int
	reads    int
	// unraised says that the ranges have not heard of the compaction yet.
	unraised bool
	// compacts says that the ranges compact by entries of their own. It is set at the beginning.
	compacts bool
	// silent is a node that does not answer requests for history.
	silent keyspace.NodeID
	// stuck is a node whose replicas apply nothing, unless they lead.
	stuck int
	// noFeeds says that no stream of feeds opens. hold is for how much longer locks may stay
	// pending.
	noFeeds bool
	// deaf says that nothing is learned from descriptors: the map is stale until it is refreshed.
	deaf bool
	hold time.Duration
}

// worldRange is a range: its log in the order of application, and how far each node has applied it.
type worldRange struct {
	desc   keyspace.Descriptor
	leader keyspace.NodeID
	log    []worldEntry
	at     [4]int
	// pipeline are batches that are sequenced and neither applied nor void, in order. locks are the
	// floors of transactions that may have a revision, by their names.
	pipeline []keyspace.Revision
	locks    map[int]keyspace.Revision
	ended    bool
	// applied is the last applied revision, and told is what was resolved once.
	applied, told keyspace.Revision
	// splitting says that the leader knows a split that others may have applied.
	splitting bool
}

// markAt is the position after n entries. A split or a merge leaves one entry.
func markAt(n int) rangeapi.FeedPosition { return rangeapi.FeedPosition{Term: 1, Number: uint64(n)} }

// worldEntry is an applied entry: events, or a split, and the range's resolved revision after it.
type worldEntry struct {
	events   []rangeapi.Event
	resolved keyspace.Revision
	last     keyspace.Revision
	heirs    []keyspace.Descriptor
	// compacted is what the range has compacted after it.
	compacted keyspace.Revision
}

func newWorld(seed uint64) *world {
	w := &world{
		rng: rand.New(rand.NewPCG(seed, 5)), rev: 1, compacted: -1, term: 1, after: 1, moved: make(chan struct{}), nextID: 2,
		down: map[keyspace.NodeID]bool{}, streams: map[*worldStream]struct{}{}, versions: map[string]int64{},
		former: map[[2]uint64]keyspace.Span{}, slowest: 10 * time.Millisecond, asked: map[keyspace.RangeID]int{},
	}
	d := keyspace.Descriptor{Range: 1, Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}}}
	w.ranges = []*worldRange{{desc: d, leader: 2, locks: map[int]keyspace.Revision{}}}
	w.refreshLocked()
	return w
}

func (w *world) pause() {
	w.mu.Lock()
	d := time.Duration(w.rng.Int64N(int64(w.slowest)))
	w.mu.Unlock()
	time.Sleep(d)
}

func (w *world) chance(p float64) bool { return w.rng.Float64() < p }

// fails says whether something with probability p goes wrong.
func (w *world) fails(p float64) bool { return !w.lossless && w.chance(p) }

// failsNext is fails for a batch or a transaction; lose makes the next one fail.
func (w *world) failsNext(p float64) bool {
	lose := w.lose
	w.lose = false
	return lose || w.fails(p)
}

// changedLocked wakes everybody who looks at the world.
func (w *world) changedLocked() {
	close(w.moved)
	w.moved = make(chan struct{})
}

func (w *world) of(key string) *worldRange {
	for _, r := range w.ranges {
		if !r.ended && r.desc.Span.Contains([]byte(key)) {
			return r
		}
	}
	panic("no range holds " + key)
}

func (r *worldRange) last() keyspace.Revision {
	if len(r.log) == 0 {
		return 0
	}
	return r.log[len(r.log)-1].last
}

// compactedAt is what the range has compacted after its first n entries.
func (r *worldRange) compactedAt(n int) keyspace.Revision {
	if n == 0 {
		return 0
	}
	return r.log[n-1].compacted
}

// kept returns an error if a replica that has applied n entries lacks events from the revision on.
func (r *worldRange) kept(n int, from keyspace.Revision) *kverror.Error {
	if c := r.compactedAt(n); from < c && from <= r.log[n-1].last {
		return &kverror.Error{Kind: kverror.Compacted, CompactRevision: c}
	}
	return nil
}

// compact compacts all but the last revisions. The ranges follow one by one, those at rest only
// now.
func (w *world) compact(but keyspace.Revision) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.compacted = max(w.compacted, w.rev-but)
}

// raiseLocked has a range compact as far as its pending writes allow.
func (w *world) raiseLocked(r *worldRange) {
	c := w.compacted
	for _, floor := range r.locks {
		c = min(c, floor)
	}
	if now := r.compactedAt(len(r.log)); c > now && r.last() >= now && !r.splitting && len(r.pipeline) == 0 {
		w.appendLocked(r, worldEntry{compacted: c})
	}
}

// resolved is the resolved revision by applied state alone.
func (r *worldRange) resolved() keyspace.Revision {
	c := r.applied
	for _, floor := range r.locks {
		c = min(c, floor)
	}
	r.told = max(r.told, c)
	return r.told
}

func (w *world) allocateLocked(rs ...*worldRange) keyspace.Revision {
	w.rev++
	for _, r := range rs {
		w.log = append(w.log, sequencer.Allocation{First: w.rev, Count: 1, Range: r.desc.Range, Generation: r.desc.Generation})
	}
	w.changedLocked()
	return w.rev
}

func (w *world) eventLocked(key string, rev keyspace.Revision, sub uint32) rangeapi.Event {
	v := mvcc.Version{Key: []byte(key), Mod: rev, Sub: sub}
	if w.versions[key] > 0 && !w.puts && w.chance(0.2) {
		v.Tombstone = true
		w.versions[key] = 0
	} else {
		w.versions[key]++
		v.Create, v.Version, v.Value = rev, w.versions[key], fmt.Appendf(nil, "%s@%d", key, rev)
	}
	return rangeapi.Event{Version: v}
}

func (w *world) appendLocked(r *worldRange, e worldEntry) {
	e.last = r.last()
	for i := range e.events {
		e.last = max(e.last, e.events[i].Mod)
	}
	e.compacted = max(e.compacted, r.compactedAt(len(r.log)))
	r.log = append(r.log, worldEntry{events: e.events, last: e.last, heirs: e.heirs, compacted: e.compacted})
	r.log[len(r.log)-1].resolved = r.resolved()
	r.at[r.leader] = len(r.log)
	w.changedLocked()
}

// write puts keys of one range. They are sequenced at once and applied or lost later, in the order
// of the range's batches.
func (w *world) write(keys ...string) {
	w.mu.Lock()
	r := w.of(keys[0])
	keys = slices.DeleteFunc(keys, func(k string) bool { return !r.desc.Span.Contains([]byte(k)) })
	if r.splitting {
		w.mu.Unlock()
		return
	}
	rev := w.allocateLocked(r)
	r.pipeline = append(r.pipeline, rev)
	lost := w.failsNext(0.1)
	w.mu.Unlock()
	w.wg.Go(func() {
		w.pause()
		w.mu.Lock()
		defer w.mu.Unlock()
		for r.pipeline[0] != rev {
			moved := w.moved
			w.mu.Unlock()
			<-moved
			w.mu.Lock()
		}
		r.pipeline = r.pipeline[1:]
		if !lost {
			var events []rangeapi.Event
			for i, k := range keys {
				events = append(events, w.eventLocked(k, rev, uint32(i)))
			}
			r.applied = rev
			w.appendLocked(r, worldEntry{events: events})
		}
		w.changedLocked()
	})
}

// txn writes keys of several ranges at one revision: first locks with their floors, then the
// revision, then the writes. Each range applies them behind its earlier batches, some of them one
// by one like a sweep. By then a range may have applied higher revisions and may have been split.
func (w *world) txn(name int, keys ...string) {
	w.mu.Lock()
	var rs []*worldRange
	for _, k := range keys {
		if r := w.of(k); !slices.Contains(rs, r) {
			rs = append(rs, r)
		}
	}
	for _, r := range rs {
		if r.splitting {
			w.mu.Unlock()
			return
		}
		r.locks[name] = w.rev
	}
	w.mu.Unlock()
	w.wg.Go(func() {
		w.pause()
		w.mu.Lock()
		if w.hold > 0 && w.chance(0.3) { // the locks stand for a while before there is a revision
			stand := time.Duration(w.rng.Int64N(int64(w.hold)))
			w.mu.Unlock()
			time.Sleep(stand)
			w.mu.Lock()
		}
		rev := w.allocateLocked(rs...) // as they were when they locked
		aborted, piecemeal, done := w.failsNext(0.2), w.chance(0.3), map[string]bool{}
		held := time.Duration(0)
		if w.hold > 0 && w.chance(0.5) {
			held = time.Duration(w.rng.Int64N(int64(w.hold)))
		}
		w.mu.Unlock()
		// A lock may outlive a split of its range. Then both halves have it.
		for locked := true; locked; {
			w.pause()
			w.mu.Lock()
			var r *worldRange
			locked = false
			for _, o := range w.ranges {
				if _, has := o.locks[name]; has && !o.ended {
					locked = true
					if !o.splitting && (len(o.pipeline) == 0 || o.pipeline[0] > rev) {
						r = o
					}
				}
			}
			if r == nil {
				w.mu.Unlock()
				continue
			}
			var events []rangeapi.Event
			last := true
			for i, k := range keys {
				if aborted || done[k] || !r.desc.Span.Contains([]byte(k)) {
					continue
				}
				if len(events) > 0 && piecemeal {
					last = false
					break
				}
				events = append(events, w.eventLocked(k, rev, uint32(i)))
				done[k], r.applied = true, max(r.applied, rev)
			}
			if last {
				delete(r.locks, name)
			}
			w.appendLocked(r, worldEntry{events: events})
			w.mu.Unlock()
			time.Sleep(held) // one range has its part, and others do not yet
			held = 0
		}
	})
}

// split cuts a range once its pipeline is empty.
func (w *world) split(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.of(key)
	if r.splitting || string(r.desc.Span.Start) == key {
		return
	}
	r.splitting = true
	for len(r.pipeline) > 0 {
		moved := w.moved
		w.mu.Unlock()
		<-moved
		w.mu.Lock()
	}
	left, right := r.desc, r.desc
	left.Generation++
	right.Generation++
	right.Range = w.nextID
	w.nextID++
	left.Span.End, right.Span.Start = []byte(key), []byte(key)
	made := make([]*worldRange, 2)
	for i, d := range []keyspace.Descriptor{left, right} {
		made[i] = &worldRange{desc: d, leader: keyspace.NodeID(1 + w.rng.IntN(3)), locks: map[int]keyspace.Revision{}, applied: r.applied, told: r.told}
		for k, v := range r.locks {
			made[i].locks[k] = v
		}
		// The heirs have what the parent applied in their past.
		past := worldEntry{last: r.last(), compacted: r.compactedAt(len(r.log))}
		for _, e := range r.log {
			for _, ev := range e.events {
				if d.Span.Contains(ev.Key) {
					past.events = append(past.events, ev)
				}
			}
		}
		made[i].log = []worldEntry{past}
		made[i].log[0].resolved = made[i].resolved()
		made[i].at[made[i].leader] = 1
	}
	w.appendLocked(r, worldEntry{heirs: []keyspace.Descriptor{left, right}})
	r.ended = true
	w.ranges = append(w.ranges, made...)
}

// count returns the number of ranges.
func (w *world) count() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.ranges {
		if !r.ended {
			n++
		}
	}
	return n
}

// merge has the range of the key absorb its right neighbour, once both pipelines are empty. The
// result holds the pending locks of both.
func (w *world) merge(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	left := w.of(key)
	if left.splitting || len(left.desc.Span.End) == 0 {
		return
	}
	right := w.of(string(left.desc.Span.End))
	if right.splitting {
		return
	}
	left.splitting, right.splitting = true, true
	for len(left.pipeline) > 0 || len(right.pipeline) > 0 {
		moved := w.moved
		w.mu.Unlock()
		<-moved
		w.mu.Lock()
	}
	compacted := max(left.compactedAt(len(left.log)), right.compactedAt(len(right.log)))
	for _, r := range []*worldRange{left, right} {
		for _, floor := range r.locks {
			if floor < compacted {
				left.splitting, right.splitting = false, false
				return
			}
		}
	}
	d := left.desc
	d.Generation, d.Span.End = max(left.desc.Generation, right.desc.Generation)+1, right.desc.Span.End
	made := &worldRange{
		desc: d, leader: keyspace.NodeID(1 + w.rng.IntN(3)), locks: map[int]keyspace.Revision{}, applied: max(left.applied, right.applied),
	}
	// The result's past is what both have applied, as far as both are resolved.
	past := worldEntry{last: max(left.last(), right.last()), compacted: compacted}
	made.told = keyspace.MaxRevision
	for _, r := range []*worldRange{left, right} {
		whole := made.applied
		for k, floor := range r.locks {
			made.locks[k], whole = floor, min(whole, floor)
		}
		made.told = min(made.told, max(r.told, whole))
		for _, e := range r.log {
			past.events = append(past.events, e.events...)
		}
	}
	made.log = []worldEntry{past}
	made.log[0].resolved = made.resolved()
	made.at[made.leader] = 1
	for _, r := range []*worldRange{left, right} {
		w.appendLocked(r, worldEntry{heirs: []keyspace.Descriptor{d}})
		r.ended = true
	}
	w.ranges = append(w.ranges, made)
}

// drive lets replicas catch up at random, until stop is closed.
func (w *world) drive(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		w.pause()
		w.mu.Lock()
		for _, r := range w.ranges {
			if w.compacts && !r.ended && w.chance(0.2) {
				w.raiseLocked(r)
			}
			for n := 1; n <= 3; n++ {
				if n != w.stuck && r.at[n] < len(r.log) && !w.down[keyspace.NodeID(n)] && !w.fails(0.3) {
					r.at[n] += 1 + w.rng.IntN(len(r.log)-r.at[n])
				}
			}
		}
		w.changedLocked()
		w.mu.Unlock()
	}
}

// trouble makes one fault.
func (w *world) trouble() {
	w.mu.Lock()
	defer w.mu.Unlock()
	live := slices.DeleteFunc(slices.Clone(w.ranges), func(r *worldRange) bool { return r.ended })
	r := live[w.rng.IntN(len(live))]
	switch w.rng.IntN(6) {
	case 0:
		r.leader = keyspace.NodeID(1 + w.rng.IntN(3))
		r.at[r.leader] = len(r.log)
	case 1: // another sequencer: the rest of the log is lost to followers
		w.term++
		w.rev += keyspace.Revision(w.rng.IntN(20))
		w.after, w.log = w.rev, nil
	case 2:
		n := keyspace.NodeID(1 + w.rng.IntN(3))
		w.down[n] = !w.down[n]
		for s := range w.streams {
			if s.node == n && w.down[n] {
				s.dead = true
			}
		}
	case 3:
		for s := range w.streams {
			s.dead = s.dead || w.chance(0.5)
		}
	case 4:
		w.refreshLocked()
	case 5:
		w.logDown = !w.logDown
	}
	w.changedLocked()
}

// heal ends all faults.
func (w *world) heal() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.down)
	w.logDown = false
	for _, r := range w.ranges {
		if r.leader == 0 {
			r.leader = 1
		}
	}
	w.changedLocked()
}

// FollowLog implements Log.
func (w *world) FollowLog(ctx context.Context, known sequencer.LogPosition, take func(*sequencer.LogPart)) {
	at, term := known.Last, known.Term
	for ctx.Err() == nil {
		w.mu.Lock()
		moved := w.moved
		part := &sequencer.LogPart{Term: w.term, After: max(at, w.after), Last: w.rev}
		for _, h := range w.log {
			if h.First > part.After {
				part.Records = append(part.Records, h)
			}
		}
		// Often only a part comes, of whole revisions.
		if n := len(part.Records); n > 1 && w.chance(0.5) {
			part.Records = part.Records[:1+w.rng.IntN(n-1)]
			next := part.Records[len(part.Records)-1].First
			for _, h := range w.log {
				if h.First == next && !slices.Contains(part.Records, h) {
					part.Records = append(part.Records, h)
				}
			}
			part.Last = next
		}
		silent := w.logDown || part.Last == at && w.term == term
		w.mu.Unlock()
		if !silent {
			w.pause()
			at, term = part.Last, part.Term
			take(part)
			continue
		}
		select {
		case <-moved:
		case <-ctx.Done():
		}
	}
}

func (w *world) refreshLocked() {
	for _, c := range w.cache {
		w.former[[2]uint64{uint64(c.Descriptor.Range), uint64(c.Descriptor.Generation)}] = c.Descriptor.Span
	}
	w.cache = nil
	for _, r := range w.ranges {
		if !r.ended {
			l := router.Located{Descriptor: r.desc}
			if w.chance(0.5) {
				l.Leader = keyspace.NodeID(1 + w.rng.IntN(3))
			}
			w.cache = append(w.cache, l)
		}
	}
	slices.SortFunc(w.cache, func(a, b router.Located) int { return bytes.Compare(a.Descriptor.Span.Start, b.Descriptor.Span.Start) })
}

// Locate implements Ranges. It is often stale.
func (w *world) Locate(_ context.Context, span keyspace.Span) ([]router.Located, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mapDown {
		return nil, errors.New("placement is away")
	}
	var out []router.Located
	for _, l := range w.cache {
		if l.Descriptor.Span.Overlaps(span) {
			out = append(out, l)
		}
	}
	return out, nil
}

// Learn implements Ranges.
func (w *world) Learn(descs ...keyspace.Descriptor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(descs) > 0 && !w.deaf && !w.fails(0.2) {
		w.refreshLocked()
	}
}

// SpanOf implements Directory.
func (w *world) SpanOf(id keyspace.RangeID, g keyspace.Generation) (keyspace.Span, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, l := range w.cache {
		if l.Descriptor.Range == id && l.Descriptor.Generation == g {
			return l.Descriptor.Span, true
		}
	}
	s, ok := w.former[[2]uint64{uint64(id), uint64(g)}]
	return s, ok
}

// Refresh implements Directory.
func (w *world) Refresh(context.Context) error {
	w.pause()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fails(0.3) {
		return errors.New("placement is away")
	}
	w.refreshLocked()
	return nil
}

// Current implements Directory.
func (w *world) Current(context.Context) (keyspace.SequenceAnswer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return keyspace.SequenceAnswer{Current: w.rev, Compacted: w.compacted}, nil
}

// findLocked returns the range at the generation as the node has it, or an error.
func (w *world) findLocked(node keyspace.NodeID, id keyspace.RangeID, g keyspace.Generation) (*worldRange, *kverror.Error) {
	if w.down[node] {
		return nil, kverror.New(kverror.Unreachable, "node %s", node)
	}
	var newer []keyspace.Descriptor
	for _, r := range w.ranges {
		switch {
		case r.desc.Range != id:
		case r.desc.Generation == g:
			if n := r.at[node]; n > 0 && len(r.log[n-1].heirs) > 0 {
				return nil, &kverror.Error{Kind: kverror.WrongRange, Descriptors: r.log[n-1].heirs}
			}
			if r.at[node] == 0 && r.desc.Generation > 1 {
				return nil, kverror.New(kverror.RangeNotHere, "range %s", id)
			}
			return r, nil
		case r.desc.Generation > g:
			newer = append(newer, r.desc)
		}
	}
	return nil, &kverror.Error{Kind: kverror.WrongRange, Descriptors: newer}
}

// AwaitResolved implements Feeds.
func (w *world) AwaitResolved(ctx context.Context, node keyspace.NodeID, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error) {
	w.pause()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked[q.Range]++
	for {
		r, e := w.findLocked(node, q.Range, q.Generation)
		if e != nil {
			return rangeapi.FeedPosition{}, e
		}
		if r.leader != node {
			e := &kverror.Error{Kind: kverror.NotLeader}
			if w.chance(0.5) {
				e.Leader = r.leader
			}
			return rangeapi.FeedPosition{}, e
		}
		may := r.splitting || len(r.pipeline) > 0 && r.pipeline[0] <= q.Revision
		for _, floor := range r.locks {
			may = may || floor < q.Revision
		}
		if !may {
			m, slow := markAt(len(r.log)), w.answer
			w.mu.Unlock()
			time.Sleep(slow)
			w.mu.Lock()
			return m, nil
		}
		moved := w.moved
		w.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
			w.mu.Lock()
			return rangeapi.FeedPosition{}, kverror.Of(ctx.Err())
		}
		w.mu.Lock()
	}
}

// History implements Feeds. Pages are short.
func (w *world) History(ctx context.Context, node keyspace.NodeID, q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
	w.pause()
	w.mu.Lock()
	if node == w.silent {
		w.mu.Unlock()
		<-ctx.Done()
		return nil, kverror.Of(ctx.Err())
	}
	defer w.mu.Unlock()
	w.reads++
	r, e := w.findLocked(node, q.Range, q.Generation)
	if e != nil {
		return nil, e
	}
	if !r.desc.Span.Covers(q.Span) {
		panic(fmt.Sprintf("history of %s was asked of %s", q.Span, r.desc.Span))
	}
	if e := r.kept(r.at[node], q.From); e != nil {
		return nil, e
	}
	if q.From < w.compacted && !w.unraised && !w.compacts {
		return nil, &kverror.Error{Kind: kverror.Compacted, CompactRevision: w.compacted}
	}
	p := &rangeapi.HistoryPage{Next: q.To + 1}
	if q.FromKey != nil {
		p.Next = q.From + 1
	}
	for _, en := range r.log[:r.at[node]] {
		for _, ev := range en.events {
			if q.FromKey != nil && (ev.Mod != q.From || bytes.Compare(ev.Key, q.FromKey) < 0) {
				continue
			}
			if q.Span.Contains(ev.Key) && ev.Mod >= q.From && ev.Mod <= q.To {
				p.Events = append(p.Events, w.looked(ev, q.Prev))
			}
		}
	}
	if !markAt(r.at[node]).Reaches(q.Seen) {
		return nil, kverror.New(kverror.Busy, "at %d", r.at[node])
	}
	slices.SortFunc(p.Events, func(a, b rangeapi.Event) int { return compare(newEvent(&a), newEvent(&b)) })
	w.cutPage(p, q.FromKey != nil)
	return p, nil
}

// cutPage cuts a page to its bound; one of a single revision it cuts by keys.
func (w *world) cutPage(p *rangeapi.HistoryPage, within bool) {
	n := w.pageRevs
	if n == 0 || len(p.Events) <= n {
		return
	}
	if first := p.Events[0].Mod; first == p.Events[n].Mod || within {
		p.Events = slices.DeleteFunc(p.Events, func(e rangeapi.Event) bool { return e.Mod != first })
		slices.SortFunc(p.Events, func(a, b rangeapi.Event) int { return bytes.Compare(a.Key, b.Key) })
		p.Events = p.Events[:n]
		p.Next, p.NextKey = first, append(bytes.Clone(p.Events[n-1].Key), 0)
		return
	}
	p.Next = p.Events[n].Mod
	p.Events = slices.DeleteFunc(p.Events, func(e rangeapi.Event) bool { return e.Mod >= p.Next })
}

func (w *world) looked(e rangeapi.Event, prev bool) rangeapi.Event {
	e.Looked = prev
	if prev && e.Version.Version != 1 {
		e.Prev = &mvcc.Version{Key: e.Key, Mod: 1, Create: 1, Version: 1}
	}
	return e
}

// worldStream is a stream of feeds.
type worldStream struct {
	w    *world
	node keyspace.NodeID
	dead bool
	// The at of a feed is how far it is in its range's log, or -1 before its first part.
	feeds map[rangeapi.FeedID]*worldFeed
	order []rangeapi.FeedID
}

type worldFeed struct {
	o  rangeapi.FeedOrder
	r  *worldRange
	at int
}

// OpenFeeds implements Feeds.
func (w *world) OpenFeeds(_ context.Context, node keyspace.NodeID) (FeedStream, error) {
	w.pause()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.down[node] || w.noFeeds || w.fails(0.1) {
		return nil, errors.New("no route")
	}
	s := &worldStream{w: w, node: node, feeds: map[rangeapi.FeedID]*worldFeed{}}
	w.streams[s] = struct{}{}
	return s, nil
}

func (s *worldStream) Order(_ context.Context, orders []rangeapi.FeedOrder) error {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	for _, o := range orders {
		if o.Close {
			delete(s.feeds, o.ID)
			continue
		}
		s.feeds[o.ID] = &worldFeed{o: o, at: -1}
		s.order = append(s.order, o.ID)
	}
	s.w.changedLocked()
	return nil
}

func (s *worldStream) Recv(ctx context.Context) ([]rangeapi.FeedPart, error) {
	w := s.w
	w.pause()
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if s.dead {
			return nil, errors.New("the session is lost")
		}
		for _, id := range s.order {
			if f := s.feeds[id]; f != nil {
				if p := s.partLocked(id, f); p != nil {
					return []rangeapi.FeedPart{*p}, nil
				}
			}
		}
		moved := w.moved
		w.mu.Unlock()
		select {
		case <-moved:
		case <-ctx.Done():
		}
		w.mu.Lock()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// partLocked returns the next part of a feed, if there is one.
func (s *worldStream) partLocked(id rangeapi.FeedID, f *worldFeed) *rangeapi.FeedPart {
	w := s.w
	p := &rangeapi.FeedPart{ID: id}
	if f.at < 0 {
		r, e := w.findLocked(s.node, f.o.Range, f.o.Generation)
		if e == nil {
			e = r.kept(r.at[s.node], f.o.From)
		}
		if e != nil {
			delete(s.feeds, id)
			p.Err = e
			return p
		}
		f.r, f.at = r, r.at[s.node]
		p.Position = markAt(f.at)
		for _, en := range r.log[:f.at] {
			p.Resolved = en.resolved
			for _, ev := range en.events {
				if ev.Mod >= f.o.From {
					p.Events = append(p.Events, w.looked(ev, f.o.Prev))
				}
			}
		}
		return p
	}
	if f.at == f.r.at[s.node] {
		return nil
	}
	en := f.r.log[f.at]
	f.at++
	if len(en.heirs) > 0 {
		delete(s.feeds, id)
		p.Err = &kverror.Error{Kind: kverror.WrongRange, Descriptors: en.heirs}
		return p
	}
	p.Resolved, p.Position = en.resolved, markAt(f.at)
	for _, ev := range en.events {
		p.Events = append(p.Events, w.looked(ev, f.o.Prev))
	}
	return p
}

func (s *worldStream) Close() {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	delete(s.w.streams, s)
}
