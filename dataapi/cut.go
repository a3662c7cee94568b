package dataapi

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
)

// The kinds of cuts.
const (
	KindBackup   = "backup"
	KindFollow   = "backup follow"
	KindExport   = "export"
	KindMirror   = "mirror"
	KindSnapshot = "snapshot" // etcd's Maintenance.Snapshot
)

// HoldLife is how long a hold lasts that nobody renews. LostLeaseTTL is the TTL of a lease of which a cut has keys
// and no record.
const (
	HoldLife     = time.Hour
	LostLeaseTTL = time.Minute
)

// Holds keeps old versions; placement's client does.
type Holds interface {
	PutHold(ctx context.Context, o fsm.PutHold) (fsm.Hold, error)
	EndHold(ctx context.Context, id fsm.HoldID) error
}

// Records are what a cut has beside keys; placement's client has them.
type Records interface {
	ListLeases(ctx context.Context) ([]placement.LeaseStatus, keyspace.Revision, error)
	AccessRows(ctx context.Context) ([]fsm.AccessRow, error)
	RangeMap(ctx context.Context) ([]keyspace.Descriptor, error)
}

// Keys reads the keyspace; the router does.
type Keys interface {
	// Present returns the current revision, and the cluster's compacted one, -1 for none.
	Present(ctx context.Context) (current, compacted keyspace.Revision, err error)
	// ReadCut passes pages of versions to send.
	ReadCut(ctx context.Context, c mvcc.Cut, from mvcc.VersionCursor, end []byte, send func(p *rangeapi.VersionsPage, next *mvcc.VersionCursor) error) error
}

// Options are what a Cutter is made of.
type Options struct {
	Cluster keyspace.ClusterID
	Holds   Holds
	Records Records
	Keys    Keys
	Clock   clock.Clock
	Logger  *zap.Logger
}

// Cutter makes cuts through the whole store, and reads them, on a node. It may be used from many goroutines.
type Cutter struct{ o Options }

// NewCutter returns a Cutter.
func NewCutter(o Options) *Cutter { return &Cutter{o} }

// Lease is a lease of a cut.
type Lease struct {
	ID keyspace.LeaseID
	// TTL is what was granted, in seconds. Remaining is the rest of it, 0 or less for an overdue lease.
	TTL       int64
	Remaining time.Duration
}

// Cut is the whole store at one revision: what it has beside keys, and the hold that keeps those.
type Cut struct {
	Hold fsm.HoldID
	// Held is the lowest revision that is held, Revision that of the cut.
	Held, Revision keyspace.Revision
	// Compacted is the cluster's compacted revision, -1 for none.
	Compacted keyspace.Revision
	Cluster   keyspace.ClusterID
	// Time is when Revision was the current one, by the clock of the node that was asked.
	Time time.Time
	// Leases are in the order of their ids: those of a moment before the revision, and of one behind it.
	Leases []Lease
	// Access are users and roles, see fsm.AccessOf.
	Access []fsm.AccessRow
	// Borders are the first keys of all ranges but the first one, ascending.
	Borders [][]byte
}

// CutOptions say from which revision on a cut is held.
type CutOptions struct {
	// Kind says for people why the cut is made, and Owner who makes it. skein hold list shows both.
	Kind, Owner string
	// From is the lowest revision to hold, 0 for the compacted one of now.
	From keyspace.Revision
	// Hold, if not 0, is that of an earlier cut. It is renewed, and moved up to From.
	Hold fsm.HoldID
}

// Cut makes a cut. The caller renews the hold and releases it. If there is an error, a new hold is released.
// HoldEnded says that the earlier cut's has ended, Compacted that From is compacted already.
func (c *Cutter) Cut(ctx context.Context, o CutOptions) (*Cut, error) {
	put := fsm.PutHold{Create: o.Hold == 0, ID: o.Hold, Kind: o.Kind, Owner: o.Owner, Revision: o.From, Life: HoldLife}
	if len(o.Kind) > fsm.MaxHoldKindBytes || len(o.Owner) > fsm.MaxHoldOwnerBytes || o.From < 0 {
		return nil, kverror.New(kverror.BadRequest, "a cut from revision %d on, of a kind of %d bytes, at most %d, by an owner of %d, at most %d",
			o.From, len(o.Kind), fsm.MaxHoldKindBytes, len(o.Owner), fsm.MaxHoldOwnerBytes)
	}
	if put.Create {
		var id [8]byte
		_, _ = rand.Read(id[:]) // it never fails
		put.ID = fsm.HoldID(max(binary.BigEndian.Uint64(id[:]), 1))
	}
	h, err := c.o.Holds.PutHold(ctx, put)
	if err != nil {
		return nil, err
	}
	cut := &Cut{Hold: h.ID, Held: h.Revision, Cluster: c.o.Cluster}
	if err := c.fill(ctx, cut); err != nil {
		if put.Create {
			_ = c.ReleaseSoon(ctx, h.ID) // it expires
		}
		return nil, err
	}
	return cut, nil
}

// releaseTimeout bounds how long a hold is released for somebody who has gone.
const releaseTimeout = 5 * time.Second

// ReleaseSoon ends a hold though its owner may have gone, within seconds. If that fails the hold expires, and the log
// says so.
func (c *Cutter) ReleaseSoon(ctx context.Context, id fsm.HoldID) error {
	ctx, cancel := clock.WithTimeout(context.WithoutCancel(ctx), c.o.Clock, releaseTimeout)
	defer cancel()
	err := c.o.Holds.EndHold(ctx, id)
	if err != nil {
		c.o.Logger.Warn("a hold of old versions could not be released, and ends when it expires", zap.Stringer("hold", id), zap.Error(err))
	}
	return err
}

// Hold renews a hold in the background until stop is called. The context that it returns ends with ctx, or once the
// hold has ended or could not be renewed for its whole life; its cause says why.
func (c *Cutter) Hold(ctx context.Context, id fsm.HoldID) (held context.Context, stop func()) {
	return keepHold(ctx, c.o.Clock, func(ctx context.Context) error {
		_, err := c.Renew(ctx, id, 0)
		return err
	})
}

// Each calls f with the versions of a cut, see Read.
func (c *Cutter) Each(ctx context.Context, cut mvcc.Cut, f func(*mvcc.Version) error) error {
	return c.Read(ctx, cut, mvcc.VersionCursor{}, nil, f, func(*mvcc.VersionCursor) error { return nil })
}

// fill chooses the revision and reads what the cut has beside keys.
func (c *Cutter) fill(ctx context.Context, cut *Cut) (err error) {
	leases := map[keyspace.LeaseID]Lease{}
	list := func() error {
		all, _, err := c.o.Records.ListLeases(ctx)
		for _, l := range all {
			leases[l.ID] = Lease{ID: l.ID, TTL: l.TTL, Remaining: l.Remaining}
		}
		return err
	}
	if err := list(); err != nil {
		return err
	}
	if cut.Revision, cut.Compacted, err = c.o.Keys.Present(ctx); err != nil {
		return err
	}
	cut.Time = c.o.Clock.Wall()
	if cut.Held > cut.Revision {
		return kverror.New(kverror.FutureRevision, "a cut from revision %d on, the current one is %d", cut.Held, cut.Revision)
	}
	if err := list(); err != nil {
		return err
	}
	cut.Leases = slices.SortedFunc(maps.Values(leases), func(a, b Lease) int { return cmp.Compare(a.ID, b.ID) })
	if cut.Access, err = c.o.Records.AccessRows(ctx); err != nil {
		return err
	}
	ranges, err := c.o.Records.RangeMap(ctx)
	if err != nil {
		return err
	}
	for i := range ranges {
		if start := ranges[i].Span.Start; len(start) > 0 {
			cut.Borders = append(cut.Borders, start)
		}
	}
	return nil
}

// Renew has a hold last for HoldLife from now on, and moves it up unless the revision is 0. HoldEnded says that it
// has ended.
func (c *Cutter) Renew(ctx context.Context, id fsm.HoldID, revision keyspace.Revision) (fsm.Hold, error) {
	if id == 0 || revision < 0 {
		return fsm.Hold{}, kverror.New(kverror.BadRequest, "renew hold %d at revision %d", id, revision)
	}
	return c.o.Holds.PutHold(ctx, fsm.PutHold{ID: id, Revision: revision, Life: HoldLife})
}

// Release ends a hold.
func (c *Cutter) Release(ctx context.Context, id fsm.HoldID) error {
	if id == 0 {
		return kverror.New(kverror.BadRequest, "no hold to release")
	}
	return c.o.Holds.EndHold(ctx, id)
}

// Read calls f with the versions of a cut, in the order of keys and those of a key newest first, from a place on up
// to end; an empty end is that of all keys. page is called behind each page, with the place where it ends, but for the
// last one. What f gets is valid during the call.
func (c *Cutter) Read(ctx context.Context, cut mvcc.Cut, from mvcc.VersionCursor, end []byte, f func(*mvcc.Version) error, page func(next *mvcc.VersionCursor) error) error {
	if err := cut.Check(); err != nil || len(end) > 0 && string(from.Key) >= string(end) || from.Below < 0 {
		return kverror.New(kverror.BadRequest, "read from %q to %q: %v", from.Key, end, err)
	}
	var v mvcc.Version
	return c.o.Keys.ReadCut(ctx, cut, from, end, func(p *rangeapi.VersionsPage, next *mvcc.VersionCursor) error {
		err := p.Each(func(s *mvcc.StoredVersion) error {
			if err := s.Decode(&v); err != nil {
				return err
			}
			return f(&v)
		})
		if err != nil {
			return fmt.Errorf("dataapi: a page of %s at %d from %q on: %w", cut.Select, cut.At, from.Key, err)
		}
		if next == nil {
			return nil
		}
		return page(next)
	})
}

// renewEvery is the pause between two renewals of a hold. Half an hour of failures does no harm.
const renewEvery = time.Minute

// keepHold renews a hold in the background until stop. The context ends with ctx, or once the hold has ended or could
// not be renewed for its whole life; its cause says why.
func keepHold(ctx context.Context, c clock.Clock, renew func(context.Context) error) (held context.Context, stop func()) {
	held, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		last := c.Now()
		for clock.Sleep(held, c, renewEvery) == nil {
			once, end := clock.WithTimeout(held, c, renewEvery)
			err := renew(once)
			end()
			switch {
			case err == nil:
				last = c.Now()
			case IsHoldEnded(err), c.Now().Sub(last) >= HoldLife:
				cancel(err)
				return
			}
		}
	}()
	return held, func() {
		cancel(context.Canceled)
		<-done
	}
}

// IsHoldEnded says that a hold has ended, or came too late.
func IsHoldEnded(err error) bool {
	return errors.Is(err, kverror.HoldEnded) || status.Code(err) == codes.FailedPrecondition
}
