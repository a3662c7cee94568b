package engine

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

const (
	lockName     = "skein.lock"
	identityName = "skein.identity"
	identityHead = "skein node directory"

	// maxIdentityBytes bounds how much of an identity file is read.
	maxIdentityBytes = 1 << 10
)

// ErrIdentity says that the directories do not belong to this node.
var ErrIdentity = errors.New("engine: wrong directory")

// Identity says to which node directories belong.
type Identity struct {
	Cluster keyspace.ClusterID
	Node    keyspace.NodeID
	// Version is the one in which the node writes: the cluster version as far as it knows. OpenDir
	// sets it, DirLock.Raise raises it.
	Version keyspace.Version
	// Instance is drawn at random before the directories are made (see EnsureInstance)
	// and is the same in both. So a wal directory is never used with the data directory
	// of an earlier incarnation of the node. OpenDir sets it.
	Instance uint64
}

// encodeIdentity returns the text of an identity file (docs/format/engine.md).
func encodeIdentity(id Identity) []byte {
	b := fmt.Appendf(nil, "%s\nformat %d\ncluster %016x\nnode %016x\ninstance %016x\n",
		identityHead, id.Version, uint64(id.Cluster), uint64(id.Node), id.Instance)
	return fmt.Appendf(b, "crc32c %08x\n", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// decodeIdentity decodes an identity file. Of a version that is not read it returns the version
// alone.
func decodeIdentity(b []byte, reads keyspace.Versions) (Identity, error) {
	var id Identity
	lines := strings.Split(string(b), "\n")
	if len(lines) < 3 || lines[0] != identityHead {
		return id, errors.New("not an identity file")
	}
	// The version comes first: a later version may have other lines behind it.
	format, ok := strings.CutPrefix(lines[1], "format ")
	v, err := strconv.ParseUint(format, 10, 32)
	if !ok || err != nil {
		return id, fmt.Errorf("line %q: no format version", lines[1])
	}
	id.Version = keyspace.Version(v)
	if !reads.Has(id.Version) {
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

// ReadIdentity returns the identity of dir. It is nil if no node has used dir yet, or if
// a crash came before the identity was written. It takes no lock; OpenDir checks again.
// ErrIdentity says that another build wrote it.
func ReadIdentity(fs vfs.FS, dir string) (*Identity, error) {
	return readIdentity(fs, dir, keyspace.OwnVersions())
}

// readIdentity reads the identity file of dir; nil if there is none.
func readIdentity(fs vfs.FS, dir string, reads keyspace.Versions) (*Identity, error) {
	b, err := readSmall(fs, dir, identityName)
	if err != nil || b == nil {
		return nil, err
	}
	id, err := decodeIdentity(b, reads)
	if err != nil {
		return nil, fmt.Errorf("%w: %s is damaged: %w; restore it from the other directory of this node", ErrIdentity, fs.PathJoin(dir, identityName), err)
	}
	if err := keyspace.CheckVersions(dir, uint64(id.Version), uint64(reads.Oldest), uint64(reads.Newest)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	return &id, nil
}

// readSmall reads a file of dir of at most maxIdentityBytes; nil if there is none.
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

// writeIdentity writes the identity file of dir. After a crash the file exists completely
// or not at all.
func writeIdentity(fs vfs.FS, dir string, id Identity) error {
	return writeWhole(fs, dir, identityName, encodeIdentity(id))
}

// writeWhole writes a file of dir. After a crash it exists completely or not at all.
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
