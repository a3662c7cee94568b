package command

import (
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// Forms of an earlier build are refused by their version, and the error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"command":     {Version, third(DecodeHeader([]byte{Version - 1, 1, 1, 1}))},
		"record":      {recordVersion, second(DecodeRecord([]byte{recordVersion - 1, 0, 1, 1}))},
		"transaction": {txnVersion, (&TxnState{}).decodeStored([]byte{suffixRecord}, []byte{txnVersion - 1})},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Newest != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error        { return err }
func third[T, U any](_ T, _ U, err error) error { return err }
