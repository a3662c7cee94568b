package removal

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// NoteKey is the node's own note of how far old versions of a range are gone.
func NoteKey(id keyspace.RangeID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte("shard/removed/"), uint64(id)))
}

// AppendNote appends the value of NoteKey: up to where old versions are gone, of the
// span that the range had in the generation.
func AppendNote(dst []byte, to keyspace.Revision, g keyspace.Generation) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(to)), uint64(g))
}

// DecodeNote reads what AppendNote wrote.
func DecodeNote(b []byte) (to keyspace.Revision, g keyspace.Generation, err error) {
	rev, rest, err := wire.Uvarint(b)
	if err != nil {
		return 0, 0, err
	}
	generation, rest, err := wire.Uvarint(rest)
	if err == nil && len(rest) > 0 {
		err = fmt.Errorf("%d bytes left over", len(rest))
	}
	return keyspace.Revision(rev), keyspace.Generation(generation), err
}
