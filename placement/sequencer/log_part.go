package sequencer

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

const (
	// maxLogRecords bounds the records of a part of the allocation log that is read: some 20 KiB, next to which a message by
	// itself costs little. A revision's are in one part.
	maxLogRecords = 4 * keyspace.MaxRevisionRanges
	// sentLogRecords bounds those of a part that is sent. Older builds that read cluster version 4 refuse more, so larger
	// parts need the next one.
	sentLogRecords = keyspace.MaxRevisionRanges
)

// LogPosition is how far a follower knows the allocation log: up to Last, and from
// which term's sequencer it learned that. The zero value knows nothing.
type LogPosition struct {
	Term uint64
	Last keyspace.Revision
}

// LogPart is one part of the allocation log: Records say who got the revisions in
// (After, Last], each of them in order and without a hole. A revision that belongs
// to several ranges has one record for each, with the same First.
type LogPart struct {
	Term        uint64
	After, Last keyspace.Revision
	Records     []Allocation
}

// encode writes of a record what does not follow from those before it.
func (p *LogPart) encode() []byte {
	dst := make([]byte, 0, 32+8*len(p.Records))
	dst = append(dst, fsm.FormatVersion)
	dst = binary.AppendUvarint(dst, p.Term)
	dst = fsm.AppendRevision(dst, p.After)
	dst = fsm.AppendRevision(dst, p.Last)
	dst = binary.AppendUvarint(dst, uint64(len(p.Records)))
	last := p.After
	for i := range p.Records {
		h := &p.Records[i]
		switch {
		case h.First == last+1 && h.Count > 0:
			dst = binary.AppendUvarint(dst, uint64(h.Count))
		case h.First == last && h.Count == 1 && i > 0:
			dst = append(dst, 0) // the same revision once more
		default:
			panic(fmt.Sprintf("placement: a record of %d revisions from %d on follows revision %d", h.Count, h.First, last))
		}
		dst = binary.AppendUvarint(dst, uint64(h.Range))
		dst = binary.AppendUvarint(dst, uint64(h.Generation))
		last = h.Last()
	}
	return dst
}

// DecodeLogPart reads one message of the allocation log.
func DecodeLogPart(b []byte) (LogPart, error) {
	r := fsm.NewReader(b)
	r.Version()
	p := LogPart{Term: r.Uvarint(), After: r.Revision(), Last: r.Revision()}
	n := r.CountUpTo(maxLogRecords, 3)
	if n > 0 {
		p.Records = make([]Allocation, 0, n)
	}
	last := p.After
	for range n {
		// A record of one range after the other is as long as they were served in a row.
		h := Allocation{First: last + 1, Count: uint32(r.Bounded(2 * CeilingBlock))}
		if h.Count == 0 {
			if len(p.Records) == 0 {
				r.Fail(errors.New("a record shares no revision with the one before"))
			}
			h.First, h.Count = last, 1
		}
		h.Range, h.Generation = keyspace.RangeID(r.Uvarint()), keyspace.Generation(r.Uvarint())
		last = h.Last()
		p.Records = append(p.Records, h)
	}
	if r.OK() && last != p.Last {
		r.Failf("records up to revision %d in a part up to %d", last, p.Last)
	}
	if err := r.Finish(); err != nil {
		return LogPart{}, fmt.Errorf("decode part of the allocation log: %w", err)
	}
	return p, nil
}

// EncodeLogRequest opens a stream of the log behind a position.
func EncodeLogRequest(known LogPosition) []byte {
	dst := binary.AppendUvarint([]byte{fsm.FormatVersion}, known.Term)
	return fsm.AppendRevision(dst, known.Last)
}

// DecodeLogRequest reads from where on a node asks for the allocation log.
func DecodeLogRequest(b []byte) (LogPosition, error) {
	r := fsm.NewReader(b)
	r.Version()
	known := LogPosition{Term: r.Uvarint(), Last: r.Revision()}
	if err := r.Finish(); err != nil {
		return LogPosition{}, fmt.Errorf("decode request for the allocation log: %w", err)
	}
	return known, nil
}
