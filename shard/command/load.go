package command

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Load brings finished versions at given revisions, takes attachments away, or ends the load of the range.
type Load struct {
	Stage rangeapi.LoadStage
	// Hash is the range's hash before the entry, as its leader counted it.
	Hash uint64
	// From is the cursor on which the entry stands. It does nothing on any other.
	From rangeapi.LoadCursor
	// Incarnation is that of all leases of the load.
	Incarnation keyspace.LeaseIncarnation
	// Revision and Compacted are those of the store behind an entry that ends the load, else 0.
	Revision, Compacted keyspace.Revision
	// Versions is how many follow.
	Versions int
	// Unused are leases of which the range has no key any more, ascending: their attachments go. An entry has either
	// these or versions, and one that ends the load has none of both.
	Unused []keyspace.LeaseID
}

// The flags of a loaded version.
const (
	// loadLived: the key was alive before.
	loadLived = 1 << iota
	// loadOld: a newer version of the key is here already. It has none of the other flags.
	loadOld
	// loadAttach: the key is attached to the version's lease, which lives.
	loadAttach
	// loadDetach: the key was attached to another lease before, which follows.
	loadDetach

	loadFlags = loadLived | loadOld | loadAttach | loadDetach
)

// LoadPrior is what a loaded version meets.
type LoadPrior struct {
	Prior
	// Old says that a newer version of the key is here: the version is history.
	Old bool
	// Attach says that the version's lease lives.
	Attach bool
}

// AppendLoad appends what the body of a load begins with.
func AppendLoad(dst []byte, c *Load) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, byte(c.Stage)), c.Hash)
	dst = rangeapi.AppendLoadCursor(dst, &c.From)
	dst = binary.AppendUvarint(dst, uint64(c.Incarnation))
	dst = binary.AppendUvarint(dst, uint64(c.Revision))
	dst = binary.AppendUvarint(dst, uint64(c.Compacted))
	dst = binary.AppendUvarint(dst, uint64(c.Versions))
	if c.Versions > 0 || c.Stage == rangeapi.LoadEnded {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(len(c.Unused)))
	for _, lease := range c.Unused {
		dst = binary.AppendUvarint(dst, uint64(lease))
	}
	return dst
}

// decodeUnused reads the leases of an entry that has no versions and does not end the load.
func (c *Load) decodeUnused(b []byte) (rest []byte, err error) {
	n, b, err := wire.Uvarint(b)
	switch {
	case err != nil:
		return nil, err
	case n == 0 || n > rangeapi.MaxLoadLeases || n > uint64(len(b)):
		return nil, fmt.Errorf("command: load of stage %d without versions, with %d leases in %d bytes", c.Stage, n, len(b))
	}
	c.Unused = make([]keyspace.LeaseID, 0, n)
	for range n {
		var lease keyspace.LeaseID
		if lease, b, err = leaseField(b); err != nil {
			return nil, err
		}
		if k := len(c.Unused); k > 0 && lease <= c.Unused[k-1] {
			return nil, fmt.Errorf("command: lease %d behind lease %d", lease, c.Unused[k-1])
		}
		c.Unused = append(c.Unused, lease)
	}
	return b, nil
}

// AppendLoadVersion appends one version.
func AppendLoadVersion(dst []byte, v *mvcc.Version, before LoadPrior) []byte {
	flags := byte(0)
	if before.Lived {
		flags |= loadLived
	}
	if before.Attach {
		flags |= loadAttach
	}
	if before.Lease != 0 {
		flags |= loadDetach
	}
	if before.Old {
		flags = loadOld
	}
	dst = append(dst, flags)
	if flags&loadDetach != 0 {
		dst = binary.AppendUvarint(dst, uint64(before.Lease))
	}
	return rangeapi.AppendStoredVersion(dst, v)
}

// DecodeLoad reads what AppendLoad wrote, and returns what follows it.
func DecodeLoad(b []byte) (c Load, rest []byte, err error) {
	if len(b) < 9 {
		return c, nil, wire.ErrTruncated
	}
	c.Stage, c.Hash = rangeapi.LoadStage(b[0]), binary.BigEndian.Uint64(b[1:])
	if c.From, b, err = rangeapi.DecodeLoadCursor(b[9:]); err != nil {
		return c, nil, err
	}
	var ints [4]uint64
	for i := range ints {
		if ints[i], b, err = wire.Uvarint(b); err != nil {
			return c, nil, err
		}
	}
	c.Incarnation, c.Revision, c.Compacted = keyspace.LeaseIncarnation(ints[0]), keyspace.Revision(ints[1]), keyspace.Revision(ints[2])
	ends := c.Stage == rangeapi.LoadEnded
	switch {
	case c.Stage == rangeapi.LoadNone || c.Stage > rangeapi.LoadEnded || c.From.Stage > c.Stage || c.From.Stage == rangeapi.LoadEnded:
		err = fmt.Errorf("command: load of stage %d on %s", c.Stage, &c.From)
	case ints[1] > uint64(keyspace.MaxRevision) || ints[2] > ints[1] || ends != (ints[1] > 0):
		err = fmt.Errorf("command: load of stage %d to revision %d, compacted %d", c.Stage, ints[1], ints[2])
	case ints[3] > uint64(len(b)) || ends && ints[3] > 0 || c.Incarnation == 0:
		err = fmt.Errorf("command: load of stage %d with %d versions in %d bytes, incarnation %d", c.Stage, ints[3], len(b), ints[0])
	}
	if c.Versions = int(ints[3]); err == nil && c.Versions == 0 && !ends {
		b, err = c.decodeUnused(b)
	}
	return c, b, err
}

// VisitLoad calls visit with every version of a load, in order, and checks the order.
func VisitLoad(c *Load, b []byte, visit func(v *mvcc.Version, before LoadPrior) error) error {
	at := c.From
	if at.Stage != c.Stage {
		at = rangeapi.LoadCursor{Stage: c.Stage}
	}
	var v mvcc.Version
	for range c.Versions {
		before, rest, err := decodeLoadVersion(b, &v)
		if err != nil {
			return err
		}
		switch {
		case at.Passed(&v):
			return fmt.Errorf("command: key %q at revision %d, operation %d, is not behind %s", v.Key, v.Mod, v.Sub, &at)
		case c.Stage == rangeapi.LoadBulk && (before.Lived || before.Lease != 0), c.Stage != rangeapi.LoadBulk && before.Old:
			return fmt.Errorf("command: key %q at revision %d of a %s load: lived %t, lease %d, old %t", v.Key, v.Mod, c.Stage, before.Lived, before.Lease, before.Old)
		case c.Stage == rangeapi.LoadBulk && before.Old != bytes.Equal(v.Key, at.Key):
			return fmt.Errorf("command: key %q at revision %d behind %s: is a newer version here: %t", v.Key, v.Mod, &at, before.Old)
		}
		if err := visit(&v, before); err != nil {
			return err
		}
		at, b = c.Stage.At(&v), rest
	}
	if len(b) > 0 {
		return fmt.Errorf("command: %d bytes behind a load", len(b))
	}
	return nil
}

func decodeLoadVersion(b []byte, v *mvcc.Version) (before LoadPrior, rest []byte, err error) {
	if len(b) == 0 {
		return before, nil, wire.ErrTruncated
	}
	flags := b[0]
	b = b[1:]
	if flags&^loadFlags != 0 || flags&loadOld != 0 && flags != loadOld {
		return before, nil, fmt.Errorf("command: loaded version with flags %#x", flags)
	}
	before.Lived, before.Old, before.Attach = flags&loadLived != 0, flags&loadOld != 0, flags&loadAttach != 0
	if flags&loadDetach != 0 {
		if before.Lease, b, err = leaseField(b); err != nil {
			return before, nil, err
		}
	}
	if rest, err = rangeapi.DecodeStoredVersion(b, v); err != nil {
		return before, nil, err
	}
	if before.Attach && v.Lease == 0 {
		return before, nil, errors.New("command: a loaded version is attached to no lease")
	}
	return before, rest, nil
}
