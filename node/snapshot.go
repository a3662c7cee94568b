package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
)

// snapshots makes etcd's database files of the store, for etcd's Maintenance.Snapshot. It implements
// etcdapi.Snapshots. One file is made at a time: it takes room on the disk of the data directory. While it is
// made there is twice the size of the data, and then the file until the client has it.
type snapshots struct {
	cuts  *dataapi.Cutter
	self  keyspace.NodeID
	clock clock.Clock
	log   *zap.Logger
	// full says that the node takes no more writes: the disk has no room to spare.
	full func() bool
	// dir has the files that are being made. One that is done has no name any more.
	dir string
	// turn holds a token while a file is made.
	turn chan struct{}
	// maxBytes bounds a file.
	maxBytes int64
}

const (
	// snapshotDirName is the directory of the files within the data directory.
	snapshotDirName = "snapshots"
	// snapshotMaxBytes bounds a file: an etcd does not support more.
	snapshotMaxBytes = 8 << 30
	// snapshotRunBytes bounds the memory of sorting, snapshotTransactionBytes a quarter of that of writing.
	// Sorting needs little of it by then.
	snapshotRunBytes         = 32 << 20
	snapshotTransactionBytes = 8 << 20
	// snapshotSpaceEvery is after how many versions the room on the disk is looked at.
	snapshotSpaceEvery = 1024
	// snapshotRenewEvery is the pause between two renewals of the hold.
	snapshotRenewEvery = time.Minute
)

// newSnapshots removes what an earlier run has left.
func newSnapshots(c *Core) (*snapshots, error) {
	s := &snapshots{
		cuts: c.cuts, self: c.o.Self, clock: c.o.Clock, log: c.log, full: c.noRoom,
		dir: filepath.Join(c.o.DataDir, snapshotDirName), turn: make(chan struct{}, 1), maxBytes: snapshotMaxBytes,
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return nil, fmt.Errorf("remove unfinished snapshots: %w", err)
	}
	return s, nil
}

// Snapshot implements etcdapi.Snapshots.
func (s *snapshots) Snapshot(ctx context.Context) (etcdapi.SnapshotFile, error) {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, kverror.Of(ctx.Err())
	}
	watch := clock.StartStopwatch()
	f, err := s.make(ctx)
	if err != nil {
		s.log.Warn("a snapshot for an etcd client could not be made", zap.Duration("took", watch.Elapsed()), zap.Error(err))
		var large *etcdfile.TooLargeError
		if errors.As(err, &large) {
			return nil, status.Error(codes.ResourceExhausted, "skein: "+large.Error())
		}
		return nil, err
	}
	s.log.Info("a snapshot for an etcd client is made", zap.Int64("bytes", f.size), zap.Duration("took", watch.Elapsed()))
	return f, nil
}

// room refuses to fill the disk up to where the node would take no more writes.
func (s *snapshots) room() error {
	if s.full() {
		return kverror.New(kverror.NoSpace, "the disk of node %s has no room for a snapshot: ask another node, or take a backup (skein backup create), which needs none", s.self)
	}
	return nil
}

// make makes a file, whose name is gone when it returns.
func (s *snapshots) make(ctx context.Context) (f *snapshotFile, err error) {
	if err := s.room(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for snapshots: %w", err)
	}
	h, sorter, err := s.collect(ctx)
	if err != nil {
		return nil, err
	}
	defer sorter.Close()
	path := filepath.Join(s.dir, "db")
	w, err := etcdfile.Create(path, h)
	if err != nil {
		return nil, err
	}
	if err := s.write(ctx, sorter, w); err != nil {
		return nil, errors.Join(err, w.Abort())
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open a snapshot: %w", err), os.Remove(path))
	}
	st, err := file.Stat()
	if err = errors.Join(err, os.Remove(path)); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &snapshotFile{File: file, size: st.Size()}, nil
}

// snapshotFile is a file without a name: it goes when it is closed, however the process ends.
type snapshotFile struct {
	*os.File
	size int64
}

// Size implements etcdapi.SnapshotFile.
func (f *snapshotFile) Size() int64 { return f.size }

// collect makes a cut and sorts all of its versions. It returns what the file has beside them. The hold is released
// when it returns: the sorter has everything.
func (s *snapshots) collect(ctx context.Context) (h etcdfile.Header, sorter *etcdfile.Sorter, err error) {
	cut, err := s.cuts.Cut(ctx, dataapi.CutOptions{Owner: fmt.Sprintf("Maintenance.Snapshot of node %s", s.self)})
	if err != nil {
		return h, nil, err
	}
	ctx, stop := s.keep(ctx, cut.Hold)
	defer stop()
	access, err := fsm.AccessOf(cut.Access)
	if err != nil {
		return h, nil, err
	}
	h = etcdfile.Header{
		Revision: max(cut.Revision, 1), Compacted: max(cut.Compacted, 0), Auth: etcdfile.AuthOf(access),
		MaxBytes: s.maxBytes, TransactionBytes: snapshotTransactionBytes,
	}
	leases := map[keyspace.LeaseID]bool{}
	for _, l := range cut.Leases {
		leases[l.ID] = true
		h.Leases = append(h.Leases, fileLease(l.ID, l.TTL, l.Remaining))
	}
	sorter = etcdfile.NewSorter(etcdfile.SorterOptions{Order: etcdfile.ByRevision, TempDir: s.dir, RunBytes: snapshotRunBytes, Compacted: h.Compacted})
	var last []byte
	err = s.cuts.Read(ctx, mvcc.Cut{Select: mvcc.SelectKept, At: cut.Revision, After: h.Compacted}, mvcc.VersionCursor{}, nil, func(v *mvcc.Version) error {
		if newest := string(last) != string(v.Key); newest && v.Lease != 0 && !leases[v.Lease] {
			leases[v.Lease] = true // trap 119: it was revoked around the cut
			h.Leases = append(h.Leases, fileLease(v.Lease, int64(dataapi.LostLeaseTTL/time.Second), dataapi.LostLeaseTTL))
		}
		last = append(last[:0], v.Key...)
		if h.DataBytes += v.Size(); h.DataBytes > s.maxBytes {
			return &etcdfile.TooLargeError{Bytes: h.DataBytes, MaxBytes: s.maxBytes}
		}
		return sorter.Add(v)
	}, func(*mvcc.VersionCursor) error { return s.room() })
	if err != nil {
		sorter.Close()
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return h, nil, err
	}
	slices.SortFunc(h.Leases, func(a, b etcdfile.Lease) int { return cmp.Compare(a.ID, b.ID) })
	return h, sorter, nil
}

// fileLease is a lease as a file has it. An overdue one has a second left there: 0 would be all of its TTL.
func fileLease(id keyspace.LeaseID, ttl int64, remaining time.Duration) etcdfile.Lease {
	return etcdfile.Lease{ID: id, TTLSeconds: ttl, RemainingSeconds: max(int64(remaining/time.Second), 1)}
}

// write writes the sorted versions and finishes the file.
func (s *snapshots) write(ctx context.Context, sorter *etcdfile.Sorter, w *etcdfile.Writer) error {
	for n := 1; ; n++ {
		if n%snapshotSpaceEvery == 0 {
			if err := errors.Join(ctx.Err(), s.room()); err != nil {
				return err
			}
		}
		v, err := sorter.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = w.Add(v)
		}
		if err != nil {
			return err
		}
	}
	_, err := w.Finish(ctx)
	return err
}

// keep renews a hold until stop, which releases it. The context ends once the hold has ended.
func (s *snapshots) keep(ctx context.Context, id fsm.HoldID) (held context.Context, stop func()) {
	held, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for clock.Sleep(held, s.clock, snapshotRenewEvery) == nil {
			if _, err := s.cuts.Renew(held, id, 0); kverror.Of(err) != nil && kverror.Of(err).Kind == kverror.HoldEnded {
				cancel(err)
			}
		}
	}()
	return held, func() {
		cancel(context.Canceled)
		<-done
		s.cuts.ReleaseSoon(ctx, id)
	}
}
