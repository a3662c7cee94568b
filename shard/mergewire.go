package shard

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// mergeRole says what a range is in the merge that it is bound to; the numbers are stored.
type mergeRole uint8

const (
	mergeNone mergeRole = iota
	// mergeTarget: the range absorbs its right neighbour, if the merge is committed. Until
	// then it serves, and keeps its span and its members.
	mergeTarget
	// mergeSource: the range is frozen. Its left neighbour absorbs it, or it is released.
	mergeSource
)

// merge is what binds a range to a merge.
type merge struct {
	role mergeRole
	// id is the operation's, which placement has given it.
	id uint64
	// other is the neighbour, and hull covers both; only the target has it.
	other keyspace.RangeID
	hull  keyspace.Span
}

// frozen says whether the range does nothing any more.
func (m *merge) frozen() bool { return m.role == mergeSource }

// still says whether the range, being frozen, stands still.
func (m *merge) still() bool { return m.frozen() && !mutation.Is(mutation.FreezeForgotten) }

// appendMerge appends what the role, which is in the record's flags, leaves open.
func appendMerge(dst []byte, m *merge) []byte {
	if m.role == mergeNone {
		return dst
	}
	dst = binary.AppendUvarint(dst, m.id)
	dst = binary.AppendUvarint(dst, uint64(m.other))
	if m.role == mergeTarget {
		dst = wire.AppendBytes(wire.AppendBytes(dst, m.hull.Start), m.hull.End)
	}
	return dst
}

// decodeMerge reads what appendMerge wrote for m's role and keeps nothing of b.
func decodeMerge(b []byte, m *merge) (rest []byte, err error) {
	if m.role == mergeNone {
		return b, nil
	}
	if m.id, b, err = wire.Uvarint(b); err != nil {
		return nil, err
	}
	other, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if m.other = keyspace.RangeID(other); m.id == 0 || other == 0 {
		return nil, fmt.Errorf("shard: bound to merge %d with range %d", m.id, other)
	}
	if m.role == mergeTarget {
		return decodeBorders(b, &m.hull)
	}
	return b, nil
}

// mergeCommand is the body of the four commands of a merge. Bind and freeze name the
// configuration by which the merge was decided: where the range has another one by then
// nothing happens.
type mergeCommand struct {
	id        uint64
	confIndex uint64
	other     keyspace.RangeID
	hull      keyspace.Span
}

// binds says whether a command of the kind has more than the merge's id.
func binds(k commandKind) bool { return k == commandBind || k == commandFreeze }

func appendMergeCommand(dst []byte, k commandKind, c *mergeCommand) []byte {
	dst = binary.AppendUvarint(dst, c.id)
	if !binds(k) {
		return dst
	}
	dst = binary.AppendUvarint(dst, c.confIndex)
	dst = binary.AppendUvarint(dst, uint64(c.other))
	if k == commandBind {
		dst = wire.AppendBytes(wire.AppendBytes(dst, c.hull.Start), c.hull.End)
	}
	return dst
}

// decodeMergeCommand reads what appendMergeCommand wrote and keeps nothing of b.
func decodeMergeCommand(k commandKind, b []byte) (c mergeCommand, err error) {
	if c.id, b, err = wire.Uvarint(b); err != nil {
		return c, err
	}
	if binds(k) {
		var other uint64
		if c.confIndex, b, err = wire.Uvarint(b); err == nil {
			other, b, err = wire.Uvarint(b)
		}
		if err == nil && k == commandBind {
			b, err = decodeBorders(b, &c.hull)
		}
		if c.other = keyspace.RangeID(other); err == nil && other == 0 {
			err = fmt.Errorf("shard: %s for merge %d with no range", k, c.id)
		}
	}
	if err == nil && (len(b) != 0 || c.id == 0) {
		err = fmt.Errorf("shard: %s for merge %d with %d bytes left over", k, c.id, len(b))
	}
	return c, err
}
