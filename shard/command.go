package shard

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// commandVersion leads every entry of a range; docs/format/shard.md has the bytes.
const commandVersion = 6

// commandKind is what an entry does.
type commandKind uint8

const (
	// commandBatch carries the finished versions of many transactions.
	commandBatch commandKind = iota + 1
	// commandSplit cuts the range in two.
	commandSplit
	// commandCompact raises the range's compacted revision.
	commandCompact
	// commandCount settles the live-key count after a split.
	commandCount
	// commandBind binds the range to a merge, into which it goes as the one that absorbs.
	commandBind
	// commandFreeze ends all that the range does, until it is absorbed or released.
	commandFreeze
	// commandAbsorb lets the range take its neighbour's place.
	commandAbsorb
	// commandRelease ends what binds the range to a merge that was aborted.
	commandRelease
)

// String returns the kind as logs and stories print it.
func (k commandKind) String() string {
	names := [...]string{"", "batch", "split", "compact", "count", "bind", "freeze", "absorb", "release"}
	if k == 0 || int(k) >= len(names) {
		return fmt.Sprintf("command-%d", uint8(k))
	}
	return names[k]
}

// link names an entry of a range's chain: the Number-th batch that the leader of
// Term made. Numbers are never used again in a term.
type link struct {
	Term, Number uint64
}

// header is what every command begins with.
type header struct {
	kind commandKind
	// term is the one in which the command was made. In another term it is a no-op.
	term uint64
	// generation is the range's at that time. In another one it is a no-op.
	generation keyspace.Generation
}

func appendHeader(dst []byte, h header) []byte {
	dst = append(dst, commandVersion, byte(h.kind))
	dst = binary.AppendUvarint(dst, h.term)
	return binary.AppendUvarint(dst, uint64(h.generation))
}

func decodeHeader(b []byte) (h header, rest []byte, err error) {
	if len(b) < 2 {
		return h, nil, wire.ErrTruncated
	}
	if err := keyspace.CheckVersion("range command", uint64(b[0]), commandVersion); err != nil {
		return h, nil, fmt.Errorf("shard: %w", err)
	}
	h.kind = commandKind(b[1])
	if h.kind < commandBatch || h.kind > commandRelease {
		return h, nil, fmt.Errorf("shard: unknown command %d", b[1])
	}
	if h.term, rest, err = wire.Uvarint(b[2:]); err != nil {
		return h, nil, err
	}
	gen, rest, err := wire.Uvarint(rest)
	h.generation = keyspace.Generation(gen)
	return h, rest, err
}

// batchCommand is a batch of transactions with consecutive revisions.
type batchCommand struct {
	// prev is the entry on which the batch was evaluated, number its own in the term.
	// It is applied only if the last applied batch is prev.
	prev   link
	number uint64
	// hash is the range's hash before the batch, as its leader counted it.
	hash uint64
	// first is the revision of the first transaction; those behind it have the
	// numbers that follow.
	first keyspace.Revision
	// txns is how many transactions follow.
	txns int
}

func appendBatchHeader(dst []byte, c *batchCommand) []byte {
	dst = binary.AppendUvarint(dst, c.prev.Term)
	dst = binary.AppendUvarint(dst, c.prev.Number)
	dst = binary.AppendUvarint(dst, c.number)
	dst = binary.BigEndian.AppendUint64(dst, c.hash)
	dst = binary.AppendUvarint(dst, uint64(c.first))
	return binary.AppendUvarint(dst, uint64(c.txns))
}

func decodeBatchHeader(b []byte) (c batchCommand, rest []byte, err error) {
	var ints [3]uint64
	rest = b
	for i := range ints {
		if ints[i], rest, err = wire.Uvarint(rest); err != nil {
			return c, nil, err
		}
	}
	c.prev, c.number = link{ints[0], ints[1]}, ints[2]
	if len(rest) < 8 {
		return c, nil, wire.ErrTruncated
	}
	c.hash = binary.BigEndian.Uint64(rest)
	first, rest, err := wire.Uvarint(rest[8:])
	if err != nil {
		return c, nil, err
	}
	txns, rest, err := wire.Uvarint(rest)
	if err != nil {
		return c, nil, err
	}
	// A transaction has a byte at least.
	if txns > uint64(len(rest)) || first >= uint64(keyspace.MaxRevision) || first+txns > uint64(keyspace.MaxRevision) {
		return c, nil, fmt.Errorf("shard: %d transactions from revision %d in %d bytes", txns, first, len(rest))
	}
	c.first, c.txns = keyspace.Revision(first), int(txns)
	return c, rest, nil
}

// Flags of a version.
const (
	versionTombstone = 1 << iota
	// versionLease: a lease follows.
	versionLease
	// versionLived: the key was alive before the transaction. Together with the
	// tombstone it says by how much the number of live keys changes, which the version
	// does not: a transaction may delete a key and make it again, or the reverse.
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

// prior is what a key was before a transaction wrote it.
type prior struct {
	lived bool
	// replaced says that the transaction has written the key again: no more is said here.
	replaced bool
	// lease is the one that the key was attached to, 0 for none.
	lease keyspace.LeaseID
}

// versionHead returns the flags of a version.
func versionHead(v *mvcc.Version, before prior) (flags byte) {
	if v.Tombstone {
		flags |= versionTombstone
	}
	if v.Lease != 0 {
		flags |= versionLease
	}
	if before.lived {
		flags |= versionLived
	}
	switch {
	case before.replaced:
		flags |= versionReplaced
	case before.lease == 0:
	case before.lease == v.Lease:
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

// appendVersion appends one version of the transaction with revision v.Mod.
func appendVersion(dst []byte, v *mvcc.Version, before prior) []byte {
	flags := versionHead(v, before)
	dst = append(dst, flags)
	dst = wire.AppendBytes(dst, v.Key)
	if flags&versionDetach != 0 {
		dst = binary.AppendUvarint(dst, uint64(before.lease))
	}
	if v.Tombstone {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Lease))
	}
	return wire.AppendBytes(dst, v.Value)
}

// decodeVersion reads a version of the transaction with revision mod into v, whose
// key and value stay parts of b.
func decodeVersion(b []byte, mod keyspace.Revision, v *mvcc.Version) (before prior, rest []byte, err error) {
	if len(b) == 0 {
		return before, nil, wire.ErrTruncated
	}
	flags := b[0]
	if !knownFlags(flags) {
		return before, nil, fmt.Errorf("shard: version with flags %#x", flags)
	}
	*v = mvcc.Version{Mod: mod, Tombstone: flags&versionTombstone != 0}
	before.lived, before.replaced = flags&versionLived != 0, flags&versionReplaced != 0
	if v.Key, rest, err = wire.Bytes(b[1:]); err != nil {
		return before, nil, err
	}
	if flags&versionDetach != 0 {
		if before.lease, rest, err = leaseField(rest); err != nil {
			return before, nil, err
		}
	}
	if v.Tombstone {
		return before, rest, nil
	}
	age, rest, err := wire.Uvarint(rest)
	if err != nil {
		return before, nil, err
	}
	version, rest, err := wire.Uvarint(rest)
	if err != nil {
		return before, nil, err
	}
	if age >= uint64(mod) || version == 0 || version > uint64(mod) {
		return before, nil, fmt.Errorf("shard: version %d, %d revisions old, at revision %d", version, age, mod)
	}
	v.Create, v.Version = mod-keyspace.Revision(age), int64(version)
	if flags&versionLease != 0 {
		if v.Lease, rest, err = leaseField(rest); err != nil {
			return before, nil, err
		}
		if flags&versionKept != 0 {
			before.lease = v.Lease
		}
	}
	v.Value, rest, err = wire.Bytes(rest)
	return before, rest, err
}

// leaseField reads a lease id that is not 0.
func leaseField(b []byte) (keyspace.LeaseID, []byte, error) {
	n, rest, err := wire.Uvarint(b)
	if err == nil && n == 0 {
		err = errors.New("shard: lease 0")
	}
	return keyspace.LeaseID(n), rest, err
}

// visitBatch calls visit with every version behind a batch's header, in order.
// txn counts the transactions, sub the versions within one. What is left are the
// batch's items.
func visitBatch(c *batchCommand, b []byte, visit func(txn int, v *mvcc.Version, before prior) error) (items []byte, err error) {
	var v mvcc.Version
	for txn := range c.txns {
		n, rest, err := wire.Uvarint(b)
		if err != nil {
			return nil, err
		}
		if n > uint64(len(rest)) {
			return nil, wire.ErrTruncated
		}
		b = rest
		for sub := range n {
			before, rest, err := decodeVersion(b, c.first+keyspace.Revision(txn), &v)
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

// splitCommand cuts the range at key. The child gets [key, end).
type splitCommand struct {
	key   []byte
	child keyspace.RangeID
	// confIndex and replicas are the configuration for which the split was made: the
	// child's first members. Where the range has another one by then, nothing happens.
	confIndex uint64
	replicas  []keyspace.Replica
}

func appendSplit(dst []byte, c *splitCommand) []byte {
	dst = wire.AppendBytes(dst, c.key)
	dst = binary.AppendUvarint(dst, uint64(c.child))
	dst = binary.AppendUvarint(dst, c.confIndex)
	return keyspace.AppendReplicas(dst, c.replicas)
}

func decodeSplit(b []byte) (c splitCommand, err error) {
	if c.key, b, err = wire.Bytes(b); err != nil {
		return c, err
	}
	child, b, err := wire.Uvarint(b)
	if err != nil {
		return c, err
	}
	if c.confIndex, b, err = wire.Uvarint(b); err != nil {
		return c, err
	}
	if c.replicas, b, err = keyspace.DecodeReplicas(b); err != nil {
		return c, err
	}
	if len(b) != 0 || len(c.key) == 0 || child == 0 {
		return c, fmt.Errorf("shard: split at %q for range %d with %d bytes left over", c.key, child, len(b))
	}
	c.child = keyspace.RangeID(child)
	return c, nil
}

// decodeNumber reads the body of a compact or count command: one number.
func decodeNumber(b []byte) (int64, error) {
	n, w := binary.Varint(b)
	if w <= 0 || w != len(b) {
		return 0, fmt.Errorf("shard: %d bytes for one number", len(b))
	}
	return n, nil
}
