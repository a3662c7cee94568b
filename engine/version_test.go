package engine

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// TestAnotherVersionIsNamed: data of an earlier build is refused by its version, and the
// error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"applied record": {appliedVersion, second(DecodeApplied([]byte{appliedVersion - 1, 1, 1, 1, 0}))},
		"identity":       {uint64(keyspace.OldestVersion), earlierIdentity(t)},
		"instance":       {instanceFormat, second(decodeInstance([]byte(instanceHead + "\nformat 0\ninstance 1\n")))},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Oldest != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func earlierIdentity(t *testing.T) error {
	t.Helper()
	fs := vfs.NewMem()
	if err := errors.Join(fs.MkdirAll("data", 0o700), writeIdentity(fs, "data", Identity{Cluster: 1, Node: 2, Version: keyspace.OldestVersion - 1, Instance: 3})); err != nil {
		t.Fatal(err)
	}
	return second(ReadIdentity(fs, "data"))
}
