package stages

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// The first byte of what stands before a request or an answer on the bus. Versions of the messages behind are far below.
const (
	// prefixAsked stands before a request whose sender wants a record in any case.
	prefixAsked = 0xc1
	// prefixRecord stands before an answer with a record. docs/format/rangeapi.md has its bytes.
	prefixRecord = 0xc2
)

// maxLockBytes bounds the name of a transaction.
const maxLockBytes = 256

// AppendAsked appends what asks for the record of the request that is appended next.
func AppendAsked(dst []byte) []byte { return append(dst, prefixAsked) }

// CutAsked returns the request behind what AppendAsked has written, and whether there was such.
func CutAsked(b []byte) (request []byte, asked bool) {
	if len(b) > 0 && b[0] == prefixAsked {
		return b[1:], true
	}
	return b, false
}

// Before returns the answer with the record before it; without a record it is the answer itself.
func (r *Record) Before(answer []byte) []byte {
	if r == nil {
		return answer
	}
	body := r.append(nil)
	dst := make([]byte, 0, 1+binary.MaxVarintLen64+len(body)+len(answer))
	return append(wire.AppendBytes(append(dst, prefixRecord), body), answer...)
}

// Cut returns the answer behind what Before has written, and the record, nil if there is none.
func Cut(b []byte) (answer []byte, r *Record, err error) {
	if len(b) == 0 || b[0] != prefixRecord {
		return b, nil, nil
	}
	body, answer, err := wire.Bytes(b[1:])
	if err != nil {
		return nil, nil, err
	}
	r, err = decode(body)
	return answer, r, err
}

func (r *Record) append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(r.Range))
	dst = binary.AppendUvarint(dst, uint64(r.Node))
	dst = binary.AppendUvarint(dst, uint64(r.Last))
	dst = binary.AppendUvarint(dst, uint64(r.Turns))
	dst = wire.AppendBytes(dst, []byte(r.Lock[:min(len(r.Lock), maxLockBytes)]))
	for s, spent := range r.Spent {
		if us := spent.Microseconds(); us > 0 {
			dst = binary.AppendUvarint(append(dst, byte(s)), uint64(us))
		}
	}
	return dst
}

// decode reads a record. Stages of a later build are left out.
func decode(b []byte) (*Record, error) {
	in := wire.NewReader(b)
	r := &Record{Range: keyspace.RangeID(in.Uvarint()), Node: keyspace.NodeID(in.Uvarint()), Last: keyspace.NodeID(in.Uvarint())}
	r.Turns = uint32(min(in.Uvarint(), 1<<32-1))
	r.Lock = string(in.BytesUpTo(maxLockBytes))
	for in.OK() && in.Len() > 0 {
		s, us := Stage(in.Byte()), in.Uvarint()
		if us > uint64(maxSpent/time.Microsecond) || s < Count && r.Spent[s] > 0 {
			in.Failf("stages: %d µs in stage %d", us, s)
		}
		if in.OK() && s < Count {
			r.Spent[s] += time.Duration(us) * time.Microsecond
			r.Took += time.Duration(us) * time.Microsecond
		}
	}
	if err := in.End(); err != nil {
		return nil, fmt.Errorf("stages: %w", err)
	}
	return r, nil
}

// maxSpent bounds one stage on the bus.
const maxSpent = 24 * time.Hour
