package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// BackupOptions say how a backup is made.
type BackupOptions struct {
	backup.Options
	// Incremental goes on with the newest chain: it takes the newest version of each key that has changed.
	Incremental bool
	// Resume goes on with a backup that was broken off, if there is one. Its hold must not have ended.
	Resume bool
}

// Backup makes one backup. It returns nil if an incremental one has nothing to add. If the cluster has removed what an
// incremental one needs, it is a full one.
func Backup(ctx context.Context, c *Cluster, r *backup.Repository, o BackupOptions) (m *backup.Manifest, err error) {
	client := dataapi.NewClient(c.Client.ActiveConnection(), c.Clock)
	cluster, err := clusterOf(ctx, c)
	if err != nil {
		return nil, err
	}
	if o.Resume {
		draft, err := r.Unfinished(ctx, cluster)
		if err != nil {
			return nil, err
		}
		if draft != nil {
			return resume(ctx, c, client, r, draft, o)
		}
	}
	if o.Incremental {
		m, err := incremental(ctx, c, client, r, cluster, o)
		var anew *fullNeeded
		if !errors.As(err, &anew) {
			return m, err
		}
		c.Report("%s, so a full backup is made", anew.why)
	}
	cut, err := client.Cut(ctx, dataapi.CutOptions{Kind: dataapi.KindBackup, Owner: owner()})
	if err != nil {
		return nil, err
	}
	return write(ctx, c, client, r, cut, "", 0, o)
}

// fullNeeded says why an incremental backup cannot be made.
type fullNeeded struct{ why string }

// Error implements error.
func (e *fullNeeded) Error() string { return e.why }

// incremental adds to the newest chain, nil if nothing has changed. A *fullNeeded says that the cluster has not kept what
// that takes.
func incremental(ctx context.Context, c *Cluster, client *dataapi.Client, r *backup.Repository, cluster keyspace.ClusterID, o BackupOptions) (*backup.Manifest, error) {
	chain, from, err := r.Latest(ctx, cluster)
	if err != nil {
		return nil, fmt.Errorf("go on with a chain: %w", err)
	}
	cut, err := client.Cut(ctx, dataapi.CutOptions{Kind: dataapi.KindBackup, Owner: owner(), From: from})
	if compacted(err) {
		return nil, &fullNeeded{fmt.Sprintf("revision %d is compacted: nobody has kept the versions since then", from)}
	}
	if err != nil {
		return nil, err
	}
	if cut.Revision == from {
		_, stop := c.hold(ctx, client, cut)
		stop(true)
		return nil, nil
	}
	m, err := write(ctx, c, client, r, cut, chain, from, o)
	if dataapi.IsHoldEnded(err) {
		return nil, &fullNeeded{fmt.Sprintf("the cluster does not keep the versions since revision %d any more: %v", from, err)}
	}
	return m, err
}

// write makes a backup of a cut: a full one begins a chain, and chain is empty.
func write(ctx context.Context, c *Cluster, client *dataapi.Client, r *backup.Repository, cut *dataapi.Cut, chain string, from keyspace.Revision, o BackupOptions) (*backup.Manifest, error) {
	kind := backup.Full
	if chain != "" {
		kind = backup.Tombstones
	}
	held, stop := c.hold(ctx, client, cut)
	draft, err := begin(ctx, r, cut, chain, kind, from)
	if err != nil {
		stop(true)
		return nil, err
	}
	return finish(held, stop, c, client, r, draft, o)
}

// resume goes on with a backup. It needs what the first run has held.
func resume(ctx context.Context, c *Cluster, client *dataapi.Client, r *backup.Repository, draft *backup.Draft, o BackupOptions) (*backup.Manifest, error) {
	cut, err := client.Cut(ctx, dataapi.CutOptions{Hold: fsm.HoldID(draft.Cut().Hold)})
	if dataapi.IsHoldEnded(err) {
		return nil, fmt.Errorf("the backup at revision %d cannot be gone on with, since the cluster does not keep what it needs any more: make a new one, without --resume (%w)", draft.Cut().Revision, err)
	}
	if err != nil {
		return nil, err
	}
	held, stop := c.hold(ctx, client, cut)
	return finish(held, stop, c, client, r, draft, o)
}

// finish writes what is missing of a backup. If that fails the hold stands until it expires, for another run.
func finish(held context.Context, stop func(release bool), c *Cluster, client *dataapi.Client, r *backup.Repository, draft *backup.Draft, o BackupOptions) (*backup.Manifest, error) {
	name, number := draft.Chain()
	c.Report("chain %s, backup %d: %s at revision %d", name, number, draft.Cut().Kind, draft.Cut().Revision)
	t := c.teller()
	o.Progress = func(p backup.Progress) {
		t.say("%d of %d spans, %d versions, %d bytes of keys and values, %d stored", p.SpansDone, p.Spans, p.Versions, p.Bytes, p.StoredBytes)
	}
	m, err := r.Write(held, draft, source{client, draft.Cut()}, o.Options)
	if cause := context.Cause(held); err != nil && dataapi.IsHoldEnded(cause) {
		err = cause // and not what that has broken off
	}
	ended := dataapi.IsHoldEnded(err)
	late := ended && client.Renew(held, fsm.HoldID(draft.Cut().Hold), 0) == nil
	stop(err == nil || ended)
	switch {
	case late:
		return nil, fmt.Errorf("a client's compaction came before the hold of old versions was everywhere: make a new backup, without --resume: %w", err)
	case ended:
		return nil, fmt.Errorf("the hold of old versions has ended, by skein hold release or since nobody could renew it: make a new backup, without --resume: %w", err)
	case err != nil:
		return nil, fmt.Errorf("%w (for %v the cluster keeps what is missing: --resume goes on)", err, dataapi.HoldLife)
	}
	return m, nil
}

// compacted says that a revision cannot be held, since it is compacted.
func compacted(err error) bool {
	s := status.Convert(err)
	return err != nil && s.Code() == codes.OutOfRange && strings.Contains(s.Message(), rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted))
}

// begin notes a new backup of the cut.
func begin(ctx context.Context, r *backup.Repository, cut *dataapi.Cut, chain string, kind backup.Kind, previous keyspace.Revision) (*backup.Draft, error) {
	b := backup.Cut{Kind: kind, Revision: cut.Revision, Previous: previous, Compacted: max(cut.Compacted, 0), Time: cut.Time, Hold: uint64(cut.Hold)}
	b.Points = []backup.Point{{Time: cut.Time, Revision: cut.Revision}}
	for _, l := range cut.Leases {
		b.Leases = append(b.Leases, backup.Lease{ID: l.ID, TTLSeconds: l.TTL, RemainingSeconds: int64(l.Remaining / time.Second)})
	}
	var err error
	if b.Users, err = encodeUsers(cut.Access); err != nil {
		return nil, err
	}
	return r.Begin(ctx, cut.Cluster, chain, b, cut.Borders)
}

// FollowOptions say how often a chain grows.
type FollowOptions struct {
	backup.Options
	// Interval is the pause between two backups, FullEvery the age at which a chain is begun anew.
	Interval, FullEvery time.Duration
}

// Follow makes backups until ctx ends: a full one, then every version since the last one, so that the state at any
// revision can be restored. If what it needs is not held any more, as after a long stop, it begins a chain and says so.
// A target that cannot be written for a while costs nothing but the points of that time.
func Follow(ctx context.Context, c *Cluster, r *backup.Repository, o FollowOptions) error {
	f := follower{c: c, r: r, o: o, client: dataapi.NewClient(c.Client.ActiveConnection(), c.Clock)}
	defer f.end()
	for {
		began := c.Clock.Now()
		m, err := f.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			c.Report("a backup has failed, and is tried again in %v: %v", o.Interval, err)
		} else if m != nil {
			c.Report("chain %s, backup %d: %s at revision %d, %d versions", m.Chain, m.Number, m.Kind, m.Revision, m.Sum.Versions)
		}
		if clock.Sleep(ctx, c.Clock, max(0, o.Interval-c.Clock.Now().Sub(began))) != nil {
			return nil
		}
	}
}

type follower struct {
	c      *Cluster
	r      *backup.Repository
	o      FollowOptions
	client *dataapi.Client
	// chain ends at revision last; it is empty where a full backup is due. The hold keeps all above last.
	chain string
	last  keyspace.Revision
	hold  fsm.HoldID
	held  context.Context
	stop  func(release bool)
	// fullAt is when the next full backup is due.
	fullAt clock.Time
}

// once makes one backup, nil if nothing has changed.
func (f *follower) once(ctx context.Context) (*backup.Manifest, error) {
	now := f.c.Clock.Now()
	if f.chain != "" && (f.o.FullEvery == 0 || now < f.fullAt) {
		held := f.held
		m, err := f.increment(ctx)
		if cause := context.Cause(held); err != nil && dataapi.IsHoldEnded(cause) {
			err = cause // and not what that has broken off
		}
		if !dataapi.IsHoldEnded(err) {
			return m, err
		}
		f.c.Report("the hold of old versions has ended, by skein hold release or since nobody could renew it, so a full backup is made: %v", err)
		f.end()
	}
	m, err := f.full(ctx)
	if err != nil {
		f.fullAt = now.Add(fullRetry) // the old chain goes on meanwhile
	}
	return m, err
}

// fullRetry is the pause between attempts to begin a chain while another one goes on.
const fullRetry = 10 * time.Minute

// full begins a chain. The one before is given up once it is there.
func (f *follower) full(ctx context.Context) (*backup.Manifest, error) {
	cut, err := f.client.Cut(ctx, dataapi.CutOptions{Kind: dataapi.KindFollow, Owner: owner()})
	if err != nil {
		return nil, err
	}
	held, stop := f.c.hold(ctx, f.client, cut)
	m, err := f.write(ctx, held, cut, "", backup.Full, 0)
	if err != nil {
		stop(true)
		return nil, err
	}
	f.end()
	f.chain, f.last, f.hold, f.held, f.stop = m.Chain, m.Revision, cut.Hold, held, stop
	f.fullAt = f.c.Clock.Now().Add(f.o.FullEvery)
	return m, nil
}

// increment adds to the chain.
func (f *follower) increment(ctx context.Context) (*backup.Manifest, error) {
	cut, err := f.client.Cut(ctx, dataapi.CutOptions{Hold: f.hold, From: f.last})
	if err != nil || cut.Revision == f.last {
		return nil, err
	}
	m, err := f.write(ctx, f.held, cut, f.chain, backup.Versions, f.last)
	if errors.Is(err, backup.ErrTaken) {
		f.end() // another writer goes on with the chain
	}
	if err != nil {
		return nil, err
	}
	f.last = m.Revision
	return m, nil
}

func (f *follower) write(ctx, held context.Context, cut *dataapi.Cut, chain string, kind backup.Kind, previous keyspace.Revision) (*backup.Manifest, error) {
	draft, err := begin(ctx, f.r, cut, chain, kind, previous)
	if errors.Is(err, backup.ErrTaken) {
		// It may be this follower's: the last attempt at the same revision has failed.
		own, ownErr := f.r.Unfinished(ctx, cut.Cluster)
		if ownErr == nil && own != nil && own.Cut().Hold == uint64(cut.Hold) && own.Cut().Revision == cut.Revision {
			draft, err = own, nil
		}
	}
	if err != nil {
		return nil, err
	}
	return f.r.Write(held, draft, source{f.client, draft.Cut()}, f.o.Options)
}

// end ends the chain and its hold: the next backup is a full one.
func (f *follower) end() {
	if f.stop != nil {
		f.stop(true)
	}
	f.chain, f.last, f.hold, f.held, f.stop = "", 0, 0, nil, nil
}

// source reads the versions of a backup from the cluster.
type source struct {
	client *dataapi.Client
	cut    backup.Cut
}

// Read implements backup.Source.
func (s source) Read(ctx context.Context, span keyspace.Span, emit func(b []byte, vs []mvcc.Version) error) error {
	what := mvcc.Cut{At: s.cut.Revision}
	switch s.cut.Kind {
	case backup.Full:
		what.Select, what.After = mvcc.SelectKept, s.cut.Compacted
	case backup.Versions:
		what.Select, what.After = mvcc.SelectAll, s.cut.Previous
	case backup.Tombstones:
		what.Select, what.After = mvcc.SelectChanges, s.cut.Previous
	default:
		return fmt.Errorf("a backup of kind %q", s.cut.Kind)
	}
	vs := s.client.Read(ctx, dataapi.ReadOptions{Cut: what, Span: span})
	defer vs.Close()
	for {
		b, of, err := vs.NextBlock()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = emit(b, of)
		}
		if err != nil {
			return err
		}
	}
}

// decodeUsers reads what encodeUsers wrote.
func decodeUsers(b []byte) (*rights.State, error) {
	var rows []fsm.AccessRow
	if err := json.Unmarshal(b, &rows); err != nil {
		return nil, fmt.Errorf("users and roles of the backup: %w", err)
	}
	s, err := fsm.AccessOf(rows)
	if err != nil {
		return nil, fmt.Errorf("users and roles of the backup: %w", err)
	}
	return s, nil
}

// encodeUsers is what a backup has of users and roles. Nobody but a cluster reads it.
func encodeUsers(rows []fsm.AccessRow) ([]byte, error) { return json.Marshal(rows) }
