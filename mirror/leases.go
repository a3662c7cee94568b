package mirror

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

// lookupLeases returns the granted TTLs of leases at the source. One that is gone there is left out: its keys go with a
// later revision.
func (m *Mirror) lookupLeases(ctx context.Context, ids []keyspace.LeaseID) (map[keyspace.LeaseID]int64, error) {
	living := make(map[keyspace.LeaseID]int64, len(ids))
	var unknown []keyspace.LeaseID
	m.mu.Lock()
	for _, id := range ids {
		if ttl, known := m.leases[id]; known {
			living[id] = ttl
		} else {
			unknown = append(unknown, id)
		}
	}
	m.mu.Unlock()
	ttls, err := diff.TTLs(ctx, m.o.SourceData, unknown)
	if err != nil {
		return nil, err
	}
	maps.Copy(living, ttls)
	m.mu.Lock()
	defer m.mu.Unlock()
	// What was looked up saves time at the cut-over. It is no loss to forget it.
	if len(m.leases) > maxLeases {
		m.leases = maps.Clone(living)
	}
	maps.Copy(m.leases, ttls)
	return living, nil
}

// checkEnded checks that the leases of versions that are not among the living have ended.
//
// A member of etcd that has just been started may not know yet what was granted last. The others ask it for as long as they
// think that it leads, and then its answer is that there is no such lease. A key would come without being attached, and outlive
// its lease at the target. But a key that is at the source as a version has it is attached there, so the version's lease lives.
// One that is there no more as the version has it comes in a later revision again.
func (m *Mirror) checkEnded(ctx context.Context, versions []mvcc.Version, living map[keyspace.LeaseID]int64) error {
	newest := make(map[string]*mvcc.Version, len(versions))
	for i := range versions {
		newest[string(versions[i].Key)] = &versions[i]
	}
	ended := slices.DeleteFunc(slices.Collect(maps.Values(newest)), func(v *mvcc.Version) bool {
		_, lives := living[v.Lease]
		return lives || v.Lease == 0
	})
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(endedLookups)
	for some := range slices.Chunk(ended, diff.LookupKeys) {
		g.Go(func() error {
			keys := make([][]byte, len(some))
			for i, v := range some {
				keys[i] = v.Key
			}
			written, err := m.o.SourceData.Written(ctx, keys)
			if err != nil {
				return err
			}
			for i, v := range some {
				if written[i] == v.Mod {
					return fmt.Errorf("lease %x of key %q: %w", int64(v.Lease), v.Key, errLeaseLives)
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// endedLookups is how many requests of checkEnded are under way at a time.
const endedLookups = 32

// forgetLeases has all TTLs looked up anew: a lease may have ended, and its id be granted again with another one.
func (m *Mirror) forgetLeases() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leases = map[keyspace.LeaseID]int64{}
}

// maxLeases bounds the leases whose TTLs are kept while the source is followed.
const maxLeases = 1 << 20

const (
	// sweepEvery is the pause between two looks for leases that have ended at the source, by default.
	sweepEvery = 30 * time.Second
	// sweepBatch is the largest number of leases that are taken back while no batch is brought.
	sweepBatch = 1000
)

// sweepLeases takes leases back that have ended at the source, again and again. It only tidies up, so no failure of it ends the
// mirror: the next turn tries again, and the cut-over takes back what is left.
func (m *Mirror) sweepLeases(ctx context.Context) error {
	failed := false
	for {
		if err := clock.Sleep(ctx, m.o.Clock, m.o.SweepEvery); err != nil {
			return err
		}
		err := m.retry(ctx, "take back leases that have ended", func() error { return m.sweep(ctx) })
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errDone):
			return nil
		case errors.Is(err, rpctypes.ErrUserEmpty) && m.isFrozen(ctx):
			return nil // the target checks users by now, before it serves
		case err != nil:
			m.wait(err.Error())
		case failed:
			m.wait("")
		}
		failed = err != nil
	}
}

// sweep takes leases back that have ended at the source and that no key of the target is attached to.
//
// Those that the target has are ending, until one is seen alive or a batch attaches a key to it. One that stays was dead at
// the source at a later moment. The revisions up to that moment delete all its keys. Once the target has
// these revisions, nothing is attached.
func (m *Mirror) sweep(ctx context.Context) error {
	has, err := m.o.TargetData.Leases(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.ending = make(map[keyspace.LeaseID]bool, len(has))
	for _, id := range has {
		m.ending[id] = true
	}
	m.mu.Unlock()
	alive, err := m.o.SourceData.Leases(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.spare(alive)
	m.mu.Unlock()
	_, rev, err := m.o.Source.Now(ctx)
	if err != nil {
		return err
	}
	m.saw(rev)
	for m.position() < rev {
		if err := clock.Sleep(ctx, m.o.Clock, requestEvery); err != nil {
			return err
		}
	}
	for {
		more, err := m.takeBack(ctx)
		if err != nil || !more {
			return err
		}
	}
}

// spare takes leases out of those that are ending. Mirror.mu is held.
func (m *Mirror) spare(ids []keyspace.LeaseID) {
	for _, id := range ids {
		delete(m.ending, id)
	}
}

// takeBack takes some of the leases back that are ending, and says whether there are more.
func (m *Mirror) takeBack(ctx context.Context) (more bool, err error) {
	if err := m.bringing(ctx); err != nil {
		return false, err
	}
	defer m.follow.unlock()
	m.mu.Lock()
	var ended []keyspace.LeaseID
	for id := range m.ending {
		if len(ended) == sweepBatch {
			more = true
			break
		}
		ended = append(ended, id)
		delete(m.leases, id) // its id may be granted again
	}
	m.spare(ended)
	m.mu.Unlock()
	if len(ended) == 0 {
		return false, nil
	}
	slices.Sort(ended)
	return more, m.o.Target.Follow(ctx, m.state.Nonce, Batch{UpTo: m.position(), Ended: ended})
}
