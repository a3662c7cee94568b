package engine

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// FormatVersion is the version of all formats on the disk of a node taken
// together. OpenDir refuses directories of another version.
// It changes with each of them: an older directory is refused before anything of it is read.
const FormatVersion = 2

const (
	lockName     = "skein.lock"
	identityName = "skein.identity"
	identityHead = "skein node directory"

	// maxIdentityBytes bounds what is read of an identity file.
	maxIdentityBytes = 1 << 10
)

// ErrIdentity says that the directories are not those of this node.
var ErrIdentity = errors.New("engine: wrong directory")

// ErrLocked says that another process uses the directory.
var ErrLocked = errors.New("engine: directory in use")

// Identity says whose directories they are.
type Identity struct {
	Cluster keyspace.ClusterID
	Node    keyspace.NodeID
	// FormatVersion is that of the files; 0 stands for the one of this program.
	FormatVersion uint32
	// Instance is drawn at random before the directories are made (see DrawInstance) and is
	// the same in both, so that a wal directory is never used with the data directory of
	// another life of the same node. OpenDir sets it.
	Instance uint64
}

// DirLock holds the locks of a node's directories.
type DirLock struct {
	// Identity is that of the directories.
	Identity Identity
	// Fresh says that OpenDir found them empty and made them this node's.
	Fresh bool

	locks []io.Closer
}

// Close gives the locks back.
func (l *DirLock) Close() error {
	var err error
	for _, c := range l.locks {
		err = errors.Join(err, c.Close())
	}
	l.locks = nil
	return err
}

// OpenDir locks the data and the wal directory, which must differ (the wal's may
// lie within the other), and checks that both belong to the node that want names;
// empty ones are made to. Nothing of the store or the wal may be opened before.
// Its errors, ErrLocked and ErrIdentity among them, say what to do.
func OpenDir(fs vfs.FS, dataDir, walDir string, want Identity) (_ *DirLock, err error) {
	if want.FormatVersion == 0 {
		want.FormatVersion = FormatVersion
	}
	data, wal, err := absolute(dataDir, walDir)
	if err != nil {
		return nil, err
	}
	if data == wal {
		return nil, fmt.Errorf("engine: data and wal directory are both %s; give the wal one of its own", dataDir)
	}
	l := &DirLock{}
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
	dataID, err := readIdentity(fs, dataDir)
	if err != nil {
		return nil, err
	}
	walID, err := readIdentity(fs, walDir)
	if err != nil {
		return nil, err
	}
	if dataID != nil && walID != nil {
		l.Identity = *dataID
		return l, errors.Join(compareIdentities(dataDir, dataID, walDir, walID, want), forgetInstance(fs, dataDir))
	}
	// Both are new, or a crash came between the two identity files.
	for _, d := range []struct{ dir, at, other string }{{dataDir, data, wal}, {walDir, wal, data}} {
		if err := refuseHalf(fs, d.dir, d.at, d.other); err != nil {
			return nil, err
		}
	}
	if want.Instance, err = instanceOf(fs, dataDir); err != nil {
		return nil, err
	}
	for _, dir := range []string{walDir, dataDir} {
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
	if err != nil {
		return fmt.Errorf("%w: %s: another skein process has it; stop that one or choose another directory: %w", ErrLocked, dir, err)
	}
	l.locks = append(l.locks, c)
	return nil
}

// compareIdentities says whether both directories are those of want.
func compareIdentities(dataDir string, data *Identity, walDir string, wal *Identity, want Identity) error {
	if err := keyspace.CheckVersion(dataDir, uint64(data.FormatVersion), uint64(want.FormatVersion)); err != nil {
		return fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	if *data != *wal {
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

// absolute returns where the directories are, so that they can be compared.
func absolute(dataDir, walDir string) (data, wal string, err error) {
	if data, err = filepath.Abs(dataDir); err == nil {
		wal, err = filepath.Abs(walDir)
	}
	if err != nil {
		return "", "", fmt.Errorf("engine: where are the directories %s and %s: %w", dataDir, walDir, err)
	}
	return data, wal, nil
}

// refuseHalf refuses a directory without an identity on both sides although there are
// files in it: one of the two was lost or exchanged, and a node that forgets half of
// what it promised is a danger to its groups. at is the directory's absolute path,
// other that of the other one, to which it may lead.
func refuseHalf(fs vfs.FS, dir, at, other string) error {
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
		return fmt.Errorf("%w: %s holds files (%s) but data and wal directory do not both have the file %s; one of them was lost or exchanged: restore it, or empty both and let the node join anew",
			ErrIdentity, dir, name, identityName)
	}
	return nil
}

// encodeIdentity returns the text of an identity file (docs/format/engine.md).
func encodeIdentity(id Identity) []byte {
	b := fmt.Appendf(nil, "%s\nformat %d\ncluster %016x\nnode %016x\ninstance %016x\n",
		identityHead, id.FormatVersion, uint64(id.Cluster), uint64(id.Node), id.Instance)
	return fmt.Appendf(b, "crc32c %08x\n", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// decodeIdentity decodes an identity file.
func decodeIdentity(b []byte) (Identity, error) {
	var id Identity
	lines := strings.Split(string(b), "\n")
	if len(lines) < 3 || lines[0] != identityHead {
		return id, errors.New("not an identity file")
	}
	// The version comes first: a later one may have other lines behind it.
	format, ok := strings.CutPrefix(lines[1], "format ")
	v, err := strconv.ParseUint(format, 10, 32)
	if !ok || err != nil {
		return id, fmt.Errorf("line %q: no format version", lines[1])
	}
	id.FormatVersion = uint32(v)
	if id.FormatVersion != FormatVersion {
		return id, nil
	}
	if len(lines) != 7 {
		return id, fmt.Errorf("%d lines, want 7", len(lines))
	}
	var cluster, node uint64
	for i, f := range []struct {
		name string
		to   *uint64
	}{{"cluster ", &cluster}, {"node ", &node}, {"instance ", &id.Instance}} {
		text, ok := strings.CutPrefix(lines[2+i], f.name)
		if *f.to, err = strconv.ParseUint(text, 16, 64); err != nil || !ok {
			return id, fmt.Errorf("line %q: want %s", lines[2+i], f.name)
		}
	}
	id.Cluster, id.Node = keyspace.ClusterID(cluster), keyspace.NodeID(node)
	if !bytes.Equal(encodeIdentity(id), b) {
		return id, errors.New("checksum does not match")
	}
	return id, nil
}

// ReadIdentity returns whose directory dir is, or nil where nobody's is it yet: no node has
// used it, or a crash came before it was that node's. It locks nothing; OpenDir looks again.
// ErrIdentity says that another build has written it.
func ReadIdentity(fs vfs.FS, dir string) (*Identity, error) {
	id, err := readIdentity(fs, dir)
	if err != nil || id == nil {
		return nil, err
	}
	if err := keyspace.CheckVersion(dir, uint64(id.FormatVersion), FormatVersion); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	return id, nil
}

// readIdentity reads the identity file of dir, nil where there is none.
func readIdentity(fs vfs.FS, dir string) (*Identity, error) {
	b, err := readSmall(fs, dir, identityName)
	if err != nil || b == nil {
		return nil, err
	}
	id, err := decodeIdentity(b)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is damaged: %w; restore it from the other directory of this node", ErrIdentity, fs.PathJoin(dir, identityName), err)
	}
	return &id, nil
}

// readSmall reads a file of dir of at most maxIdentityBytes, nil where there is none.
func readSmall(fs vfs.FS, dir, name string) ([]byte, error) {
	path := fs.PathJoin(dir, name)
	if _, err := fs.Stat(path); err != nil {
		if isNotExist(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("engine: stat %s: %w", path, err)
	}
	f, err := fs.Open(path)
	if err != nil {
		return nil, fmt.Errorf("engine: open %s: %w", path, err)
	}
	b := []byte{}
	part, err := io.ReadAll(io.LimitReader(f, maxIdentityBytes))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("engine: read %s: %w", path, err)
	}
	return append(b, part...), nil
}

// writeIdentity writes the identity file of dir so that after a crash it is there
// whole or not at all.
func writeIdentity(fs vfs.FS, dir string, id Identity) error {
	return writeWhole(fs, dir, identityName, encodeIdentity(id))
}

// writeWhole writes a file of dir so that after a crash it is there whole or not at all.
func writeWhole(fs vfs.FS, dir, name string, b []byte) error {
	path := fs.PathJoin(dir, name)
	tmp := path + ".new"
	f, err := fs.Create(tmp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("engine: create %s: %w", tmp, err)
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("engine: write %s: %w", tmp, err)
	}
	if err := fs.Rename(tmp, path); err != nil {
		return fmt.Errorf("engine: rename %s: %w", tmp, err)
	}
	d, err := fs.OpenDir(dir)
	if err != nil {
		return fmt.Errorf("engine: open %s: %w", dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("engine: sync %s: %w", dir, err)
	}
	return nil
}

// makeDir makes dir and its missing parents and syncs the entries of all that it
// made, since a directory that a crash takes away takes its files with it.
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
