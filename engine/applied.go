package engine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// appliedVersion is the first byte of an applied record.
const appliedVersion = 1

// maxReplicas bounds the replicas of one group; a record with more is malformed.
const maxReplicas = 1 << 10

// replicaBytesMin is the minimum size of a replica in a record.
const replicaBytesMin = 10

// ErrBadApplied says that bytes are not an applied record of a known version.
var ErrBadApplied = errors.New("engine: malformed applied record")

// Applied says how much of a group's log the store contains. It is written in the same
// batch as the data that it describes.
type Applied struct {
	// Index and Term identify the last applied entry.
	Index, Term uint64
	// Replicas is the configuration as of Index, at most 1024 replicas; ConfIndex is the
	// index of the entry that set it.
	Replicas  []keyspace.Replica
	ConfIndex uint64
	// Payload is the state machine's own record: for a range its descriptor.
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

// DecodeApplied decodes an applied record. The result does not refer to b.
func DecodeApplied(b []byte) (Applied, error) {
	r := wire.NewReader(b)
	if err := keyspace.CheckVersion("applied record", uint64(r.Byte()), appliedVersion); err != nil && r.OK() {
		return Applied{}, fmt.Errorf("%w: %w", ErrBadApplied, err)
	}
	a := Applied{Index: r.Uvarint(), Term: r.Uvarint(), ConfIndex: r.Uvarint()}
	for n := r.CountUpTo(maxReplicas, replicaBytesMin); n > 0; n-- {
		o := keyspace.Replica{ID: keyspace.ReplicaID(r.Uvarint()), Node: keyspace.NodeID(r.Uint64BE()), Role: keyspace.Role(r.Byte())}
		if o.Role > keyspace.RoleVoterDemoting {
			r.Failf("role %d of replica %d", o.Role, o.ID)
		}
		if !r.OK() {
			break
		}
		a.Replicas = append(a.Replicas, o)
	}
	if err := r.Err(); err != nil {
		return Applied{}, fmt.Errorf("%w: %d bytes: %w", ErrBadApplied, len(b), err)
	}
	if r.Len() > 0 {
		a.Payload = slices.Clone(r.Rest())
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

// ReadApplied returns the group's applied record as r shows it; ok is false if there is
// none.
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

// VisitApplied calls visit with every applied record in the order of the groups' ids. It
// stops at visit's first error and returns it.
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

// DurableApplied returns the group's applied record that would survive a crash at this
// moment; ok is false if none would. After a fatal error it returns that error, because
// nothing is known to be durable any more.
func (e *Engine) DurableApplied(g keyspace.GroupID) (a Applied, ok bool, err error) {
	err = e.VisitDurableApplied([]keyspace.GroupID{g}, func(_ keyspace.GroupID, d Applied) error {
		a, ok = d, true
		return nil
	})
	return a, ok, err
}

// VisitDurableApplied calls visit with the durable applied record of each group that has
// one, in one pass. It costs one iterator and a seek for each group. It fails as
// DurableApplied does; calls before the error were correct.
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
			// Checked after the read: an error that could falsify the read was recorded
			// before the read could see its effect.
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

// currentApplied decodes the applied record at the iterator's position.
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
