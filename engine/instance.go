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
	// Since instanceName begins with identityName, it does not make a directory one that
	// is in use.
	instanceName = identityName + ".instance"
	instanceHead = "skein directory to be"
	// instanceFormat is the version of that file.
	instanceFormat = 1
)

// instanceOf is EnsureInstance in a locked directory.
func instanceOf(fs vfs.FS, dataDir string, reads keyspace.Versions) (uint64, error) {
	id, err := readIdentity(fs, dataDir, reads)
	if err != nil {
		return 0, err
	}
	if id != nil {
		return id.Instance, nil
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
	instance := binary.BigEndian.Uint64(drawn[:]) | 1 // 0 means none
	return instance, writeWhole(fs, dataDir, instanceName, encodeInstance(instance))
}

// forgetInstance removes the file once the identity replaces it. If the identity is lost
// later, the directory counts as a different one.
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
		return 0, errors.New("not an instance file")
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
