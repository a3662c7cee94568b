package engine

import (
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// ErrLocked says that another process uses the directory.
var ErrLocked = errors.New("engine: directory in use")

// DirLock holds the locks of a node's directories.
type DirLock struct {
	// Identity is that of the directories.
	Identity Identity
	// Fresh says that OpenDir found the directories empty and assigned them to this node.
	Fresh bool

	fs    vfs.FS
	dirs  []string
	locks []io.Closer
}

// Raise notes in both directories that the node writes in another version from now on. It returns
// once that is durable. A build that does not read the version refuses the directories from then
// on.
func (l *DirLock) Raise(to keyspace.Version) error {
	id := l.Identity
	id.Version = to
	for _, dir := range l.dirs {
		if err := writeIdentity(l.fs, dir, id); err != nil {
			return err
		}
	}
	l.Identity.Version = to
	return nil
}

// Close releases the locks.
func (l *DirLock) Close() error {
	var err error
	for _, c := range l.locks {
		err = errors.Join(err, c.Close())
	}
	l.locks = nil
	return err
}

// OpenDir locks the data and the wal directory and checks that both belong to the node
// named by want. It assigns empty ones to that node. The two must differ, but the wal
// directory may lie within the data directory. Nothing of the store or the wal may be
// opened before. The texts of its errors, including ErrLocked and ErrIdentity, say what
// to do. New directories begin with the oldest version of those that the build reads: the cluster
// may write in that one still.
func OpenDir(fs vfs.FS, dataDir, walDir string, want Identity, reads keyspace.Versions) (_ *DirLock, err error) {
	data, wal, err := absolute(dataDir, walDir)
	if err != nil {
		return nil, err
	}
	if data == wal {
		return nil, fmt.Errorf("engine: data and wal directory are both %s; give the wal one of its own", dataDir)
	}
	l := &DirLock{fs: fs, dirs: []string{walDir, dataDir}}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	for _, dir := range []string{dataDir, walDir} {
		if err := l.lock(fs, dir); err != nil {
			return nil, err
		}
	}
	dataID, err := readIdentity(fs, dataDir, reads)
	if err != nil {
		return nil, err
	}
	walID, err := readIdentity(fs, walDir, reads)
	if err != nil {
		return nil, err
	}
	if dataID != nil && walID != nil {
		if err := compareIdentities(dataDir, dataID, walDir, walID, want); err != nil {
			return nil, err
		}
		l.Identity = *dataID
		if dataID.Version != walID.Version {
			// A crash came within Raise. The next build may not read the lower version any more.
			if err := l.Raise(max(dataID.Version, walID.Version)); err != nil {
				return nil, err
			}
		}
		return l, forgetInstance(fs, dataDir)
	}
	// Either both are new, or a crash came between the two identity files.
	advice := "restore it"
	if dataID != nil { // no crash leaves that: the identity of the wal directory is written first
		advice = fmt.Sprintf("if the log was in another directory, move all files from there to %s; else restore it", walDir)
	}
	for _, d := range []struct{ dir, at, other string }{{dataDir, data, wal}, {walDir, wal, data}} {
		if err := refusePartial(fs, d.dir, d.at, d.other, advice); err != nil {
			return nil, err
		}
	}
	if want.Instance, err = instanceOf(fs, dataDir, reads); err != nil {
		return nil, err
	}
	want.Version = reads.Oldest
	for _, dir := range l.dirs {
		if err := writeIdentity(fs, dir, want); err != nil {
			return nil, err
		}
	}
	l.Identity, l.Fresh = want, true
	return l, forgetInstance(fs, dataDir)
}

func (l *DirLock) lock(fs vfs.FS, dir string) error {
	if err := makeDir(fs, dir); err != nil {
		return err
	}
	c, err := fs.Lock(fs.PathJoin(dir, lockName))
	if at := (*iofs.PathError)(nil); errors.As(err, &at) && !errors.Is(err, syscall.EAGAIN) {
		return fmt.Errorf("engine: make the lock of directory %s: %w", dir, err) // it could not be opened: nobody need have it
	}
	if err != nil {
		return fmt.Errorf("%w: %s: another skein process uses it; stop that process or choose another directory: %w", ErrLocked, dir, err)
	}
	l.locks = append(l.locks, c)
	return nil
}

// compareIdentities checks that both directories belong to want.
func compareIdentities(dataDir string, data *Identity, walDir string, wal *Identity, want Identity) error {
	same := *wal
	same.Version = data.Version
	if *data != same {
		return fmt.Errorf("%w: %s belongs to node %s of cluster %s (instance %x), but %s to node %s of cluster %s (instance %x); give the wal directory that was used with the data directory",
			ErrIdentity, dataDir, data.Node, data.Cluster, data.Instance, walDir, wal.Node, wal.Cluster, wal.Instance)
	}
	if data.Cluster != want.Cluster {
		return fmt.Errorf("%w: %s belongs to cluster %s, this node is configured for cluster %s; check the initial cluster and its token, or give another directory",
			ErrIdentity, dataDir, data.Cluster, want.Cluster)
	}
	if data.Node != want.Node {
		return fmt.Errorf("%w: %s belongs to node %s, this node is %s; check its name and peer URLs, or give another directory",
			ErrIdentity, dataDir, data.Node, want.Node)
	}
	return nil
}

// absolute returns the directories' absolute paths, so that they can be compared.
func absolute(dataDir, walDir string) (data, wal string, err error) {
	if data, err = filepath.Abs(dataDir); err == nil {
		wal, err = filepath.Abs(walDir)
	}
	if err != nil {
		return "", "", fmt.Errorf("engine: absolute paths of %s and %s: %w", dataDir, walDir, err)
	}
	return data, wal, nil
}

// refusePartial refuses a directory that contains files if not both directories have an
// identity. One of the two was lost or exchanged, and a node that forgets half of its
// promises endangers its groups. at is the directory's absolute path. other is the path
// of the other directory, which may lie within this one. advice says what brings the
// missing identity back.
func refusePartial(fs vfs.FS, dir, at, other, advice string) error {
	names, err := fs.List(dir)
	if err != nil {
		return fmt.Errorf("engine: list %s: %w", dir, err)
	}
	for _, name := range names {
		below := filepath.Join(at, name)
		if name == lockName || strings.HasPrefix(name, identityName) || name == "lost+found" ||
			below == other || strings.HasPrefix(other, below+string(filepath.Separator)) {
			continue
		}
		return fmt.Errorf("%w: %s holds files (%s) but data and wal directory do not both have the file %s; one of them was lost or exchanged: %s, or empty both and let the node join anew",
			ErrIdentity, dir, name, identityName, advice)
	}
	return nil
}

// makeDir makes dir and its missing parents. It syncs the entries of all new directories,
// because a directory lost in a crash takes its files with it.
func makeDir(fs vfs.FS, dir string) error {
	var parents []string
	for p := fs.PathDir(dir); ; p = fs.PathDir(p) {
		parents = append(parents, p)
		if fs.PathDir(p) == p {
			break
		}
		if _, err := fs.Stat(p); err == nil {
			break
		}
	}
	if err := fs.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("engine: make directory %s: %w", dir, err)
	}
	for _, p := range parents {
		d, err := fs.OpenDir(p)
		if err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
		if err != nil {
			return fmt.Errorf("engine: make directory %s: sync %s: %w", dir, p, err)
		}
	}
	return nil
}

// EnsureInstance returns the instance of the directories and draws one if there is none.
// It stores the instance in the data directory. So a joining node is known by it before
// it has an identity, even after a crash. The instance of directories with an identity is
// the identity's. ErrLocked says that another process uses the directory.
func EnsureInstance(fs vfs.FS, dataDir string) (_ uint64, err error) {
	l := &DirLock{}
	if err := l.lock(fs, dataDir); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	return instanceOf(fs, dataDir, keyspace.OwnVersions())
}
