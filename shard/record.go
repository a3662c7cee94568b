package shard

import (
	"encoding/binary"
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// recordVersion leads the payload of a range's applied record; docs/format/shard.md
// has the bytes.
const recordVersion = 3

// record is what a range's applied record says beside raft's position and
// configuration: the replicated state that is no user data. All replicas have the
// same bytes at the same index.
type record struct {
	rangeID    keyspace.RangeID
	generation keyspace.Generation
	span       keyspace.Span
	// last is the last applied batch.
	last link
	// lastRevision is the highest revision applied here.
	lastRevision keyspace.Revision
	// compacted is the range's own compacted revision: no read below it is answered,
	// and what it lets go may be gone. 0 is none.
	compacted keyspace.Revision
	// live is the number of live keys if counted; otherwise the change of that
	// number since the split that left the range uncounted.
	live    int64
	counted bool
	// hash is the sum over all versions that were applied to the range (S8). A
	// child's begins at 0.
	hash uint64
	// fence is the highest attempt of a transaction that was aborted at an anchor here: no
	// attempt up to it can be anchored any more.
	fence uint64
	// merge is what binds the range to a merge with a neighbour, if anything does.
	merge merge
	// merged is the last merge that has ended here, however: none up to it binds the range
	// any more.
	merged uint64
	// absorbed is the generation that the last absorbing gave the range, 0 if it has never
	// absorbed another one.
	absorbed keyspace.Generation
}

// The flags of a record: counted, and the role in a merge.
const (
	recordCounted   = 1
	recordRoleShift = 1
)

func appendRecord(dst []byte, r *record) []byte {
	flags := byte(r.merge.role) << recordRoleShift
	if r.counted {
		flags |= recordCounted
	}
	dst = append(dst, recordVersion, flags)
	dst = binary.AppendUvarint(dst, uint64(r.rangeID))
	dst = binary.AppendUvarint(dst, uint64(r.generation))
	dst = wire.AppendBytes(dst, r.span.Start)
	dst = wire.AppendBytes(dst, r.span.End)
	dst = binary.AppendUvarint(dst, r.last.Term)
	dst = binary.AppendUvarint(dst, r.last.Number)
	dst = binary.AppendUvarint(dst, uint64(r.lastRevision))
	dst = binary.AppendUvarint(dst, uint64(r.compacted))
	dst = binary.AppendUvarint(dst, r.fence)
	dst = binary.AppendUvarint(dst, r.merged)
	dst = binary.AppendUvarint(dst, uint64(r.absorbed))
	dst = appendMerge(dst, &r.merge)
	dst = binary.AppendVarint(dst, r.live)
	return binary.BigEndian.AppendUint64(dst, r.hash)
}

// decodeRecord reads what appendRecord wrote and keeps nothing of b.
func decodeRecord(b []byte) (r record, err error) {
	if len(b) < 2 {
		return r, wire.ErrTruncated
	}
	if err := keyspace.CheckVersion("range record", uint64(b[0]), recordVersion); err != nil {
		return r, fmt.Errorf("shard: %w", err)
	}
	if r.merge.role = mergeRole(b[1] >> recordRoleShift); r.merge.role > mergeSource {
		return r, fmt.Errorf("shard: record with flags %d", b[1])
	}
	r.counted = b[1]&recordCounted != 0
	b = b[2:]
	var id, gen uint64
	if id, b, err = wire.Uvarint(b); err != nil {
		return r, err
	}
	if gen, b, err = wire.Uvarint(b); err != nil {
		return r, err
	}
	r.rangeID, r.generation = keyspace.RangeID(id), keyspace.Generation(gen)
	if b, err = decodeBorders(b, &r.span); err != nil {
		return r, err
	}
	var ints [7]uint64
	for i := range ints {
		if ints[i], b, err = wire.Uvarint(b); err != nil {
			return r, err
		}
	}
	r.last = link{ints[0], ints[1]}
	r.lastRevision, r.compacted = keyspace.Revision(ints[2]), keyspace.Revision(ints[3])
	r.fence, r.merged, r.absorbed = ints[4], ints[5], keyspace.Generation(ints[6])
	if b, err = decodeMerge(b, &r.merge); err != nil {
		return r, err
	}
	live, n := binary.Varint(b)
	if n <= 0 || len(b) != n+8 {
		return r, wire.ErrTruncated
	}
	r.live, r.hash = live, binary.BigEndian.Uint64(b[n:])
	return r, nil
}

// decodeBorders reads the borders of a span and keeps nothing of b.
func decodeBorders(b []byte, s *keyspace.Span) (rest []byte, err error) {
	for _, p := range []*[]byte{&s.Start, &s.End} {
		var f []byte
		if f, b, err = wire.Bytes(b); err != nil {
			return nil, err
		}
		if len(f) > 0 {
			*p = append([]byte(nil), f...)
		}
	}
	return b, nil
}

// versionHash is what one applied version adds to the range's hash. It covers
// all that a replica stores of the version.
func versionHash(v *mvcc.Version) uint64 {
	var short [256]byte // keys are seldom longer
	s := append(short[:0], 0)
	if v.Tombstone {
		s[0] = 1
	}
	s = binary.BigEndian.AppendUint64(s, uint64(v.Mod))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Create))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Version))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Lease))
	s = binary.BigEndian.AppendUint32(s, v.Sub)
	s = binary.BigEndian.AppendUint32(s, uint32(len(v.Key)))
	s = append(s, v.Key...)
	sum := xxhash.Sum64(s)
	if len(v.Value) > 0 {
		// An odd factor keeps value and rest from cancelling each other out.
		sum += xxhash.Sum64(v.Value) * 0x9e3779b97f4a7c15
	}
	return sum
}

// descriptor returns the descriptor that the record and the configuration make.
func (r *record) descriptor(confIndex uint64, replicas []keyspace.Replica) keyspace.Descriptor {
	return keyspace.Descriptor{
		Range: r.rangeID, Generation: r.generation, Span: r.span,
		ConfIndex: confIndex, Replicas: replicas,
	}
}
