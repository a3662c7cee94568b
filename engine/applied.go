package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// appliedVersion is the first byte of an applied record.
const appliedVersion = 1

// maxReplicas bounds the replicas of one group; more is a broken record.
const maxReplicas = 1 << 10

// ErrBadApplied says that bytes are not an applied record of a known version.
var ErrBadApplied = errors.New("engine: malformed applied record")

// Applied says how far a group's log is contained in the store. It is written in
// the same batch as the data it speaks of.
type Applied struct {
	// Index and Term are those of the last applied entry.
	Index, Term uint64
	// Replicas is the configuration as of Index, ConfIndex the index of the entry
	// that made it so. There are at most 1024.
	Replicas  []keyspace.Replica
	ConfIndex uint64
	// Payload is the state machine's own record, for a range its descriptor.
	Payload []byte
}

// AppendApplied appends the encoding of a (docs/format/engine.md).
func AppendApplied(dst []byte, a *Applied) []byte {
	if len(a.Replicas) > maxReplicas {
		panic(fmt.Sprintf("engine: %d replicas, bound %d", len(a.Replicas), maxReplicas))
	}
	dst = append(dst, appliedVersion)
	dst = binary.AppendUvarint(dst, a.Index)
	dst = binary.AppendUvarint(dst, a.Term)
	dst = binary.AppendUvarint(dst, a.ConfIndex)
	dst = binary.AppendUvarint(dst, uint64(len(a.Replicas)))
	for _, r := range a.Replicas {
		dst = binary.AppendUvarint(dst, uint64(r.ID))
		dst = binary.BigEndian.AppendUint64(dst, uint64(r.Node))
		dst = append(dst, byte(r.Role))
	}
	return append(dst, a.Payload...)
}

// DecodeApplied decodes an applied record. The result keeps nothing of b.
func DecodeApplied(b []byte) (Applied, error) {
	if len(b) == 0 {
		return Applied{}, fmt.Errorf("%w: empty", ErrBadApplied)
	}
	if err := keyspace.CheckVersion("applied record", uint64(b[0]), appliedVersion); err != nil {
		return Applied{}, fmt.Errorf("%w: %w", ErrBadApplied, err)
	}
	var a Applied
	rest, n := b[1:], uint64(0)
	for _, v := range []*uint64{&a.Index, &a.Term, &a.ConfIndex, &n} {
		x, w := binary.Uvarint(rest)
		if w <= 0 {
			return Applied{}, fmt.Errorf("%w: %d bytes: truncated", ErrBadApplied, len(b))
		}
		*v, rest = x, rest[w:]
	}
	// A replica has ten bytes at least, so that a false count allocates no more
	// than the record's own size.
	if n > maxReplicas || n*10 > uint64(len(rest)) {
		return Applied{}, fmt.Errorf("%w: %d replicas in %d bytes", ErrBadApplied, n, len(rest))
	}
	for range n {
		id, w := binary.Uvarint(rest)
		if w <= 0 || len(rest) < w+9 {
			return Applied{}, fmt.Errorf("%w: %d bytes: truncated", ErrBadApplied, len(b))
		}
		r := keyspace.Replica{
			ID:   keyspace.ReplicaID(id),
			Node: keyspace.NodeID(binary.BigEndian.Uint64(rest[w:])),
			Role: keyspace.Role(rest[w+8]),
		}
		if r.Role > keyspace.RoleVoterDemoting {
			return Applied{}, fmt.Errorf("%w: role %d of replica %d", ErrBadApplied, r.Role, r.ID)
		}
		a.Replicas = append(a.Replicas, r)
		rest = rest[w+9:]
	}
	if len(rest) > 0 {
		a.Payload = slices.Clone(rest)
	}
	return a, nil
}

// SetApplied writes the group's applied record.
func (b *Batch) SetApplied(g keyspace.GroupID, a Applied) error {
	const replicaBytes, fixedBytes = binary.MaxVarintLen64 + 8 + 1, 1 + 4*binary.MaxVarintLen64
	dst := make([]byte, 0, fixedBytes+len(a.Replicas)*replicaBytes+len(a.Payload))
	return b.Set(appliedKey(g), AppendApplied(dst, &a))
}

// DeleteApplied removes the group's applied record.
func (b *Batch) DeleteApplied(g keyspace.GroupID) error {
	return b.Delete(appliedKey(g))
}

// ReadApplied returns the group's applied record as r shows it; ok is false where
// there is none.
func ReadApplied(r Reader, g keyspace.GroupID) (a Applied, ok bool, err error) {
	v, ok, err := r.Get(appliedKey(g))
	if err != nil || !ok {
		return Applied{}, false, err
	}
	if a, err = DecodeApplied(v); err != nil {
		return Applied{}, false, fmt.Errorf("engine: group %s: %w", g, err)
	}
	return a, true, nil
}

// Applied returns the group's newest applied record, durable or not.
func (e *Engine) Applied(g keyspace.GroupID) (Applied, bool, error) { return ReadApplied(e, g) }

// AppliedGroups returns the groups that have an applied record, in order of their
// ids, with one iterator over them. An error ends the sequence as its last pair.
func (e *Engine) AppliedGroups() iter.Seq2[keyspace.GroupID, error] {
	return func(yield func(keyspace.GroupID, error) bool) {
		stop := errors.New("stop")
		err := e.VisitApplied(func(g keyspace.GroupID, _ Applied) error {
			if !yield(g, nil) {
				return stop
			}
			return nil
		})
		if err != nil && !errors.Is(err, stop) {
			yield(0, err)
		}
	}
}

// VisitApplied calls visit with every applied record in order of the groups' ids.
// It ends at visit's first error, which it returns.
func (e *Engine) VisitApplied(visit func(keyspace.GroupID, Applied) error) error {
	it, err := e.NewIter(IterOptions{Lower: []byte{prefixApplied}, Upper: []byte{prefixApplied + 1}})
	if err != nil {
		return fmt.Errorf("engine: applied records: %w", err)
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var g keyspace.GroupID
		var a Applied
		if g, a, err = currentApplied(it); err == nil {
			err = visit(g, a)
		}
	}
	return errors.Join(err, it.Close())
}

// DurableApplied returns the group's applied record as a crash at this moment
// would leave it; ok is false where none would be left. After a fatal error
// nothing is known to be durable any more: it returns that error.
func (e *Engine) DurableApplied(g keyspace.GroupID) (a Applied, ok bool, err error) {
	err = e.VisitDurableApplied([]keyspace.GroupID{g}, func(_ keyspace.GroupID, d Applied) error {
		a, ok = d, true
		return nil
	})
	return a, ok, err
}

// VisitDurableApplied calls visit with the durable applied record of each of the
// groups that has one, all read in one pass. The cost is that of one iterator and
// a seek for each group. It fails as DurableApplied does; what visit got before an
// error counts.
func (e *Engine) VisitDurableApplied(groups []keyspace.GroupID, visit func(keyspace.GroupID, Applied) error) error {
	it, err := e.NewIter(IterOptions{
		Lower: []byte{prefixApplied}, Upper: []byte{prefixApplied + 1}, OnlyDurable: true,
	})
	if err != nil {
		return fmt.Errorf("engine: durable applied records: %w", err)
	}
	for _, g := range groups {
		if !it.SeekPrefixGE(appliedKey(g)) {
			if err = it.Error(); err != nil {
				break
			}
			continue
		}
		var a Applied
		if _, a, err = currentApplied(it); err == nil {
			// Asked after the read: whatever could have made what was read wrong was
			// recorded before it could be read.
			err = e.Err()
		}
		if err == nil {
			err = visit(g, a)
		}
		if err != nil {
			break
		}
	}
	return errors.Join(err, it.Close())
}

// currentApplied decodes the applied record at which the iterator stands.
func currentApplied(it *Iterator) (keyspace.GroupID, Applied, error) {
	g, err := decodeAppliedKey(it.Key())
	if err != nil {
		return 0, Applied{}, err
	}
	v, err := it.ValueAndErr()
	if err != nil {
		return g, Applied{}, fmt.Errorf("engine: group %s: applied record: %w", g, err)
	}
	a, err := DecodeApplied(v)
	if err != nil {
		return g, Applied{}, fmt.Errorf("engine: group %s: %w", g, err)
	}
	return g, a, nil
}
