package shard

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// slowPusher takes a moment for each push and knows no coordinator.
type slowPusher struct {
	takes time.Duration

	mu            sync.Mutex
	running, most int
}

func (p *slowPusher) Push(context.Context, rangeapi.TxnName, []byte) (bool, *rangeapi.Decided, error) {
	p.mu.Lock()
	p.running++
	p.most = max(p.most, p.running)
	p.mu.Unlock()
	time.Sleep(p.takes)
	p.mu.Lock()
	p.running--
	p.mu.Unlock()
	return false, &rangeapi.Decided{}, nil
}

func (p *slowPusher) Finish(context.Context, rangeapi.TxnName, *rangeapi.Decided) (bool, error) {
	return false, nil
}

func (p *slowPusher) Reads(context.Context, keyspace.Revision) (bool, error) { return false, nil }

// The locks that a gateway leaves behind are ended one right after the other, however many
// they are, and those of one range do not take all that a node can push.
func TestManyLocksOfADeadGateway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &slowPusher{takes: 2 * time.Millisecond}
		w := newFakeWorld(t)
		w.store.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		const locks = 400
		for i := range locks {
			if g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(i + 1), Anchor: []byte("z"), Writes: writeAt(fmt.Sprint(i))}); g.err != nil {
				t.Fatal(g.err)
			}
		}
		r := w.store.Replica(1)
		for range 300 {
			time.Sleep(3 * time.Millisecond)
			w.settle()
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if n, _ := r.locks.Len(); n != 0 {
			t.Errorf("%d of %d locks are left after a second", n, locks)
		}
		if p.most != maxRangePushes {
			t.Errorf("%d pushes at a time", p.most)
		}
	})
}

// stuckPusher reaches the anchors of none of the first transactions.
type stuckPusher struct {
	slowPusher
	stuck uint64
}

func (p *stuckPusher) Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (bool, *rangeapi.Decided, error) {
	if name.Attempt > p.stuck {
		return p.slowPusher.Push(ctx, name, anchor)
	}
	p.mu.Lock()
	p.running++
	p.most = max(p.most, p.running)
	p.mu.Unlock()
	<-ctx.Done()
	p.mu.Lock()
	p.running--
	p.mu.Unlock()
	return false, nil, ctx.Err()
}

// pushWorld serves a range whose locks are asked for by p. Of the functions that it returns one
// prepares a lock, one lets time pass, and one counts the locks.
func pushWorld(t *testing.T, p TxnPusher) (w *fakeWorld, lock func(), pass func(time.Duration), left func() int) {
	t.Helper()
	w = newFakeWorld(t)
	w.store.cfg.Txns = p
	w.seq.auto = true
	w.serve(1, 5)
	n := 0
	lock = func() {
		t.Helper()
		n++
		if g := w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(n), Anchor: []byte("z"), Writes: writeAt(fmt.Sprint(n))}); g.err != nil {
			t.Fatal(g.err)
		}
	}
	pass = func(d time.Duration) {
		for range d / pushTick {
			time.Sleep(pushTick)
			w.settle()
		}
	}
	left = func() int {
		r := w.store.Replica(1)
		r.mu.Lock()
		defer r.mu.Unlock()
		n, _ := r.locks.Len()
		return n
	}
	return w, lock, pass, left
}

// Locks whose transactions nobody can decide, since their anchors have no quorum, are asked for
// again and again. Those of other transactions do not stand for as long: neither behind many of
// them, nor behind few that are asked for by many at a time.
func TestLocksThatCannotBeDecidedKeepNoOthers(t *testing.T) {
	for _, stuck := range []int{1, 60} {
		synctest.Test(t, func(t *testing.T) {
			p := &stuckPusher{stuck: uint64(stuck)}
			w, lock, pass, left := pushWorld(t, p)
			defer w.stop()
			for range stuck {
				lock()
			}
			pass(20 * time.Second)
			lock()
			pass(2 * time.Second)
			if n := left(); n != stuck {
				t.Errorf("%d locks are left where %d cannot be decided", n, stuck)
			}
			if most := min(stuck+1, maxRangePushes); p.most > most {
				t.Errorf("%d pushes at a time of %d locks", p.most, stuck+1)
			}
		})
	}
}

// healingPusher hangs on locks up to stuck, and on all of them until healed is set.
type healingPusher struct {
	slowPusher
	stuck  uint64
	healed bool
}

func (p *healingPusher) Push(ctx context.Context, name rangeapi.TxnName, _ []byte) (bool, *rangeapi.Decided, error) {
	p.mu.Lock()
	can := p.healed && name.Attempt > p.stuck
	p.mu.Unlock()
	if can {
		return false, &rangeapi.Decided{}, nil
	}
	<-ctx.Done()
	return false, nil, ctx.Err()
}

func (p *healingPusher) heal() {
	p.mu.Lock()
	p.healed = true
	p.mu.Unlock()
}

// Leadership is lost while pushes hang, and had again before they end: they count where they
// began, and keep no others from being made later.
func TestPushesOutliveALeadership(t *testing.T) {
	for _, locks := range [][2]int{{6, 6}, {12, 8}, {20, 8}} {
		synctest.Test(t, func(t *testing.T) {
			p := &healingPusher{}
			w, lock, pass, left := pushWorld(t, p)
			defer w.stop()
			for range locks[0] {
				lock()
			}
			pass(20 * time.Second)
			for range locks[1] {
				lock()
				pass(pushTick)
			}
			pass(3 * pushTick)
			w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
			pass(3 * pushTick)
			w.serve(1, 7)
			pass(time.Minute)
			p.heal()
			pass(time.Minute)
			if n := left(); n != 0 {
				t.Errorf("%d and %d locks: %d are left a minute after their anchors are back", locks[0], locks[1], n)
			}
		})
	}
}

// A lock that was asked for in vain has its turn again, beside however many that hang.
func TestEachLockHasItsTurn(t *testing.T) {
	const stuck = 20
	synctest.Test(t, func(t *testing.T) {
		p := &healingPusher{stuck: stuck}
		w, lock, pass, left := pushWorld(t, p)
		defer w.stop()
		for range stuck {
			lock()
		}
		pass(20 * time.Second)
		lock()
		pass(3 * time.Second)
		p.heal()
		// maxRangePushes/2 of them at a time, each for as long as a push may take.
		pass((stuck + 1) * pushTimeout / (maxRangePushes / 2))
		pass(2 * time.Second)
		if n := left(); n != stuck {
			t.Errorf("%d locks are left where %d cannot be decided", n, stuck)
		}
	})
}

// refusedPusher reaches no anchor, and hears once of the node of a committed transaction that
// it cannot say yet whether it is at it.
type refusedPusher struct {
	stuckPusher
	asked int
}

func (p *refusedPusher) Finish(context.Context, rangeapi.TxnName, *rangeapi.Decided) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asked++; p.asked == 1 {
		return false, kverror.Unreachable
	}
	return false, nil
}

// Items that were asked for in vain have their turn in the order of their waiting, be they few or
// many. So a committed transaction is forgotten though more locks than are asked for
// at a time stay undecided.
func TestRecordHasItsTurnBesideLocks(t *testing.T) {
	const stuck = maxRangePushes/2 + 2
	synctest.Test(t, func(t *testing.T) {
		p := &refusedPusher{stuckPusher: stuckPusher{stuck: stuck}}
		w, lock, pass, left := pushWorld(t, p)
		defer w.stop()
		for range stuck {
			lock()
		}
		pass(20 * time.Second)
		name := nameAged(stuck + 1)
		g := w.command(t.Context(), &rangeapi.Prepare{Name: name, Anchor: []byte("z"), Writes: writeAt("z")})
		if g.err != nil {
			t.Fatal(g.err)
		}
		anchor := g.answer.(*rangeapi.Prepared).Lock
		w.seq.last = 100
		if g = w.command(t.Context(), &rangeapi.Commit{Name: name, Anchor: []byte("z"), AnchorLock: anchor, Revision: 100}); g.err != nil {
			t.Fatal(g.err)
		}
		pass(time.Minute)
		r := w.store.Replica(1)
		r.mu.Lock()
		_, records := r.locks.Len()
		r.mu.Unlock()
		if n := left(); n != stuck || records != 0 {
			t.Errorf("%d of %d locks and %d records are left, which was asked for %d times", n, stuck, records, p.asked)
		}
	})
}
