package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// The first byte of a value: the version of the codec and flags.
const (
	valueVersion     = 0x20
	valueVersionMask = 0xf0

	flagTombstone = 0x01
	flagLease     = 0x02 // a lease id follows
	flagSub       = 0x04 // an operation number follows
	flagEarlier   = 0x08 // earlier writes follow
	flagsKnown    = flagTombstone | flagLease | flagSub | flagEarlier
)

// MaxValueOverhead is the most bytes that the encoding adds to a value without earlier
// writes.
const MaxValueOverhead = 1 + binary.MaxVarintLen32 + 2*binary.MaxVarintLen64 + 8

// ErrCorrupt says that a stored version cannot be decoded.
var ErrCorrupt = errors.New("mvcc: corrupt version")

// Version is one version of a user key.
type Version struct {
	Key []byte
	// Mod is the revision of this version, Create that of the put that created the key. A
	// tombstone has no Create.
	Mod, Create keyspace.Revision
	// Version counts the puts since Create, from 1. A tombstone has none.
	Version int64
	// Lease is the lease to which the key is attached, 0 for none.
	Lease keyspace.LeaseID
	// Sub is the number of the operation within its transaction. It orders events of one
	// revision.
	Sub uint32
	// Tombstone says that this version is a delete.
	Tombstone bool
	Value     []byte
	// Earlier is the previous write of the key in the same transaction, nil for nearly
	// all versions. No read shows it, but it is an event of its own.
	Earlier *Version
}

// Clone returns a copy that shares no memory with v.
func (v *Version) Clone() Version {
	c := *v
	c.Key, c.Value = slices.Clone(v.Key), slices.Clone(v.Value)
	for last := &c; last.Earlier != nil; last = last.Earlier {
		w := *last.Earlier
		w.Key, w.Value = c.Key, slices.Clone(w.Value)
		last.Earlier = &w
	}
	return c
}

// Size is the size of key and value, without earlier writes.
func (v *Version) Size() int64 { return int64(len(v.Key)) + int64(len(v.Value)) }

// Validate returns an error if the version, or an earlier write of it, violates the model.
func (v *Version) Validate() error {
	for w := v; w != nil; w = w.Earlier {
		if err := w.validateOne(); err != nil {
			return err
		}
		if e := w.Earlier; e != nil && (e.Mod != w.Mod || e.Sub >= w.Sub || string(e.Key) != string(w.Key)) {
			return fmt.Errorf("mvcc: key %q at revision %d, operation %d, after key %q at revision %d, operation %d",
				w.Key, w.Mod, w.Sub, e.Key, e.Mod, e.Sub)
		}
	}
	return nil
}

func (v *Version) validateOne() error {
	switch {
	case len(v.Key) == 0:
		return errors.New("mvcc: version of an empty key")
	case v.Mod < 1 || v.Mod > keyspace.MaxRevision:
		return fmt.Errorf("mvcc: key %q: revision %d outside [1, %d]", v.Key, v.Mod, keyspace.MaxRevision)
	case v.Tombstone && (v.Create != 0 || v.Version != 0 || v.Lease != 0 || len(v.Value) != 0):
		return fmt.Errorf("mvcc: key %q: tombstone with create %d, version %d, lease %d, %d bytes of value",
			v.Key, v.Create, v.Version, v.Lease, len(v.Value))
	case !v.Tombstone && (v.Create < 1 || v.Create > v.Mod || v.Version < 1):
		return fmt.Errorf("mvcc: key %q: create %d, version %d at revision %d", v.Key, v.Create, v.Version, v.Mod)
	}
	return nil
}

// AppendKey appends the physical key of the version.
func (v *Version) AppendKey(dst []byte) []byte { return engine.AppendVersionedKey(dst, v.Key, v.Mod) }

// AppendValue appends the physical value of the version (docs/format/mvcc.md). It panics
// on a version that violates the model.
func (v *Version) AppendValue(dst []byte) []byte {
	if err := v.Validate(); err != nil {
		panic(err.Error())
	}
	return v.appendValue(dst)
}

func (v *Version) appendValue(dst []byte) []byte {
	head := byte(valueVersion)
	if v.Tombstone {
		head |= flagTombstone
	}
	if v.Lease != 0 {
		head |= flagLease
	}
	if v.Sub != 0 {
		head |= flagSub
	}
	if v.Earlier != nil {
		head |= flagEarlier
	}
	dst = append(dst, head)
	if v.Sub != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Sub))
	}
	if v.Earlier != nil {
		dst = v.appendEarlier(dst)
	}
	if v.Tombstone {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.BigEndian.AppendUint64(dst, uint64(v.Lease))
	}
	return append(dst, v.Value...)
}

// appendEarlier appends the earlier writes, latest first.
func (v *Version) appendEarlier(dst []byte) []byte {
	n := uint64(0)
	for w := v.Earlier; w != nil; w = w.Earlier {
		n++
	}
	dst = binary.AppendUvarint(dst, n)
	for w := v.Earlier; w != nil; w = w.Earlier {
		one := *w
		one.Earlier = nil
		b := one.appendValue(nil)
		dst = append(binary.AppendUvarint(dst, uint64(len(b))), b...)
	}
	return dst
}

// DecodeValue decodes the physical value of the version. v's Key and Mod must be set.
// Value refers to b, and so do the values of earlier writes, which share the Key.
func (v *Version) DecodeValue(b []byte) error {
	if len(b) == 0 || b[0]&valueVersionMask != valueVersion || b[0]&^valueVersionMask&^flagsKnown != 0 {
		return v.corrupt("unknown value version %x", b[:min(len(b), 1)])
	}
	head, rest := b[0], b[1:]
	v.Create, v.Version, v.Lease, v.Sub, v.Value, v.Earlier = 0, 0, 0, 0, nil, nil
	v.Tombstone = head&flagTombstone != 0
	if head&flagSub != 0 {
		sub, n := binary.Uvarint(rest)
		if n <= 0 || sub == 0 || sub > math.MaxUint32 {
			return v.corrupt("operation number")
		}
		v.Sub, rest = uint32(sub), rest[n:]
	}
	if head&flagEarlier != 0 {
		var err error
		if rest, err = v.decodeEarlier(rest); err != nil {
			return err
		}
	}
	if v.Tombstone {
		if head&flagLease != 0 || len(rest) != 0 {
			return v.corrupt("tombstone with lease or value")
		}
		return nil
	}
	age, n := binary.Uvarint(rest)
	if n <= 0 || age >= uint64(v.Mod) {
		return v.corrupt("create revision")
	}
	v.Create, rest = v.Mod-keyspace.Revision(age), rest[n:]
	version, n := binary.Uvarint(rest)
	if n <= 0 || version == 0 || version > math.MaxInt64 {
		return v.corrupt("version")
	}
	v.Version, rest = int64(version), rest[n:]
	if head&flagLease != 0 {
		if len(rest) < 8 {
			return v.corrupt("lease")
		}
		v.Lease, rest = keyspace.LeaseID(binary.BigEndian.Uint64(rest)), rest[8:]
		if v.Lease == 0 {
			return v.corrupt("lease 0")
		}
	}
	v.Value = rest
	return nil
}

// decodeEarlier decodes what appendEarlier wrote.
func (v *Version) decodeEarlier(b []byte) (rest []byte, err error) {
	count, n := binary.Uvarint(b)
	if n <= 0 || count == 0 {
		return nil, v.corrupt("no earlier writes")
	}
	b = b[n:]
	for last := v; count > 0; count-- {
		size, n := binary.Uvarint(b)
		if n <= 0 || size == 0 || size > uint64(len(b)-n) {
			return nil, v.corrupt("earlier writes")
		}
		one := b[n : n+int(size)]
		if one[0]&flagEarlier != 0 {
			return nil, v.corrupt("earlier writes of an earlier one")
		}
		w := &Version{Key: v.Key, Mod: v.Mod}
		if err := w.DecodeValue(one); err != nil {
			return nil, err
		}
		if w.Sub >= last.Sub {
			return nil, v.corrupt("operation %d before operation %d", w.Sub, last.Sub)
		}
		last.Earlier, last, b = w, w, b[n+int(size):]
	}
	return b, nil
}

func (v *Version) corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: key %q at revision %d: %s", ErrCorrupt, v.Key, v.Mod, fmt.Sprintf(format, args...))
}

// putScratch holds buffers in which Put encodes, each of at most maxScratchBytes.
var putScratch = sync.Pool{New: func() any { return new([]byte) }}

const maxScratchBytes = 64 << 10

// Put writes the version. It panics on a version that violates the model. What v refers
// to may be reused after the call.
func Put(w engine.Writer, v *Version) error {
	// The writer copies both.
	scratch := putScratch.Get().(*[]byte) //nolint:forcetypeassert // the pool has nothing else
	buf := v.AppendKey((*scratch)[:0])
	n := len(buf)
	buf = v.AppendValue(buf)
	err := w.Set(buf[:n:n], buf[n:])
	if cap(buf) <= maxScratchBytes {
		*scratch = buf
		putScratch.Put(scratch)
	}
	if err != nil {
		return fmt.Errorf("mvcc: put %q at revision %d: %w", v.Key, v.Mod, err)
	}
	return nil
}

// isTombstone reads a physical value without decoding it.
func isTombstone(value []byte) (bool, error) {
	if len(value) == 0 || value[0]&valueVersionMask != valueVersion {
		return false, fmt.Errorf("%w: unknown value version %x", ErrCorrupt, value[:min(len(value), 1)])
	}
	return value[0]&flagTombstone != 0, nil
}
