package placement

import (
	"encoding/binary"
	"errors"
	"fmt"

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

var errTruncated = errors.New("placement: truncated")

// reader takes fields off the front of b. After the first error every further
// read returns zero values, so that a decoder checks once, at its end.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.b = nil
}

func (r *reader) byte() byte {
	if len(r.b) == 0 {
		r.fail(errTruncated)
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) bool() bool {
	v := r.byte()
	if v > 1 {
		r.fail(fmt.Errorf("placement: flag is %d", v))
	}
	return v == 1
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail(errTruncated)
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) fixed64() uint64 {
	if len(r.b) < 8 {
		r.fail(errTruncated)
		return 0
	}
	v := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// revision reads a revision, which is at least -1 and below 2^53.
func (r *reader) revision() keyspace.Revision {
	v := r.uvarint()
	if v > uint64(keyspace.MaxRevision) {
		r.fail(fmt.Errorf("placement: revision %d, must be below %d", v, keyspace.MaxRevision))
		return 0
	}
	return keyspace.Revision(v) - 1
}

// count reads how many elements follow, each of at least minBytes bytes; what the
// rest of the input cannot hold is refused before anything is allocated for it.
func (r *reader) count(limit, minBytes int) int {
	n := r.uvarint()
	if n > uint64(limit) {
		r.fail(fmt.Errorf("placement: %d elements, at most %d", n, limit))
		return 0
	}
	if int(n)*minBytes > len(r.b) {
		r.fail(errTruncated)
		return 0
	}
	return int(n)
}

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
		ids = append(ids, keyspace.NodeID(r.uvarint()))
	}
	return ids
}

// bytes reads a length and that many bytes, which it copies.
func (r *reader) bytes(limit int) []byte {
	n := r.count(limit, 1)
	if n == 0 {
		return nil
	}
	v := append([]byte(nil), r.b[:n]...)
	r.b = r.b[n:]
	return v
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
	if r.err != nil {
		return keyspace.Descriptor{}
	}
	d, rest, err := keyspace.DecodeDescriptor(r.b)
	if err != nil {
		r.fail(err)
		return keyspace.Descriptor{}
	}
	r.b = rest
	return d
}

func (r *reader) replicas() []keyspace.Replica {
	if r.err != nil {
		return nil
	}
	rs, rest, err := keyspace.DecodeReplicas(r.b)
	if err != nil {
		r.fail(err)
		return nil
	}
	r.b = rest
	return rs
}

func (r *reader) descriptors(limit int) []keyspace.Descriptor {
	n := r.count(limit, 7)
	var ds []keyspace.Descriptor
	for range n {
		ds = append(ds, r.descriptor())
		if r.err != nil {
			return nil
		}
	}
	return ds
}

// version reads the leading version byte.
func (r *reader) version() { r.versionIs(formatVersion) }

// versionIs reads the version of a message that has one of its own.
func (r *reader) versionIs(want byte) {
	v := r.byte()
	if err := keyspace.CheckVersion("placement's data", uint64(v), uint64(want)); r.err == nil && err != nil {
		r.fail(fmt.Errorf("placement: %w", err))
	}
}

// end returns the first error, or one for bytes that nobody read.
func (r *reader) end() error {
	if r.err == nil && len(r.b) != 0 {
		r.fail(fmt.Errorf("placement: %d bytes left over", len(r.b)))
	}
	return r.err
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
