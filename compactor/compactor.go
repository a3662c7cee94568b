package compactor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Cluster is the cluster that is compacted.
type Cluster interface {
	// Current returns the current revision.
	Current(ctx context.Context) (keyspace.Revision, error)
	// Compact raises the compacted revision. It returns kverror.Compacted if the revision is
	// compacted already.
	Compact(ctx context.Context, at keyspace.Revision) error
	// Leads says whether this node is the one that compacts.
	Leads() bool
}

// Options say what to keep. One of Period and Revisions is positive, the other 0.
type Options struct {
	Clock   clock.Clock
	Cluster Cluster
	// Period is for how long revisions are kept, at least 10 ns.
	Period time.Duration
	// Revisions is how many revisions are kept.
	Revisions int64
	Logger    *zap.Logger
}

const (
	// revisionInterval is the time between two compactions by number.
	revisionInterval = 5 * time.Minute
	// maxInterval is the longest time between two compactions by period. It is divided into looks.
	maxInterval = time.Hour
	looks       = 10
)

// Run compacts until ctx ends.
func Run(ctx context.Context, o Options) {
	if (o.Period > 0) == (o.Revisions > 0) || o.Period < 0 || o.Revisions < 0 || o.Period > 0 && o.Period < looks {
		panic(fmt.Sprintf("compactor: Period %v and Revisions %d, exactly one has to be positive", o.Period, o.Revisions))
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Period > 0 {
		o.periodic(ctx)
	} else {
		o.revisions(ctx)
	}
}

func (o *Options) periodic(ctx context.Context) {
	interval := min(o.Period, maxInterval)
	look := interval / looks
	// noted are the revisions of a period, the oldest first.
	noted, most := []keyspace.Revision(nil), int(o.Period/look)+1
	var done keyspace.Revision
	last, wait := o.Clock.Now(), o.Period
	for {
		if noted = append(noted, o.current(ctx, noted)); len(noted) > most {
			noted = noted[1:]
		}
		if clock.Sleep(ctx, o.Clock, look) != nil {
			return
		}
		at := noted[0]
		if !o.Cluster.Leads() || o.Clock.Now().Sub(last) < wait || at == done {
			continue
		}
		wait = interval // only the first one waits for a whole period
		if o.compact(ctx, at) {
			done, last = at, o.Clock.Now()
		}
	}
}

// current asks for the current revision. If nobody answers, the last known one replaces it; then
// less is compacted, never more.
func (o *Options) current(ctx context.Context, noted []keyspace.Revision) keyspace.Revision {
	rev, err := o.Cluster.Current(ctx)
	if err == nil || len(noted) == 0 {
		return rev
	}
	return noted[len(noted)-1]
}

func (o *Options) revisions(ctx context.Context) {
	var done keyspace.Revision
	for clock.Sleep(ctx, o.Clock, revisionInterval) == nil {
		if !o.Cluster.Leads() {
			continue
		}
		current, err := o.Cluster.Current(ctx)
		at := current - keyspace.Revision(o.Revisions)
		if err != nil || at <= 0 || at == done {
			continue
		}
		if o.compact(ctx, at) {
			done = at
		}
	}
}

// compact compacts below the revision, and returns whether everything below it is compacted.
func (o *Options) compact(ctx context.Context, at keyspace.Revision) bool {
	log := o.Logger.With(zap.Int64("revision", int64(at)), zap.Duration("period", o.Period), zap.Int64("revisions", o.Revisions))
	if err := o.Cluster.Compact(ctx, at); err != nil && !errors.Is(err, kverror.Compacted) {
		log.Warn("automatic compaction failed", zap.Error(err))
		return false
	}
	log.Info("compacted automatically")
	return true
}
