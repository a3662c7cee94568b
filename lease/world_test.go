package lease

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/sim/simclock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a placement group and the keys of leases, in a bubble of virtual time. It
// fails the test where a lease is decided to have expired before it may, or goes while a
// key of it may be there.
type world struct {
	t *testing.T
	// auto commits every proposal at once; otherwise they wait for settle.
	auto bool

	mu      sync.Mutex
	records map[keyspace.LeaseID]*fsm.Lease
	index   uint64
	term    uint64
	nodes   []*node
	leader  *node
	pending []*proposal
	// safe is until when a lease must not be decided to have expired; asked are those that
	// somebody wants to end; deleted those whose keys are gone.
	safe    map[fsm.LeaseRef]time.Duration
	asked   map[fsm.LeaseRef]bool
	deleted map[fsm.LeaseRef]bool
	// failing says how often the deletion of a lease's keys fails yet; hanging ones wait
	// for the end of their context.
	failing map[keyspace.LeaseID]int
	hanging map[keyspace.LeaseID]bool
	// written is the revision of the last write of a key with the lease.
	written map[keyspace.LeaseID]keyspace.Revision
	// running and most count the deletions at a time.
	running, most int
	revision      keyspace.Revision
	events        []string
	start         time.Time
}

// node has a Timer, and is the world's Records and Revoker for it.
type node struct {
	w      *world
	name   string
	clock  *simclock.Clock
	timer  *Timer
	cancel context.CancelFunc
}

// proposal is an entry that is not committed yet.
type proposal struct {
	term   uint64
	refs   []fsm.LeaseRef
	remove bool
	// checked is that of a RevokeChecked, or of a KeepLease with keep.
	checked keyspace.Revision
	keep    bool
	done    chan error
}

func newWorld(t *testing.T, names ...string) *world {
	t.Helper()
	w := &world{
		t: t, auto: true, index: 10, revision: 100, start: time.Now(),
		records: map[keyspace.LeaseID]*fsm.Lease{},
		safe:    map[fsm.LeaseRef]time.Duration{}, asked: map[fsm.LeaseRef]bool{}, deleted: map[fsm.LeaseRef]bool{},
		failing: map[keyspace.LeaseID]int{}, hanging: map[keyspace.LeaseID]bool{},
		written: map[keyspace.LeaseID]keyspace.Revision{},
	}
	for i, name := range names {
		n := &node{w: w, name: name, clock: simclock.New(time.Duration(i)*time.Hour, 1)}
		n.timer = New(Options{Clock: n.clock, Records: n, Revoker: n, Extend: time.Second, Logger: zap.NewNop()})
		w.nodes = append(w.nodes, n)
	}
	return w
}

// stop ends all nodes.
func (w *world) stop() {
	for _, n := range w.nodes {
		n.clock.Resume()
		n.timer.Stop()
	}
}

func (w *world) now() time.Duration { return time.Since(w.start) }

func (w *world) logf(format string, args ...any) {
	w.events = append(w.events, fmt.Sprintf("%7.3fs ", w.now().Seconds())+fmt.Sprintf(format, args...))
}

// take returns what has happened since the last take.
func (w *world) take() string {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	s := strings.Join(w.events, "\n")
	w.events = nil
	return s
}

// lead begins the next term at a node. The last leader's proposals are committed before it
// if commit says so, or never. The last leader hears of the term unless it is paused.
func (w *world) lead(n *node, commit bool) {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	old, lost := w.leader, w.pending
	w.pending, w.leader = nil, nil // nobody is told of what is applied now
	for _, p := range lost {
		if commit {
			w.applyLocked(p)
		}
		p.done <- kverror.LeaderChanged
	}
	if old != nil && old != n {
		old.cancel()
	}
	w.term++
	w.leader = n
	ctx, cancel := context.WithCancel(context.Background())
	if n.cancel != nil {
		n.cancel()
	}
	n.cancel = cancel
	n.timer.Lead(ctx, w.term, func(yield func(*fsm.Lease) bool) {
		for _, id := range sortedIDs(w.records) {
			if !yield(w.records[id]) {
				return
			}
		}
	})
	w.logf("%s leads in term %d", n.name, w.term)
}

func sortedIDs(m map[keyspace.LeaseID]*fsm.Lease) []keyspace.LeaseID {
	ids := make([]keyspace.LeaseID, 0, len(m))
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// grant grants a lease, with keys if it has spans.
func (w *world) grant(id keyspace.LeaseID, ttl int64, spans int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.records[id] != nil {
		return false
	}
	w.index++
	l := &fsm.Lease{ID: id, Incarnation: keyspace.LeaseIncarnation(w.index), TTL: ttl}
	for i := range spans {
		l.Spans = append(l.Spans, keyspace.Span{Start: []byte{byte(i)}, End: []byte{byte(i + 1)}})
	}
	w.records[id] = l
	w.safe[l.Ref()] = w.now() + time.Duration(ttl)*time.Second
	w.tellLocked(fsm.LeaseChange{Lease: l})
	return true
}

func (w *world) tellLocked(c fsm.LeaseChange) {
	if w.leader != nil {
		w.leader.timer.Changed(w.term, []fsm.LeaseChange{c})
	}
}

// revoke is a client's decision, who has checked the keys as of a revision, or need not, with 0.
func (w *world) revoke(id keyspace.LeaseID, checked keyspace.Revision) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.records[id]; l != nil {
		w.asked[l.Ref()] = true
		w.applyLocked(&proposal{term: w.term, refs: []fsm.LeaseRef{l.Ref()}, checked: checked})
	}
}

// write writes a key with a lease.
func (w *world) write(id keyspace.LeaseID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.written[id] = 50
}

// keepAlive renews a lease at the leader, which was seen to lead.
func (w *world) keepAlive(id keyspace.LeaseID) placement.LeaseStatus {
	w.mu.Lock()
	leader, term := w.leader, w.term
	w.mu.Unlock()
	came := w.now()
	sts, err := leader.timer.Renew(term, []keyspace.LeaseID{id})
	if err != nil {
		w.t.Fatalf("renew in term %d: %v", term, err)
	}
	st := sts[0]
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.records[id]
	switch {
	case st.Phase == placement.LeaseLive && (l == nil || l.Revoking || l.Ref() != st.LeaseRef):
		w.t.Errorf("lease %d was renewed, its record is %+v", id, l)
	case st.Phase == placement.LeaseLive:
		w.safe[l.Ref()] = max(w.safe[l.Ref()], came+time.Duration(l.TTL)*time.Second)
	case st.Phase == placement.LeaseGone && l != nil:
		w.t.Errorf("lease %d is gone, its record is %+v", id, l)
	}
	return st
}

// settle commits, or drops, the first pending proposal.
func (w *world) settle(commit bool) bool {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pending) == 0 {
		return false
	}
	p := w.pending[0]
	w.pending = w.pending[1:]
	if !commit {
		p.done <- kverror.New(kverror.NotLeader, "not taken in")
		return true
	}
	w.applyLocked(p)
	p.done <- nil
	return true
}

// applyLocked applies an entry and tells the leader.
func (w *world) applyLocked(p *proposal) {
	for _, ref := range p.refs {
		l := w.records[ref.ID]
		switch {
		case l == nil || l.Ref() != ref:
		case p.keep:
			if l.Revoking && l.Checked == p.checked {
				next := *l
				next.Revoking, next.Checked = false, 0
				w.records[ref.ID] = &next
				delete(w.asked, ref)
				w.logf("lease %d stays", ref.ID)
				w.tellLocked(fsm.LeaseChange{Lease: &next, Kept: true})
			}
		case p.remove && l.Revoking:
			if len(l.Spans) > 0 && !w.deleted[ref] {
				w.t.Errorf("lease %d is forgotten, and has keys", ref.ID)
			}
			delete(w.records, ref.ID)
			w.logf("lease %d is gone", ref.ID)
			w.tellLocked(fsm.LeaseChange{Lease: l, Gone: true})
		case !p.remove && (!l.Revoking || l.Checked != 0 && p.checked == 0):
			if now := w.now(); now < w.safe[ref] && !w.asked[ref] {
				w.t.Errorf("lease %d expires at %v, and not before %v", ref.ID, now, w.safe[ref])
			}
			next := *l
			next.Revoking, next.Checked = true, p.checked
			w.records[ref.ID] = &next
			w.logf("the end of lease %d is decided", ref.ID)
			w.tellLocked(fsm.LeaseChange{Lease: &next})
		}
	}
}

// propose is the end of RevokeLeases and RemoveLeases.
func (n *node) propose(ctx context.Context, p *proposal) error {
	w := n.w
	p.done = make(chan error, 1)
	w.mu.Lock()
	switch {
	case p.term != w.term || w.leader != n:
		w.logf("%s proposes in term %d: refused", n.name, p.term)
		w.mu.Unlock()
		return kverror.New(kverror.NotLeader, "term %d, it is %d", p.term, w.term)
	case w.auto:
		w.applyLocked(p)
		w.mu.Unlock()
		return nil
	}
	w.pending = append(w.pending, p)
	w.mu.Unlock()
	select {
	case err := <-p.done:
		return err
	case <-ctx.Done():
		return kverror.New(kverror.Timeout, "%v", ctx.Err())
	}
}

// RevokeLeases implements Records.
func (n *node) RevokeLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error {
	return n.propose(ctx, &proposal{term: term, refs: refs})
}

// RemoveLeases implements Records.
func (n *node) RemoveLeases(ctx context.Context, term uint64, refs []fsm.LeaseRef) error {
	return n.propose(ctx, &proposal{term: term, refs: refs, remove: true})
}

// KeepLease implements Records.
func (n *node) KeepLease(ctx context.Context, term uint64, ref fsm.LeaseRef, checked keyspace.Revision) error {
	return n.propose(ctx, &proposal{term: term, refs: []fsm.LeaseRef{ref}, keep: true, checked: checked})
}

// LeaseRecord implements Records.
func (n *node) LeaseRecord(ref fsm.LeaseRef) *fsm.Lease {
	n.w.mu.Lock()
	defer n.w.mu.Unlock()
	if l := n.w.records[ref.ID]; l != nil && l.Ref() == ref {
		return l
	}
	return nil
}

// RevokeLease implements Revoker.
func (n *node) RevokeLease(ctx context.Context, id keyspace.LeaseID, inc keyspace.LeaseIncarnation, spans []keyspace.Span, checked keyspace.KeyCheck) (keyspace.Revision, error) {
	w := n.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running++
	w.most = max(w.most, w.running)
	defer func() { w.running-- }()
	w.mu.Unlock()
	time.Sleep(5*time.Millisecond + time.Duration(id%100)*time.Microsecond) // an order for stories
	w.mu.Lock()
	ref := fsm.LeaseRef{ID: id, Incarnation: inc}
	switch l := w.records[id]; {
	case w.hanging[id]:
		w.mu.Unlock()
		<-ctx.Done()
		w.mu.Lock()
		w.logf("%s: the keys of lease %d: %v", n.name, id, context.Cause(ctx))
		return 0, ctx.Err()
	case w.failing[id] > 0:
		w.failing[id]--
		w.logf("%s: the keys of lease %d are not to be reached", n.name, id)
		return 0, kverror.NoLeader
	case checked.At != 0 && !w.deleted[ref] && w.written[id] > checked.At:
		w.logf("%s: lease %d has newer keys", n.name, id)
		return 0, kverror.KeysChanged
	case l != nil && l.Ref() == ref && !l.Revoking:
		w.t.Errorf("lease %d loses its keys, and lives", id)
	case l != nil && l.Ref() == ref && len(l.Spans) != len(spans):
		w.t.Errorf("lease %d is ended in %d spans of %d", id, len(spans), len(l.Spans))
	}
	if !w.deleted[ref] {
		w.deleted[ref] = true
		w.revision++
	}
	w.logf("%s: the keys of lease %d are deleted", n.name, id)
	return w.revision, nil
}

// LeaseKeys implements Revoker.
func (n *node) LeaseKeys(context.Context, keyspace.LeaseID, []keyspace.Span) ([][]byte, keyspace.Revision, error) {
	return nil, 0, kverror.NoLeader
}

// finish lets everything go its way and checks that no lease is left.
func (w *world) finish() {
	w.mu.Lock()
	w.auto = true
	clear(w.hanging)
	clear(w.failing)
	w.mu.Unlock()
	for w.settle(true) {
	}
	time.Sleep(10 * time.Minute)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range sortedIDs(w.records) {
		w.t.Errorf("lease %d is left: %+v", id, w.records[id])
	}
}

// TestEveryOrder walks every order of what can happen to two leases. Time passes, keepalives
// come, a client revokes, the id is granted again. Decisions are committed, dropped, or under
// way when another node comes to lead. The world checks.
func TestEveryOrder(t *testing.T) {
	steps := []func(w *world){
		func(w *world) { time.Sleep(1900 * time.Millisecond) },
		func(w *world) { time.Sleep(200 * time.Millisecond) },
		func(w *world) { w.keepAlive(1) },
		func(w *world) { w.revoke(1, 0) },
		func(w *world) { w.revoke(1, 49) },
		func(w *world) { w.write(1) },
		func(w *world) { w.settle(true) },
		func(w *world) { w.settle(false) },
		func(w *world) { w.lead(w.other(), true) },
		func(w *world) { w.lead(w.other(), false) },
		func(w *world) { w.lead(w.leader, true) },
		func(w *world) { w.grant(1, 2, 1) },
	}
	run := func(course []int) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			defer w.stop()
			w.lead(w.nodes[0], false)
			w.auto = false
			w.grant(1, 2, 1)
			w.grant(2, 3, 0)
			for _, s := range course {
				steps[s](w)
			}
			w.finish()
		})
		if t.Failed() {
			t.Fatalf("in the course %v", course)
		}
	}
	depth, long := 4, 2000
	if testing.Short() {
		depth, long = 3, 500
	}
	for n := range pow(len(steps), depth) {
		course := make([]int, depth)
		for i := range course {
			course[i] = n % len(steps)
			n /= len(steps)
		}
		run(course)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range long {
		course := make([]int, 5+rng.IntN(30))
		for i := range course {
			course[i] = rng.IntN(len(steps))
		}
		run(course)
	}
}

func pow(b, e int) int {
	n := 1
	for range e {
		n *= b
	}
	return n
}

// other is the node that does not lead.
func (w *world) other() *node {
	if w.leader == w.nodes[0] {
		return w.nodes[1]
	}
	return w.nodes[0]
}

// TestManyAtOnce: 10,000 leases that expire in one moment are ended at the pace of
// PerSecond, few at a time, and one that a client revokes meanwhile does not wait for
// them.
func TestManyAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		defer w.stop()
		w.lead(w.nodes[0], false)
		const leases = 10_000
		for id := range keyspace.LeaseID(leases) {
			w.grant(id+1, 5, 1)
		}
		w.grant(leases+1, 3600, 1)
		time.Sleep(5 * time.Second)
		left := func() int {
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.records) - 1
		}
		before := leases
		for second := range 9 {
			time.Sleep(time.Second)
			now := left()
			if ended := before - now; ended < 900 || ended > 1200 {
				t.Errorf("%d leases ended in second %d", ended, second)
			}
			before = now
		}
		w.revoke(leases+1, 0)
		time.Sleep(20 * time.Millisecond)
		if st := w.keepAlive(leases + 1); st.Phase != placement.LeaseGone {
			t.Errorf("a revoked lease among many that expire: %+v", st)
		}
		w.finish()
		if w.most > 16 {
			t.Errorf("%d at a time", w.most)
		}
	})
}
