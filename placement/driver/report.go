package driver

import (
	"encoding/binary"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// Measure is what a node says of a range that it leads.
type Measure struct {
	Range keyspace.RangeID
	// Term is the raft term in which it leads, at least 1: of two nodes that say to lead
	// a range the one with the higher term is right.
	Term uint64
	// Bytes is about what the range takes on the node's disk, Load the puts and reads a
	// second, smoothed.
	Bytes, Load int64
}

// Measurer tells what placement decides by of its own node.
type Measurer interface {
	// Led returns what the ranges that the node leads hold and bear.
	Led() []Measure
	// Disk returns the size of the node's disk and the bytes in use. A size of 0 is not known.
	Disk() (capacity, used int64)
	// Full says that the node has no memory for another replica.
	Full() bool
	// Quarantined returns the replicas that the node keeps closed until they are replaced.
	Quarantined() []Quarantined
	// Alarms says that the node takes no more data, and that it has a replica in quarantine.
	Alarms() (noSpace, corrupt bool)
}

// Quarantined is a replica of the node that is in quarantine.
type Quarantined struct {
	Range   keyspace.RangeID
	Replica keyspace.ReplicaID
	// Reason says why, for people, in at most MaxReasonBytes.
	Reason string
}

// MaxReasonBytes bounds the reason of a quarantine in a report. The node itself has all of it.
const MaxReasonBytes = 256

// The versions of method 36's messages. This build reads both.
const (
	// reportOlder is written below keyspace.VersionFullNodes. It has no Full: the disk of a full node
	// is said to be full.
	reportOlder = 2
	reportNewer = 3
)

// Bounds of a part of a node's report.
const (
	// ReportRanges bounds the ranges in a part, ReportBytes about its size.
	ReportRanges = 4096
	ReportBytes  = 128 << 10
)

// Part is one message of what a node says of itself. A node reports everything once, in parts,
// and then the changes. Parts are numbered one by one, so a leader that has missed one notices
// it and asks for everything.
type Part struct {
	Boot   keyspace.BootID
	Number uint64
	// Whole says that the node tells everything, from this part on; More, that the part
	// after this one belongs to it.
	Whole, More    bool
	Capacity, Used int64
	// Full says that the node has no memory for another replica.
	Full bool
	// NoSpace says that the node takes no more data, and Corrupt that it has a replica in quarantine.
	NoSpace, Corrupt bool
	// Led are ranges that the node leads, or has led and does not any more: those have
	// the term 0.
	Led []Measure
	// Quarantined are replicas in quarantine, or that have been and are not any more: those have the
	// replica id 0.
	Quarantined []Quarantined
}

const (
	partWhole = 1 << 0
	partMore  = 1 << 1
	// Since reportNewer.
	partFull    = 1 << 2
	partNoSpace = 1 << 3
	partCorrupt = 1 << 4
)

// Encode returns the form of the part on the bus, as it is written in that version of the cluster.
func (p *Part) Encode(written keyspace.Version) []byte {
	version, flags, used := byte(reportNewer), byte(0), p.Used
	if written < keyspace.VersionFullNodes {
		version = reportOlder
	}
	if p.Whole {
		flags |= partWhole
	}
	if p.More {
		flags |= partMore
	}
	switch {
	case p.Full && version == reportOlder:
		used = p.Capacity
	case p.Full:
		flags |= partFull
	}
	if p.NoSpace && version == reportNewer {
		flags |= partNoSpace
	}
	if p.Corrupt && version == reportNewer {
		flags |= partCorrupt
	}
	dst := []byte{version, flags}
	dst = binary.BigEndian.AppendUint64(dst, uint64(p.Boot))
	dst = binary.AppendUvarint(dst, p.Number)
	dst = binary.AppendUvarint(dst, uint64(p.Capacity))
	dst = binary.AppendUvarint(dst, uint64(used))
	dst = binary.AppendUvarint(dst, uint64(len(p.Led)))
	for i := range p.Led {
		dst = appendMeasure(dst, &p.Led[i])
	}
	dst = binary.AppendUvarint(dst, uint64(len(p.Quarantined)))
	for _, q := range p.Quarantined {
		dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(q.Range)), uint64(q.Replica))
		dst = fsm.AppendString(dst, q.Reason)
	}
	return dst
}

func appendMeasure(dst []byte, m *Measure) []byte {
	dst = binary.AppendUvarint(dst, uint64(m.Range))
	dst = binary.AppendUvarint(dst, m.Term)
	dst = binary.AppendUvarint(dst, uint64(m.Bytes))
	return binary.AppendUvarint(dst, uint64(m.Load))
}

// DecodePart reads what Part.Encode wrote.
func DecodePart(b []byte) (Part, error) {
	r := fsm.NewReader(b)
	known := byte(partWhole | partMore)
	if r.VersionFrom(reportOlder, reportNewer) >= reportNewer {
		known |= partFull | partNoSpace | partCorrupt
	}
	flags := r.Byte()
	if flags&^known != 0 {
		r.Failf("report flags %x", flags)
	}
	p := Part{
		Whole: flags&partWhole != 0, More: flags&partMore != 0, Full: flags&partFull != 0,
		NoSpace: flags&partNoSpace != 0, Corrupt: flags&partCorrupt != 0,
		Boot: keyspace.BootID(r.Uint64BE()), Number: r.Uvarint(), Capacity: readAmount(&r), Used: readAmount(&r),
	}
	n := r.CountUpTo(ReportRanges, 4)
	p.Led = make([]Measure, 0, n)
	for range n {
		m := Measure{
			Range: keyspace.RangeID(r.Uvarint()), Term: r.Uvarint(),
			Bytes: readAmount(&r), Load: readAmount(&r),
		}
		if r.OK() && m.Range == 0 {
			r.Failf("a report of range 0")
		}
		p.Led = append(p.Led, m)
	}
	p.Quarantined = readQuarantined(&r)
	if err := r.Finish(); err != nil {
		return Part{}, fmt.Errorf("decode part of a node's report: %w", err)
	}
	return p, nil
}

func readQuarantined(r *fsm.Reader) (qs []Quarantined) {
	for range r.CountUpTo(ReportRanges, 3) {
		q := Quarantined{Range: keyspace.RangeID(r.Uvarint()), Replica: keyspace.ReplicaID(r.Uvarint()), Reason: r.StringUpTo(MaxReasonBytes)}
		if r.OK() && q.Range == 0 {
			r.Failf("a quarantine of range 0")
		}
		qs = append(qs, q)
	}
	return qs
}

// MaxAmount bounds bytes and load in a report, so that sums of them do not overflow.
const MaxAmount = 1 << 50

// readAmount reads a number of bytes, or of requests a second.
func readAmount(r *fsm.Reader) int64 {
	v := r.Uvarint()
	if v > MaxAmount {
		r.Failf("an amount of %d, at most %d", v, int64(MaxAmount))
		return 0
	}
	return int64(v)
}

// EncodePartAnswer answers a part: anew says that one before it has not come, and that
// everything is to be told.
func EncodePartAnswer(anew bool) []byte {
	return fsm.AppendBool([]byte{fsm.FormatVersion, fsm.AnswerOK}, anew)
}

// DecodePartAnswer reads the answer to a part.
func DecodePartAnswer(p []byte) (anew bool, err error) {
	r, err := fsm.AnswerBody(p)
	if err != nil {
		return false, err
	}
	anew = r.Bool()
	if err := r.Finish(); err != nil {
		return false, fmt.Errorf("decode answer to a node's report: %w", err)
	}
	return anew, nil
}

// Clamp keeps a measure within what a report holds.
func (m *Measure) Clamp() {
	m.Bytes, m.Load = min(max(m.Bytes, 0), MaxAmount), min(max(m.Load, 0), MaxAmount)
}

// Clamp cuts the reason to what a report holds.
func (q *Quarantined) Clamp() { q.Reason = cutTo(q.Reason, MaxReasonBytes) }

// Steps are changes of bytes and load that are too small to be told.
type Steps struct{ Bytes, Load int64 }

// boundSteps is how many steps there are in the bounds above which ranges are split. Merged
// ranges have a quarter of a bound at most as reported, and so less than a third as they are.
const boundSteps = 64

// Steps returns them: a MiB and ten requests a second, and less where ranges are split for
// little more than that.
func (s *Driver) Steps() Steps {
	return Steps{Bytes: min(1<<20, s.o.RangeMaxBytes/boundSteps), Load: min(10, s.o.RangeSplitLoad/boundSteps)}
}

// Differs says whether a measure is news to who knows an older one. Small changes are not
// reported. Small is below a step, a sixteenth of the bytes, or an eighth of the load.
func (m *Measure) Differs(old *Measure, least Steps) bool {
	far := func(a, b, least, part int64) bool { return max(a-b, b-a) > max(least, b/part) }
	return m.Term != old.Term ||
		far(m.Bytes, old.Bytes, least.Bytes, 16) || far(m.Load, old.Load, least.Load, 8)
}

// cutTo keeps whole characters, and at most so many bytes.
func cutTo(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	for len(s) > most {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}
