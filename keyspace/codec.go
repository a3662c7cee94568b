package keyspace

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// descriptorVersion leads the binary form of a Descriptor (docs/FORMAT.md).
const descriptorVersion = 1

// maxReplicas bounds what a decoder allocates for one descriptor.
const maxReplicas = 64

var errTruncated = errors.New("keyspace: truncated descriptor")

// AppendDescriptor appends the binary form of d to dst.
func AppendDescriptor(dst []byte, d *Descriptor) []byte {
	dst = append(dst, descriptorVersion)
	dst = binary.AppendUvarint(dst, uint64(d.Range))
	dst = binary.AppendUvarint(dst, uint64(d.Generation))
	dst = binary.AppendUvarint(dst, d.ConfIndex)
	dst = binary.AppendUvarint(dst, uint64(len(d.Span.Start)))
	dst = append(dst, d.Span.Start...)
	dst = binary.AppendUvarint(dst, uint64(len(d.Span.End)))
	dst = append(dst, d.Span.End...)
	return AppendReplicas(dst, d.Replicas)
}

// AppendReplicas appends the binary form of a list of replicas to dst.
func AppendReplicas(dst []byte, rs []Replica) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(rs)))
	for _, r := range rs {
		dst = binary.AppendUvarint(dst, uint64(r.ID))
		dst = binary.AppendUvarint(dst, uint64(r.Node))
		dst = append(dst, byte(r.Role))
	}
	return dst
}

// DecodeDescriptor reads a Descriptor from the front of b and returns the rest. The
// Descriptor does not refer to b.
func DecodeDescriptor(b []byte) (Descriptor, []byte, error) {
	var d Descriptor
	if len(b) == 0 {
		return d, nil, errTruncated
	}
	if err := CheckVersion("descriptor", uint64(b[0]), descriptorVersion); err != nil {
		return d, nil, fmt.Errorf("keyspace: %w", err)
	}
	b = b[1:]
	var ints [3]uint64
	var err error
	for i := range ints {
		if ints[i], b, err = uvarint(b); err != nil {
			return d, nil, err
		}
	}
	d.Range, d.Generation, d.ConfIndex = RangeID(ints[0]), Generation(ints[1]), ints[2]
	if d.Span.Start, b, err = bytesField(b); err != nil {
		return d, nil, err
	}
	if d.Span.End, b, err = bytesField(b); err != nil {
		return d, nil, err
	}
	d.Replicas, b, err = DecodeReplicas(b)
	return d, b, err
}

// DecodeReplicas reads a list of replicas from the front of b and returns the rest.
func DecodeReplicas(b []byte) ([]Replica, []byte, error) {
	n, b, err := uvarint(b)
	if err != nil {
		return nil, nil, err
	}
	if n > maxReplicas {
		return nil, nil, fmt.Errorf("keyspace: %d replicas, at most %d", n, maxReplicas)
	}
	var rs []Replica
	for range n {
		var id, node uint64
		if id, b, err = uvarint(b); err != nil {
			return nil, nil, err
		}
		if node, b, err = uvarint(b); err != nil {
			return nil, nil, err
		}
		if len(b) == 0 {
			return nil, nil, errTruncated
		}
		if Role(b[0]) > RoleVoterDemoting {
			return nil, nil, fmt.Errorf("keyspace: unknown role %d", b[0])
		}
		rs = append(rs, Replica{ID: ReplicaID(id), Node: NodeID(node), Role: Role(b[0])})
		b = b[1:]
	}
	return rs, b, nil
}

func uvarint(b []byte) (uint64, []byte, error) {
	v, n := binary.Uvarint(b)
	if n <= 0 {
		return 0, nil, errTruncated
	}
	return v, b[n:], nil
}

func bytesField(b []byte) (field, rest []byte, err error) {
	n, b, err := uvarint(b)
	if err != nil {
		return nil, nil, err
	}
	if n > uint64(len(b)) {
		return nil, nil, errTruncated
	}
	if n == 0 {
		return nil, b, nil
	}
	return append([]byte(nil), b[:n]...), b[n:], nil
}
