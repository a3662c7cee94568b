package node

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
	"github.com/skeindb/skein/sim/simclock"
)

// fakeAccess is a placement that tells what a test says.
type fakeAccess struct {
	mu      sync.Mutex
	m       *fsm.Map
	changed chan struct{}
	// now is the access index of answers; 0 is that nobody answers.
	now    keyspace.AccessIndex
	asked  []keyspace.AccessIndex
	notes  []uint64
	noNote error
}

func (f *fakeAccess) WatchMap() (*fsm.Map, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.m, f.changed
}

func (f *fakeAccess) TakenAccess(ctx context.Context, at keyspace.AccessIndex) (keyspace.AccessIndex, error) {
	f.mu.Lock()
	f.asked = append(f.asked, at)
	now := f.now
	f.mu.Unlock()
	if now == 0 {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return now, nil
}

func (f *fakeAccess) note(_ context.Context, since uint64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noNote == nil {
		f.notes = append(f.notes, since)
	}
	return f.noNote
}

// tell has the map have these rights, nil for none, and answers of the access index.
func (f *fakeAccess) tell(a *fsm.Access, now keyspace.AccessIndex) {
	f.mu.Lock()
	f.m, f.now = &fsm.Map{Version: 1, Access: a}, now
	close(f.changed)
	f.changed = make(chan struct{})
	f.mu.Unlock()
	synctest.Wait()
}

func (f *fakeAccess) questions() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked)
}

// rightsAt are rights as of an index. They are checked since an index, 0 for not.
func rightsAt(changed, since, access uint64) *fsm.Access {
	a := &fsm.Access{State: rights.New(), Changed: changed}
	a.Meta = rights.Meta{Enabled: since > 0, Revision: changed, EnabledSince: since, Access: access}
	return a
}

// watchedAccess runs an access with a fake placement.
func watchedAccess(t *testing.T, noted uint64) (*access, *fakeAccess) {
	t.Helper()
	f := &fakeAccess{changed: make(chan struct{})}
	options, err := auth.ParseOptions("simple")
	if err != nil {
		t.Fatal(err)
	}
	clk := clock.Virtual()
	tokens, err := options.Open(clk, nil, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	a := &access{
		clk: clk, election: time.Second, log: zap.NewNop(), source: f, note: f.note, noted: noted,
		gate: auth.NewGate(clk, tokens), lease: newViewLease(clk), told: wake.New(),
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { a.follow(ctx) })
	wait.Go(func() { a.ask(ctx) })
	t.Cleanup(func() { cancel(); wait.Wait() })
	synctest.Wait()
	return a, f
}

// knows returns the access index that the gate goes by, and whether it goes by any.
func (a *access) knows(ctx context.Context) (uint64, bool) {
	ctx, cancel := clock.WithTimeout(ctx, a.clk, time.Millisecond)
	defer cancel()
	c, err := a.gate.Identify(ctx, auth.Claim{})
	if err != nil {
		return 0, false
	}
	return c.Access, true
}

func wantLease(t *testing.T, when string, a *access, want bool) {
	t.Helper()
	if got := a.lease.Valid(); got != want {
		t.Errorf("%s: may serve: %t", when, got)
	}
}

// TestViewLease: when a node may serve by the rights that it knows. Traps 105 and 106.
func TestViewLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, f := watchedAccess(t, 0)
		wantLease(t, "nothing was heard", a, false)
		if _, ok := a.knows(t.Context()); ok {
			t.Error("nothing was heard, and the gate lets requests pass")
		}
		f.tell(nil, 0)
		if at, ok := a.knows(t.Context()); !ok || at != 0 {
			t.Errorf("nobody has ever made a user: %d, %t", at, ok)
		}
		time.Sleep(time.Hour)
		wantLease(t, "rights were never checked", a, true)
		f.tell(rightsAt(5, 0, 5), 0)
		time.Sleep(time.Hour)
		wantLease(t, "rights are not checked", a, true)
		if n := f.questions(); n > 0 {
			t.Errorf("%d questions though nothing is checked", n)
		}

		f.tell(rightsAt(7, 7, 7), 7)
		wantLease(t, "rights are checked", a, true)
		for range 10 {
			time.Sleep(time.Second)
			wantLease(t, "an idle node", a, true)
		}
		if n := f.questions(); n < 10 || n > 12 {
			t.Errorf("%d questions in 10 s", n)
		}
		// A grant moves nothing.
		f.tell(rightsAt(8, 7, 7), 7)
		wantLease(t, "a grant", a, true)

		// The answers tell of a revocation of which the map does not tell yet.
		f.tell(f.m.Access, 9)
		time.Sleep(3100 * time.Millisecond)
		wantLease(t, "a later index is answered", a, false)
		ran := false
		f2 := func(v *auth.View) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if at := f.asked[len(f.asked)-1]; at >= 9 {
				t.Error("placement was told before watchers were cancelled")
			}
			c, err := a.gate.Identify(t.Context(), auth.Claim{})
			if err != nil || c.Access != 9 || v.Rights.Access != 9 {
				t.Errorf("watchers are cancelled by index %d, and the gate has %+v, %v", v.Rights.Access, c, err)
			}
			ran = true
		}
		a.revoked.Store(&f2)
		f.tell(rightsAt(9, 7, 9), 9)
		wantLease(t, "the later index is taken in", a, true)
		if !ran {
			t.Error("watchers were not cancelled")
		}

		// Nobody answers.
		f.tell(f.m.Access, 0)
		time.Sleep(1900 * time.Millisecond)
		wantLease(t, "cut off a moment ago", a, true)
		time.Sleep(1200 * time.Millisecond)
		wantLease(t, "cut off", a, false)
		f.tell(f.m.Access, 9)
		time.Sleep(200 * time.Millisecond)
		wantLease(t, "heard again", a, true)
		sent := clock.Virtual().Now()
		a.lease.drop()
		wantLease(t, "restored from a snapshot", a, false)
		a.lease.extend(9, sent, sent.Add(3*time.Second))
		wantLease(t, "an answer to an earlier question", a, false)
		time.Sleep(1100 * time.Millisecond)
		wantLease(t, "asked again", a, true)

		// Off and on: what counted for ever ends at once.
		f.tell(rightsAt(10, 0, 9), 0)
		time.Sleep(time.Hour)
		wantLease(t, "off again", a, true)
		ran = false
		f2 = func(*auth.View) { wantLease(t, "on again, while watchers are cancelled", a, false); ran = true }
		f.tell(rightsAt(11, 11, 11), 0)
		wantLease(t, "on again", a, false)
		if !ran {
			t.Error("watchers were not cancelled when rights began to be checked")
		}
		if len(f.notes) != 2 || f.notes[0] != 7 || f.notes[1] != 11 {
			t.Errorf("noted %v", f.notes)
		}
	})
}

// TestViewLeaseNoted: a node that has noted that rights are checked does not go by an older map, and does
// not tell placement before it has noted it.
func TestViewLeaseNoted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, f := watchedAccess(t, 7)
		for _, old := range []*fsm.Access{nil, rightsAt(6, 0, 5)} {
			f.tell(old, 7)
			if _, ok := a.knows(t.Context()); ok {
				t.Error("the gate lets requests pass by an old map")
			}
			wantLease(t, "an old map", a, false)
		}
		f.tell(rightsAt(8, 0, 7), 7)
		wantLease(t, "off since", a, true)

		f.noNote = errors.New("the disk is full")
		f.tell(rightsAt(9, 9, 9), 9)
		time.Sleep(5 * time.Second)
		f.tell(rightsAt(10, 9, 10), 10)
		if at, ok := a.knows(t.Context()); !ok || at != 10 {
			t.Errorf("the gate goes by %d, %t", at, ok)
		}
		if n := f.questions(); n > 0 {
			t.Errorf("%d questions before it is noted", n)
		}
		wantLease(t, "not noted", a, false)
		f.mu.Lock()
		f.noNote = nil
		f.mu.Unlock()
		time.Sleep(2 * time.Second)
		wantLease(t, "noted", a, true)
	})
}

// checked makes a user root and a role r in the rig's cluster, and has rights checked.
func (r *rig) checked() {
	r.t.Helper()
	if err := r.nodes[0].core.Placement().RaiseVersion(r.t.Context(), keyspace.VersionAccess); err != nil {
		r.t.Fatal(err)
	}
	for _, c := range []rights.Change{
		{Kind: rights.AddUser, User: "root", Hash: []byte("$2a$10$theroots")},
		{Kind: rights.GrantRole, User: "root", Role: "root"},
		{Kind: rights.AddRole, Role: "r"},
	} {
		r.changed(r.nodes[0], "", c, time.Second)
	}
	r.changed(r.nodes[0], "", rights.Change{Kind: rights.Enable}, time.Second)
}

// changed makes a change that is acknowledged within a time.
func (r *rig) changed(n *rigNode, caller string, c rights.Change, limit time.Duration) (took time.Duration) {
	r.t.Helper()
	begun := time.Now()
	err := n.core.Placement().ChangeAccess(r.t.Context(), caller, c)
	if took = time.Since(begun); err != nil || took > limit {
		r.t.Errorf("change of kind %d: %v, after %v, want %v", c.Kind, err, took, limit)
	}
	return took
}

var (
	someGrant  = rights.Change{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.Read, Key: []byte("a")}}
	someRevoke = rights.Change{Kind: rights.RevokePermission, Role: "r", Permission: rights.Permission{Key: []byte("a")}}
)

// TestViewLeaseEnds: a node that is cut off serves by no rights that were taken since. Trap 106.
func TestViewLeaseEnds(t *testing.T) {
	bubble(t, 4, nil, shortLog, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(3 * rigElection)
		r.checked()
		for i := range r.nodes {
			r.changed(r.nodes[i], "root", someGrant, 20*time.Millisecond)
			r.changed(r.nodes[i], "root", someRevoke, 20*time.Millisecond)
		}
		leader := r.nodes[0].core.Placement().Leader()
		for _, cut := range r.nodes {
			if cut.id == leader {
				continue
			}
			asks := r.nodes[leader-1]
			r.changed(asks, "root", someGrant, 20*time.Millisecond)
			time.Sleep(3 * rigElection)
			r.net.Partition(cut.id)
			if !cut.core.MayServe() {
				r.t.Errorf("node %s has just been cut off, and serves nothing", cut.id)
			}
			took := r.changed(asks, "root", someRevoke, 4*time.Second)
			if cut.core.MayServe() {
				r.t.Errorf("node %s is cut off and serves by rights that were taken, acknowledged after %v", cut.id, took)
			}
			for _, n := range r.nodes {
				if n != cut && !n.core.MayServe() {
					r.t.Errorf("node %s serves nothing", n.id)
				}
			}
			r.net.HealAll()
			time.Sleep(3 * rigElection)
			if !cut.core.MayServe() {
				r.t.Errorf("node %s is back and serves nothing", cut.id)
			}
		}
	})
}

// TestViewLeaseOfAPausedMachine: a machine that was paused counts no time meanwhile. It notices that by its wall
// clock, as for its leader leases, and serves by no rights that were taken since.
func TestViewLeaseOfAPausedMachine(t *testing.T) {
	clk := simclock.New(0, 1)
	bubble(t, 3, nil, func(o *Options) {
		shortLog(o)
		if o.Self == 3 {
			o.Clock = clk
		}
	}, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(3 * rigElection)
		r.checked()
		r.changed(r.nodes[0], "root", someGrant, 20*time.Millisecond)
		time.Sleep(3 * rigElection)
		paused := r.nodes[2]
		r.net.Pause(paused.id)
		clk.Suspend()
		r.changed(r.nodes[0], "root", someRevoke, 8*time.Second)
		clk.Resume()
		time.Sleep(2 * rigHeartbeat)
		if paused.core.MayServe() {
			r.t.Error("it serves by rights that were taken while it was paused")
		}
		r.net.Resume(paused.id)
		time.Sleep(3 * rigElection)
		if !paused.core.MayServe() {
			r.t.Error("it goes on, and serves nothing")
		}
	})
}

// TestWatchersBeforeAcknowledgement: a revocation is acknowledged after each node has cancelled its
// watchers. Trap 105.
func TestWatchersBeforeAcknowledgement(t *testing.T) {
	bubble(t, 3, nil, shortLog, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(3 * rigElection)
		r.checked()
		r.changed(r.nodes[0], "root", someGrant, 20*time.Millisecond)
		var cancelled atomic.Int32
		for i, n := range r.nodes {
			n.core.OnRevoked(func(*auth.View) {
				time.Sleep(time.Duration(i) * 100 * time.Millisecond)
				cancelled.Add(1)
			})
		}
		took := r.changed(r.nodes[0], "root", someRevoke, 300*time.Millisecond)
		if n := cancelled.Load(); n != 3 || took < 200*time.Millisecond {
			r.t.Errorf("acknowledged after %v, when %d nodes had cancelled watchers", took, n)
		}
	})
}

// TestRightsAfterAPowerCut: after a power cut the disk has an older state of placement, and nobody tells
// the node. It still knows that rights are checked, because it has said so. Trap 106.
func TestRightsAfterAPowerCut(t *testing.T) {
	bubble(t, 3, nil, shortLog, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(3 * rigElection)
		for _, n := range r.nodes {
			if !n.core.MayServe() {
				r.t.Errorf("node %s serves nothing where rights were never checked", n.id)
			}
		}
		r.checked()
		for _, n := range r.nodes {
			r.net.Partition(n.id)
			r.crash(n)
			r.start(n)
			time.Sleep(10 * time.Second)
			if n.core.MayServe() {
				r.t.Errorf("node %s is cut off and serves", n.id)
			}
			ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
			c, err := n.core.Gate().Identify(ctx, auth.Claim{})
			cancel()
			if err == nil && c.Root() == nil || err != nil && !errors.Is(err, kverror.NoLeader) {
				r.t.Errorf("node %s is cut off and takes everybody for root: %+v, %v", n.id, c, err)
			}
			r.net.HealAll()
			time.Sleep(5 * time.Second)
			if !n.core.MayServe() {
				r.t.Errorf("node %s is back and serves nothing", n.id)
			}
		}
	})
}

// TestOwnWorkNeedsNoUser: leases expire and old revisions are compacted while rights are checked, though no user asks for
// it. Trap 104.
func TestOwnWorkNeedsNoUser(t *testing.T) {
	keep := func(o *Options) {
		shortLog(o)
		o.KeepRevisions = 5
	}
	bubble(t, 3, borders(2), keep, func(r *rig) {
		r.publish(r.nodes...)
		time.Sleep(3 * rigElection)
		r.checked()
		first := r.mustPut(r.nodes[0], keyOf(0), "first")
		id := r.leased(r.nodes[1], 5, 2)
		time.Sleep(7 * time.Second)
		if resp := r.ttl(r.nodes[2], id); resp.GetTTL() != -1 {
			r.t.Errorf("the lease has not expired: %v", resp)
		}
		if keys, _ := r.total(r.nodes[0]); keys != 1 {
			r.t.Errorf("%d keys are left, want one", keys)
		}
		for range 20 {
			r.mustPut(r.nodes[2], keyOf(1), "later")
		}
		time.Sleep(11 * time.Minute)
		_, err := r.nodes[1].core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(keyOf(0)), Revision: first})
		r.wantKind("a read of what was to be compacted", err, kverror.Compacted)
	})
}
