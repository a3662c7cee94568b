package command

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Version leads every entry of a range; docs/format/shard.md has the bytes.
const Version = 7

// Kind is what an entry does.
type Kind uint8

const (
	// KindBatch carries the finished versions of many transactions.
	KindBatch Kind = iota + 1
	// KindSplit cuts the range in two.
	KindSplit
	// KindCompact raises the range's compacted revision.
	KindCompact
	// KindCount settles the live-key count after a split.
	KindCount
	// KindBind binds the range to a merge, into which it goes as the one that absorbs.
	KindBind
	// KindFreeze ends all that the range does, until it is absorbed or released.
	KindFreeze
	// KindAbsorb lets the range take its neighbour's place.
	KindAbsorb
	// KindRelease ends what binds the range to a merge that was aborted.
	KindRelease
	// KindLoad brings finished versions into a new cluster. It is written from keyspace.VersionData on.
	KindLoad
)

// String returns the kind as logs and stories print it.
func (k Kind) String() string {
	names := [...]string{"", "batch", "split", "compact", "count", "bind", "freeze", "absorb", "release", "load"}
	if k == 0 || int(k) >= len(names) {
		return fmt.Sprintf("command-%d", uint8(k))
	}
	return names[k]
}

// Link names an entry of a range's chain: the Number-th batch that the leader of
// Term made. Numbers are never used again in a term.
type Link struct {
	Term, Number uint64
}

// Header is what every command begins with.
type Header struct {
	Kind Kind
	// Term is the one in which the command was made. In another term it is a no-op.
	Term uint64
	// Generation is the range's at that time. In another one it is a no-op.
	Generation keyspace.Generation
}

// AppendHeader appends the version and the header of an entry.
func AppendHeader(dst []byte, h Header) []byte {
	dst = append(dst, Version, byte(h.Kind))
	dst = binary.AppendUvarint(dst, h.Term)
	return binary.AppendUvarint(dst, uint64(h.Generation))
}

// DecodeHeader reads what AppendHeader wrote, and returns the body.
func DecodeHeader(b []byte) (h Header, rest []byte, err error) {
	if len(b) < 2 {
		return h, nil, wire.ErrTruncated
	}
	if err := keyspace.CheckVersion("range command", uint64(b[0]), Version); err != nil {
		return h, nil, fmt.Errorf("command: %w", err)
	}
	h.Kind = Kind(b[1])
	if h.Kind < KindBatch || h.Kind > KindLoad {
		return h, nil, fmt.Errorf("command: unknown command %d", b[1])
	}
	if h.Term, rest, err = wire.Uvarint(b[2:]); err != nil {
		return h, nil, err
	}
	gen, rest, err := wire.Uvarint(rest)
	h.Generation = keyspace.Generation(gen)
	return h, rest, err
}

// Batch is a batch of transactions with consecutive revisions.
type Batch struct {
	// Prev is the entry on which the batch was evaluated, number its own in the term.
	// It is applied only if the last applied batch is prev.
	Prev   Link
	Number uint64
	// Hash is the range's hash before the batch, as its leader counted it.
	Hash uint64
	// First is the revision of the first transaction; those behind it have the
	// numbers that follow.
	First keyspace.Revision
	// Txns is how many transactions follow.
	Txns int
	// SequencerTerm is the highest term of a sequencer that the leader knew.
	SequencerTerm uint64
}

// AppendBatchHeader appends what the body of a batch begins with.
func AppendBatchHeader(dst []byte, c *Batch) []byte {
	dst = binary.AppendUvarint(dst, c.Prev.Term)
	dst = binary.AppendUvarint(dst, c.Prev.Number)
	dst = binary.AppendUvarint(dst, c.Number)
	dst = binary.BigEndian.AppendUint64(dst, c.Hash)
	dst = binary.AppendUvarint(dst, uint64(c.First))
	dst = binary.AppendUvarint(dst, c.SequencerTerm)
	return binary.AppendUvarint(dst, uint64(c.Txns))
}

// DecodeBatchHeader reads what AppendBatchHeader wrote, and returns what follows it.
func DecodeBatchHeader(b []byte) (c Batch, rest []byte, err error) {
	var ints [3]uint64
	rest = b
	for i := range ints {
		if ints[i], rest, err = wire.Uvarint(rest); err != nil {
			return c, nil, err
		}
	}
	c.Prev, c.Number = Link{ints[0], ints[1]}, ints[2]
	if len(rest) < 8 {
		return c, nil, wire.ErrTruncated
	}
	c.Hash = binary.BigEndian.Uint64(rest)
	first, rest, err := wire.Uvarint(rest[8:])
	if err != nil {
		return c, nil, err
	}
	if c.SequencerTerm, rest, err = wire.Uvarint(rest); err != nil {
		return c, nil, err
	}
	txns, rest, err := wire.Uvarint(rest)
	if err != nil {
		return c, nil, err
	}
	// A transaction has a byte at least.
	if txns > uint64(len(rest)) || txns > 0 && first == 0 || first >= uint64(keyspace.MaxRevision) || first+txns > uint64(keyspace.MaxRevision) {
		return c, nil, fmt.Errorf("command: %d transactions from revision %d in %d bytes", txns, first, len(rest))
	}
	c.First, c.Txns = keyspace.Revision(first), int(txns)
	return c, rest, nil
}

// Flags of a version.
const (
	versionTombstone = 1 << iota
	// versionLease: a lease follows.
	versionLease
	// versionLived: the key was alive before the transaction. With the tombstone it tells
	// how the number of live keys changes. The version alone does not: a transaction may
	// delete a key and make it again, or the reverse.
	versionLived
	// versionDetach: the key was attached to another lease before the transaction, which
	// follows behind the key.
	versionDetach
	// versionKept: the key was attached to the same lease before the transaction. The index
	// of leases has it already.
	versionKept
	// versionReplaced: a later write of the same transaction has replaced this one. It is an
	// event and nothing else; what the key was before is with the last write.
	versionReplaced

	// intentFlags are those of an intent: one attaches its key again in any case.
	intentFlags  = versionTombstone | versionLease | versionLived | versionDetach | versionReplaced
	versionFlags = intentFlags | versionKept
)

// Prior is what a key was before a transaction wrote it.
type Prior struct {
	Lived bool
	// Replaced says that the transaction has written the key again: no more is said here.
	Replaced bool
	// Lease is the one that the key was attached to, 0 for none.
	Lease keyspace.LeaseID
}

// versionHead returns the flags of a version.
func versionHead(v *mvcc.Version, before Prior) (flags byte) {
	if v.Tombstone {
		flags |= versionTombstone
	}
	if v.Lease != 0 {
		flags |= versionLease
	}
	if before.Lived {
		flags |= versionLived
	}
	switch {
	case before.Replaced:
		flags |= versionReplaced
	case before.Lease == 0:
	case before.Lease == v.Lease:
		flags |= versionKept
	default:
		flags |= versionDetach
	}
	return flags
}

// knownFlags says whether a version may have the flags.
func knownFlags(flags byte) bool {
	return flags&^versionFlags == 0 && flags&(versionTombstone|versionLease) != versionTombstone|versionLease &&
		(flags&versionKept == 0 || flags&(versionLease|versionDetach) == versionLease) &&
		(flags&versionReplaced == 0 || flags&(versionLived|versionDetach|versionKept) == 0)
}

// AppendVersion appends one version of the transaction with revision v.Mod.
func AppendVersion(dst []byte, v *mvcc.Version, before Prior) []byte {
	flags := versionHead(v, before)
	dst = append(dst, flags)
	dst = wire.AppendBytes(dst, v.Key)
	if flags&versionDetach != 0 {
		dst = binary.AppendUvarint(dst, uint64(before.Lease))
	}
	if v.Tombstone {
		return dst
	}
	return rangeapi.AppendPut(dst, v)
}

// DecodeVersion reads a version of the transaction with revision mod into v, whose
// key and value stay parts of b.
func DecodeVersion(b []byte, mod keyspace.Revision, v *mvcc.Version) (before Prior, rest []byte, err error) {
	if len(b) == 0 {
		return before, nil, wire.ErrTruncated
	}
	flags := b[0]
	if !knownFlags(flags) {
		return before, nil, fmt.Errorf("command: version with flags %#x", flags)
	}
	*v = mvcc.Version{Mod: mod, Tombstone: flags&versionTombstone != 0}
	before.Lived, before.Replaced = flags&versionLived != 0, flags&versionReplaced != 0
	if v.Key, rest, err = wire.Bytes(b[1:]); err != nil {
		return before, nil, err
	}
	if len(v.Key) == 0 {
		return before, nil, errors.New("command: version without a key")
	}
	if flags&versionDetach != 0 {
		if before.Lease, rest, err = leaseField(rest); err != nil {
			return before, nil, err
		}
	}
	if v.Tombstone {
		return before, rest, nil
	}
	if rest, err = rangeapi.DecodePut(rest, flags&versionLease != 0, v); err != nil {
		return before, nil, err
	}
	if flags&versionKept != 0 {
		before.Lease = v.Lease
	}
	return before, rest, nil
}

// leaseField reads a lease id that is not 0.
func leaseField(b []byte) (keyspace.LeaseID, []byte, error) {
	n, rest, err := wire.Uvarint(b)
	if err == nil && n == 0 {
		err = errors.New("command: lease 0")
	}
	return keyspace.LeaseID(n), rest, err
}

// VisitBatch calls visit with every version behind a batch's header, in order.
// txn counts the transactions, sub the versions within one. What is left are the
// batch's items.
func VisitBatch(c *Batch, b []byte, visit func(txn int, v *mvcc.Version, before Prior) error) (items []byte, err error) {
	var v mvcc.Version
	for txn := range c.Txns {
		n, rest, err := wire.Uvarint(b)
		if err != nil {
			return nil, err
		}
		if n > uint64(len(rest)) {
			return nil, wire.ErrTruncated
		}
		b = rest
		for sub := range n {
			before, rest, err := DecodeVersion(b, c.First+keyspace.Revision(txn), &v)
			if err != nil {
				return nil, err
			}
			v.Sub = uint32(sub)
			if err := visit(txn, &v, before); err != nil {
				return nil, err
			}
			b = rest
		}
	}
	return b, nil
}

// Split cuts the range at key. The child gets [key, end).
type Split struct {
	Key   []byte
	Child keyspace.RangeID
	// ConfIndex and replicas are the configuration for which the split was made: the
	// child's first members. Where the range has another one by then, nothing happens.
	ConfIndex uint64
	Replicas  []keyspace.Replica
}

// AppendSplit appends the body of a split.
func AppendSplit(dst []byte, c *Split) []byte {
	dst = wire.AppendBytes(dst, c.Key)
	dst = binary.AppendUvarint(dst, uint64(c.Child))
	dst = binary.AppendUvarint(dst, c.ConfIndex)
	return keyspace.AppendReplicas(dst, c.Replicas)
}

// DecodeSplit reads the body of a split and keeps nothing of b.
func DecodeSplit(b []byte) (c Split, err error) {
	if c.Key, b, err = wire.Bytes(b); err != nil {
		return c, err
	}
	child, b, err := wire.Uvarint(b)
	if err != nil {
		return c, err
	}
	if c.ConfIndex, b, err = wire.Uvarint(b); err != nil {
		return c, err
	}
	if c.Replicas, b, err = keyspace.DecodeReplicas(b); err != nil {
		return c, err
	}
	if len(b) != 0 || len(c.Key) == 0 || child == 0 {
		return c, fmt.Errorf("command: split at %q for range %d with %d bytes left over", c.Key, child, len(b))
	}
	c.Child = keyspace.RangeID(child)
	return c, nil
}

// DecodeNumber reads the body of a compact or count command: one number.
func DecodeNumber(b []byte) (int64, error) {
	n, rest, err := wire.Varint(b)
	if err != nil || len(rest) > 0 {
		return 0, fmt.Errorf("command: %d bytes for one number", len(b))
	}
	return n, nil
}

// VersionOverheadBytes bounds what an entry has for a version beside key and value.
const VersionOverheadBytes = 56
