package mvcc

import (
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestAnotherVersionIsNamed: data of an earlier build is refused by its version, and the
// error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"key count": {liveCountVersion, second(DecodeLiveCount([]byte{liveCountVersion - 1}, 10))},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Reads != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }
