package fsm

import (
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// Records of an earlier build are refused by their version, and the error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"command": {FormatVersion, second(DecodeCommand([]byte{FormatVersion - 1, 1, 1}))},
		"record":  {FormatVersion, NewState().Load([]byte("m"), []byte{FormatVersion - 1, 0, 0, 0})},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Reads != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }
