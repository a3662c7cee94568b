package command

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// MergeRole says what a range is in the merge that it is bound to; the numbers are stored.
type MergeRole uint8

const (
	// MergeNone is a range that no merge binds.
	MergeNone MergeRole = iota
	// MergeTarget absorbs its right neighbour, if the merge is committed. Until
	// then it serves, and keeps its span and its members.
	MergeTarget
	// MergeSource is frozen. Its left neighbour absorbs it, or it is released.
	MergeSource
)

// MergeState is what binds a range to a merge.
type MergeState struct {
	Role MergeRole
	// ID is the operation's, which placement has given it.
	ID uint64
	// Other is the neighbour, and hull covers both; only the target has it.
	Other keyspace.RangeID
	Hull  keyspace.Span
}

// Frozen says whether the range does nothing any more.
func (m *MergeState) Frozen() bool { return m.Role == MergeSource }

// StandsStill says whether the range, being frozen, stands still.
func (m *MergeState) StandsStill() bool { return m.Frozen() && !mutation.Is(mutation.FreezeForgotten) }

// appendMerge appends what the role, which is in the record's flags, leaves open.
func appendMerge(dst []byte, m *MergeState) []byte {
	if m.Role == MergeNone {
		return dst
	}
	dst = binary.AppendUvarint(dst, m.ID)
	dst = binary.AppendUvarint(dst, uint64(m.Other))
	if m.Role == MergeTarget {
		dst = wire.AppendBytes(wire.AppendBytes(dst, m.Hull.Start), m.Hull.End)
	}
	return dst
}

// decodeMerge reads what appendMerge wrote for m's role and keeps nothing of b.
func decodeMerge(b []byte, m *MergeState) (rest []byte, err error) {
	if m.Role == MergeNone {
		return b, nil
	}
	if m.ID, b, err = wire.Uvarint(b); err != nil {
		return nil, err
	}
	other, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if m.Other = keyspace.RangeID(other); m.ID == 0 || other == 0 {
		return nil, fmt.Errorf("command: bound to merge %d with range %d", m.ID, other)
	}
	if m.Role == MergeTarget {
		return decodeBorders(b, &m.Hull)
	}
	return b, nil
}

// MergeCommand is the body of the four commands of a merge. Bind and freeze name the
// configuration by which the merge was decided: where the range has another one by then
// nothing happens.
type MergeCommand struct {
	ID        uint64
	ConfIndex uint64
	Other     keyspace.RangeID
	Hull      keyspace.Span
}

// binds says whether a command of the kind has more than the merge's id.
func binds(k Kind) bool { return k == KindBind || k == KindFreeze }

// AppendMergeCommand appends the body of a command of a merge.
func AppendMergeCommand(dst []byte, k Kind, c *MergeCommand) []byte {
	dst = binary.AppendUvarint(dst, c.ID)
	if !binds(k) {
		return dst
	}
	dst = binary.AppendUvarint(dst, c.ConfIndex)
	dst = binary.AppendUvarint(dst, uint64(c.Other))
	if k == KindBind {
		dst = wire.AppendBytes(wire.AppendBytes(dst, c.Hull.Start), c.Hull.End)
	}
	return dst
}

// DecodeMergeCommand reads what AppendMergeCommand wrote and keeps nothing of b.
func DecodeMergeCommand(k Kind, b []byte) (c MergeCommand, err error) {
	if c.ID, b, err = wire.Uvarint(b); err != nil {
		return c, err
	}
	if binds(k) {
		var other uint64
		if c.ConfIndex, b, err = wire.Uvarint(b); err == nil {
			other, b, err = wire.Uvarint(b)
		}
		if err == nil && k == KindBind {
			b, err = decodeBorders(b, &c.Hull)
		}
		if c.Other = keyspace.RangeID(other); err == nil && other == 0 {
			err = fmt.Errorf("command: %s for merge %d with no range", k, c.ID)
		}
	}
	if err == nil && (len(b) != 0 || c.ID == 0) {
		err = fmt.Errorf("command: %s for merge %d with %d bytes left over", k, c.ID, len(b))
	}
	return c, err
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
