package engine

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

const (
	// instanceName begins with identityName: it makes no directory one that is in use.
	instanceName = identityName + ".instance"
	instanceHead = "skein directory to be"
	// instanceFormat is the version of that file.
	instanceFormat = 1
)

// DrawInstance returns the instance that the directories will have, and has the data
// directory keep it: a node that is to join a cluster is known by it before it has an
// identity, also after a crash. Where the directories are some node's it is theirs.
// ErrLocked says that another process uses the directory.
func DrawInstance(fs vfs.FS, dataDir string) (_ uint64, err error) {
	l := &DirLock{}
	if err := l.lock(fs, dataDir); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	return instanceOf(fs, dataDir)
}

// instanceOf is DrawInstance in a directory that is locked.
func instanceOf(fs vfs.FS, dataDir string) (uint64, error) {
	id, err := readIdentity(fs, dataDir)
	if err != nil || id != nil && id.FormatVersion == FormatVersion {
		if id == nil {
			id = &Identity{}
		}
		return id.Instance, err
	}
	b, err := readSmall(fs, dataDir, instanceName)
	if err != nil {
		return 0, err
	}
	if b != nil {
		instance, err := decodeInstance(b)
		if err != nil {
			return 0, fmt.Errorf("%w: %s: %w; remove it, and let the node join anew", ErrIdentity, fs.PathJoin(dataDir, instanceName), err)
		}
		return instance, nil
	}
	var drawn [8]byte
	if _, err := rand.Read(drawn[:]); err != nil {
		return 0, fmt.Errorf("engine: draw an instance: %w", err)
	}
	instance := binary.BigEndian.Uint64(drawn[:]) | 1 // 0 stands for none
	return instance, writeWhole(fs, dataDir, instanceName, encodeInstance(instance))
}

// forgetInstance removes what the identity has replaced: a directory that loses that and
// the rest is another one.
func forgetInstance(fs vfs.FS, dataDir string) error {
	path := fs.PathJoin(dataDir, instanceName)
	if err := fs.Remove(path); err != nil && !isNotExist(err) {
		return fmt.Errorf("engine: remove %s: %w", path, err)
	}
	return nil
}

// encodeInstance returns the text of the file (docs/format/engine.md).
func encodeInstance(instance uint64) []byte {
	b := fmt.Appendf(nil, "%s\nformat %d\ninstance %016x\n", instanceHead, instanceFormat, instance)
	return fmt.Appendf(b, "crc32c %08x\n", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

func decodeInstance(b []byte) (uint64, error) {
	lines := strings.Split(string(b), "\n")
	if len(lines) < 3 || lines[0] != instanceHead {
		return 0, errors.New("not a file of an instance")
	}
	format, ok := strings.CutPrefix(lines[1], "format ")
	v, err := strconv.ParseUint(format, 10, 32)
	if !ok || err != nil {
		return 0, fmt.Errorf("line %q: no format version", lines[1])
	}
	if err := keyspace.CheckVersion("it", v, instanceFormat); err != nil {
		return 0, err
	}
	text, ok := strings.CutPrefix(lines[2], "instance ")
	instance, err := strconv.ParseUint(text, 16, 64)
	switch {
	case !ok || err != nil || instance == 0:
		return 0, fmt.Errorf("line %q: no instance", lines[2])
	case !bytes.Equal(encodeInstance(instance), b):
		return 0, errors.New("checksum does not match")
	}
	return instance, nil
}
