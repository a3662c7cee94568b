package shard

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/locktable"
)

// TxnPusher finds out what became of transactions with old locks, and ends them if their
// coordinator is gone. The router is one.
type TxnPusher interface {
	// Push asks for an attempt. live says that its coordinator is still at it; otherwise
	// it is decided from now on.
	Push(ctx context.Context, name rangeapi.TxnName, anchor []byte) (live bool, d *rangeapi.Decided, err error)
	// Finish ends all locks of a committed attempt, unless its coordinator is still at it.
	Finish(ctx context.Context, name rangeapi.TxnName, d *rangeapi.Decided) (live bool, err error)
	// Reads says whether a transaction that began before the call, coordinated by any node
	// that lives, may still read below the revision.
	Reads(ctx context.Context, below keyspace.Revision) (bool, error)
}

// The times of pushing.
const (
	// pushTick is how often leaders look at the age of what they hold, while they hold
	// anything.
	pushTick = 100 * time.Millisecond
	// pushTimeout bounds one push; the next one follows. The first one is short: until it has
	// ended others may wait for it.
	pushTimeout      = 5 * time.Second
	firstPushTimeout = time.Second
)

const (
	// maxPushes bounds the pushes of a node that run at a time, and maxRangePushes those of
	// one range. Half of either may be such of what was asked for in vain before: an anchor that
	// nobody reaches is not to keep all of them busy.
	maxPushes      = 32
	maxRangePushes = 8
)

// pushes looks after the locks and records of a node's leaders. While there are none it
// costs nothing.
type pushes struct {
	store *Store
	// slots bounds the pushes that run.
	slots chan struct{}

	mu sync.Mutex
	// Guarded by mu. watched has how many pushes run for each replica, and again is how many
	// of all are of what was asked for in vain before.
	watched map[*Replica]*running
	again   int
	ticking bool
}

// running are the pushes that run for a replica, and those of them of what was asked for in
// vain before. Pushes that outlive being forgotten count in what they began with.
type running struct{ all, again int }

func newPushes(s *Store) *pushes {
	return &pushes{store: s, slots: make(chan struct{}, maxPushes), watched: map[*Replica]*running{}}
}

// note has a replica with locks or records looked after.
func (p *pushes) note(r *Replica) {
	if p.store.cfg.Txns == nil {
		return
	}
	p.mu.Lock()
	if _, ok := p.watched[r]; !ok {
		p.watched[r] = &running{}
	}
	start := !p.ticking
	p.ticking = true
	p.mu.Unlock()
	if start {
		p.store.after(pushTick, p.tick)
	}
}

// tick begins what is due.
func (p *pushes) tick() {
	p.mu.Lock()
	all := make([]*Replica, 0, len(p.watched))
	for r := range p.watched {
		all = append(all, r)
	}
	p.mu.Unlock()
	for _, r := range all {
		if !r.holdsLocks() {
			p.forget(r)
			continue
		}
		for p.begin(r) {
		}
	}
	p.mu.Lock()
	p.ticking = len(p.watched) > 0
	again := p.ticking
	p.mu.Unlock()
	if again {
		p.store.after(pushTick, p.tick)
	}
}

// begin starts a push for the replica, if something is due there and a push may run. One
// that has found something goes on for as long as it does, and succeeds.
func (p *pushes) begin(r *Replica) bool {
	return p.beginOf(r, false) || p.beginOf(r, true)
}

// beginOf is begin of what was asked for in vain before, or of all else.
func (p *pushes) beginOf(r *Replica, again bool) bool {
	p.mu.Lock()
	is, ok := p.watched[r]
	if !ok || is.all >= maxRangePushes || again && (is.again >= maxRangePushes/2 || p.again >= maxPushes/2) {
		p.mu.Unlock()
		return false
	}
	select {
	case p.slots <- struct{}{}:
	default:
		p.mu.Unlock()
		return false // the next tick finds it again
	}
	p.countLocked(is, again, 1)
	p.mu.Unlock()
	due := r.duePushes(again)
	if len(due) == 0 {
		p.end(is, again)
		return false
	}
	p.store.wg.Go(func() {
		defer p.end(is, again)
		for ok := true; ok && len(due) > 0 && p.store.ctx.Err() == nil; {
			if ok = r.pushAll(p.store.ctx, due); ok {
				due = r.duePushes(again)
			}
		}
	})
	return true
}

func (p *pushes) countLocked(is *running, again bool, n int) {
	is.all += n
	if again {
		is.again += n
		p.again += n
	}
}

func (p *pushes) end(is *running, again bool) {
	<-p.slots
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countLocked(is, again, -1)
}

// forget takes a replica off the list, unless it holds something again.
func (p *pushes) forget(r *Replica) {
	p.mu.Lock()
	delete(p.watched, r)
	p.mu.Unlock()
	r.mu.Lock()
	again := r.pipe.Leads() && !r.locks.Empty()
	r.mu.Unlock()
	if again {
		p.note(r)
	}
}

// holdsLocks says whether the replica leads and holds something.
func (r *Replica) holdsLocks() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pushesLocked()
}

func (r *Replica) pushesLocked() bool {
	return !r.stopped && r.pipe.Leads() && !r.locks.Empty() && !mutation.Is(mutation.LockLeftBehind)
}

// duePushes returns what is to be asked about now: locks and records of which the last question
// failed, or all others. They are not due again until pushAll has ended.
func (r *Replica) duePushes(again bool) []locktable.Due {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.pushesLocked() {
		return nil
	}
	return r.locks.Due(r.store.cfg.Clock.Now(), again, maxRangePushes)
}

// pushAll asks about what is due, one after the other, until one fails: the others are due
// again at once, for another push to take.
func (r *Replica) pushAll(ctx context.Context, due []locktable.Due) (ok bool) {
	ok = true
	for i := range due {
		if ok {
			ok = r.pushOne(ctx, &due[i])
			continue
		}
		r.mu.Lock()
		due[i].Skip()
		r.mu.Unlock()
	}
	return ok
}

// pushOne asks about one lock or record, and says whether it got an answer.
func (r *Replica) pushOne(ctx context.Context, d *locktable.Due) bool {
	timeout := firstPushTimeout
	if d.Failed() {
		timeout = pushTimeout
	}
	pushing, cancel := clock.WithTimeout(ctx, r.store.cfg.Clock, timeout)
	defer cancel()
	var err error
	if d.Record != nil {
		err = r.finish(pushing, d.Record)
	} else {
		err = r.push(pushing, d.Lock)
	}
	r.mu.Lock()
	d.Done(err != nil)
	r.mu.Unlock()
	return err == nil
}

// push asks what became of the lock's transaction, and ends the lock if it is decided.
func (r *Replica) push(ctx context.Context, l *command.Lock) error {
	r.store.metrics.pushes.Inc()
	live, d, err := r.store.cfg.Txns.Push(ctx, l.Name, l.Anchor)
	if err != nil || live {
		return err
	}
	rev := d.Revision
	if !slices.ContainsFunc(d.Locks, func(o rangeapi.LockRef) bool { return o.ID == l.ID }) {
		rev = 0
	}
	r.log.Info("ended the lock of a transaction whose coordinator is gone",
		zap.Stringer("txn", l.Name), zap.Stringer("lock", l.ID), zap.Int64("revision", int64(rev)))
	return r.untilDone(ctx, &rangeapi.Resolve{Name: l.Name, Lock: l.ID, Revision: rev})
}

// finish ends all locks of a committed transaction and forgets it.
func (r *Replica) finish(ctx context.Context, t *command.CommitRecord) error {
	live, err := r.store.cfg.Txns.Finish(ctx, t.Name, &rangeapi.Decided{Revision: t.Revision, Locks: t.Locks})
	if err != nil || live {
		return err
	}
	return r.untilDone(ctx, &rangeapi.Forget{Name: t.Name, Anchor: t.Anchor})
}

// untilDone repeats a command of this replica's own until nothing is left of it. What
// fails is tried again at a later tick.
func (r *Replica) untilDone(ctx context.Context, op rangeapi.TxnCommand) error {
	for {
		a, _, err := r.command(ctx, &rangeapi.Request{Range: r.id, Generation: r.generation()}, op)
		if err != nil {
			return err
		}
		if d, ok := a.(*rangeapi.Resolved); !ok || !d.More {
			return nil
		}
		if ctx.Err() != nil {
			return kverror.Of(ctx.Err())
		}
	}
}

func (r *Replica) generation() keyspace.Generation {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rec.Generation
}
