package kverror

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// codecVersion leads the binary form of an Error (docs/FORMAT.md).
const codecVersion = 1

// maxDescriptors bounds what a decoder allocates for one error.
const maxDescriptors = 1024

// descriptorBytesMin is the minimum size of an encoded descriptor.
const descriptorBytesMin = 7

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

// Decode decodes an Error that Append encoded. The Error does not refer to b.
func Decode(b []byte) (*Error, error) {
	r := wire.NewReader(b)
	if v := r.Byte(); r.OK() && v != codecVersion {
		return nil, fmt.Errorf("kverror: version %d, want %d", v, codecVersion)
	}
	e := &Error{Kind: Kind(r.Byte())}
	if e.Kind >= numKinds {
		e.Kind = Internal
	}
	e.Detail = string(r.Bytes())
	e.Leader = keyspace.NodeID(r.Uvarint())
	e.CompactRevision = keyspace.Revision(r.Uvarint())
	for n := r.CountUpTo(maxDescriptors, descriptorBytesMin); n > 0 && r.OK(); n-- {
		d, rest, err := keyspace.DecodeDescriptor(r.Peek())
		r.Take(rest, err)
		e.Descriptors = append(e.Descriptors, d)
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("kverror: %w", err)
	}
	return e, nil
}
