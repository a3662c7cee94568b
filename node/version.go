package node

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// writtenVersion is the version in which the node writes: on its disks and to its peers. It is the
// cluster version as far as the node knows. The node learns it from the map and from its peers'
// Hellos, and notes it in its directories before it writes anything in it.
type writtenVersion struct {
	reads keyspace.Versions
	log   *zap.Logger
	now   atomic.Uint32
	// admitted says that the peers have admitted the node, and so compared their versions with its.
	admitted func() bool

	mu sync.Mutex // held while dirs are written
	// dirs is guarded by mu; nil once the directories are closed.
	dirs *engine.DirLock
}

func newWrittenVersion(dirs *engine.DirLock, reads keyspace.Versions, admitted func() bool, log *zap.Logger) *writtenVersion {
	v := &writtenVersion{reads: reads, admitted: admitted, log: log, dirs: dirs}
	v.now.Store(uint32(dirs.Identity.Version))
	return v
}

// Now implements transport.Version.
func (v *writtenVersion) Now() (keyspace.Version, keyspace.Versions) {
	return v.written(), v.reads
}

// written is the version alone.
func (v *writtenVersion) written() keyspace.Version { return keyspace.Version(v.now.Load()) }

// Fresh implements transport.Version.
func (v *writtenVersion) Fresh() bool { return !v.admitted() }

// Raise implements transport.Version.
func (v *writtenVersion) Raise(to keyspace.Version) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	from, _ := v.Now()
	switch {
	case to <= from:
		return nil
	case !v.reads.Has(to):
		return fmt.Errorf("the cluster has version %d, and this build reads %s: start a newer build", to, v.reads)
	case v.dirs == nil:
		return errors.New("the node is closing")
	}
	if mutation.Is(mutation.VersionUnnoted) {
		v.now.Store(uint32(to))
		return nil
	}
	if err := v.dirs.Raise(to); err != nil {
		return fmt.Errorf("note version %d of the cluster: %w", to, err)
	}
	v.now.Store(uint32(to))
	v.log.Info("the node writes in another version from now on, and builds that do not read it refuse its directories",
		zap.Uint32("version", uint32(to)), zap.Uint32("before", uint32(from)))
	return nil
}

// close ends what Raise may do, before the locks of the directories are released.
func (v *writtenVersion) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.dirs = nil
}

// versions are those that the node reads and writes.
func (o *Options) versions() keyspace.Versions {
	if o.Versions == (keyspace.Versions{}) {
		return keyspace.OwnVersions()
	}
	return o.Versions
}

// closeDirs releases the directories.
func (c *Core) closeDirs() error {
	c.version.close()
	return c.dirs.Close()
}
