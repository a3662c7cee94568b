package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

// Source is the etcd that is followed. All methods may be called from many goroutines.
type Source interface {
	// Expect says by its cluster id which source is meant. An answer of another cluster is an error from then on.
	Expect(cluster uint64)
	// Now returns the cluster id and the present revision, read linearizably.
	Now(ctx context.Context) (cluster uint64, revision keyspace.Revision, err error)
	// Watch sends what happens to all keys from a revision on, until ctx ends or the stream
	// breaks; it always returns an error. That is a *CompactedError if the source has
	// removed the revision.
	Watch(ctx context.Context, from keyspace.Revision, out chan<- Part) error
	// Snapshot writes the database file of a member whose revision is atLeast or higher. The
	// error is ErrLagging if no member is there yet.
	Snapshot(ctx context.Context, atLeast keyspace.Revision, w io.Writer) error
	// Compacted returns the source's compacted revision, 0 if it is none or cannot be told.
	Compacted(ctx context.Context) (keyspace.Revision, error)
}

// Part is an answer of a watch, or a fragment of one.
type Part struct {
	// Cluster is the cluster id of the member that sent it.
	Cluster uint64
	// Revision is that of the member. It is 0 if it was not told.
	Revision keyspace.Revision
	// Events are in order of revision, and within one in the order of its operations. Sub
	// is not set.
	Events []mvcc.Version
	// More says that the last revision may go on in the next Part.
	More bool
	// Sparse says that the source may have revisions without events, as a Skein has behind a crash. An etcd has none: there
	// a gap is a loss.
	Sparse bool
	// Through is the revision up to which a sparse source has sent everything, 0 if it does not say.
	Through keyspace.Revision
}

// CompactedError says that a watch began at or below the source's compacted revision.
type CompactedError struct{ Compacted keyspace.Revision }

func (e *CompactedError) Error() string {
	return fmt.Sprintf("the source has compacted revision %d", e.Compacted)
}

// ErrLagging says that no member of the source has reached a revision yet.
var ErrLagging = errors.New("no member of the source that answers has reached the revision at which the watch began")

// Phase is what a target is about.
type Phase string

// The phases of a target.
const (
	TargetEmpty     Phase = "empty"
	TargetLoading   Phase = "loading"
	TargetServing   Phase = "serving"
	TargetAbandoned Phase = "abandoned"
)

// Target is the cluster that is loaded. Every method may be repeated after an error whose
// effect is not known: a repeat does no harm. Another loader's nonce is an error.
type Target interface {
	// State returns the phase and, while loading, the revision up to which everything is
	// there and visible.
	State(ctx context.Context, nonce string) (Phase, keyspace.Revision, error)
	// Import loads a database file, from its beginning or where an earlier call ended. Its
	// revision is then the target's position. What it returns is always that of the whole file.
	Import(ctx context.Context, nonce, path string) (Imported, error)
	// Follow adds a batch. Its error has code DataLoss if a version does not follow on what the target has: by create
	// revision, version, or as the end of a key that is not there.
	Follow(ctx context.Context, nonce string, b Batch) error
	// Finish opens the target for its clients. Its next revision is Finish.Revision+1.
	Finish(ctx context.Context, nonce string, f Finish) error
	// Abandon gives the load up.
	Abandon(ctx context.Context, nonce string) error
}

// Sum is by what a target finds that it lacks a version, or has one that the source has not: the
// number of versions and the sum of their hashes (mvcc.HashWrite). Earlier writes of a
// transaction count as versions.
type Sum struct {
	Versions uint64 `json:"versions"`
	Hashes   uint64 `json:"hashes"`
}

// Add adds a version with its earlier writes.
func (s *Sum) Add(v *mvcc.Version) {
	for w := v; w != nil; w = w.Earlier {
		s.Versions++
		s.Hashes += mvcc.HashWrite(w)
	}
}

// Imported is what a database file has.
type Imported struct {
	// Compacted is 0 for none.
	Revision, Compacted keyspace.Revision
	Sum                 Sum
}

// Batch is what a target is to add.
type Batch struct {
	// Versions are in the order of (Mod, Sub), above the position.
	Versions []mvcc.Version
	// UpTo becomes the position. It is the old one as long as more versions of the next revision
	// are to come.
	UpTo keyspace.Revision
	// Leases are those of Versions that live, with their granted TTLs in seconds. The others
	// attach nothing.
	Leases map[keyspace.LeaseID]int64
	// Ended are leases that have ended at the source, and that no key is attached to at UpTo. The target takes them
	// back, so that it does not keep each lease that the source ever had.
	Ended []keyspace.LeaseID
}

// Finish is the end of a load.
type Finish struct {
	// Revision is the last one of the source, and the position of the target.
	Revision keyspace.Revision `json:"revision"`
	// Compacted is the source's compacted revision, 0 if not known.
	Compacted keyspace.Revision `json:"compacted"`
	// Keys is the number of keys at Revision.
	Keys int64 `json:"keys"`
	// Sum is that of all versions: of the file, and of what followed.
	Sum Sum `json:"sum"`
	// Leases are those of the source with their granted TTLs in seconds. They begin anew,
	// as they do when etcd's leader changes.
	Leases map[keyspace.LeaseID]int64 `json:"leases"`
}

// Options say what is mirrored.
type Options struct {
	FS    vfs.FS
	Dir   string
	Clock clock.Clock
	// Source and Target are the two clusters, SourceData and TargetData their keys and
	// leases.
	Source                 Source
	Target                 Target
	SourceData, TargetData diff.Reader
	// SnapshotRevision reads the revision of a database file.
	SnapshotRevision func(path string) (keyspace.Revision, error)
	// Nonce names this load to the target. It is used for a new directory only.
	Nonce string
	// VerifyBytesPerSecond bounds the verification; 0 for 16 MiB.
	VerifyBytesPerSecond int64
	// SweepEvery is the pause between two looks for leases that have ended at the source; 0 for half a minute.
	SweepEvery time.Duration
	// Prepare, if not nil, is called before the source has to stand still for the cut-over, for what takes long, and once more
	// right before the target is opened. A *Refusal calls the cut-over off.
	Prepare func(context.Context) error
	// Progress, if not nil, is called each second.
	Progress func(Status)
}

// A Stop ends a mirror for good: to start it again would not help.
type Stop struct {
	// Reason is what happened, Next what to do.
	Reason, Next string
}

func (s *Stop) Error() string { return s.Reason + ": " + s.Next }

// A Refusal says why the target cannot be opened now. The mirror goes on.
type Refusal struct {
	// Reason is what hinders it, Next what to do.
	Reason string `json:"reason"`
	Next   string `json:"next"`
}

func (r *Refusal) Error() string { return r.Reason + ": " + r.Next }

// anew is what helps where the copy cannot be continued.
const anew = "begin anew: `skein mirror abandon`, then start with an empty cluster and another --spool"

func stopf(format string, args ...any) error {
	return &Stop{Reason: fmt.Sprintf(format, args...), Next: anew}
}
