package dataapi

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// Cuts makes and reads cuts: a Cutter on its node, a Client over a connection.
type Cuts interface {
	// Cut makes a cut, whose hold is new or an earlier one.
	Cut(ctx context.Context, o CutOptions) (*Cut, error)
	// Hold renews a hold until stop. The context ends with ctx, or with the hold, and its cause says so.
	Hold(ctx context.Context, id fsm.HoldID) (held context.Context, stop func())
	// ReleaseSoon ends a hold though ctx may have ended. If that fails the hold expires.
	ReleaseSoon(ctx context.Context, id fsm.HoldID) error
	// Each calls f with the versions of a cut, in the order of keys and those of a key newest first.
	Each(ctx context.Context, cut mvcc.Cut, f func(*mvcc.Version) error) error
}

// CollectOptions say what is collected.
type CollectOptions struct {
	// Cut says who collects; From and Hold are not looked at.
	Cut CutOptions
	// Revision is that of the state, 0 for the current one.
	Revision keyspace.Revision
	// EtcdVersion, MaxBytes and TransactionBytes are the file's, see etcdfile.Header.
	EtcdVersion                etcdfile.EtcdVersion
	MaxBytes, TransactionBytes int64
	// TempDir and RunBytes are for sorting, see etcdfile.SorterOptions.
	TempDir  string
	RunBytes int64
	// Began, if there is one, is told of the header before versions are read, and Again why they are read anew.
	Began func(h *etcdfile.Header)
	Again func(error)
	// Look, if there is one, is called after each LookBytes of keys and values, and ends the collection by an error.
	Look  func() error
	Clock clock.Clock
}

const (
	// LookBytes is after how many bytes of keys and values Look is called.
	LookBytes = 4 << 20
	// maxCollections bounds how often the store is read because a compaction came before the hold, collectPause is
	// the first pause between two of them. Each pause is twice the one before.
	maxCollections = 6
	collectPause   = 100 * time.Millisecond
)

// Collect makes a cut and sorts all of its versions by revision, for a file of etcd's. It returns what the file has
// beside them. The caller closes the sorter. The hold is released when Collect returns: the sorter has everything.
//
// A leader that hears of the hold after it has compacted cannot serve the cut. Then another one is made under the same
// hold, a few times. A file that would be too large is an *etcdfile.TooLargeError as soon as that is certain.
func Collect(ctx context.Context, c Cuts, o CollectOptions) (*etcdfile.Header, *etcdfile.Sorter, error) {
	o.Cut.From, o.Cut.Hold = 0, 0
	cut, err := c.Cut(ctx, o.Cut)
	if err != nil {
		return nil, nil, err
	}
	held, stop := c.Hold(ctx, cut.Hold)
	defer func() {
		stop()
		_ = c.ReleaseSoon(ctx, cut.Hold) // it expires
	}()
	for n := 1; ; n++ {
		h, sorter, err := collect(held, c, cut, &o)
		if err == nil {
			return h, sorter, nil
		}
		if cause := context.Cause(held); cause != nil {
			return nil, nil, cause
		}
		if !IsHoldEnded(err) {
			return nil, nil, err
		}
		if n == maxCollections {
			return nil, nil, fmt.Errorf("a compaction has come before the hold of old versions %d times: ask again when fewer compactions run: %w", n, err)
		}
		if o.Again != nil {
			o.Again(err)
		}
		if clock.Sleep(held, o.Clock, collectPause<<(n-1)) != nil {
			return nil, nil, context.Cause(held)
		}
		o.Cut.Hold = cut.Hold
		again, err := c.Cut(held, o.Cut) // under a hold that somebody has ended there is none
		if err != nil {
			return nil, nil, err
		}
		cut = again
	}
}

// collect reads a cut.
func collect(ctx context.Context, c Cuts, cut *Cut, o *CollectOptions) (h *etcdfile.Header, sorter *etcdfile.Sorter, err error) {
	if h, err = fileHeader(cut, o); err != nil {
		return nil, nil, err
	}
	if o.Began != nil {
		o.Began(h)
	}
	sorter = etcdfile.NewSorter(etcdfile.SorterOptions{Order: etcdfile.ByRevision, TempDir: o.TempDir, RunBytes: o.RunBytes, Compacted: h.Compacted})
	leases := map[keyspace.LeaseID]bool{}
	for _, l := range h.Leases {
		leases[l.ID] = true
	}
	var last []byte
	looked := int64(0)
	err = c.Each(ctx, mvcc.Cut{Select: mvcc.SelectKept, At: h.Revision, After: h.Compacted}, func(v *mvcc.Version) error {
		if newest := !bytes.Equal(last, v.Key); newest && v.Lease != 0 && !leases[v.Lease] {
			leases[v.Lease] = true // trap 119: it was revoked around the cut
			h.Leases = append(h.Leases, fileLease(v.Lease, int64(LostLeaseTTL/time.Second), LostLeaseTTL))
		}
		last = append(last[:0], v.Key...)
		h.DataBytes += v.Size()
		if most := cmp.Or(o.MaxBytes, etcdfile.DefaultMaxBytes); h.DataBytes > most {
			return &etcdfile.TooLargeError{Bytes: h.DataBytes, MaxBytes: most}
		}
		if o.Look != nil && h.DataBytes-looked >= LookBytes {
			looked = h.DataBytes
			if err := o.Look(); err != nil {
				return err
			}
		}
		return sorter.Add(v)
	})
	if err != nil {
		sorter.Close()
		return nil, nil, err
	}
	slices.SortFunc(h.Leases, func(a, b etcdfile.Lease) int { return cmp.Compare(a.ID, b.ID) })
	return h, sorter, nil
}

// fileHeader is what the file has beside versions.
func fileHeader(cut *Cut, o *CollectOptions) (*etcdfile.Header, error) {
	compacted, current := max(cut.Compacted, 0), max(cut.Revision, 1)
	at := cmp.Or(o.Revision, current)
	if at > current || at < max(compacted, 1) {
		return nil, fmt.Errorf("there is no state of revision %d: the cluster has the revisions %d to %d", at, max(compacted, 1), current)
	}
	access, err := fsm.AccessOf(cut.Access)
	if err != nil {
		return nil, fmt.Errorf("users and roles of the cut: %w", err)
	}
	h := &etcdfile.Header{
		Revision: at, Compacted: compacted, Auth: etcdfile.AuthOf(access),
		EtcdVersion: o.EtcdVersion, MaxBytes: o.MaxBytes, TransactionBytes: o.TransactionBytes,
	}
	for _, l := range cut.Leases {
		h.Leases = append(h.Leases, fileLease(l.ID, l.TTL, l.Remaining))
	}
	return h, nil
}

// fileLease is a lease as a file has it. An overdue one has a second left there: 0 would be all of its TTL.
func fileLease(id keyspace.LeaseID, ttl int64, remaining time.Duration) etcdfile.Lease {
	return etcdfile.Lease{ID: id, TTLSeconds: ttl, RemainingSeconds: max(int64(remaining/time.Second), 1)}
}
