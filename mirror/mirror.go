package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/spool"
)

const (
	// retryFirst and retryMost bound the pause before a step is tried again.
	retryFirst = 100 * time.Millisecond
	retryMost  = 5 * time.Second
	// statusEvery is how often the status is written.
	statusEvery = time.Second
	// requestEvery is how often requests are looked for.
	requestEvery = 200 * time.Millisecond
)

// Mirror is a mirror that runs.
type Mirror struct {
	o     Options
	spool *spool.Spool

	// follow is held while something is brought to the target, and by a cut-over that lets
	// nothing more be brought.
	follow sync.Mutex
	frozen bool // nothing more may be brought; guarded by follow

	mu       sync.Mutex
	state    state
	status   Status
	seen     []sighting
	leases   map[keyspace.LeaseID]int64 // granted TTLs that were looked up
	wantEnd  bool                       // a cut-over is requested
	verified chan struct{}              // closed after the first pass
}

// sighting says when the source was first known to have a revision.
type sighting struct {
	revision keyspace.Revision
	at       clock.Time
}

// errAbandoned ends a run whose mirror is to be given up.
var errAbandoned = errors.New("the mirror is abandoned")

// Run mirrors until the cut-over is done, the mirror is abandoned, or something fails. It
// goes on where an earlier run in the same directory ended. The error is a *Stop if it
// would be of no use to call it again.
func Run(ctx context.Context, o Options) (err error) {
	if o.VerifyBytesPerSecond == 0 {
		o.VerifyBytesPerSecond = defaultVerifyBytes
	}
	if err := errors.Join(o.FS.MkdirAll(o.Dir, 0o700), syncDir(o.FS, o.FS.PathDir(o.Dir))); err != nil {
		return fmt.Errorf("mirror %s: %w", o.Dir, err)
	}
	lock, err := o.FS.Lock(o.FS.PathJoin(o.Dir, lockName))
	if err != nil {
		return fmt.Errorf("mirror %s: another process uses it: %w", o.Dir, err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	m := &Mirror{o: o, leases: map[keyspace.LeaseID]int64{}, verified: make(chan struct{})}
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
		m.state, m.status.Step = st, st.Step
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

// run goes through the steps.
func (m *Mirror) run(ctx context.Context) error {
	switch m.state.Step {
	case Done:
		return nil
	case Failed:
		return m.failedBefore()
	case Abandoned:
		return errAbandoned
	case Finishing:
		return m.finish(ctx)
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
	g.Go(func() error { return m.watchRequests(ctx) })
	g.Go(func() error { return m.report(ctx) })
	g.Go(func() error { return m.copyAndFollow(ctx) })
	err = g.Wait()
	if errors.Is(err, errDone) {
		err = nil
	}
	m.noteSpool()
	return errors.Join(err, sp.Close())
}

// errDone ends the goroutines of a run whose cut-over is done.
var errDone = errors.New("the cut-over is done")

// failedBefore is the error of a mirror that has failed. It may still be abandoned.
func (m *Mirror) failedBefore() error {
	if yes, err := requested(m.o.FS, m.o.Dir, abandonName); yes || err != nil {
		return errors.Join(err, errAbandoned)
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
		if err := m.retry(ctx, "import the snapshot", func() error { return m.o.Target.Import(ctx, m.state.Nonce, path) }); err != nil {
			return err
		}
		if err := m.step(Following); err != nil {
			return err
		}
	}
	if err := m.remove(snapshotName); err != nil {
		return err
	}
	return m.followAndVerify(ctx)
}

func (m *Mirror) remove(name string) error {
	if err := m.o.FS.Remove(m.o.FS.PathJoin(m.o.Dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
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

// step notes that the mirror has come to a step.
func (m *Mirror) step(s Step) error {
	m.mu.Lock()
	m.state.Step, m.status.Step = s, s
	m.mu.Unlock()
	return writeJSON(m.o.FS, m.o.Dir, stateName, m.state)
}

// retry repeats f until it succeeds or fails for another reason than that somebody is away.
func (m *Mirror) retry(ctx context.Context, what string, f func() error) error {
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		err := f()
		if err == nil {
			if pause > retryFirst {
				m.wait("")
			}
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if !transient(err) {
			return fmt.Errorf("%s: %w", what, err)
		}
		m.wait(fmt.Sprintf("%s: %v", what, err))
		if err := clock.Sleep(ctx, m.o.Clock, pause); err != nil {
			return err
		}
	}
}

// wait notes what the mirror waits for, or nothing.
func (m *Mirror) wait(what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Waiting = what
}

// transient says that an error may go away by itself.
func transient(err error) bool {
	if errors.Is(err, ErrLagging) || errors.Is(err, errStalled) || errors.Is(err, errBehindCompaction) || errors.Is(err, io.EOF) || errors.Is(err, context.DeadlineExceeded) || spool.IsNoSpace(err) {
		return true
	}
	var e rpctypes.EtcdError
	code := codes.OK
	if errors.As(err, &e) {
		code = e.Code()
	} else if s, ok := status.FromError(err); ok {
		code = s.Code()
	}
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.Canceled:
		return true
	case codes.ResourceExhausted:
		return errors.Is(err, rpctypes.ErrTooManyRequests)
	case codes.Unauthenticated:
		return errors.Is(err, rpctypes.ErrInvalidAuthToken) // the client gets another
	}
	return false
}

// saw notes a revision of the source.
func (m *Mirror) saw(rev keyspace.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rev <= m.status.Source {
		return
	}
	m.status.Source = rev
	if n := len(m.seen); n > 0 && m.o.Clock.Now().Sub(m.seen[n-1].at) < sightingEvery {
		return
	}
	if len(m.seen) < maxSightings {
		m.seen = append(m.seen, sighting{rev, m.o.Clock.Now()})
	}
}

// Sightings are at most so many, and so far apart. Later ones are not needed: the lag counts
// from the first one above the position.
const (
	maxSightings  = 1000
	sightingEvery = 50 * time.Millisecond
)

// at notes the target's position.
func (m *Mirror) at(pos keyspace.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Position = pos
	for len(m.seen) > 0 && m.seen[0].revision <= pos {
		m.seen = m.seen[1:]
	}
}

func (m *Mirror) position() keyspace.Revision {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status.Position
}

// now returns the present status.
func (m *Mirror) now() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.status
	s.At = m.o.Clock.Wall()
	if s.LagSeconds = 0; len(m.seen) > 0 && s.Source > s.Position {
		s.LagSeconds = m.o.Clock.Now().Sub(m.seen[0].at).Seconds()
	}
	return s
}

func (m *Mirror) noteSpool() {
	last, size := m.spool.Last(), m.spool.Bytes()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status.Spooled, m.status.SpoolBytes = last, size
}

// report writes the status again and again.
func (m *Mirror) report(ctx context.Context) error {
	for {
		m.noteSpool()
		// A status that cannot be written now will be the next time; what counts is the
		// state.
		if err := m.writeStatus(); err != nil && !spool.IsNoSpace(err) {
			return err
		}
		if m.o.Progress != nil {
			m.o.Progress(m.now())
		}
		if err := clock.Sleep(ctx, m.o.Clock, statusEvery); err != nil {
			return err
		}
	}
}

func (m *Mirror) writeStatus() error {
	return writeJSON(m.o.FS, m.o.Dir, statusName, m.now())
}

// watchRequests looks for requests of other processes.
func (m *Mirror) watchRequests(ctx context.Context) error {
	for {
		if yes, err := requested(m.o.FS, m.o.Dir, abandonName); yes || err != nil {
			return errors.Join(err, errAbandoned)
		}
		yes, err := requested(m.o.FS, m.o.Dir, cutoverName)
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.wantEnd = yes
		m.mu.Unlock()
		if err := clock.Sleep(ctx, m.o.Clock, requestEvery); err != nil {
			return err
		}
	}
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
