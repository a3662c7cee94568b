package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/spool"
)

// Run mirrors until the cut-over is done, the mirror is abandoned, or something fails. It
// goes on where an earlier run in the same directory ended. The error is a *Stop if it
// would be of no use to call it again.
func Run(ctx context.Context, o Options) (err error) {
	if o.VerifyBytesPerSecond == 0 {
		o.VerifyBytesPerSecond = defaultVerifyBytes
	}
	if o.SweepEvery == 0 {
		o.SweepEvery = sweepEvery
	}
	if err := errors.Join(o.FS.MkdirAll(o.Dir, 0o700), syncDir(o.FS, o.FS.PathDir(o.Dir))); err != nil {
		return fmt.Errorf("mirror %s: %w", o.Dir, err)
	}
	lock, err := o.lock(ctx)
	if err != nil {
		return fmt.Errorf("mirror %s: another process uses it: %w", o.Dir, err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	m := &Mirror{o: o, follow: make(gate, 1), leases: map[keyspace.LeaseID]int64{}}
	if err := m.load(ctx); err != nil {
		return err
	}
	err = m.run(ctx)
	if stop := (*Stop)(nil); errors.As(err, &stop) {
		m.state.Stop = stop
		err = errors.Join(err, m.step(Failed))
	}
	if errors.Is(err, errAbandoned) {
		err = m.abandon(ctx)
	}
	return errors.Join(err, m.writeStatus())
}

// load reads the state of the directory, or begins it.
func (m *Mirror) load(ctx context.Context) error {
	st, err := readState(m.o.FS, m.o.Dir)
	if err == nil {
		m.state, m.status.Step, m.status.Compared = st, st.Step, st.Compared
		return nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("mirror %s: %w", m.o.Dir, err)
	}
	return m.retry(ctx, "begin", func() error {
		cluster, rev, err := m.o.Source.Now(ctx)
		if err != nil {
			return err
		}
		m.state = state{Version: stateVersion, Nonce: m.o.Nonce, Source: cluster, After: rev}
		return m.step(Copying)
	})
}

const (
	// lockTries and lockPause bound how long a mirror waits for its directory.
	lockTries = 10
	lockPause = 50 * time.Millisecond
)

// lock makes the directory this mirror's. Who reads the status locks it too, for a moment, to see whether a mirror runs.
func (o *Options) lock(ctx context.Context) (lock io.Closer, err error) {
	for range lockTries {
		if lock, err = o.FS.Lock(o.FS.PathJoin(o.Dir, lockName)); err == nil {
			return lock, nil
		}
		if clock.Sleep(ctx, o.Clock, lockPause) != nil {
			break
		}
	}
	return nil, err
}

// run goes through the steps.
func (m *Mirror) run(ctx context.Context) error {
	m.o.Source.Expect(m.state.Source)
	switch m.state.Step {
	case Done:
		return nil
	case Failed:
		return m.failedBefore()
	case Abandoned:
		return errAbandoned
	case Finishing:
		return m.finish(ctx)
	case Copying, Importing, Following:
		// Neither the source nor the spool may be readable any more.
		if err := m.abandonRequested(); err != nil {
			return err
		}
	default:
		return fmt.Errorf("mirror %s: %s has the step %q, which this build does not know: use the build that wrote it", m.o.Dir, stateName, m.state.Step)
	}
	if err := m.checkSource(ctx); err != nil {
		return err
	}
	sp, err := spool.Open(spool.Options{FS: m.o.FS, Dir: m.o.FS.PathJoin(m.o.Dir, spoolName), Source: m.state.Source, After: m.state.After})
	if err != nil {
		return err
	}
	m.spool = sp
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return m.receive(ctx) })
	g.Go(func() error { return m.watchAbandon(ctx) })
	g.Go(func() error { return m.report(ctx) })
	g.Go(func() error { return m.copyAndFollow(ctx) })
	err = g.Wait()
	if errors.Is(err, errDone) {
		err = nil
	}
	m.noteSpool()
	return errors.Join(err, sp.Close())
}

// failedBefore is the error of a mirror that has failed. It may still be abandoned.
func (m *Mirror) failedBefore() error {
	if err := m.abandonRequested(); err != nil {
		return err
	}
	return m.state.Stop
}

// checkSource says whether the source is the one that the mirror began with.
func (m *Mirror) checkSource(ctx context.Context) error {
	return m.retry(ctx, "ask the source for its revision", func() error {
		cluster, rev, err := m.o.Source.Now(ctx)
		switch {
		case err != nil:
			return err
		case cluster != m.state.Source:
			return fmt.Errorf("mirror %s: it follows cluster %x, and the source is cluster %x: give the endpoints of that cluster, or another --spool", m.o.Dir, m.state.Source, cluster)
		}
		m.saw(rev)
		return nil
	})
}

// copyAndFollow goes through the steps from the snapshot on.
func (m *Mirror) copyAndFollow(ctx context.Context) error {
	if m.state.Step == Copying {
		if err := m.retry(ctx, "fetch a snapshot", func() error { return m.fetch(ctx) }); err != nil {
			return err
		}
		if err := m.step(Importing); err != nil {
			return err
		}
	}
	if m.state.Step == Importing {
		path := m.o.FS.PathJoin(m.o.Dir, snapshotName)
		var in Imported
		err := m.retry(ctx, "import the snapshot", func() (err error) {
			in, err = m.o.Target.Import(ctx, m.state.Nonce, path)
			return err
		})
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.state.Counted, m.state.Sum, m.state.Compacted = in.Revision, in.Sum, in.Compacted
		m.mu.Unlock()
		if err := m.step(Following); err != nil {
			return err
		}
	}
	if err := m.remove(snapshotName); err != nil {
		return err
	}
	return m.followAndVerify(ctx)
}

// fetch gets a snapshot that has everything up to the beginning of the watch.
func (m *Mirror) fetch(ctx context.Context) error {
	part, whole := m.o.FS.PathJoin(m.o.Dir, partName), m.o.FS.PathJoin(m.o.Dir, snapshotName)
	f, err := m.o.FS.Create(part, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	err = m.o.Source.Snapshot(ctx, m.state.After, io.Writer(f))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	rev, err := m.o.SnapshotRevision(part)
	if err != nil {
		return fmt.Errorf("read the snapshot of the source: %w", err)
	}
	if rev < m.state.After {
		return fmt.Errorf("the snapshot is at revision %d, the watch began behind revision %d: %w", rev, m.state.After, ErrLagging)
	}
	if err := m.o.FS.Rename(part, whole); err != nil {
		return err
	}
	return syncDir(m.o.FS, m.o.Dir)
}

// watchAbandon looks for the request of another process to give the mirror up.
func (m *Mirror) watchAbandon(ctx context.Context) error {
	for {
		if err := m.abandonRequested(); err != nil {
			return err
		}
		if err := clock.Sleep(ctx, m.o.Clock, requestEvery); err != nil {
			return err
		}
	}
}

// abandonRequested returns errAbandoned if another process has asked to give the mirror up.
func (m *Mirror) abandonRequested() error {
	yes, err := requested(m.o.FS, m.o.Dir, abandonName)
	if yes {
		return errAbandoned
	}
	return err
}

// abandon gives the target's load up and removes the copy.
func (m *Mirror) abandon(ctx context.Context) error {
	if err := m.retry(ctx, "abandon the load", func() error { return m.o.Target.Abandon(ctx, m.state.Nonce) }); err != nil {
		return err
	}
	if err := m.step(Abandoned); err != nil {
		return err
	}
	err := m.o.FS.RemoveAll(m.o.FS.PathJoin(m.o.Dir, spoolName))
	return errors.Join(err, m.remove(snapshotName), m.remove(partName), &Stop{Reason: "the mirror is abandoned", Next: "a new one needs an empty cluster and another --spool"})
}
