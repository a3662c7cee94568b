package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

const (
	magic         = "SKEINSPL"
	formatVersion = 2
	headerBytes   = 52
	prefixBytes   = 8
	// maxBody bounds a record. One event of the largest size that a source may send fits.
	maxBody = 80 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errTorn says that bytes are no record.
var errTorn = errors.New("damaged or incomplete")

// header begins a segment.
type header struct {
	seq uint64
	// source is the cluster id of the source.
	source uint64
	// after is the last whole revision before this segment.
	after keyspace.Revision
	// prevEnd is where the segment before this one ends, 0 if none is needed.
	prevEnd int64
}

func (h header) append(b []byte) []byte {
	b = append(b, magic...)
	b = binary.LittleEndian.AppendUint32(b, formatVersion)
	b = binary.LittleEndian.AppendUint64(b, h.seq)
	b = binary.LittleEndian.AppendUint64(b, h.source)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.after))
	b = binary.LittleEndian.AppendUint64(b, uint64(h.prevEnd))
	b = binary.LittleEndian.AppendUint32(b, 0) // for later use
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[len(b)-headerBytes+4:], castagnoli))
}

func decodeHeader(b []byte) (h header, err error) {
	if len(b) < headerBytes {
		return h, errTorn
	}
	b = b[:headerBytes]
	if string(b[:8]) != magic || binary.LittleEndian.Uint32(b[48:]) != crc32.Checksum(b[:48], castagnoli) {
		return h, errTorn
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != formatVersion {
		return h, fmt.Errorf("the format has version %d; this build reads %d: use the build that wrote it, or begin anew: `skein mirror abandon`, then start with an empty cluster and another --spool", v, formatVersion)
	}
	h = header{
		seq: binary.LittleEndian.Uint64(b[12:]), source: binary.LittleEndian.Uint64(b[20:]),
		after: keyspace.Revision(binary.LittleEndian.Uint64(b[28:])), prevEnd: int64(binary.LittleEndian.Uint64(b[36:])),
	}
	if h.after < 0 || h.after > keyspace.MaxRevision || h.prevEnd < 0 || binary.LittleEndian.Uint32(b[44:]) != 0 {
		return h, errTorn
	}
	return h, nil
}

// Kinds of records.
const (
	kindPiece byte = 1
	kindEnd   byte = 2
	kindGap   byte = 3
)

// Flags of an event.
const (
	flagDelete byte = 1
	flagLease  byte = 2
)

// A Record is a piece of a revision, its end, or a gap: a run of revisions that the source has left out.
type Record struct {
	// Revision is the last one of a gap.
	Revision keyspace.Revision
	// Events are those of a piece, in the order of their Sub. Each has the revision as its
	// Mod.
	Events []mvcc.Version
	// End says that the revision is whole with this; then there are no Events. It is set for a gap too.
	End bool
	// Total is the number of events of the revision, at its end. A gap has none.
	Total int
	// Gap is the first revision of a gap, 0 for any other record.
	Gap keyspace.Revision
}

// first returns the first revision that the record is about.
func (r *Record) first() keyspace.Revision {
	if r.Gap != 0 {
		return r.Gap
	}
	return r.Revision
}

// appendBody appends the bytes of a record.
func appendBody(b []byte, r Record) []byte {
	if r.Gap != 0 {
		b = binary.AppendUvarint(append(b, kindGap), uint64(r.Revision))
		return binary.AppendUvarint(b, uint64(r.Gap))
	}
	if r.End {
		b = binary.AppendUvarint(append(b, kindEnd), uint64(r.Revision))
		return binary.AppendUvarint(b, uint64(r.Total))
	}
	b = binary.AppendUvarint(append(b, kindPiece), uint64(r.Revision))
	b = binary.AppendUvarint(b, uint64(r.Events[0].Sub))
	b = binary.AppendUvarint(b, uint64(len(r.Events)))
	for i := range r.Events {
		e := &r.Events[i]
		b = append(b, wire.Flag(e.Tombstone, flagDelete)|wire.Flag(e.Lease != 0, flagLease))
		b = wire.AppendBytes(b, e.Key)
		if e.Tombstone {
			continue
		}
		b = binary.AppendUvarint(b, uint64(e.Create))
		b = binary.AppendUvarint(b, uint64(e.Version))
		if e.Lease != 0 {
			b = binary.AppendUvarint(b, uint64(e.Lease))
		}
		b = wire.AppendBytes(b, e.Value)
	}
	return b
}

// decodeBody reads what appendBody has written. The Record refers to b.
func decodeBody(b []byte) (Record, error) {
	r := wire.NewReader(b)
	kind := r.Byte()
	rec := Record{Revision: keyspace.Revision(r.Uvarint())}
	if rec.Revision <= 0 || rec.Revision > keyspace.MaxRevision {
		r.Failf("revision %d", rec.Revision)
	}
	switch kind {
	case kindEnd:
		rec.End, rec.Total = true, int(r.Uvarint())
		if rec.Total <= 0 {
			r.Failf("a revision of %d events", rec.Total)
		}
	case kindGap:
		rec.End, rec.Gap = true, keyspace.Revision(r.Uvarint())
		if rec.Gap <= 0 || rec.Gap > rec.Revision {
			r.Failf("a gap from revision %d to %d", rec.Gap, rec.Revision)
		}
	case kindPiece:
		decodeEvents(&r, &rec)
	default:
		r.Failf("a record of kind %d", kind)
	}
	return rec, r.End()
}

func decodeEvents(r *wire.Reader, rec *Record) {
	sub, n := r.Uvarint(), r.Uvarint()
	// Each event takes two bytes or more, so a claim beyond the input allocates nothing.
	if n == 0 || n > uint64(r.Len()) || sub > 1<<32-1-n {
		r.Failf("%d events from number %d in %d bytes", n, sub, r.Len())
		return
	}
	for i := uint64(0); i < n && r.OK(); i++ {
		flags := r.Flags(flagDelete | flagLease)
		e := mvcc.Version{Key: r.Bytes(), Mod: rec.Revision, Sub: uint32(sub + i), Tombstone: flags&flagDelete != 0}
		if e.Tombstone && flags&flagLease != 0 {
			r.Failf("a delete with a lease")
		}
		if !e.Tombstone {
			e.Create, e.Version = keyspace.Revision(r.Uvarint()), int64(r.Uvarint())
			if flags&flagLease != 0 {
				e.Lease = keyspace.LeaseID(r.Uvarint())
			}
			e.Value = r.Bytes()
		}
		rec.Events = append(rec.Events, e)
	}
}

// appendRecord appends prefix and body of a record that begins at an offset of a segment.
func appendRecord(b []byte, seq uint64, offset int64, r Record) []byte {
	at := len(b)
	b = appendBody(append(b, make([]byte, prefixBytes)...), r)
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-prefixBytes))
	binary.LittleEndian.PutUint32(b[at+4:], checksum(seq, offset, b[at+prefixBytes:]))
	return b
}

// checksum covers where a record lies, its length and its body.
func checksum(seq uint64, offset int64, body []byte) uint32 {
	var where [20]byte
	binary.LittleEndian.PutUint64(where[:], seq)
	binary.LittleEndian.PutUint64(where[8:], uint64(offset))
	binary.LittleEndian.PutUint32(where[16:], uint32(len(body)))
	return crc32.Update(crc32.Checksum(where[:], castagnoli), castagnoli, body)
}
