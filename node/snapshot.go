package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// snapshots makes etcd's database files of the store, for etcd's Maintenance.Snapshot. It implements
// etcdapi.Snapshots. One file is made at a time: it takes room on the disk of the data directory. While it is
// made there is twice the size of the data, and then the file until the client has it.
type snapshots struct {
	cuts  dataapi.Cuts
	self  keyspace.NodeID
	clock clock.Clock
	log   *zap.Logger
	// spare returns how much may be written to dir before the node takes no more writes; known is false where the
	// file system does not say.
	spare func(dir string) (bytes int64, known bool)
	// estimate returns about how many bytes all keys and values have.
	estimate func(context.Context) (int64, error)
	// dir has the files that are being made. One that is done has no name any more.
	dir string
	// turn holds a token while a file is made.
	turn chan struct{}
	// maxBytes bounds a file.
	maxBytes int64
	// heap returns how many bytes are on the process's heap, and collect collects its garbage.
	heap    func() uint64
	collect func()
}

const (
	// snapshotDirName is the directory of the files within the data directory.
	snapshotDirName = "snapshots"
	// snapshotMaxBytes bounds a file: an etcd does not support more.
	snapshotMaxBytes = 8 << 30
	// snapshotRunBytes bounds the memory of sorting, snapshotTransactionBytes a quarter of that of writing.
	// Sorting needs little of it by then.
	snapshotRunBytes         = 16 << 20
	snapshotTransactionBytes = 2 << 20
	// snapshotStepBytes is more than what is written between two looks at the room on the disk: a run of the sorter,
	// or a transaction.
	snapshotStepBytes = snapshotRunBytes + snapshotTransactionBytes + dataapi.LookBytes
	// snapshotRecordBytes is about what a record takes beside its key and value.
	snapshotRecordBytes = 64
	// snapshotEstimateTimeout bounds how long all nodes are asked for the sizes of their ranges.
	snapshotEstimateTimeout = 10 * time.Second
)

// newSnapshots removes what an earlier run has left.
func newSnapshots(c *Core) (*snapshots, error) {
	s := &snapshots{
		cuts: c.cuts, self: c.o.Self, clock: c.o.Clock, log: c.log, spare: c.spare, estimate: c.rangeBytes,
		dir: filepath.Join(c.o.DataDir, snapshotDirName), turn: make(chan struct{}, 1), maxBytes: snapshotMaxBytes,
		heap: heapBytes, collect: runtime.GC,
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return nil, fmt.Errorf("remove unfinished snapshots: %w", err)
	}
	return s, nil
}

// spare returns how much may be written to a directory before this node takes no more writes.
func (c *Core) spare(dir string) (bytes int64, known bool) {
	if c.noRoom() {
		return 0, true
	}
	return c.engine.SpareBytes(dir)
}

// rangeBytes returns about how many bytes all ranges have on the disks of their leaders, each counted once.
func (c *Core) rangeBytes(ctx context.Context) (sum int64, err error) {
	l, err := c.admin.Ranges(ctx, &adminpb.RangeListRequest{})
	for _, r := range l.GetRanges() {
		sum += r.GetBytes()
	}
	return sum, err
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
		if dataapi.IsHoldEnded(err) {
			return nil, status.Error(codes.FailedPrecondition, "skein: the snapshot was given up: "+err.Error())
		}
		return nil, err
	}
	s.log.Info("a snapshot for an etcd client is made", zap.Int64("bytes", f.size), zap.Duration("took", watch.Elapsed()))
	return f, nil
}

// room refuses to write so many bytes more where the node would then take no more writes.
func (s *snapshots) room(need int64) error {
	spare, known := s.spare(s.dir)
	if !known || spare >= need {
		return nil
	}
	return status.Errorf(codes.ResourceExhausted, "skein: no room for a snapshot: it needs about %d bytes of the disk of node %s, and %d are free beside what the node keeps for itself: "+
		"ask another node, make room, or let the client's disk take it all (skein export etcd, skein backup create)", need, s.self, spare)
}

// roomForAll looks before anything is read whether the versions fit, sorted and once more as a file, by the sizes of the
// ranges. They are rough: who cannot say them is not refused, since the room is looked at while it is used, too.
func (s *snapshots) roomForAll(ctx context.Context) error {
	ctx, cancel := clock.WithTimeout(ctx, s.clock, snapshotEstimateTimeout)
	defer cancel()
	size, err := s.estimate(ctx)
	if err != nil {
		s.log.Warn("the size of a snapshot is not known beforehand", zap.Error(err))
	}
	return s.room(2*min(size, s.maxBytes) + snapshotStepBytes)
}

// make makes a file, whose name is gone when it returns.
func (s *snapshots) make(ctx context.Context) (f *snapshotFile, err error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for snapshots: %w", err)
	}
	if err := s.roomForAll(ctx); err != nil {
		return nil, err
	}
	tidy := newTidyHeap(s.heap, s.collect)
	h, sorter, err := dataapi.Collect(ctx, s.cuts, dataapi.CollectOptions{
		Cut: dataapi.CutOptions{Kind: dataapi.KindSnapshot, Owner: fmt.Sprintf("node %s", s.self)}, Clock: s.clock,
		MaxBytes: s.maxBytes, TransactionBytes: snapshotTransactionBytes, TempDir: s.dir, RunBytes: snapshotRunBytes,
		Look: func() error {
			tidy.passed(dataapi.LookBytes)
			return s.room(snapshotStepBytes)
		},
		Again: func(err error) {
			s.log.Info("a snapshot for an etcd client begins anew, since a compaction came before the hold", zap.Error(err))
		},
	})
	if err != nil {
		return nil, err
	}
	defer sorter.Close()
	if err := s.room(h.DataBytes + snapshotStepBytes); err != nil {
		return nil, err
	}
	path := filepath.Join(s.dir, "db")
	w, err := etcdfile.Create(path, *h)
	if err != nil {
		return nil, err
	}
	if err := s.write(ctx, sorter, w, tidy); err != nil {
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
	return &snapshotFile{file: file, size: st.Size(), tidy: tidy}, nil
}

// snapshotFile is a file without a name: it goes when it is closed, however the process ends.
type snapshotFile struct {
	file *os.File
	size int64
	tidy *tidyHeap
}

// Read implements etcdapi.SnapshotFile.
func (f *snapshotFile) Read(b []byte) (n int, err error) {
	n, err = f.file.Read(b)
	f.tidy.passed(int64(n))
	return n, err
}

// Close implements etcdapi.SnapshotFile.
func (f *snapshotFile) Close() error { return f.file.Close() }

// Size implements etcdapi.SnapshotFile.
func (f *snapshotFile) Size() int64 { return f.size }

// write writes the sorted versions and finishes the file.
func (s *snapshots) write(ctx context.Context, sorter *etcdfile.Sorter, w *etcdfile.Writer, tidy *tidyHeap) error {
	for n := int64(0); ; {
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
		if n += v.Size() + snapshotRecordBytes; n >= dataapi.LookBytes {
			tidy.passed(n)
			n = 0
			if err := errors.Join(ctx.Err(), s.room(snapshotStepBytes)); err != nil {
				return err
			}
		}
	}
	_, err := w.Finish(ctx)
	return err
}
