package mirror

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
)

const (
	// quiet is how long the source's revision must stand still.
	quiet = 2 * time.Second
	// quietEvery is how often it is asked meanwhile.
	quietEvery = 100 * time.Millisecond
)

// cutover waits until it is requested and possible, and does it. It returns errDone.
func (m *Mirror) cutover(ctx context.Context) error {
	for {
		err := m.cutoverOnce(ctx)
		refusal := (*Refusal)(nil)
		if !errors.As(err, &refusal) {
			return err
		}
		if err := m.callOff(ctx, refusal); err != nil {
			return err
		}
	}
}

// cutoverOnce waits for a request and meets it. It returns errDone, or a *Refusal.
func (m *Mirror) cutoverOnce(ctx context.Context) error {
	if err := m.waitRequested(ctx); err != nil {
		return err
	}
	f, err := m.prepare(ctx)
	if err != nil {
		return err
	}
	for {
		still, since, err := m.waitQuiet(ctx)
		if err != nil {
			return err
		}
		var done bool
		err = m.retry(ctx, "cut over", func() (err error) {
			done, err = m.freeze(ctx, still, f)
			return err
		})
		if err != nil {
			return err
		}
		if done {
			m.mu.Lock()
			m.status.FreezeSeconds = m.o.Clock.Now().Sub(since).Seconds()
			m.mu.Unlock()
			return errDone
		}
	}
}

// prepare does what takes long, before the source stands still.
func (m *Mirror) prepare(ctx context.Context) (*Finish, error) {
	f := &Finish{}
	err := m.retry(ctx, "prepare the cut-over", func() (err error) {
		if f.Compacted, err = m.o.Source.Compacted(ctx); err != nil {
			return err
		}
		ids, err := m.o.SourceData.Leases(ctx)
		if err != nil {
			return err
		}
		m.forgetLeases()
		if _, err := m.lookupLeases(ctx, ids); err != nil || m.o.Prepare == nil {
			return err
		}
		return m.o.Prepare(ctx)
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

// callOff withdraws the request for a cut-over. Who made it sees that it is gone, and by then the status says why.
func (m *Mirror) callOff(ctx context.Context, why *Refusal) error {
	m.mu.Lock()
	m.status.Cutover, m.status.Refused = "", why
	m.mu.Unlock()
	return m.retry(ctx, "call the cut-over off", func() error {
		if err := m.writeStatus(); err != nil {
			return err
		}
		return errors.Join(m.remove(cutoverName), syncDir(m.o.FS, m.o.Dir))
	})
}

// cutoverWaits notes what a cut-over waits for.
func (m *Mirror) cutoverWaits(what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Cutover = what
}

// waitRequested waits for the request.
func (m *Mirror) waitRequested(ctx context.Context) error {
	for {
		yes, err := requested(m.o.FS, m.o.Dir, cutoverName)
		if err != nil {
			return err
		}
		if yes {
			break
		}
		if err := clock.Sleep(ctx, m.o.Clock, requestEvery); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Refused = nil
	return nil
}

// waitQuiet waits until the source's revision has not changed for the time quiet and is the
// position. It returns that revision, and since when it stood still.
func (m *Mirror) waitQuiet(ctx context.Context) (still keyspace.Revision, since clock.Time, err error) {
	for {
		var rev keyspace.Revision
		before := m.position() // it may move on while the source answers
		err := m.retry(ctx, "ask the source for its revision", func() (err error) {
			_, rev, err = m.o.Source.Now(ctx)
			return err
		})
		if err != nil {
			return 0, 0, err
		}
		m.saw(rev)
		now, pos := m.o.Clock.Now(), m.position()
		switch {
		case rev < before:
			return 0, 0, stopf("the source has gone back to revision %d, and the target is at revision %d", rev, before)
		case since == 0 || rev != still:
			still, since = rev, now
		case rev == pos && now.Sub(since) >= quiet:
			return still, since, nil
		}
		m.cutoverWaits(fmt.Sprintf("for the source to stand still: it is at revision %d, the target at revision %d", rev, pos))
		if err := clock.Sleep(ctx, m.o.Clock, quietEvery); err != nil {
			return 0, 0, err
		}
	}
}

// freeze checks once more, while nothing is brought to the target, and opens it. It returns
// false if the source has moved.
func (m *Mirror) freeze(ctx context.Context, rev keyspace.Revision, f *Finish) (done bool, err error) {
	if err := m.follow.lock(ctx); err != nil {
		return false, err
	}
	defer m.follow.unlock()
	f.Revision = rev
	if m.position() != rev || m.state.Counted != rev {
		return false, nil
	}
	if m.o.Prepare != nil { // the source may have been written to for long since the first time
		if err := m.o.Prepare(ctx); err != nil {
			return false, err
		}
	}
	f.Sum = m.state.Sum
	f.Compacted = max(f.Compacted, m.state.Compacted) // the source may not have told it
	before, err := m.o.SourceData.Leases(ctx)
	if err != nil {
		return false, err
	}
	slices.Sort(before)
	if f.Leases, err = m.lookupLeases(ctx, before); err != nil {
		return false, err
	}
	source, _, err := m.o.SourceData.Count(ctx, nil, nil, rev)
	if err != nil {
		return false, err
	}
	target, _, err := m.o.TargetData.Count(ctx, nil, nil, rev)
	if err != nil {
		return false, err
	}
	if source != target {
		return false, stopf("at revision %d the source has %d keys and the target %d", rev, source, target)
	}
	// Nothing may have changed meanwhile, so that all of this is true of one moment.
	after, err := m.o.SourceData.Leases(ctx)
	if err != nil {
		return false, err
	}
	slices.Sort(after)
	_, now, err := m.o.Source.Now(ctx)
	if err != nil || now != rev || !slices.Equal(before, after) {
		return false, err
	}
	f.Keys = source
	if len(f.Leases) != len(after) {
		return false, nil // one ended while it was looked up
	}
	if err := m.commit(ctx, f); err != nil {
		return false, err
	}
	return true, m.finish(ctx)
}

// commit notes that the target is opened with f. If that cannot be written, the mirror goes on, and the source may be written to
// again. So what was written is taken back: it may be there all the same, and the next start would open the target.
// Mirror.follow is held.
func (m *Mirror) commit(ctx context.Context, f *Finish) error {
	next := m.state
	next.Step, next.Finish = Finishing, f
	if err := writeJSON(m.o.FS, m.o.Dir, stateName, next); err != nil {
		undone := m.retry(ctx, "take the cut-over back", func() error { return writeJSON(m.o.FS, m.o.Dir, stateName, m.state) })
		return cmp.Or(undone, err)
	}
	m.frozen = true
	m.mu.Lock()
	defer m.mu.Unlock()
	m.state.Finish, m.state.Step, m.status.Step = f, Finishing, Finishing
	return nil
}

// finish opens the target. It may be called again after a crash.
func (m *Mirror) finish(ctx context.Context) error {
	f := m.state.Finish
	if f == nil {
		return fmt.Errorf("mirror %s: %s says %s without saying how: the file was changed by hand", m.o.Dir, stateName, Finishing)
	}
	m.at(f.Revision)
	err := m.retry(ctx, "open the target", func() error {
		phase, _, err := m.o.Target.State(ctx, m.state.Nonce)
		if err != nil || phase == TargetServing {
			return err
		}
		return m.o.Target.Finish(ctx, m.state.Nonce, *f)
	})
	if err != nil {
		return err
	}
	warning := m.checkFinished(ctx, f)
	m.mu.Lock()
	m.status.Waiting, m.status.Cutover, m.status.Warning = "", "", warning
	m.mu.Unlock()
	return m.retry(ctx, "note that the target is open", func() error { return m.step(Done) })
}

// checkFinished says what is not as it should be behind the cut-over, or nothing.
func (m *Mirror) checkFinished(ctx context.Context, f *Finish) string {
	_, now, err := m.o.Source.Now(ctx)
	switch {
	case err != nil:
		return fmt.Sprintf("the source could not be asked whether it was written to after the cut-over: %v", err)
	case now != f.Revision:
		return fmt.Sprintf("somebody still writes to the source: it is at revision %d, and the target was opened at revision %d; what came later is not in the target", now, f.Revision)
	}
	ttls, err := diff.TTLs(ctx, m.o.TargetData, slices.Collect(maps.Keys(f.Leases)))
	switch {
	case errors.Is(err, rpctypes.ErrUserEmpty):
		return "" // the target checks users by now, and the mirror is none of them
	case err != nil:
		return fmt.Sprintf("the target's leases could not be compared: %v", err)
	case !maps.Equal(ttls, f.Leases):
		return fmt.Sprintf("the target has %d of the source's %d leases, or some with other TTLs", len(ttls), len(f.Leases))
	}
	return ""
}
