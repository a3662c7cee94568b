package kverror

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// Version 1 of the binary form, all integers unsigned varints unless said
// otherwise:
//
//	version     1 byte   1
//	kind        1 byte
//	detail      length, bytes
//	leader      node id
//	compacted   revision
//	count       number of descriptors
//	per descriptor: keyspace's binary form of a descriptor
const codecVersion = 1

// maxDescriptors bounds what a decoder allocates for one error.
const maxDescriptors = 1024

var errTruncated = errors.New("kverror: truncated")

// Append appends the binary form of e to dst.
func Append(dst []byte, e *Error) []byte {
	dst = append(dst, codecVersion, byte(e.Kind))
	dst = binary.AppendUvarint(dst, uint64(len(e.Detail)))
	dst = append(dst, e.Detail...)
	dst = binary.AppendUvarint(dst, uint64(e.Leader))
	dst = binary.AppendUvarint(dst, uint64(e.CompactRevision))
	dst = binary.AppendUvarint(dst, uint64(len(e.Descriptors)))
	for i := range e.Descriptors {
		dst = keyspace.AppendDescriptor(dst, &e.Descriptors[i])
	}
	return dst
}

// Decode reads an Error that Append wrote. It copies what it keeps of b.
func Decode(b []byte) (*Error, error) {
	if len(b) < 2 {
		return nil, errTruncated
	}
	if b[0] != codecVersion {
		return nil, fmt.Errorf("kverror: version %d, want %d", b[0], codecVersion)
	}
	e := &Error{Kind: Kind(b[1])}
	if e.Kind >= numKinds {
		e.Kind = Internal
	}
	d := b[2:]
	n, d, err := uvarint(d)
	if err != nil {
		return nil, err
	}
	if n > uint64(len(d)) {
		return nil, errTruncated
	}
	e.Detail, d = string(d[:n]), d[n:]
	leader, d, err := uvarint(d)
	if err != nil {
		return nil, err
	}
	compacted, d, err := uvarint(d)
	if err != nil {
		return nil, err
	}
	count, d, err := uvarint(d)
	if err != nil {
		return nil, err
	}
	if count > maxDescriptors {
		return nil, fmt.Errorf("kverror: %d descriptors, at most %d", count, maxDescriptors)
	}
	e.Leader, e.CompactRevision = keyspace.NodeID(leader), keyspace.Revision(compacted)
	for range count {
		var desc keyspace.Descriptor
		if desc, d, err = keyspace.DecodeDescriptor(d); err != nil {
			return nil, err
		}
		e.Descriptors = append(e.Descriptors, desc)
	}
	if len(d) != 0 {
		return nil, fmt.Errorf("kverror: %d bytes left over", len(d))
	}
	return e, nil
}

func uvarint(b []byte) (uint64, []byte, error) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, errTruncated
	}
	return v, b[n:], nil
}
