package lifecycle

import (
	"context"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
)

// Check has RunGC look whether the group's replica here still is a member. It does not block.
func (l *Lifecycle) Check(g keyspace.GroupID) {
	l.mu.Lock()
	l.listLocked(g)
	l.mu.Unlock()
	l.check.Set()
}

func (l *Lifecycle) listLocked(g keyspace.GroupID) {
	if !l.listed[g] {
		l.listed[g] = true
		l.todo = append(l.todo, g)
	}
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
		for gs := l.next(); len(gs) > 0 && ctx.Err() == nil; gs = l.next() {
			failed := l.removeAll(ctx, gs)
			for _, g := range gs {
				if failed[g] != nil && ctx.Err() == nil {
					l.cfg.Logger.Warn("remove a replica", zap.Stringer("group", g), zap.Error(failed[g]))
				}
			}
		}
		if !waits && l.hasLater() {
			waits = true
			retry.Reset(RetryAfter)
		}
	}
}

// next takes the next groups to look at from todo.
func (l *Lifecycle) next() []keyspace.GroupID {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(len(l.todo), MaxTogether)
	gs := l.todo[:n:n]
	if l.todo = l.todo[n:]; len(l.todo) == 0 {
		l.todo = nil
	}
	for _, g := range gs {
		delete(l.listed, g)
	}
	return gs
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
		l.listLocked(g)
	}
	slices.Sort(l.todo)
	clear(l.later)
}

// Remove removes the group's replica here, unless it stays. After an error RunGC tries again.
func (l *Lifecycle) Remove(ctx context.Context, g keyspace.GroupID) error {
	return l.removeAll(ctx, []keyspace.GroupID{g})[g]
}

// removeAll is Remove for groups that share each flush. One that fails does not keep the others.
func (l *Lifecycle) removeAll(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error) {
	failed = map[keyspace.GroupID]error{}
	select {
	case l.removing <- struct{}{}:
		defer func() { <-l.removing }()
	case <-ctx.Done():
		for _, g := range gs {
			failed[g] = ctx.Err()
			l.Check(g)
		}
		return failed
	}
	var again, going []keyspace.GroupID
	for _, g := range gs {
		switch v, err := l.verdict(g); {
		case err != nil:
			failed[g] = err
		case v == Wait:
			again = append(again, g)
		case v == Remove:
			l.begin(g)
			going = append(going, g)
		}
	}
	gone := func(_ context.Context, gs []keyspace.GroupID) map[keyspace.GroupID]error {
		failed := map[keyspace.GroupID]error{}
		for _, g := range gs {
			if err := l.cfg.Owner.Gone(g); err != nil {
				failed[g] = err
			}
		}
		return failed
	}
	for _, step := range []func(context.Context, []keyspace.GroupID) map[keyspace.GroupID]error{l.cfg.Owner.End, l.cfg.Owner.Destroy, gone} {
		if len(going) == 0 {
			break
		}
		maps.Copy(failed, step(ctx, going))
		going = slices.DeleteFunc(going, func(g keyspace.GroupID) bool { return failed[g] != nil })
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range going {
		delete(l.underRemoval, g)
	}
	for g := range failed {
		again = append(again, g)
	}
	for _, g := range again {
		l.later[g] = true
	}
	if len(again) > 0 {
		l.check.Set() // for the pause to begin
	}
	return failed
}

// verdict is the owner's, unless the removal has begun.
func (l *Lifecycle) verdict(g keyspace.GroupID) (Verdict, error) {
	if l.Removing(g) {
		return Remove, nil
	}
	return l.cfg.Owner.Verdict(g)
}

func (l *Lifecycle) begin(g keyspace.GroupID) {
	l.mu.Lock()
	l.underRemoval[g] = true
	l.mu.Unlock()
}
