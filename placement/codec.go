package placement

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// formatVersion leads every command, record and message of this package.
// docs/format/placement.md describes version 8 byte by byte.
const formatVersion = 8

// Bounds of what a decoder accepts, and of what may therefore be written.
const (
	// maxNameBytes bounds names of nodes and settings.
	maxNameBytes = 1024
	// maxURLs bounds each of a node's two lists of URLs, maxURLBytes each URL.
	maxURLs     = 64
	maxURLBytes = 4096
	// maxSettingBytes bounds the value of a setting.
	maxSettingBytes = 64 << 10
	// maxDescriptors bounds the descriptors of one report.
	maxDescriptors = 1024
	// maxRangeIDs bounds the ids that one command marks or allocates.
	maxRangeIDs = 4096
	// maxItems bounds the requests for revisions in one batch of a node.
	maxItems = 4096
	// maxAlso bounds their further ranges, all together.
	maxAlso = 8192
)

// reader reads this package's elements of its forms. After the first error every
// further read returns zero values, so that a decoder checks once, at its end.
type reader struct{ wire.Reader }

// revision reads a revision, which is at least -1 and below 2^53.
func (r *reader) revision() keyspace.Revision {
	v := r.Uvarint()
	if v > uint64(keyspace.MaxRevision) {
		r.Failf("revision %d, must be below %d", v, keyspace.MaxRevision)
		return 0
	}
	return keyspace.Revision(v) - 1
}

// count reads how many elements follow, each of at least minBytes bytes. It refuses
// what the rest of the input cannot hold before anything is allocated for it.
func (r *reader) count(limit, minBytes int) int { return r.CountUpTo(limit, minBytes) }

func appendNodeIDs(dst []byte, ids []keyspace.NodeID) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ids)))
	for _, id := range ids {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

func (r *reader) nodeIDs() []keyspace.NodeID {
	var ids []keyspace.NodeID
	for range r.count(maxNodes, 1) {
		ids = append(ids, keyspace.NodeID(r.Uvarint()))
	}
	return ids
}

// bytes reads a length, at most limit, and that many bytes, which it copies.
func (r *reader) bytes(limit int) []byte {
	n := r.count(limit, 1)
	if n == 0 {
		return nil
	}
	b := r.Peek()
	r.Take(b[n:], nil)
	return append([]byte(nil), b[:n]...)
}

func (r *reader) string(limit int) string { return string(r.bytes(limit)) }

func (r *reader) strings(limit, each int) []string {
	n := r.count(limit, 1)
	var s []string
	for range n {
		s = append(s, r.string(each))
	}
	return s
}

func (r *reader) descriptor() keyspace.Descriptor {
	if !r.OK() {
		return keyspace.Descriptor{}
	}
	d, rest, err := keyspace.DecodeDescriptor(r.Peek())
	if r.Take(rest, err); err != nil {
		return keyspace.Descriptor{}
	}
	return d
}

func (r *reader) replicas() []keyspace.Replica {
	if !r.OK() {
		return nil
	}
	rs, rest, err := keyspace.DecodeReplicas(r.Peek())
	if r.Take(rest, err); err != nil {
		return nil
	}
	return rs
}

func (r *reader) descriptors(limit int) []keyspace.Descriptor {
	n := r.count(limit, 7)
	var ds []keyspace.Descriptor
	for range n {
		ds = append(ds, r.descriptor())
		if !r.OK() {
			return nil
		}
	}
	return ds
}

// version reads the leading version byte.
func (r *reader) version() { r.versionIs(formatVersion) }

// versionIs reads the version of a message that has one of its own.
func (r *reader) versionIs(want byte) {
	v := r.Byte()
	if err := keyspace.CheckVersion("placement's data", uint64(v), uint64(want)); r.OK() && err != nil {
		r.Failf("%w", err)
	}
}

// end returns the first error, or one where bytes are left over.
func (r *reader) end() error {
	if err := r.End(); err != nil {
		return fmt.Errorf("placement: %w", err)
	}
	return nil
}

func appendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// appendRevision appends a revision plus one, so that -1 (never compacted) needs
// no sign.
func appendRevision(dst []byte, rev keyspace.Revision) []byte {
	return binary.AppendUvarint(dst, uint64(rev+1))
}

func appendBytes(dst, v []byte) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

func appendString(dst []byte, v string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(v))), v...)
}

func appendStrings(dst []byte, vs []string) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(vs)))
	for _, v := range vs {
		dst = appendString(dst, v)
	}
	return dst
}

func appendDescriptors(dst []byte, ds []keyspace.Descriptor) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ds)))
	for i := range ds {
		dst = keyspace.AppendDescriptor(dst, &ds[i])
	}
	return dst
}
