package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// BackupOptions say how a backup is made.
type BackupOptions struct {
	backup.Options
	// Incremental goes on with the newest chain: it takes the newest version of each key that has changed.
	Incremental bool
	// Resume goes on with a backup that was broken off, if there is one. Its hold must not have ended.
	Resume bool
}

// Backup makes one backup. It returns nil if an incremental one has nothing to add.
func Backup(ctx context.Context, c *Cluster, r *backup.Repository, o BackupOptions) (*backup.Manifest, error) {
	client := dataapi.NewClient(c.Client.ActiveConnection(), c.Clock)
	var from keyspace.Revision
	var chain string
	cluster, err := clusterOf(ctx, c)
	if err != nil {
		return nil, err
	}
	if o.Incremental {
		if chain, from, err = r.Latest(ctx, cluster); err != nil {
			return nil, fmt.Errorf("go on with a chain: %w", err)
		}
	}
	var draft *backup.Draft
	if o.Resume {
		if draft, err = r.Unfinished(ctx, cluster); err != nil {
			return nil, err
		}
	}
	cut, err := client.Cut(ctx, cutOptions(draft, from))
	if err != nil {
		return nil, err
	}
	held, stop := c.hold(ctx, client, cut)
	defer stop()
	if o.Incremental && draft == nil && cut.Revision == from {
		return nil, nil
	}
	if draft == nil {
		kind := backup.Full
		if o.Incremental {
			kind = backup.Tombstones
		}
		if draft, err = begin(ctx, r, cut, chain, kind, from); err != nil {
			return nil, err
		}
	}
	name, number := draft.Chain()
	c.Report("cluster %s, chain %s, backup %d: %s at revision %d", cluster, name, number, draft.Cut().Kind, draft.Cut().Revision)
	return r.Write(held, draft, source{client, draft.Cut()}, o.Options)
}

// cutOptions are those of a new backup, or of one that goes on: it needs what its first run has held.
func cutOptions(draft *backup.Draft, from keyspace.Revision) dataapi.CutOptions {
	o := dataapi.CutOptions{Owner: "backup"}
	switch {
	case draft != nil && draft.Cut().Kind == backup.Full:
		o.From = max(draft.Cut().Compacted, 1)
	case draft != nil:
		o.From = draft.Cut().Previous
	default:
		o.From = from // nothing above it may be there yet
	}
	return o
}

// begin notes a new backup of the cut.
func begin(ctx context.Context, r *backup.Repository, cut *dataapi.Cut, chain string, kind backup.Kind, previous keyspace.Revision) (*backup.Draft, error) {
	b := backup.Cut{Kind: kind, Revision: cut.Revision, Previous: previous, Compacted: max(cut.Compacted, 0), Time: cut.Time}
	b.Points = []backup.Point{{Time: cut.Time, Revision: cut.Revision}}
	for _, l := range cut.Leases {
		b.Leases = append(b.Leases, backup.Lease{ID: l.ID, TTLSeconds: l.TTL, RemainingSeconds: int64(l.Remaining / time.Second)})
	}
	var err, also error
	b.Users, err = encodeUsers(cut.Access)
	b.Settings, also = encodeSettings(cut.Settings)
	if err = errors.Join(err, also); err != nil {
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
func Follow(ctx context.Context, c *Cluster, r *backup.Repository, o FollowOptions) error {
	client := dataapi.NewClient(c.Client.ActiveConnection(), c.Clock)
	f := follower{c: c, r: r, o: o, client: client}
	defer func() {
		if f.stop != nil {
			f.stop()
		}
	}()
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
	// hold is the standing one, and stop ends it. chain ends at revision last; it began at began.
	hold  fsm.HoldID
	held  context.Context
	stop  func()
	chain string
	last  keyspace.Revision
	began clock.Time
}

// once makes one backup, nil if nothing has changed.
func (f *follower) once(ctx context.Context) (*backup.Manifest, error) {
	full := f.hold == 0 || f.o.FullEvery > 0 && f.c.Clock.Now().Sub(f.began) >= f.o.FullEvery
	if f.held != nil && f.held.Err() != nil {
		f.c.Report("the hold of old versions has ended, so a full backup is made: %v", context.Cause(f.held))
		f.end()
		full = true
	}
	o := dataapi.CutOptions{Owner: "backup follow", Hold: f.hold}
	if !full {
		o.From = f.last
	}
	if full {
		f.end()
		o.Hold = 0
	}
	cut, err := f.client.Cut(ctx, o)
	if err != nil {
		return nil, err
	}
	if f.hold == 0 {
		f.hold = cut.Hold
		f.held, f.stop = f.c.hold(ctx, f.client, cut)
	}
	kind := backup.Versions
	if full {
		kind, f.chain, f.last = backup.Full, "", 0
	} else if cut.Revision == f.last {
		return nil, nil
	}
	draft, err := begin(ctx, f.r, cut, f.chain, kind, f.last)
	if err != nil {
		f.end() // another writer, or a target that cannot be written: what is there is not known
		return nil, err
	}
	m, err := f.r.Write(f.held, draft, source{f.client, draft.Cut()}, f.o.Options)
	if err != nil {
		f.end()
		return nil, err
	}
	if full {
		f.began = f.c.Clock.Now()
	}
	f.chain, f.last = m.Chain, m.Revision
	return m, nil
}

// end ends the standing hold: the next backup is a full one.
func (f *follower) end() {
	if f.stop != nil {
		f.stop()
	}
	f.hold, f.held, f.stop = 0, nil, nil
}

// source reads the versions of a backup from the cluster.
type source struct {
	client *dataapi.Client
	cut    backup.Cut
}

// Read implements backup.Source.
func (s source) Read(ctx context.Context, span keyspace.Span, emit func(b []byte) error) error {
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
	w := block.NewWriter(block.ByKey, func(b []byte, _ block.Sum) error { return emit(b) })
	for {
		v, err := vs.Next()
		if errors.Is(err, io.EOF) {
			return w.Flush()
		}
		if err == nil {
			err = w.Add(v)
		}
		if err != nil {
			return err
		}
	}
}

// encodeUsers and encodeSettings are what a backup has of a cluster beside keys. Nobody but a cluster reads it.
func encodeUsers(rows []fsm.AccessRow) ([]byte, error) { return json.Marshal(rows) }

func encodeSettings(all []fsm.Setting) ([]byte, error) { return json.Marshal(all) }
