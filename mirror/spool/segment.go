package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// segmentName is the file of a segment.
func segmentName(seq uint64) string { return fmt.Sprintf("%016x.spool", seq) }

// parseName is the inverse of segmentName.
func parseName(name string) (seq uint64, ok bool) {
	_, err := fmt.Sscanf(name, "%016x.spool", &seq)
	return seq, err == nil && segmentName(seq) == name
}

// A scan reads the records of one segment in order.
type scan struct {
	f    vfs.File
	seq  uint64
	size int64 // what may be read
	at   int64
	buf  []byte // bytes from bufAt on
	off  int64
}

// readAhead is how much a scan reads at a time.
const readAhead = 256 << 10

// window returns n bytes at the scan's offset. They are valid until the next call.
func (s *scan) window(n int) ([]byte, error) {
	if s.at+int64(n) > s.size {
		return nil, errTorn
	}
	from := int(s.at - s.off)
	if from < 0 || from+n > len(s.buf) {
		want := min(int64(max(n, readAhead)), s.size-s.at)
		if int64(cap(s.buf)) < want {
			s.buf = make([]byte, want)
		}
		s.buf, s.off, from = s.buf[:want], s.at, 0
		if _, err := s.f.ReadAt(s.buf, s.at); err != nil && !errors.Is(err, io.EOF) {
			s.buf = s.buf[:0]
			return nil, err
		} else if err != nil {
			s.buf = s.buf[:0]
			return nil, errTorn
		}
	}
	return s.buf[from : from+n], nil
}

// next returns the record at the scan's offset. Its bytes are valid until the next call.
func (s *scan) next() (Record, error) {
	p, err := s.window(prefixBytes)
	if err != nil {
		return Record{}, err
	}
	n, sum := binary.LittleEndian.Uint32(p), binary.LittleEndian.Uint32(p[4:])
	if n == 0 || n > maxBody {
		return Record{}, errTorn
	}
	b, err := s.window(prefixBytes + int(n))
	if err != nil {
		return Record{}, err
	}
	if checksum(s.seq, s.at, b[prefixBytes:]) != sum {
		return Record{}, errTorn
	}
	r, err := decodeBody(b[prefixBytes:])
	if err != nil {
		// The checksum holds, so these bytes were written so.
		return Record{}, fmt.Errorf("offset %d: %w", s.at, err)
	}
	s.at += int64(prefixBytes + n)
	return r, nil
}

// wholeUpTo reads a segment to its end, or to the first bytes that are no record. It
// returns where its last whole revision ends, and that revision.
func (s *scan) wholeUpTo(after keyspace.Revision) (end int64, last keyspace.Revision, err error) {
	end, last = s.at, after
	events := 0
	for {
		r, err := s.next()
		switch {
		case errors.Is(err, errTorn):
			return end, last, nil
		case err != nil:
			return 0, 0, err
		case r.first() != last+1 || r.Gap != 0 && events > 0:
			return 0, 0, fmt.Errorf("offset %d: revision %d behind revision %d and %d events", s.at, r.first(), last, events)
		case r.End && r.Total != events:
			return 0, 0, fmt.Errorf("offset %d: revision %d has %d events and says %d", s.at, r.Revision, events, r.Total)
		case r.End:
			end, last, events = s.at, r.Revision, 0
		default:
			events += len(r.Events)
		}
	}
}
