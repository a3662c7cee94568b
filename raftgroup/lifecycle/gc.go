package lifecycle

import (
	"context"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// Check has RunGC look whether the group's replica here still is a member. It does not block.
func (l *Lifecycle) Check(g keyspace.GroupID) {
	l.mu.Lock()
	if !slices.Contains(l.todo, g) {
		l.todo = append(l.todo, g)
	}
	l.mu.Unlock()
	l.check.Set()
}

// Continue has a removal completed that began before a crash. No verdict is asked for.
func (l *Lifecycle) Continue(g keyspace.GroupID) {
	l.begin(g)
	l.Check(g)
}

// Removing says whether a removal of the group's replica has begun and is not completed.
func (l *Lifecycle) Removing(g keyspace.GroupID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.underRemoval[g]
}

// RunGC removes replicas that are no members any more, until ctx ends.
func (l *Lifecycle) RunGC(ctx context.Context) {
	sweep := l.cfg.Clock.NewTimer(SweepEvery)
	defer sweep.Stop()
	retry := l.cfg.Clock.NewTimer(RetryAfter)
	defer retry.Stop()
	waits := true // for the retry timer
	for {
		select {
		case <-ctx.Done():
			return
		case <-sweep.C():
			for _, g := range l.cfg.Owner.Suspects() {
				l.Check(g)
			}
			sweep.Reset(SweepEvery)
		case <-retry.C():
			waits = false
			l.checkLater()
		case <-l.check:
		}
		for g, ok := l.next(); ok && ctx.Err() == nil; g, ok = l.next() {
			if err := l.Remove(ctx, g); err != nil && ctx.Err() == nil {
				l.cfg.Logger.Warn("remove a replica", zap.Stringer("group", g), zap.Error(err))
			}
		}
		if !waits && l.hasLater() {
			waits = true
			retry.Reset(RetryAfter)
		}
	}
}

func (l *Lifecycle) next() (g keyspace.GroupID, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.todo) == 0 {
		return 0, false
	}
	g = l.todo[0]
	l.todo = slices.Delete(l.todo, 0, 1)
	return g, true
}

func (l *Lifecycle) hasLater() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.later) > 0
}

// checkLater moves to todo what waited for the end of the pause.
func (l *Lifecycle) checkLater() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for g := range l.later {
		if !slices.Contains(l.todo, g) {
			l.todo = append(l.todo, g)
		}
	}
	slices.Sort(l.todo)
	clear(l.later)
}

// Remove removes the group's replica here, unless it stays. After an error RunGC tries again.
func (l *Lifecycle) Remove(ctx context.Context, g keyspace.GroupID) error {
	l.removing.Lock()
	defer l.removing.Unlock()
	again, err := l.remove(ctx, g)
	if again || err != nil {
		l.mu.Lock()
		l.later[g] = true
		l.mu.Unlock()
		l.check.Set() // for the pause to begin
	}
	return err
}

func (l *Lifecycle) remove(ctx context.Context, g keyspace.GroupID) (again bool, err error) {
	if !l.Removing(g) {
		v, err := l.cfg.Owner.Verdict(g)
		if v != Remove || err != nil {
			return v == Wait, err
		}
		l.begin(g)
	}
	if err := l.cfg.Owner.End(ctx, g); err != nil {
		return true, err
	}
	if err := l.cfg.Owner.Destroy(ctx, g); err != nil {
		return true, err
	}
	if err := l.cfg.Owner.Gone(g); err != nil {
		return true, err
	}
	l.mu.Lock()
	delete(l.underRemoval, g)
	l.mu.Unlock()
	return false, nil
}

func (l *Lifecycle) begin(g keyspace.GroupID) {
	l.mu.Lock()
	l.underRemoval[g] = true
	l.mu.Unlock()
}
