package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
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
	follow gate
	frozen bool // nothing more may be brought; guarded by follow

	// statusFile is held over a write of the status.
	statusFile sync.Mutex

	mu     sync.Mutex
	state  state
	status Status
	seen   []sighting
	leases map[keyspace.LeaseID]int64 // granted TTLs that were looked up
	ending map[keyspace.LeaseID]bool  // of the target, and perhaps no longer at the source
}

// A gate is a lock that is held over requests: whoever waits for it can be told to end.
type gate chan struct{}

func (g gate) lock(ctx context.Context) error {
	select {
	case g <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g gate) unlock() { <-g }

// bringing takes the lock to bring something to the target. The error is errDone if nothing more may be brought.
func (m *Mirror) bringing(ctx context.Context) error {
	if err := m.follow.lock(ctx); err != nil {
		return err
	}
	if m.frozen {
		m.follow.unlock()
		return errDone
	}
	return nil
}

// isFrozen says whether the cut-over has come so far that nothing more is brought. It waits for its end.
func (m *Mirror) isFrozen(ctx context.Context) bool {
	if m.follow.lock(ctx) != nil {
		return false
	}
	defer m.follow.unlock()
	return m.frozen
}

// sighting says when the source was first known to have a revision, or the target to be at it.
type sighting struct {
	revision keyspace.Revision
	at       clock.Time
}

// errAbandoned ends a run whose mirror is to be given up.
var errAbandoned = errors.New("the mirror is abandoned")

// errBehindCompaction says that the source cannot be read at the position. It goes away when
// the target comes further.
var errBehindCompaction = errors.New("the source has compacted the revision that the target is at; the comparison waits until the target is further")

// errLeaseLives says that the source has said of a lease that there is none, and it lives.
var errLeaseLives = errors.New("the source says that there is no such lease, and a key is attached to it")

// errDone ends the goroutines of a run whose cut-over is done.
var errDone = errors.New("the cut-over is done")

// step notes that the mirror has come to a step.
func (m *Mirror) step(s Step) error {
	m.mu.Lock()
	m.state.Step, m.status.Step = s, s
	m.mu.Unlock()
	return writeJSON(m.o.FS, m.o.Dir, stateName, m.state)
}

// remove removes a file of the directory, if it is there.
func (m *Mirror) remove(name string) error {
	if err := m.o.FS.Remove(m.o.FS.PathJoin(m.o.Dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
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
	if errors.Is(err, ErrLagging) || errors.Is(err, errStalled) || errors.Is(err, errBehindCompaction) || errors.Is(err, errLeaseLives) ||
		errors.Is(err, io.EOF) || errors.Is(err, context.DeadlineExceeded) || spool.IsNoSpace(err) {
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
	default:
		return false
	}
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

// rateSamples is over how many reports the speed is taken.
const rateSamples = 10

// measure notes how fast the position moves. past are the positions of the last reports.
func (m *Mirror) measure(past []sighting) []sighting {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := sighting{m.status.Position, m.o.Clock.Now()}
	if len(past) > 0 && past[0].revision == 0 {
		past = nil // it did not follow yet
	}
	if past = append(past, now); len(past) > rateSamples {
		past = past[1:]
	}
	m.status.RevisionsPerSecond = 0
	if took := now.at.Sub(past[0].at); took > 0 {
		m.status.RevisionsPerSecond = float64(now.revision-past[0].revision) / took.Seconds()
	}
	return past
}

// report writes the status again and again.
func (m *Mirror) report(ctx context.Context) error {
	var past []sighting
	for {
		m.noteSpool()
		past = m.measure(past)
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
	m.statusFile.Lock()
	defer m.statusFile.Unlock()
	return writeJSON(m.o.FS, m.o.Dir, statusName, m.now())
}
