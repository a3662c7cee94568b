package block

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// MaxBytes bounds the charge of a block with more than one version.
const MaxBytes = 256 << 10

// MaxVersionBytes bounds the charge of a version. It is far above what a range takes as an
// entry, so that a block can carry what is then refused with its key.
const MaxVersionBytes = 64 << 20

// writeBytes is what a write is charged beside its key and value. No encoding of the rest is
// longer.
const writeBytes = 64

// MaxVersions bounds the versions of a block, which follows from MaxBytes.
const MaxVersions = MaxBytes / writeBytes

// maxPacked bounds a packed block: stored chunks, and the sizes in front of them.
const maxPacked = MaxVersionBytes + MaxVersionBytes/chunkBytes*4 + 64

// chunkBytes is the most that is compressed in one piece, and so the most that is
// decompressed by a claim.
const chunkBytes = MaxBytes

const version = 1

// Flags of a block.
const (
	flagByRevision = 0x01
	flagStored     = 0x02 // not compressed
)

// Flags of a write.
const (
	writeTombstone = 0x01
	writeLease     = 0x02
	writeSub       = 0x04
	writeEarlier   = 0x08 // an earlier write follows
	writeSameKey   = 0x10
)

// Order says how the versions of a block, and of a stream of blocks, follow each other.
type Order uint8

// The orders.
const (
	// ByKey is by key, the newest version of a key first: as a store has them.
	ByKey Order = iota
	// ByRevision is by revision, then by operation number: as events happened.
	ByRevision
)

// String returns the order in words.
func (o Order) String() string {
	if o == ByRevision {
		return "by revision"
	}
	return "by key"
}

// compare returns below 0 if b may follow a.
func (o Order) compare(a, b *mvcc.Version) int {
	if o == ByRevision {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub))
	}
	return cmp.Or(bytes.Compare(a.Key, b.Key), cmp.Compare(b.Mod, a.Mod))
}

// follows returns an error if b may not follow a.
func (o Order) follows(a, b *mvcc.Version) error {
	if o.compare(a, b) < 0 {
		return nil
	}
	return fmt.Errorf("key %q at revision %d, operation %d follows key %q at revision %d, operation %d in the order %s",
		b.Key, b.Mod, b.Sub, a.Key, a.Mod, a.Sub, o)
}

// ErrCorrupt says that a block is not what was written, or not a block.
var ErrCorrupt = errors.New("block: corrupt")

func corrupt(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// Charge is what a version counts in MaxBytes and MaxVersionBytes.
func Charge(v *mvcc.Version) int64 {
	n := v.Size() + writeBytes
	for w := v.Earlier; w != nil; w = w.Earlier {
		n += int64(len(w.Value)) + writeBytes
	}
	return n
}

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// headBytes is the size of version and checksum.
const headBytes = 1 + 4

// The coders have no goroutine and are safe for concurrent use. Each call takes one of
// GOMAXPROCS states, which bounds their memory.
var coders = newCoders()

type coder struct {
	enc *zstd.Encoder
	dec *zstd.Decoder
}

func newCoders() (c coder) {
	var err error
	c.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(chunkBytes),
		zstd.WithEncoderCRC(false), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(fmt.Sprintf("block: compressor: %v", err))
	}
	c.dec, err = zstd.NewReader(nil, zstd.WithDecoderMaxMemory(chunkBytes), zstd.WithDecoderMaxWindow(chunkBytes),
		zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(0))
	if err != nil {
		panic(fmt.Sprintf("block: decompressor: %v", err))
	}
	c.enc.EncodeAll(nil, nil) // it makes its channels with the first call, which may come in the bubble of a test
	return c
}

// pack makes a block of the count versions that are encoded in raw.
func pack(raw []byte, count int, order Order) []byte {
	flags := wire.Flag(order == ByRevision, flagByRevision)
	dst := make([]byte, headBytes, headBytes+len(raw)/2+64)
	dst[0] = version
	dst = binary.AppendUvarint(append(dst, flags), uint64(count))
	dst = binary.AppendUvarint(dst, uint64(len(raw)))
	var packed []byte
	start := len(dst)
	for rest := raw; len(rest) > 0; {
		n := min(len(rest), chunkBytes)
		packed = coders.enc.EncodeAll(rest[:n], packed[:0])
		dst = wire.AppendBytes(dst, packed)
		rest = rest[n:]
	}
	if len(dst)-start >= len(raw) {
		dst[headBytes] |= flagStored
		dst = append(dst[:start], raw...)
	}
	binary.BigEndian.PutUint32(dst[1:], crc32.Checksum(dst[headBytes:], crcTable))
	return dst
}

// unpack returns what pack was given. It appends the versions to dst[:0].
func unpack(b, dst []byte) (raw []byte, count int, order Order, err error) {
	switch {
	case len(b) < headBytes:
		return dst, 0, 0, corrupt("%d bytes", len(b))
	case b[0] != version:
		return dst, 0, 0, fmt.Errorf("block: version %d, this program reads version %d: use a newer program", b[0], version)
	case len(b) > maxPacked:
		return dst, 0, 0, corrupt("%d bytes, at most %d", len(b), int64(maxPacked))
	}
	if got, want := crc32.Checksum(b[headBytes:], crcTable), binary.BigEndian.Uint32(b[1:]); got != want {
		return dst, 0, 0, corrupt("checksum %08x, noted %08x", got, want)
	}
	r := wire.NewReader(b[headBytes:])
	flags := r.Flags(flagByRevision | flagStored)
	versions, size := r.Uvarint(), r.Uvarint()
	switch {
	case !r.OK():
		return dst, 0, 0, corrupt("%v", r.Err())
	case versions == 0 || versions > MaxVersions:
		return dst, 0, 0, corrupt("%d versions outside [1, %d]", versions, MaxVersions)
	case size > MaxVersionBytes || versions > 1 && size > MaxBytes:
		return dst, 0, 0, corrupt("%d versions in %d bytes", versions, size)
	}
	if flags&flagByRevision != 0 {
		order = ByRevision
	}
	dst = dst[:0]
	if flags&flagStored != 0 {
		dst = append(dst, r.Rest()...)
	}
	for flags&flagStored == 0 && r.Len() > 0 {
		chunk := r.Bytes()
		if !r.OK() {
			return dst, 0, 0, corrupt("%v", r.Err())
		}
		n := len(dst)
		// The decompressor appends no more than chunkBytes, whatever the chunk claims. Room
		// for them is made here, since it would grow by no more than it needs.
		dst = slices.Grow(dst, min(chunkBytes, int(size)-n))
		piece, err := coders.dec.DecodeAll(chunk, dst[n:n])
		if err != nil {
			return dst, 0, 0, corrupt("%v", err)
		}
		dst = append(dst, piece...) // nearly always there already
		if uint64(len(dst)) > size || len(dst) == n {
			break
		}
	}
	if uint64(len(dst)) != size {
		return dst, 0, 0, corrupt("%d bytes, noted %d", len(dst), size)
	}
	return dst, int(versions), order, nil
}

// appendVersion appends v, which follows prev, to dst.
func appendVersion(dst []byte, v, prev *mvcc.Version) []byte {
	var keyFlag byte
	if prev.Key != nil && bytes.Equal(v.Key, prev.Key) {
		keyFlag = writeSameKey
	}
	dst = append(dst, writeFlags(v)|keyFlag)
	if keyFlag == 0 {
		shared := sharedPrefix(v.Key, prev.Key)
		dst = binary.AppendUvarint(dst, uint64(shared))
		dst = wire.AppendBytes(dst, v.Key[shared:])
	}
	dst = binary.AppendVarint(dst, int64(v.Mod-prev.Mod))
	dst = appendWrite(dst, v, prev.Lease)
	for w := v.Earlier; w != nil; w = w.Earlier {
		dst = appendWrite(append(dst, writeFlags(w)), w, prev.Lease)
	}
	return dst
}

func writeFlags(v *mvcc.Version) byte {
	return wire.Flag(v.Tombstone, writeTombstone) | wire.Flag(v.Lease != 0, writeLease) |
		wire.Flag(v.Sub != 0, writeSub) | wire.Flag(v.Earlier != nil, writeEarlier)
}

// appendWrite appends what v has beside key and revision.
func appendWrite(dst []byte, v *mvcc.Version, lease keyspace.LeaseID) []byte {
	if v.Sub != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Sub))
	}
	if v.Tombstone {
		return dst
	}
	dst = binary.AppendUvarint(dst, uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendVarint(dst, int64(v.Lease-lease))
	}
	return wire.AppendBytes(dst, v.Value)
}

func sharedPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// versionReader reads the versions of one block.
type versionReader struct {
	r     wire.Reader
	order Order
	keys  []byte // full keys, one after the other
	// charge is that of the versions so far.
	charge int64
}

// next reads into v, which follows prev. first says that prev is the zero version.
func (d *versionReader) next(v, prev *mvcc.Version, first bool) error {
	flags := d.r.Flags(writeTombstone | writeLease | writeSub | writeEarlier | writeSameKey)
	if err := d.key(v, prev, flags); err != nil {
		return err
	}
	v.Mod = prev.Mod + keyspace.Revision(d.r.Varint())
	d.write(v, flags, prev.Lease)
	for last := v; flags&writeEarlier != 0 && d.r.OK(); last = last.Earlier {
		flags = d.r.Flags(writeTombstone | writeLease | writeSub | writeEarlier)
		last.Earlier = &mvcc.Version{Key: v.Key, Mod: v.Mod}
		d.write(last.Earlier, flags, prev.Lease)
	}
	if !d.r.OK() {
		return corrupt("%v", d.r.Err())
	}
	if err := v.Validate(); err != nil {
		return corrupt("%v", err)
	}
	d.charge += Charge(v)
	if !first {
		if err := d.order.follows(prev, v); err != nil {
			return corrupt("%v", err)
		}
	}
	return nil
}

// key reads the key of v. What keys take is bounded by the charge, however much they share.
func (d *versionReader) key(v, prev *mvcc.Version, flags byte) error {
	if flags&writeSameKey != 0 {
		v.Key = prev.Key
		return nil
	}
	shared, suffix := d.r.Uvarint(), d.r.Bytes()
	switch {
	case !d.r.OK():
		return corrupt("%v", d.r.Err())
	case shared > uint64(len(prev.Key)):
		return corrupt("a key shares %d bytes with one of %d", shared, len(prev.Key))
	}
	start := len(d.keys)
	d.keys = append(append(d.keys, prev.Key[:shared]...), suffix...)
	v.Key = d.keys[start:len(d.keys):len(d.keys)]
	return nil
}

// write reads what appendWrite wrote.
func (d *versionReader) write(v *mvcc.Version, flags byte, lease keyspace.LeaseID) {
	if flags&writeSub != 0 {
		sub := d.r.Uvarint()
		if d.r.OK() && (sub == 0 || sub > math.MaxUint32) {
			d.r.Failf("operation number %d", sub)
		}
		v.Sub = uint32(sub)
	}
	if v.Tombstone = flags&writeTombstone != 0; v.Tombstone {
		if flags&writeLease != 0 {
			d.r.Failf("a tombstone with a lease")
		}
		return
	}
	age, puts := d.r.Uvarint(), d.r.Uvarint()
	if d.r.OK() && (age > math.MaxInt64 || puts > math.MaxInt64) {
		d.r.Failf("age %d, version %d", age, puts)
	}
	v.Create, v.Version = v.Mod-keyspace.Revision(age), int64(puts)
	if flags&writeLease != 0 {
		if v.Lease = lease + keyspace.LeaseID(d.r.Varint()); d.r.OK() && v.Lease == 0 {
			d.r.Failf("lease 0")
		}
	}
	v.Value = d.r.Bytes()
}
