package fsm

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// FormatVersion leads every command, record and message of this package.
// docs/format/placement.md describes version 9 byte by byte.
const FormatVersion = 9

// Bounds of what a decoder accepts, and of what may therefore be written.
const (
	// MaxNameBytes bounds names of nodes and settings.
	MaxNameBytes = 1024
	// maxURLs bounds each of a node's two lists of URLs, maxURLBytes each URL.
	maxURLs     = 64
	maxURLBytes = 4096
	// MaxSettingBytes bounds the value of a setting.
	MaxSettingBytes = 64 << 10
	// MaxDescriptors bounds the descriptors of one report.
	MaxDescriptors = 1024
	// MaxRangeIDs bounds the ids that one command marks or allocates.
	MaxRangeIDs = 4096
)

// Reader reads this package's elements of its forms. After the first error every
// further read returns zero values, so that a decoder checks once, at its end.
type Reader struct{ wire.Reader }

// NewReader returns a Reader of b.
func NewReader(b []byte) Reader { return Reader{wire.NewReader(b)} }

// Revision reads a revision, which is at least -1 and below 2^53.
func (r *Reader) Revision() keyspace.Revision {
	v := r.Uvarint()
	if v > uint64(keyspace.MaxRevision) {
		r.Failf("revision %d, must be below %d", v, keyspace.MaxRevision)
		return 0
	}
	return keyspace.Revision(v) - 1
}

// AppendNodeIDs appends a list of node ids to dst.
func AppendNodeIDs(dst []byte, ids []keyspace.NodeID) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ids)))
	for _, id := range ids {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

// NodeIDs reads what AppendNodeIDs wrote.
func (r *Reader) NodeIDs() []keyspace.NodeID {
	var ids []keyspace.NodeID
	for range r.CountUpTo(maxNodes, 1) {
		ids = append(ids, keyspace.NodeID(r.Uvarint()))
	}
	return ids
}

// CopyUpTo reads a length, at most limit, and that many bytes, which it copies.
func (r *Reader) CopyUpTo(limit int) []byte {
	n := r.CountUpTo(limit, 1)
	if n == 0 {
		return nil
	}
	b := r.Peek()
	r.Take(b[n:], nil)
	return append([]byte(nil), b[:n]...)
}

// StringUpTo reads a string of at most that many bytes.
func (r *Reader) StringUpTo(limit int) string { return string(r.CopyUpTo(limit)) }

// StringsUpTo reads a list of strings; its arguments bound their number and their bytes.
func (r *Reader) StringsUpTo(limit, each int) []string {
	n := r.CountUpTo(limit, 1)
	var s []string
	for range n {
		s = append(s, r.StringUpTo(each))
	}
	return s
}

// Descriptor reads what AppendDescriptor wrote.
func (r *Reader) Descriptor() keyspace.Descriptor {
	if !r.OK() {
		return keyspace.Descriptor{}
	}
	d, rest, err := keyspace.DecodeDescriptor(r.Peek())
	if r.Take(rest, err); err != nil {
		return keyspace.Descriptor{}
	}
	return d
}

// Replicas reads a list of replicas.
func (r *Reader) Replicas() []keyspace.Replica {
	if !r.OK() {
		return nil
	}
	rs, rest, err := keyspace.DecodeReplicas(r.Peek())
	if r.Take(rest, err); err != nil {
		return nil
	}
	return rs
}

// Descriptors reads what AppendDescriptors wrote.
func (r *Reader) Descriptors(limit int) []keyspace.Descriptor {
	n := r.CountUpTo(limit, 7)
	var ds []keyspace.Descriptor
	for range n {
		ds = append(ds, r.Descriptor())
		if !r.OK() {
			return nil
		}
	}
	return ds
}

// Version reads the leading version byte.
func (r *Reader) Version() { r.VersionIs(FormatVersion) }

// VersionIs reads the version of a message that has one of its own.
func (r *Reader) VersionIs(want byte) {
	v := r.Byte()
	if err := keyspace.CheckVersion("placement's data", uint64(v), uint64(want)); r.OK() && err != nil {
		r.Failf("%w", err)
	}
}

// VersionFrom reads the version of a message that has one of its own, and of which this build reads
// several.
func (r *Reader) VersionFrom(oldest, newest byte) byte {
	v := r.Byte()
	if err := keyspace.CheckVersions("placement's data", uint64(v), uint64(oldest), uint64(newest)); r.OK() && err != nil {
		r.Failf("%w", err)
	}
	return v
}

// Finish returns the first error, or one where bytes are left over.
func (r *Reader) Finish() error {
	if err := r.End(); err != nil {
		return fmt.Errorf("placement: %w", err)
	}
	return nil
}

// AppendBool appends one byte, 0 or 1, to dst.
func AppendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// AppendRevision appends a revision plus one, so that -1 (never compacted) needs
// no sign.
func AppendRevision(dst []byte, rev keyspace.Revision) []byte {
	return binary.AppendUvarint(dst, uint64(rev+1))
}

func appendVersion(dst []byte, v keyspace.Version) []byte {
	return binary.AppendUvarint(dst, uint64(v))
}

// ClusterVersion reads a version, 0 for none.
func (r *Reader) ClusterVersion() keyspace.Version { return keyspace.Version(r.Bounded(math.MaxInt32)) }

// AppendBytes appends a length and the bytes to dst.
func AppendBytes(dst, v []byte) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

// AppendString appends a length and the string to dst.
func AppendString(dst []byte, v string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

func appendStrings(dst []byte, vs []string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(vs)))
	for _, v := range vs {
		dst = AppendString(dst, v)
	}
	return dst
}

// AppendDescriptors appends a list of descriptors to dst.
func AppendDescriptors(dst []byte, ds []keyspace.Descriptor) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ds)))
	for i := range ds {
		dst = keyspace.AppendDescriptor(dst, &ds[i])
	}
	return dst
}

// maxNodes and MaxSettings bound what an answer holds.
const (
	maxNodes    = 1 << 14
	MaxSettings = 1 << 14
)

// Bounded reads a number that is no count of what follows, but bounded like one.
func (r *Reader) Bounded(limit int) int {
	n := r.Uvarint()
	if n > uint64(limit) {
		r.Failf("%d asked for, at most %d", n, limit)
		return 0
	}
	return int(n)
}
