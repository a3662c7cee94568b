package command

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// recordVersion leads the payload of a range's applied record; docs/format/shard.md
// has the bytes.
const recordVersion = 4

// Record is what a range's applied record says beside raft's position and
// configuration: the replicated state that is no user data. All replicas have the
// same bytes at the same index.
type Record struct {
	RangeID    keyspace.RangeID
	Generation keyspace.Generation
	Span       keyspace.Span
	// Last is the last applied batch.
	Last Link
	// LastRevision is the highest revision applied here.
	LastRevision keyspace.Revision
	// SequencerTerm is the highest term of a sequencer that a leader of the range knew when it
	// proposed something. No revision of an earlier sequencer is read at or taken any more.
	SequencerTerm uint64
	// Compacted is the range's own compacted revision: no read below it is answered,
	// and what it lets go may be gone. 0 is none.
	Compacted keyspace.Revision
	// Live is the number of live keys if counted; otherwise the change of that
	// number since the split that left the range uncounted.
	Live    int64
	Counted bool
	// Hash is the sum of mvcc.HashWrite over all versions that were applied to the range (S8). A
	// child's begins at 0.
	Hash uint64
	// Fence is the highest attempt of a transaction that was aborted at an anchor here: no
	// attempt up to it can be anchored any more.
	Fence uint64
	// Merge is what binds the range to a merge with a neighbour, if anything does.
	Merge MergeState
	// Merged is the last merge that has ended here, however: none up to it binds the range
	// any more.
	Merged uint64
	// Absorbed is the generation that the last absorbing gave the range, 0 if it has never
	// absorbed another one.
	Absorbed keyspace.Generation
	// Load is what the range has taken of the load of a new cluster.
	Load rangeapi.LoadState
}

// CompactedIn returns the highest compacted revision that is known, given the cluster's. The
// range's own is 0 before the first compaction, the cluster's -1.
func (r *Record) CompactedIn(cluster keyspace.Revision) keyspace.Revision {
	if r.Compacted == 0 {
		return cluster
	}
	return max(cluster, r.Compacted)
}

// The flags of a record: counted, the role in a merge, and loaded.
const (
	recordCounted   = 1
	recordRoleShift = 1
	recordRoles     = 3 << recordRoleShift
	recordLoaded    = 8
)

// AppendRecord appends the payload of the applied record.
func AppendRecord(dst []byte, r *Record) []byte {
	flags := byte(r.Merge.Role) << recordRoleShift
	if r.Counted {
		flags |= recordCounted
	}
	if r.Load.Stage != rangeapi.LoadNone {
		flags |= recordLoaded
	}
	dst = append(dst, recordVersion, flags)
	dst = binary.AppendUvarint(dst, uint64(r.RangeID))
	dst = binary.AppendUvarint(dst, uint64(r.Generation))
	dst = wire.AppendBytes(dst, r.Span.Start)
	dst = wire.AppendBytes(dst, r.Span.End)
	dst = binary.AppendUvarint(dst, r.Last.Term)
	dst = binary.AppendUvarint(dst, r.Last.Number)
	dst = binary.AppendUvarint(dst, uint64(r.LastRevision))
	dst = binary.AppendUvarint(dst, r.SequencerTerm)
	dst = binary.AppendUvarint(dst, uint64(r.Compacted))
	dst = binary.AppendUvarint(dst, r.Fence)
	dst = binary.AppendUvarint(dst, r.Merged)
	dst = binary.AppendUvarint(dst, uint64(r.Absorbed))
	dst = appendMerge(dst, &r.Merge)
	if r.Load.Stage != rangeapi.LoadNone {
		dst = rangeapi.AppendLoadState(dst, &r.Load)
	}
	dst = binary.AppendVarint(dst, r.Live)
	return binary.BigEndian.AppendUint64(dst, r.Hash)
}

// DecodeRecord reads what AppendRecord wrote and keeps nothing of b.
func DecodeRecord(b []byte) (r Record, err error) {
	if len(b) < 2 {
		return r, wire.ErrTruncated
	}
	if err := keyspace.CheckVersion("range record", uint64(b[0]), recordVersion); err != nil {
		return r, fmt.Errorf("command: %w", err)
	}
	if r.Merge.Role = MergeRole(b[1] & recordRoles >> recordRoleShift); r.Merge.Role > MergeSource || b[1] > recordLoaded|recordRoles|recordCounted {
		return r, fmt.Errorf("command: record with flags %d", b[1])
	}
	r.Counted = b[1]&recordCounted != 0
	loaded := b[1]&recordLoaded != 0
	b = b[2:]
	var id, gen uint64
	if id, b, err = wire.Uvarint(b); err != nil {
		return r, err
	}
	if gen, b, err = wire.Uvarint(b); err != nil {
		return r, err
	}
	r.RangeID, r.Generation = keyspace.RangeID(id), keyspace.Generation(gen)
	if b, err = decodeBorders(b, &r.Span); err != nil {
		return r, err
	}
	var ints [8]uint64
	for i := range ints {
		if ints[i], b, err = wire.Uvarint(b); err != nil {
			return r, err
		}
	}
	r.Last = Link{ints[0], ints[1]}
	r.LastRevision, r.SequencerTerm, r.Compacted = keyspace.Revision(ints[2]), ints[3], keyspace.Revision(ints[4])
	r.Fence, r.Merged, r.Absorbed = ints[5], ints[6], keyspace.Generation(ints[7])
	if b, err = decodeMerge(b, &r.Merge); err != nil {
		return r, err
	}
	if loaded {
		if r.Load, b, err = rangeapi.DecodeLoadState(b); err != nil {
			return r, err
		}
		if r.Load.Stage == rangeapi.LoadNone {
			return r, errors.New("command: a record is loaded and in no stage of it")
		}
	}
	if r.Live, b, err = wire.Varint(b); err != nil || len(b) != 8 {
		return r, wire.ErrTruncated
	}
	r.Hash = binary.BigEndian.Uint64(b)
	return r, nil
}

// Descriptor returns the descriptor that the record and the configuration make.
func (r *Record) Descriptor(confIndex uint64, replicas []keyspace.Replica) keyspace.Descriptor {
	return keyspace.Descriptor{
		Range: r.RangeID, Generation: r.Generation, Span: r.Span,
		ConfIndex: confIndex, Replicas: replicas,
	}
}
