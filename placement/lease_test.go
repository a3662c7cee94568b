package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/sim/simbus"
)

// clocklessLeases are the leases of one node as package lease sees them, without clocks:
// all that live are renewed, and what is revoked is forgotten after a while.
type clocklessLeases struct {
	service func() *Service
	// linger is how long a revoked lease stays.
	linger time.Duration
	wait   *sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu.
	ctx     context.Context
	term    uint64
	records map[keyspace.LeaseID]*fsm.Lease
	renewed map[keyspace.LeaseID]int
	// calls counts the calls of Renew.
	calls int
	// failing says that leases whose end is decided cannot be ended.
	failing bool
}

// Lead implements LeaseObserver.
func (l *clocklessLeases) Lead(ctx context.Context, term uint64, records func(yield func(*fsm.Lease) bool)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ctx, l.term, l.records, l.renewed = ctx, term, map[keyspace.LeaseID]*fsm.Lease{}, map[keyspace.LeaseID]int{}
	for r := range records {
		l.takeLocked(r)
	}
}

func (l *clocklessLeases) takeLocked(r *fsm.Lease) {
	l.records[r.ID] = r
	if !r.Revoking {
		return
	}
	ctx, term := l.ctx, l.term
	l.wait.Go(func() {
		select {
		case <-time.After(l.linger):
			_ = l.service().RemoveLeases(ctx, term, []fsm.LeaseRef{r.Ref()}) // the next leader does, if not
		case <-ctx.Done():
		}
	})
}

// Changed implements LeaseObserver.
func (l *clocklessLeases) Changed(term uint64, changes []fsm.LeaseChange) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term != l.term {
		panic(fmt.Sprintf("changes of term %d in term %d", term, l.term))
	}
	for _, c := range changes {
		if c.Gone {
			delete(l.records, c.Lease.ID)
		} else {
			l.takeLocked(c.Lease)
		}
	}
}

// Look implements LeaseTimes.
func (l *clocklessLeases) Look(term uint64, ids []keyspace.LeaseID) ([]LeaseStatus, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if term != l.term {
		return nil, kverror.Busy
	}
	out := make([]LeaseStatus, len(ids))
	for i, id := range ids {
		out[i].ID = id
		if r := l.records[id]; r != nil {
			out[i] = recordStatus(r)
			out[i].Remaining = time.Duration(1000-r.ID) * time.Second
			out[i].Failed = l.failing && r.Revoking
		}
	}
	return out, nil
}

// Renew implements LeaseTimes.
func (l *clocklessLeases) Renew(term uint64, ids []keyspace.LeaseID) ([]LeaseStatus, error) {
	out, err := l.Look(term, ids)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	for _, id := range ids {
		l.renewed[id]++
	}
	return out, err
}

// Wait implements LeaseTimes.
func (l *clocklessLeases) Wait(_ context.Context, term uint64, ref fsm.LeaseRef) (LeaseStatus, keyspace.Revision, error) {
	for range 4 {
		sts, err := l.Look(term, []keyspace.LeaseID{ref.ID})
		if err != nil || sts[0].LeaseRef != ref {
			return LeaseStatus{LeaseRef: ref}, 0, err
		}
		if sts[0].Phase == LeaseLive {
			return sts[0], 0, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return LeaseStatus{LeaseRef: ref, Phase: LeaseEnding}, 0, nil
}

func wantKind(t *testing.T, what string, err error, want kverror.Kind) {
	t.Helper()
	if err == nil || kverror.Of(err).Kind != want {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// TestLeaseRequests asks at every node, which it is not always that leads.
func TestLeaseRequests(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 21, 3, quiet)
		r.startAll()
		before := r.leader().sequence(3)
		for i, n := range r.nodes {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			c := n.client
			id := keyspace.LeaseID(-1 - 10*i)
			ttl, rev, err := c.GrantLease(ctx, id, 60, false)
			if err != nil || ttl != 60 || rev != before.First+2 {
				t.Fatalf("grant: ttl %d at %d, %v; revision %d before", ttl, rev, err, before.First+2)
			}
			_, _, err = c.GrantLease(ctx, id, 60, false)
			wantKind(t, "grant again", err, kverror.LeaseExists)
			if ttl, _, err := c.GrantLease(ctx, id, 60, true); err != nil || ttl != 60 {
				t.Errorf("grant an id that nobody else can have: %d, %v", ttl, err)
			}
			_, _, err = c.GrantLease(ctx, id, fsm.MaxLeaseTTL+1, false)
			wantKind(t, "a long one", err, kverror.LeaseTTLTooLarge)
			if ttl, _, err := c.GrantLease(ctx, id-1, -7, false); err != nil || ttl != 2 {
				t.Errorf("a short one: %d, %v", ttl, err)
			}
			span := keyspace.Span{Start: []byte("a"), End: []byte("b")}
			var inc keyspace.LeaseIncarnation
			for range 2 {
				reg, err := c.RegisterLease(ctx, id, span)
				if err != nil || reg.Incarnation == 0 || inc != 0 && inc != reg.Incarnation {
					t.Errorf("register: %+v, %v; before %d", reg, err, inc)
				}
				inc = reg.Incarnation
			}
			for _, id := range []keyspace.LeaseID{id, 77} {
				ch := make(chan error, 1)
				c.Register(id, span, func(_ keyspace.LeaseRegistration, err error) { ch <- err })
				if err := <-ch; (id == 77) != errors.Is(err, kverror.LeaseNotFound) {
					t.Errorf("register with %d: %v", id, err)
				}
			}
			_, err = c.RegisterLease(ctx, 77, span)
			wantKind(t, "register with an unknown one", err, kverror.LeaseNotFound)
			info, err := c.LookLease(ctx, id)
			if err != nil || info.Incarnation != inc || info.TTL != 60 || len(info.Spans) != 1 || !info.Spans[0].Equal(span) {
				t.Errorf("look: %+v, %v", info, err)
			}
			if ttl, _, err := c.KeepLeaseAlive(ctx, id); err != nil || ttl != 60 {
				t.Errorf("keepalive: %d, %v", ttl, err)
			}
			if ttl, _, err := c.KeepLeaseAlive(ctx, 77); err != nil || ttl != 0 {
				t.Errorf("keepalive of an unknown one: %d, %v", ttl, err)
			}
			if rev, err := c.RevokeLease(ctx, id); err != nil || rev != before.First+2 {
				t.Errorf("revoke: %d, %v", rev, err)
			}
			_, err = c.RevokeLease(ctx, id)
			wantKind(t, "revoke again", err, kverror.LeaseNotFound)
			if info, err := c.LookLease(ctx, id); err != nil || info.Phase != LeaseGone {
				t.Errorf("look at a gone one: %+v, %v", info, err)
			}
			all, _, err := c.ListLeases(ctx)
			if err != nil || len(all) != i+1 {
				t.Errorf("list: %v, %v", all, err)
			}
			if !slices.IsSortedFunc(all, func(a, b LeaseStatus) int { return int(a.Remaining - b.Remaining) }) {
				t.Errorf("not in the order of their ends: %+v", all)
			}
		}
	})
}

// TestGrantsInTheUsualSpan: a lease lists a span from the beginning if many leases in turn were registered there. Its
// registration is no entry then. A registration elsewhere ends that.
func TestGrantsInTheUsualSpan(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 23, 3, quiet)
		r.startAll()
		r.leader()
		r.publish(t.Context())
		leader, c, last := r.leader(), r.nodes[0].client, keyspace.LeaseID(0)
		usual, part := leader.service.View().Lookup([]byte("a")).Descriptor.Span, keyspace.Span{Start: []byte("a"), End: []byte("b")}
		if !usual.Covers(part) || usual.Equal(part) {
			t.Fatalf("the range is %v", usual)
		}
		// grant grants a lease, which has to list what is wanted.
		grant := func(when string, want ...keyspace.Span) keyspace.LeaseID {
			t.Helper()
			last++
			if _, _, err := c.GrantLease(t.Context(), last, 60, false); err != nil {
				t.Fatal(err)
			}
			if info, err := c.LookLease(t.Context(), last); err != nil || !slices.EqualFunc(info.Spans, want, keyspace.Span.Equal) {
				t.Fatalf("granted %s: in %v, %v, want %v", when, info.Spans, err, want)
			}
			return last
		}
		register := func(id keyspace.LeaseID, span keyspace.Span) (entries uint64) {
			t.Helper()
			before := leader.service.View().Index
			if _, err := c.RegisterLease(t.Context(), id, span); err != nil {
				t.Fatal(err)
			}
			return leader.service.View().Index - before
		}
		if err := c.RaiseVersion(t.Context(), keyspace.VersionLeases-1); err != nil {
			t.Fatal(err)
		}
		for range usualAfter {
			if n := register(grant("before there is a usual span"), usual); n != 1 {
				t.Fatalf("%d entries register a span", n)
			}
		}
		grant("in an older cluster version")
		if err := c.RaiseVersion(t.Context(), keyspace.VersionLeases); err != nil {
			t.Fatal(err)
		}
		id := grant("after many registrations", usual)
		if n := register(id, part); n != 0 {
			t.Fatalf("%d entries register what the lease lists", n)
		}
		grant("after one of another span")
		for range usualAfter {
			register(id, part)
		}
		grant("after many of what is no range")
		for range usualAfter {
			register(id, usual)
		}
		grant("after many again", usual)
	})
}

// TestRegistrationsTogether: registrations that a node makes at a time go together, and each has its own outcome.
func TestRegistrationsTogether(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 24, 3, quiet)
		r.startAll()
		r.written.Store(uint32(keyspace.VersionLeases))
		leader := r.leader()
		n := r.nodes[0]
		if n == leader {
			n = r.nodes[1]
		}
		c := n.client
		type outcome struct {
			id  keyspace.LeaseID
			reg keyspace.LeaseRegistration
			err error
		}
		// register registers a span for each lease, and returns how many entries that took.
		register := func(ids []keyspace.LeaseID, span func(i int) keyspace.Span) (all []outcome, entries uint64) {
			t.Helper()
			before := leader.service.View().Index
			ch := make(chan outcome, len(ids))
			for i, id := range ids {
				c.Register(id, span(i), func(reg keyspace.LeaseRegistration, err error) { ch <- outcome{id, reg, err} })
			}
			for range ids {
				all = append(all, <-ch)
			}
			return all, leader.service.View().Index - before
		}
		single := func(i int) keyspace.Span { return keyspace.Single(fmt.Appendf(nil, "k%04d", i)) }
		var ids []keyspace.LeaseID
		for id := range keyspace.LeaseID(300) {
			if ids = append(ids, id+1); id < 299 {
				if _, _, err := c.GrantLease(t.Context(), id+1, 60, false); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, most := range []uint64{4, 0} { // the second time the records list all of it
			all, entries := register(ids, single)
			for _, o := range all {
				if o.id == 300 {
					wantKind(t, "register with an unknown lease", o.err, kverror.LeaseNotFound)
				} else if info, err := c.LookLease(t.Context(), o.id); err != nil || o.err != nil || o.reg.Incarnation != info.Incarnation || len(info.Spans) != 1 {
					t.Fatalf("lease %d: %+v, now %+v, %v", o.id, o, info, err)
				}
			}
			if entries > most {
				t.Errorf("%d entries for %d registrations, want %d at most", entries, len(ids), most)
			}
		}
		// One lease, in more ranges than it may have keys in.
		all, _ := register(slices.Repeat(ids[:1], 1000), single)
		refused := 0
		for _, o := range all {
			if o.err != nil {
				wantKind(t, "register one span too many", o.err, kverror.TooManyRanges)
				refused++
			}
		}
		if info, err := c.LookLease(t.Context(), 1); err != nil || refused != 1000-len(info.Spans) {
			t.Errorf("%d were refused of 1000, and %d are listed, %v", refused, len(info.Spans), err)
		}
		// One that ends is waited for, and holds nobody else up.
		leader.leases.linger = 3 * time.Second
		revoked := make(chan error, 1)
		go func() { _, err := n.client.RevokeLease(t.Context(), 2); revoked <- err }()
		time.Sleep(100 * time.Millisecond)
		start := time.Now()
		ends := make(chan error, 1)
		c.Register(2, single(7), func(_ keyspace.LeaseRegistration, err error) { ends <- err })
		if all, _ := register(ids[2:3], single); all[0].err != nil || time.Since(start) > time.Second {
			t.Errorf("another lease: %v after %v", all[0].err, time.Since(start))
		}
		wantKind(t, "register with a lease that ends", <-ends, kverror.LeaseNotFound)
		if err := <-revoked; err != nil {
			t.Error(err)
		}
		// A client that stops answers all.
		stopped := make(chan error, 10)
		r.net.Crash(leader.id)
		for i := range 10 {
			c.Register(ids[3+i], single(500), func(_ keyspace.LeaseRegistration, err error) { stopped <- err })
		}
		n.stop()
		for range 10 {
			wantKind(t, "register, and stop", <-stopped, kverror.Stopped)
		}
		c.Register(3, single(1), func(_ keyspace.LeaseRegistration, err error) { stopped <- err })
		wantKind(t, "register after the stop", <-stopped, kverror.Stopped)
	})
}

// TestLeaseStays: everybody who waits for the end of a lease goes on when that decision is taken back. Two revokes with
// a check share their fate, and one without a check ends the lease.
func TestLeaseStays(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 22, 3, quiet)
		r.startAll()
		leader := r.leader()
		for _, n := range r.nodes {
			n.leases.linger = 3 * time.Second
		}
		c := r.nodes[0].client
		if _, _, err := c.GrantLease(t.Context(), 1, 60, false); err != nil {
			t.Fatal(err)
		}
		info, err := c.LookLease(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.RevokeLeaseChecked(t.Context(), fsm.LeaseRef{ID: 1, Incarnation: info.Incarnation + 1}, 5)
		wantKind(t, "an earlier lease", err, kverror.LeaseNotFound)
		var wg sync.WaitGroup
		start := time.Now()
		expect := func(what string, want error, f func() error) {
			wg.Go(func() {
				if err := f(); !errors.Is(err, want) {
					t.Errorf("%s: %v, want %v", what, err, want)
				}
			})
			time.Sleep(50 * time.Millisecond)
		}
		keep := func(at keyspace.Revision) {
			if err := leader.service.KeepLease(t.Context(), leader.service.machine.leaderState().Term, info.LeaseRef, at); err != nil {
				t.Error(err)
			}
		}
		checked := func(at keyspace.Revision) func() error {
			return func() error { _, err := c.RevokeLeaseChecked(t.Context(), info.LeaseRef, at); return err }
		}
		expect("revoke", kverror.KeysChanged, checked(5))
		expect("a second one", kverror.KeysChanged, checked(6))
		expect("register", nil, func() error { _, err := c.RegisterLease(t.Context(), 1, keyspace.Span{}); return err })
		expect("look", nil, func() error { _, err := c.LookLease(t.Context(), 1); return err })
		expect("keepalive", nil, func() error {
			ttl, _, err := r.nodes[1].client.KeepLeaseAlive(t.Context(), 1)
			if ttl != 60 {
				t.Errorf("a keepalive of a lease that stays: %d", ttl)
			}
			return err
		})
		keep(5)
		wg.Wait()
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("all went on after %v", took)
		}
		expect("revoke, and then another without a check", nil, checked(7))
		expect("the other", kverror.LeaseNotFound, func() error { _, err := c.RevokeLease(t.Context(), 1); return err })
		keep(7)
		wg.Wait()
		r.stopAllAtOnce()
	})
}

// TestLeaseWaits: whoever asks about a lease whose end is decided waits for the outcome.
// Those who ask for something else do not.
func TestLeaseWaits(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 22, 3, quiet)
		r.startAll()
		r.leader()
		for _, n := range r.nodes {
			n.leases.linger = 3 * time.Second
		}
		c := r.nodes[0].client
		for id := range keyspace.LeaseID(2) {
			if _, _, err := c.GrantLease(t.Context(), id+1, 60, false); err != nil {
				t.Fatal(err)
			}
		}
		start := time.Now()
		var wg sync.WaitGroup
		waits := func(what string, f func() error, want error) {
			wg.Go(func() {
				err := f()
				if took := time.Since(start); took < 2900*time.Millisecond || took > 4*time.Second {
					t.Errorf("%s: took %v", what, took)
				}
				if (err == nil) != (want == nil) || err != nil && !errors.Is(kverror.Of(err).Kind, want) {
					t.Errorf("%s: %v, want %v", what, err, want)
				}
			})
		}
		waits("revoke", func() error { _, err := c.RevokeLease(t.Context(), 1); return err }, nil)
		time.Sleep(100 * time.Millisecond)
		waits("revoke again", func() error { _, err := r.nodes[1].client.RevokeLease(t.Context(), 1); return err }, kverror.LeaseNotFound)
		waits("register", func() error { _, err := c.RegisterLease(t.Context(), 1, keyspace.Span{}); return err }, kverror.LeaseNotFound)
		waits("keepalive", func() error {
			ttl, _, err := c.KeepLeaseAlive(t.Context(), 1)
			if ttl != 0 {
				t.Errorf("a keepalive of a revoked lease: %d", ttl)
			}
			return err
		}, nil)
		waits("look", func() error { _, err := c.LookLease(t.Context(), 1); return err }, nil)
		waits("list", func() error { _, _, err := c.ListLeases(t.Context()); return err }, nil)
		if ttl, _, err := c.KeepLeaseAlive(t.Context(), 2); err != nil || ttl != 60 || time.Since(start) > time.Second {
			t.Errorf("a keepalive of another lease: %d, %v after %v", ttl, err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.LookLease(ctx, 1); kverror.Of(err).Kind != kverror.Timeout {
			t.Errorf("a look without patience: %v", err)
		}
		wg.Wait()
	})
}

// TestLeasesOverLeaders: leases outlive their leader; a revoke that waits, keepalives and
// grants of ids that nobody else has go on at the next one.
func TestLeasesOverLeaders(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 23, 3, quiet)
		r.startAll()
		for _, n := range r.nodes {
			n.leases.linger = 2 * time.Second
		}
		id := keyspace.LeaseID(1)
		for round := range 6 {
			old := r.leader()
			other := r.nodes[old.id%3]
			for range 2 {
				if _, _, err := other.client.GrantLease(t.Context(), id, 60, false); err != nil {
					t.Fatal(err)
				}
				id++
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				if _, err := other.client.RevokeLease(t.Context(), id-2); err != nil {
					t.Errorf("round %d: revoke: %v", round, err)
				}
			})
			time.Sleep(time.Second)
			if round%2 == 0 {
				old.crash()
			} else if err := other.client.TransferLeader(t.Context(), other.id); err != nil {
				t.Errorf("round %d: transfer: %v", round, err)
			}
			wg.Go(func() {
				if ttl, _, err := other.client.KeepLeaseAlive(t.Context(), id-1); err != nil || ttl != 60 {
					t.Errorf("round %d: keepalive: %d, %v", round, ttl, err)
				}
			})
			wg.Go(func() {
				if ttl, _, err := other.client.GrantLease(t.Context(), 1000+keyspace.LeaseID(round), 60, true); err != nil || ttl != 60 {
					t.Errorf("round %d: grant: %d, %v", round, ttl, err)
				}
			})
			wg.Wait()
			if !old.up() {
				old.start()
			}
			all, _, err := other.client.ListLeases(t.Context())
			if err != nil || len(all) != 2*(round+1) {
				t.Fatalf("round %d: %v, %v", round, all, err)
			}
		}
	})
}

// TestKeepalivesGoTogether: those of one node that come while a call is under way share
// the next one, and a full queue refuses.
func TestKeepalivesGoTogether(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 24, 3, quiet)
		r.startAll()
		leader := r.leader()
		c := r.nodes[leader.id%3].client
		const leases = 200
		for id := range keyspace.LeaseID(leases) {
			if _, _, err := c.GrantLease(t.Context(), id+1, 60, false); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for id := range keyspace.LeaseID(leases) {
			wg.Go(func() {
				if ttl, _, err := c.KeepLeaseAlive(t.Context(), id+1); err != nil || ttl != 60 {
					t.Errorf("lease %d: %d, %v", id+1, ttl, err)
				}
			})
		}
		wg.Wait()
		if n := leader.leases.calls; n > 3 {
			t.Errorf("%d calls for %d keepalives at a time", n, leases)
		}
		r.net.Crash(leader.id) // unheard; the queue fills
		c.o.MaxQueued = 10
		full := 0
		var mu sync.Mutex
		for id := range keyspace.LeaseID(50) {
			wg.Go(func() {
				_, _, err := c.KeepLeaseAlive(t.Context(), id+1)
				if err != nil && kverror.Of(err).Kind == kverror.TooManyRequests {
					mu.Lock()
					full++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if full < 30 {
			t.Errorf("%d of 50 were refused by a queue of 10", full)
		}
	})
}

// TestLeaseListPages lists more leases than one answer holds.
func TestLeaseListPages(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 25, 1, quiet)
		r.startAll()
		leader := r.leader()
		const leases = 2*fsm.MaxLeaseBatch + 17
		var wg sync.WaitGroup
		for n := range 64 {
			wg.Go(func() {
				for id := n; id < leases; id += 64 {
					if _, _, err := leader.client.GrantLease(t.Context(), keyspace.LeaseID(id-100), 60, id == 100); err != nil && id != 100 {
						t.Errorf("lease %d: %v", id, err)
					}
				}
			})
		}
		wg.Wait()
		all, _, err := leader.client.ListLeases(t.Context())
		if err != nil || len(all) != leases-1 {
			t.Errorf("%d leases of %d, %v", len(all), leases-1, err)
		}
	})
}

// TestLeaseDiskFull: no lease is granted where the disk is full; revokes go on.
func TestLeaseDiskFull(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 26, 1, quiet)
		r.startAll()
		n := r.leader()
		if _, _, err := n.client.GrantLease(t.Context(), 1, 60, false); err != nil {
			t.Fatal(err)
		}
		n.full.Store(true)
		_, _, err := n.client.GrantLease(t.Context(), 2, 60, false)
		wantKind(t, "grant", err, kverror.NoSpace)
		if _, err := n.client.RevokeLease(t.Context(), 1); err != nil {
			t.Error(err)
		}
	})
}

// TestLeaseListWaitsForAllAtOnce: a list waits for leases that end as long as the slowest
// of them, and not for each in turn. It does not show those.
func TestLeaseListWaitsForAllAtOnce(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 27, 3, simbus.Faults{Delay: simbus.Delay{Min: 20 * time.Millisecond, Max: 20 * time.Millisecond}})
		r.startAll()
		leader := r.leader()
		other := r.nodes[int(leader.id)%3]
		const leases, linger = 200, 2 * time.Second
		for _, n := range r.nodes {
			n.leases.linger = linger
		}
		var wg sync.WaitGroup
		for id := range keyspace.LeaseID(leases) {
			wg.Go(func() {
				if _, _, err := leader.client.GrantLease(t.Context(), id+1, 60, false); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		for id := range keyspace.LeaseID(leases - 1) {
			wg.Go(func() {
				if _, err := leader.client.RevokeLease(t.Context(), id+1); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(linger / 2)
		start := time.Now()
		all, _, err := other.client.ListLeases(t.Context())
		if took := time.Since(start); err != nil || len(all) != 1 || all[0].ID != leases || took < linger/4 || took > 3*linger {
			t.Errorf("%d leases after %v, %v", len(all), took, err)
		}
		wg.Wait()
	})
}

// TestLeaseThatCannotEndIsListed: a lease that nobody can end now holds up no list, and is in
// it, since it is there. Who asks about that lease waits.
func TestLeaseThatCannotEndIsListed(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 28, 3, quiet)
		r.startAll()
		leader := r.leader()
		other := r.nodes[int(leader.id)%3].client
		for _, n := range r.nodes {
			n.leases.linger = time.Hour
		}
		for id := range keyspace.LeaseID(2) {
			if _, _, err := other.GrantLease(t.Context(), id+1, 60, false); err != nil {
				t.Fatal(err)
			}
		}
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			t.Cleanup(cancel)
			return ctx
		}
		if _, err := other.RevokeLease(within(time.Second), 1); kverror.Of(err).Kind != kverror.Timeout {
			t.Errorf("a revoke that comes to no end: %v", err)
		}
		if _, _, err := other.ListLeases(within(time.Second)); kverror.Of(err).Kind != kverror.Timeout {
			t.Errorf("a list beside a lease that is about to end: %v", err)
		}
		time.AfterFunc(time.Second, func() {
			for _, n := range r.nodes {
				n.leases.mu.Lock()
				n.leases.failing = true
				n.leases.mu.Unlock()
			}
		})
		for _, most := range []time.Duration{2 * time.Second, 100 * time.Millisecond} {
			start := time.Now()
			all, _, err := other.ListLeases(within(5 * time.Second))
			if took := time.Since(start); err != nil || len(all) != 2 || took > most {
				t.Errorf("%v after %v, %v", all, took, err)
			}
		}
		if _, err := other.LookLease(within(time.Second), 1); kverror.Of(err).Kind != kverror.Timeout {
			t.Errorf("a look at a lease that is to end: %v", err)
		}
	})
}
