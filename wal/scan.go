package wal

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// CorruptionError says that synced bytes are damaged or missing. The log is not opened,
// and nothing on disk is changed.
type CorruptionError struct {
	File   string
	Offset int64
	Detail string
}

// Error returns file, offset and what is wrong there.
func (e *CorruptionError) Error() string {
	return fmt.Sprintf("wal: %s is damaged at offset %d: %s", e.File, e.Offset, e.Detail)
}

// scanned is the result of reading a segment's bytes from their beginning.
type scanned struct {
	// end is the offset behind the last whole unit; recovery keeps the bytes before it.
	end int64
	// bad is the offset of the first record that does not verify, and why is the
	// reason. bad is above end if a unit is cut off.
	bad int64
	why error
	// firstMark and lastMark are the first record, which has to be a mark, and the
	// newest mark below end. Their ok is false where the first record is none.
	firstMark, lastMark mark
	hasMark             bool
}

// scan verifies a segment from its first record on, up to limit bytes or the first
// damaged place.
func scan(b []byte, h segmentHeader, limit int64) scanned {
	s := scanned{end: headerLen, bad: headerLen}
	limit = min(limit, int64(len(b)))
	inUnit := false
	for {
		if s.bad == limit {
			s.why = fmt.Errorf("end of data")
			return s
		}
		r, err := verify(b[s.bad:limit], h, s.bad)
		if err != nil {
			s.why = err
			return s
		}
		if kind(r[16]) == kindMark {
			m, err := decodeMark(r, s.bad)
			if err == nil && inUnit {
				err = fmt.Errorf("mark within a unit")
			}
			if err != nil {
				s.why = err
				return s
			}
			if !s.hasMark {
				s.firstMark, s.hasMark = m, true
			}
			s.lastMark = m
			s.bad += markLen
			s.end = s.bad
			if m.next != 0 {
				s.why = fmt.Errorf("the segment is sealed")
				return s
			}
			continue
		}
		if !s.hasMark {
			s.why = fmt.Errorf("segment does not begin with a mark")
			return s
		}
		rec, err := decodeRecord(r, s.bad)
		if err != nil {
			s.why = err
			return s
		}
		s.bad += rec.len
		inUnit = rec.flags&flagUnitEnd == 0
		if !inUnit {
			s.end = s.bad
		}
	}
}

// provenEnd returns the highest offset that any intact mark in b calls synced, wherever
// the mark lies, or 0 if there is none. It also returns the offset behind the last
// occurrence of the salt: no record of this use can lie beyond it.
//
// Unsynced pages survive a crash in any order, so a valid record behind a damaged place
// proves nothing. Only a mark does: it was written after the fsync that it reports.
func provenEnd(b []byte, h segmentHeader) (proven, saltEnd int64) {
	var salt [8]byte
	binary.LittleEndian.PutUint64(salt[:], h.salt)
	for at := headerLen; ; {
		i := bytes.Index(b[at:], salt[:])
		if i < 0 {
			return proven, saltEnd
		}
		at += i
		saltEnd = int64(at + len(salt))
		if off := int64(at - saltAt); off >= headerLen && kindAt(b, off) == kindMark {
			if r, err := verify(b[off:min(int64(len(b)), off+markLen)], h, off); err == nil {
				if m, err := decodeMark(r, off); err == nil {
					proven = max(proven, m.durable)
				}
			}
		}
		at++
	}
}

func kindAt(b []byte, off int64) kind {
	if off+prefixLen > int64(len(b)) {
		return 0
	}
	return kind(b[off+16])
}

// eachRecord calls f for the groups' records in a scanned segment below end.
func eachRecord(b []byte, end int64, f func(record) error) error {
	for off := int64(headerLen); off < end; {
		r := b[off : off+int64(binary.LittleEndian.Uint32(b[off+4:]))]
		if kind(r[16]) != kindMark {
			rec, err := decodeRecord(r, off)
			if err != nil {
				return err
			}
			if err := f(rec); err != nil {
				return err
			}
		}
		off += int64(len(r))
	}
	return nil
}
