package rangeapi

import (
	"errors"
	"fmt"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/skeindb/skein/mvcc"
)

// Page is a RangeRequest for as many of the first keys of a span as fit. So a read of any size
// needs bounded memory and bounded messages. It is the Op of a Request, and its order is key order.
type Page struct {
	*pb.RangeRequest
	// MaxBytes bounds the keys of the answer, between 1 and MaxPageBytes; one key always
	// fits.
	MaxBytes int
	// WithCount asks for the number of keys in this range's part of the span, without filters and
	// limit.
	WithCount bool
}

// PageAnswer is the Op of the Response to a Page. It fills the RangeResponse's header revision,
// more and, if asked for, count. More says that another key of the span passes the filters; it may
// be false because the page ended before it met one.
type PageAnswer struct {
	*pb.RangeResponse
	// Keys are N key values, one after the other, as a RangeResponse encodes them.
	Keys []byte
	N    int64
	// Seen counts the keys that the page has passed, also those that the filters left out.
	Seen int64
	// Next is where the next page begins. It is empty if this one ends the span.
	Next []byte
	// Room has Keys behind PageHeadroom free bytes, so that an answer to another node needs no
	// copy; nil without such room.
	Room []byte
}

// PageHeadroom is enough for what most answers have before their keys.
const PageHeadroom = 256

// MaxPageBytes bounds Page.MaxBytes.
const MaxPageBytes = 8 << 20

// RangeOf returns the RangeRequest of a read or of a page.
func RangeOf(op any) (*pb.RangeRequest, bool) {
	switch o := op.(type) {
	case *pb.RangeRequest:
		return o, true
	case *Page:
		return o.RangeRequest, true
	}
	return nil, false
}

// The fields of an encoded KeyValue, and that of a RangeResponse for it.
const (
	fieldKvs protowire.Number = 2

	fieldKey     protowire.Number = 1
	fieldCreate  protowire.Number = 2
	fieldMod     protowire.Number = 3
	fieldVersion protowire.Number = 4
	fieldValue   protowire.Number = 5
	fieldLease   protowire.Number = 6
)

// keyBody returns the size of an encoded KeyValue.
func keyBody(v *mvcc.Version, bare bool) int {
	n := 1 + protowire.SizeBytes(len(v.Key)) +
		1 + protowire.SizeVarint(uint64(v.Create)) + 1 + protowire.SizeVarint(uint64(v.Mod)) + 1 + protowire.SizeVarint(uint64(v.Version))
	if len(v.Value) > 0 {
		n += 1 + protowire.SizeBytes(len(v.Value))
	}
	if v.Lease != 0 && !bare {
		n += 1 + protowire.SizeVarint(uint64(v.Lease))
	}
	return n
}

// SizeOfKey returns how many bytes AppendKey appends. bare leaves the lease out.
func SizeOfKey(v *mvcc.Version, bare bool) int { return 1 + protowire.SizeBytes(keyBody(v, bare)) }

// AppendKey appends a live version as a field of a RangeResponse.
func AppendKey(b []byte, v *mvcc.Version, bare bool) []byte {
	b = protowire.AppendVarint(protowire.AppendTag(b, fieldKvs, protowire.BytesType), uint64(keyBody(v, bare)))
	b = protowire.AppendBytes(protowire.AppendTag(b, fieldKey, protowire.BytesType), v.Key)
	b = protowire.AppendVarint(protowire.AppendTag(b, fieldCreate, protowire.VarintType), uint64(v.Create))
	b = protowire.AppendVarint(protowire.AppendTag(b, fieldMod, protowire.VarintType), uint64(v.Mod))
	b = protowire.AppendVarint(protowire.AppendTag(b, fieldVersion, protowire.VarintType), uint64(v.Version))
	if len(v.Value) > 0 {
		b = protowire.AppendBytes(protowire.AppendTag(b, fieldValue, protowire.BytesType), v.Value)
	}
	if v.Lease != 0 && !bare {
		b = protowire.AppendVarint(protowire.AppendTag(b, fieldLease, protowire.VarintType), uint64(v.Lease))
	}
	return b
}

// errBadKeys says that bytes are not a page's key values.
var errBadKeys = errors.New("rangeapi: malformed key values")

// DecodeKeys decodes the n key values of a page. Keys and values are parts of b.
func DecodeKeys(b []byte, n int64) ([]*mvccpb.KeyValue, error) {
	// A key value takes at least two bytes.
	if n < 0 || n > int64(len(b)/2) {
		return nil, fmt.Errorf("%w: %d of them in %d bytes", errBadKeys, n, len(b))
	}
	kvs, slab := make([]*mvccpb.KeyValue, n), []mvccpb.KeyValue(nil)
	for i := range kvs {
		body, rest, err := nextKey(b)
		if err != nil {
			return nil, err
		}
		if len(slab) == 0 {
			slab = make([]mvccpb.KeyValue, min(slabKeys, int(n)-i))
		}
		kvs[i], slab = &slab[0], slab[1:]
		if err := decodeKey(kvs[i], body); err != nil {
			return nil, err
		}
		b = rest
	}
	if len(b) != 0 {
		return nil, fmt.Errorf("%w: %d bytes behind them", errBadKeys, len(b))
	}
	return kvs, nil
}

// slabKeys are allocated together: one that outlives the others keeps all of them in memory.
const slabKeys = 64

// nextKey splits the first key value off.
func nextKey(b []byte) (body, rest []byte, err error) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 || num != fieldKvs || typ != protowire.BytesType {
		return nil, nil, fmt.Errorf("%w: field %d", errBadKeys, num)
	}
	body, m := protowire.ConsumeBytes(b[n:])
	if m < 0 {
		return nil, nil, fmt.Errorf("%w: %w", errBadKeys, protowire.ParseError(m))
	}
	return body, b[n+m:], nil
}

func decodeKey(kv *mvccpb.KeyValue, b []byte) error {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: %w", errBadKeys, protowire.ParseError(n))
		}
		b = b[n:]
		var v uint64
		var field []byte
		switch typ {
		case protowire.VarintType:
			v, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			field, n = protowire.ConsumeBytes(b)
		default:
			return fmt.Errorf("%w: field %d of type %d", errBadKeys, num, typ)
		}
		if n < 0 || v > math.MaxInt64 && num != fieldLease {
			return fmt.Errorf("%w: field %d", errBadKeys, num)
		}
		b = b[n:]
		switch {
		case num == fieldKey && typ == protowire.BytesType:
			kv.Key = field[:len(field):len(field)]
		case num == fieldValue && typ == protowire.BytesType:
			kv.Value = field[:len(field):len(field)]
		case num == fieldCreate && typ == protowire.VarintType:
			kv.CreateRevision = int64(v)
		case num == fieldMod && typ == protowire.VarintType:
			kv.ModRevision = int64(v)
		case num == fieldVersion && typ == protowire.VarintType:
			kv.Version = int64(v)
		case num == fieldLease && typ == protowire.VarintType:
			kv.Lease = int64(v)
		default:
			return fmt.Errorf("%w: field %d of type %d", errBadKeys, num, typ)
		}
	}
	return nil
}
