package wal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
)

// docs/format/wal.md has the byte tables.
const (
	formatVersion = 3

	// headerLen is one block. No later write touches the header's block, so a torn write
	// cannot damage it.
	headerLen = 4096

	prefixLen = 24
	markLen   = prefixLen + 40
	// recordLen is the length of a record without entries; hardStateLen is the part that
	// follows the entries.
	recordLen    = prefixLen + 40 + hardStateLen
	entriesAt    = prefixLen + 40
	hardStateLen = 24
	entryLen     = 13

	saltAt = 8
)

var magic = [8]byte{'S', 'K', 'E', 'I', 'N', 'W', 'A', 'L'}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// kind is the kind of a record.
type kind uint8

const (
	// kindMark belongs to no group: it states the synced offset, the first segment of
	// the log, and the predecessor of this segment.
	kindMark kind = iota + 1
	// kindAppend adds entries, replacing any tail from the first one on, or sets a new
	// hard state, or both.
	kindAppend
	// kindCompact raises the base.
	kindCompact
	// kindReset empties the log behind the base.
	kindReset
	// kindRewrite repeats entries, each in place of the one with its index.
	kindRewrite
	// kindRemove is the tombstone of the group.
	kindRemove
	// kindForget ends the tombstone.
	kindForget

	kindMax = kindForget
)

var kindNames = [...]string{"invalid", "mark", "append", "compact", "reset", "rewrite", "remove", "forget"}

// String returns the kind's name in docs/format/wal.md.
func (k kind) String() string {
	if k > kindMax {
		k = 0
	}
	return kindNames[k]
}

const (
	// flagUnitEnd is set in the last record of an atomic unit.
	flagUnitEnd = 1 << iota
	// flagHardState says that the group has a hard state.
	flagHardState
)

// segmentHeader is the content of a segment's first block.
type segmentHeader struct {
	seq, salt uint64
	// size is that of the whole file, which has this size before it gets its name.
	size int64
}

func (h segmentHeader) encode() []byte {
	b := make([]byte, headerLen)
	copy(b, magic[:])
	binary.LittleEndian.PutUint32(b[8:], formatVersion)
	binary.LittleEndian.PutUint64(b[16:], h.seq)
	binary.LittleEndian.PutUint64(b[24:], h.salt)
	binary.LittleEndian.PutUint64(b[32:], uint64(h.size))
	binary.LittleEndian.PutUint32(b[12:], headerChecksum(b))
	return b
}

func decodeSegmentHeader(b []byte) (segmentHeader, error) {
	if len(b) < headerLen {
		return segmentHeader{}, fmt.Errorf("header cut off after %d bytes", len(b))
	}
	b = b[:headerLen]
	if [8]byte(b) != magic {
		return segmentHeader{}, fmt.Errorf("no segment header")
	}
	if got, want := binary.LittleEndian.Uint32(b[12:]), headerChecksum(b); got != want {
		return segmentHeader{}, fmt.Errorf("header checksum %08x, want %08x", got, want)
	}
	if err := keyspace.CheckVersion("wal segment", uint64(binary.LittleEndian.Uint32(b[8:])), formatVersion); err != nil {
		return segmentHeader{}, err
	}
	h := segmentHeader{
		seq: binary.LittleEndian.Uint64(b[16:]), salt: binary.LittleEndian.Uint64(b[24:]),
		size: int64(binary.LittleEndian.Uint64(b[32:])),
	}
	if h.seq == 0 {
		return segmentHeader{}, fmt.Errorf("sequence number 0")
	}
	if h.size < minSegmentBytes || h.size > maxSegmentBytes {
		return segmentHeader{}, fmt.Errorf("size %d out of range [%d, %d]", h.size, minSegmentBytes, maxSegmentBytes)
	}
	return h, nil
}

// headerChecksum covers the whole block but its own four bytes.
func headerChecksum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:12], castagnoli), castagnoli, b[16:headerLen])
}

// mark is the body of a kindMark record.
type mark struct {
	// durable: every byte of the segment below this offset has been synced.
	durable int64
	// oldest is the first segment that belongs to the log.
	oldest uint64
	// prevSeq and prevEnd name the previous segment and its end. All of it was synced
	// before this segment was written. 0 in the first one.
	prevSeq uint64
	prevEnd int64
	// next is the segment behind this one, which existed under its name before the mark
	// was written. The mark then seals the segment as its last record. It is 0 in all other
	// marks.
	next uint64
}

// record is a decoded record of a group. entries aliases the segment's bytes.
type record struct {
	kind     kind
	flags    uint8
	count    uint32
	group    keyspace.GroupID
	base     position
	first    uint64
	prevOff  uint32
	prevLen  uint32
	entries  []byte
	hard     hardState
	off, len int64
}

// last is the index of the last entry, or first-1 if there are none.
func (r *record) last() uint64 { return r.first + uint64(r.count) - 1 }

// position is a place in a raft log.
type position struct{ index, term uint64 }

// hardState is raft's HardState by value.
type hardState struct{ term, vote, commit uint64 }

func hardStateOf(hs *raftpb.HardState) hardState {
	return hardState{hs.GetTerm(), hs.GetVote(), hs.GetCommit()}
}

// recordChecksum covers sequence number, offset and everything behind the checksum.
func recordChecksum(seq uint64, off int64, b []byte) uint32 {
	var place [16]byte
	binary.LittleEndian.PutUint64(place[:], seq)
	binary.LittleEndian.PutUint64(place[8:], uint64(off))
	return crc32.Update(crc32.Checksum(place[:], castagnoli), castagnoli, b[4:])
}

// seal fills in what depends on a record's place.
func seal(b []byte, h segmentHeader, off int64) {
	binary.LittleEndian.PutUint32(b[4:], uint32(len(b)))
	binary.LittleEndian.PutUint64(b[saltAt:], h.salt)
	binary.LittleEndian.PutUint32(b, recordChecksum(h.seq, off, b))
}

// verify returns the bytes of the record at the beginning of b, which lies at off in the
// segment, or an error if there is none.
func verify(b []byte, h segmentHeader, off int64) ([]byte, error) {
	if len(b) < prefixLen {
		return nil, fmt.Errorf("%d bytes are no record", len(b))
	}
	if salt := binary.LittleEndian.Uint64(b[saltAt:]); salt != h.salt {
		return nil, fmt.Errorf("salt %016x, want %016x", salt, h.salt)
	}
	n := binary.LittleEndian.Uint32(b[4:])
	if n < markLen || uint64(n) > uint64(len(b)) {
		return nil, fmt.Errorf("length %d out of range [%d, %d]", n, markLen, len(b))
	}
	b = b[:n]
	if got, want := binary.LittleEndian.Uint32(b), recordChecksum(h.seq, off, b); got != want {
		return nil, fmt.Errorf("checksum %08x, want %08x", got, want)
	}
	return b, nil
}

func appendMark(dst []byte, m mark, h segmentHeader, off int64) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, markLen)...)
	b := dst[at:]
	b[16] = byte(kindMark)
	binary.LittleEndian.PutUint64(b[24:], uint64(m.durable))
	binary.LittleEndian.PutUint64(b[32:], m.oldest)
	binary.LittleEndian.PutUint64(b[40:], m.prevSeq)
	binary.LittleEndian.PutUint64(b[48:], uint64(m.prevEnd))
	binary.LittleEndian.PutUint64(b[56:], m.next)
	seal(b, h, off)
	return dst
}

// decodeMark reads a verified record that lies at off.
func decodeMark(b []byte, off int64) (mark, error) {
	if len(b) != markLen {
		return mark{}, fmt.Errorf("mark of %d bytes, want %d", len(b), markLen)
	}
	m := mark{
		durable: int64(binary.LittleEndian.Uint64(b[24:])),
		oldest:  binary.LittleEndian.Uint64(b[32:]),
		prevSeq: binary.LittleEndian.Uint64(b[40:]),
		prevEnd: int64(binary.LittleEndian.Uint64(b[48:])),
		next:    binary.LittleEndian.Uint64(b[56:]),
	}
	if m.durable < 0 || m.durable > off {
		return mark{}, fmt.Errorf("mark at %d calls %d bytes synced", off, m.durable)
	}
	return m, nil
}

// decodeRecord reads a verified record of a group that lies at off.
func decodeRecord(b []byte, off int64) (record, error) {
	if len(b) < recordLen {
		return record{}, fmt.Errorf("record of %d bytes, want at least %d", len(b), recordLen)
	}
	r := record{
		kind:    kind(b[16]),
		flags:   b[17],
		count:   binary.LittleEndian.Uint32(b[20:]),
		group:   keyspace.GroupID(binary.LittleEndian.Uint64(b[24:])),
		base:    position{binary.LittleEndian.Uint64(b[32:]), binary.LittleEndian.Uint64(b[40:])},
		first:   binary.LittleEndian.Uint64(b[48:]),
		prevOff: binary.LittleEndian.Uint32(b[56:]),
		prevLen: binary.LittleEndian.Uint32(b[60:]),
		entries: b[entriesAt : len(b)-hardStateLen],
		off:     off,
		len:     int64(len(b)),
	}
	hs := b[len(b)-hardStateLen:]
	r.hard = hardState{
		binary.LittleEndian.Uint64(hs), binary.LittleEndian.Uint64(hs[8:]), binary.LittleEndian.Uint64(hs[16:]),
	}
	if r.kind <= kindMark || r.kind > kindMax {
		return record{}, fmt.Errorf("unknown kind %d", uint8(r.kind))
	}
	if r.count > 0 && (r.first == 0 || r.first+uint64(r.count) < r.first) {
		return record{}, fmt.Errorf("%d entries from index %d", r.count, r.first)
	}
	rest := r.entries
	for range r.count {
		var err error
		if _, rest, err = cutEntry(rest); err != nil {
			return record{}, err
		}
	}
	if len(rest) != 0 {
		return record{}, fmt.Errorf("%d bytes behind %d entries", len(rest), r.count)
	}
	return r, nil
}

// encodedEntry is one entry in a record; its position implies its index.
type encodedEntry struct {
	term uint64
	typ  raftpb.EntryType
	data []byte
}

func cutEntry(b []byte) (encodedEntry, []byte, error) {
	if len(b) < entryLen {
		return encodedEntry{}, nil, fmt.Errorf("%d bytes are no entry", len(b))
	}
	n := binary.LittleEndian.Uint32(b)
	if uint64(n) > uint64(len(b)-entryLen) {
		return encodedEntry{}, nil, fmt.Errorf("entry of %d bytes in %d", n, len(b)-entryLen)
	}
	e := encodedEntry{typ: raftpb.EntryType(b[4]), term: binary.LittleEndian.Uint64(b[5:])}
	end := entryLen + int(n)
	e.data = b[entryLen:end:end]
	return e, b[end:], nil
}

func appendEntry(dst []byte, e *raftpb.Entry) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(e.GetData())))
	dst = append(dst, byte(e.GetType()))
	dst = binary.LittleEndian.AppendUint64(dst, e.GetTerm())
	return append(dst, e.GetData()...)
}

// beginRecord appends the front of a record, without what putState and seal fill in
// later.
func beginRecord(dst []byte, k kind, g keyspace.GroupID, first uint64, count int) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, entriesAt)...)
	b := dst[at:]
	b[16] = byte(k)
	binary.LittleEndian.PutUint32(b[20:], uint32(count))
	binary.LittleEndian.PutUint64(b[24:], uint64(g))
	binary.LittleEndian.PutUint64(b[48:], first)
	return dst
}

// endRecord appends space for the hard state.
func endRecord(dst []byte) []byte { return append(dst, make([]byte, hardStateLen)...) }

// putState fills in the group's small state.
func putState(b []byte, base position, hard hardState, hasHard bool) {
	binary.LittleEndian.PutUint64(b[32:], base.index)
	binary.LittleEndian.PutUint64(b[40:], base.term)
	if !hasHard {
		return
	}
	b[17] |= flagHardState
	hs := b[len(b)-hardStateLen:]
	binary.LittleEndian.PutUint64(hs, hard.term)
	binary.LittleEndian.PutUint64(hs[8:], hard.vote)
	binary.LittleEndian.PutUint64(hs[16:], hard.commit)
}

// putPrev fills in the place of the previous record of the same run.
func putPrev(b []byte, off, length uint32) {
	binary.LittleEndian.PutUint32(b[56:], off)
	binary.LittleEndian.PutUint32(b[60:], length)
}
