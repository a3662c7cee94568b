package recovery

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// Dir names the directories of a node that does not run.
type Dir struct {
	// FS holds both; nil is the machine's.
	FS vfs.FS
	// Data is --data-dir, WAL --wal-dir; an empty WAL is Data/wal.
	Data, WAL string
	// WALSegmentBytes is the size of new segments, 0 the default.
	WALSegmentBytes int64
	// Clock is the machine's where it is nil.
	Clock clock.Clock
	// Logger may be nil.
	Logger *zap.Logger
}

func (d Dir) fs() vfs.FS {
	if d.FS == nil {
		return vfs.Default
	}
	return d.FS
}

// store is a node's opened directories.
type store struct {
	id     engine.Identity
	lock   *engine.DirLock
	wal    *wal.Log
	engine *engine.Engine
}

// cacheBytes is the memory for blocks of tables.
const cacheBytes = 64 << 20

// open opens the directories. Their locks say that no node runs in them. Beside what each start of a
// node does (it finds the end of the log), nothing is changed.
func (d Dir) open() (_ *store, err error) {
	d.FS = d.fs()
	if d.Clock == nil {
		d.Clock = clock.System()
	}
	if d.WAL == "" {
		d.WAL = filepath.Join(d.Data, "wal")
	}
	for _, dir := range []string{d.Data, d.WAL} {
		have, err := engine.ReadIdentity(d.FS, dir)
		if err != nil {
			return nil, err
		}
		if have == nil {
			return nil, fmt.Errorf("recovery: %s is no directory of a node: give the one that was its --data-dir, and its --wal-dir if it had one", dir)
		}
	}
	s := &store{}
	have, err := engine.ReadIdentity(d.FS, d.Data)
	if err != nil {
		return nil, err
	}
	if s.lock, err = engine.OpenDir(d.FS, d.Data, d.WAL, *have, keyspace.OwnVersions()); err != nil {
		return nil, err
	}
	s.id = s.lock.Identity
	defer func() {
		if err != nil {
			err = errors.Join(err, s.abort())
		}
	}()
	if s.wal, err = wal.Open(wal.Options{FS: d.FS, Dir: d.WAL, Clock: d.Clock, SegmentBytes: d.WALSegmentBytes, Logger: d.Logger}); err != nil {
		return nil, err
	}
	if s.engine, err = engine.Open(engine.Options{
		FS: d.FS, Dir: filepath.Join(d.Data, "engine"), Clock: d.Clock, CacheBytes: cacheBytes, Logger: d.Logger,
	}); err != nil {
		return nil, err
	}
	empty, err := s.engine.Empty()
	if err != nil {
		return nil, err
	}
	if lost := s.wal.BeganEmpty(); lost != empty {
		return nil, fmt.Errorf("recovery: one of the log in %s and the store in %s is lost: this directory cannot be used; name the node with --dead", d.WAL, d.Data)
	}
	return s, nil
}

// abort closes the directories without writing anything.
func (s *store) abort() error {
	var errs []error
	if s.engine != nil {
		errs = append(errs, s.engine.Abort())
	}
	if s.wal != nil {
		errs = append(errs, s.wal.Close())
	}
	return errors.Join(append(errs, s.lock.Close())...)
}
