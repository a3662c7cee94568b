package wal

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestAnotherVersionIsNamed shows that Open refuses files of an earlier build by their
// version, with an error that names the remedy.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"segment": {formatVersion, earlierSegment(t)},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Newest != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

// earlierSegment opens a log with an intact segment of an earlier version.
func earlierSegment(t *testing.T) error {
	t.Helper()
	fs := vfs.NewMem()
	h := segmentHeader{seq: 1, salt: 7, size: headerLen}
	b := h.encode()
	binary.LittleEndian.PutUint32(b[8:], formatVersion-1)
	binary.LittleEndian.PutUint32(b[12:], headerChecksum(b))
	if err := fs.MkdirAll("wal", 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := fs.Create(fs.PathJoin("wal", segmentName(1, segmentSuffix)), vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = f.Write(b)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	l, err := Open(Options{FS: fs, Dir: "wal", Clock: clock.System()})
	if err == nil {
		l.Close()
	}
	if corrupt := (*CorruptionError)(nil); errors.As(err, &corrupt) {
		t.Errorf("it is called damaged: %v", err)
	}
	return err
}
