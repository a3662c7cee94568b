package etcdfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// ErrCorrupt says that a file is not what etcd writes.
var ErrCorrupt = errors.New("corrupt database file")

// A record's key in the bucket "key" is a revision: main, '_', sub, and 't' for a tombstone.
const (
	revisionBytes  = 8 + 1 + 8
	tombstoneBytes = revisionBytes + 1
	separator      = '_'
	tombstoneMark  = 't'
)

// encodeRevision returns the key of a record.
func encodeRevision(main keyspace.Revision, sub uint32, tombstone bool) []byte {
	dst := append(binary.BigEndian.AppendUint64(make([]byte, 0, tombstoneBytes), uint64(main)), separator)
	dst = binary.BigEndian.AppendUint64(dst, uint64(sub))
	if tombstone {
		dst = append(dst, tombstoneMark)
	}
	return dst
}

// decodeRevision decodes the key of a record.
func decodeRevision(b []byte) (main keyspace.Revision, sub uint32, tombstone bool, err error) {
	switch {
	case len(b) != revisionBytes && len(b) != tombstoneBytes:
		return 0, 0, false, fmt.Errorf("%w: %d bytes are no revision: %x", ErrCorrupt, len(b), b[:min(len(b), 32)])
	case b[8] != separator:
		return 0, 0, false, fmt.Errorf("%w: revision %x without its separator", ErrCorrupt, b)
	case len(b) == tombstoneBytes && b[revisionBytes] != tombstoneMark:
		return 0, 0, false, fmt.Errorf("%w: revision %x with the unknown mark %q", ErrCorrupt, b, b[revisionBytes])
	}
	m, s := binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[9:])
	if m > uint64(keyspace.MaxRevision) {
		return 0, 0, false, fmt.Errorf("%w: revision %d is above %d, the highest that is supported", ErrCorrupt, m, keyspace.MaxRevision)
	}
	if s > math.MaxUint32 {
		return 0, 0, false, fmt.Errorf("%w: operation %d of revision %d is above %d, the highest that is supported", ErrCorrupt, s, m, uint32(math.MaxUint32))
	}
	return keyspace.Revision(m), uint32(s), len(b) == tombstoneBytes, nil
}

// leaseKey is the key of a lease's record.
func leaseKey(id keyspace.LeaseID) []byte { return binary.BigEndian.AppendUint64(nil, uint64(id)) }

// The fields of etcd's mvccpb.KeyValue.
const (
	fieldKey     = 1
	fieldCreate  = 2
	fieldMod     = 3
	fieldVersion = 4
	fieldValue   = 5
	fieldLease   = 6
)

// appendKeyValue appends the value of a record: the bytes that etcd makes of its
// mvccpb.KeyValue, since HashKV covers them. A tombstone has the key alone.
func appendKeyValue(dst []byte, v *mvcc.Version) []byte {
	dst = appendBytes(dst, fieldKey, v.Key)
	if v.Tombstone {
		return dst
	}
	dst = appendVarint(dst, fieldCreate, int64(v.Create))
	dst = appendVarint(dst, fieldMod, int64(v.Mod))
	dst = appendVarint(dst, fieldVersion, v.Version)
	dst = appendBytes(dst, fieldValue, v.Value)
	return appendVarint(dst, fieldLease, int64(v.Lease))
}

func appendBytes(dst []byte, n protowire.Number, b []byte) []byte {
	if len(b) == 0 {
		return dst
	}
	return protowire.AppendBytes(protowire.AppendTag(dst, n, protowire.BytesType), b)
}

func appendVarint(dst []byte, n protowire.Number, i int64) []byte {
	if i == 0 {
		return dst
	}
	return protowire.AppendVarint(protowire.AppendTag(dst, n, protowire.VarintType), uint64(i))
}

// decodeKeyValue decodes the value of a record into v. Key and Value refer to b. Unknown
// fields are skipped, as etcd skips them. It is written by hand because a file has
// millions of records, and proto.Unmarshal would allocate each twice.
func decodeKeyValue(v *mvcc.Version, b []byte) error {
	*v = mvcc.Version{}
	for len(b) > 0 {
		field, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: tag: %w", ErrCorrupt, protowire.ParseError(n))
		}
		if field > protowire.MaxValidNumber {
			return fmt.Errorf("%w: field %d, and the highest is %d", ErrCorrupt, field, protowire.MaxValidNumber)
		}
		b = b[n:]
		switch {
		case kind == protowire.BytesType && (field == fieldKey || field == fieldValue):
			var data []byte
			if data, n = protowire.ConsumeBytes(b); n >= 0 {
				if field == fieldKey {
					v.Key = data
				} else {
					v.Value = data
				}
			}
		case kind == protowire.VarintType:
			var u uint64
			if u, n = protowire.ConsumeVarint(b); n >= 0 {
				setNumber(v, field, int64(u))
			}
		default:
			n = protowire.ConsumeFieldValue(field, kind, b)
		}
		if n < 0 {
			return fmt.Errorf("%w: field %d: %w", ErrCorrupt, field, protowire.ParseError(n))
		}
		b = b[n:]
	}
	return nil
}

func setNumber(v *mvcc.Version, field protowire.Number, i int64) {
	switch field {
	case fieldCreate:
		v.Create = keyspace.Revision(i)
	case fieldMod:
		v.Mod = keyspace.Revision(i)
	case fieldVersion:
		v.Version = i
	case fieldLease:
		v.Lease = keyspace.LeaseID(i)
	default: // not one of its fields
	}
}

// decodeRecord decodes a record of the bucket "key" into v, whose Key and Value refer to
// value. A record with an empty key is none of a user's: etcdutl snapshot restore
// --bump-revision writes one.
func decodeRecord(v *mvcc.Version, key, value []byte) error {
	main, sub, tombstone, err := decodeRevision(key)
	if err != nil {
		return err
	}
	if err := decodeKeyValue(v, value); err != nil {
		return fmt.Errorf("record at revision %d, operation %d: %w", main, sub, err)
	}
	if len(v.Key) == 0 {
		*v = mvcc.Version{Mod: main, Sub: sub, Tombstone: tombstone}
		return nil
	}
	if tombstone {
		*v = mvcc.Version{Key: v.Key, Mod: main, Sub: sub, Tombstone: true}
		return nil
	}
	if v.Mod != main || v.Create < 1 || v.Create > main || v.Version < 1 {
		return fmt.Errorf("%w: key %q at revision %d, operation %d, says revision %d, create revision %d, version %d",
			ErrCorrupt, v.Key, main, sub, v.Mod, v.Create, v.Version)
	}
	v.Sub = sub
	return nil
}
