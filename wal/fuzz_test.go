package wal

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// fuzzHeader is the segment to which fuzzed records claim to belong. The fuzzer cannot
// guess checksums, so records are sealed before they are read.
var fuzzHeader = segmentHeader{seq: 1, salt: 0x5a17000000000001, size: headerLen + 32<<10}

// FuzzRecord decodes arbitrary bytes as a record. There is no panic, mere claims allocate
// nothing, and the entries of a decoded record lie within it.
func FuzzRecord(f *testing.F) {
	rec := beginRecord(nil, kindAppend, 7, 11, 2)
	for _, e := range testEntries(11, 6, "one", "two") {
		rec = appendEntry(rec, e)
	}
	rec = endRecord(rec)
	putState(rec, position{10, 5}, hardState{6, 2, 10}, true)
	f.Add(rec, int64(headerLen))
	f.Add(appendMark(nil, mark{durable: headerLen, oldest: 1}, fuzzHeader, headerLen), int64(headerLen))
	f.Fuzz(func(t *testing.T, b []byte, off int64) {
		if _, err := verify(b, fuzzHeader, off); err == nil && len(b) < prefixLen {
			t.Fatal("a record shorter than its prefix")
		}
		if len(b) < markLen {
			return
		}
		b = bytes.Clone(b)
		seal(b, fuzzHeader, off)
		raw, err := verify(b, fuzzHeader, off)
		if err != nil || len(raw) != len(b) {
			t.Fatalf("sealed record does not verify: %v", err)
		}
		if m, err := decodeMark(raw, off); err == nil && (m.durable < 0 || m.durable > off) {
			t.Fatalf("mark at %d: %+v", off, m)
		}
		r, err := decodeRecord(raw, off)
		if err != nil {
			return
		}
		n, rest := uint32(0), r.entries
		for len(rest) > 0 {
			if _, rest, err = cutEntry(rest); err != nil {
				t.Fatal(err)
			}
			n++
		}
		if n != r.count {
			t.Fatalf("%d entries, %d claimed", n, r.count)
		}
		for _, seq := range []uint64{0, 2} {
			if _, err := verify(b, segmentHeader{seq: seq, salt: fuzzHeader.salt}, off); err == nil {
				t.Fatal("record verifies in another segment")
			}
		}
	})
}

// FuzzSegment recovers a log of one segment of arbitrary bytes behind a valid header, and
// again with every possible record sealed: Open succeeds or refuses.
func FuzzSegment(f *testing.F) {
	mem := vfs.NewMem()
	l, err := open(testOptions(mem), func() (uint64, error) { return fuzzHeader.salt, nil })
	if err != nil {
		f.Fatal(err)
	}
	b := l.NewBatch()
	b.Append(1, testHard(hardState{1, 1, 1}), testEntries(1, 1, "one", "two"))
	b.Reset(2, 10, 5, nil)
	b.Remove(3)
	l.Submit(b, nil)
	if err := l.Close(); err != nil {
		f.Fatal(err)
	}
	file, err := mem.Open("wal/" + segmentName(1, segmentSuffix))
	if err != nil {
		f.Fatal(err)
	}
	raw := make([]byte, minSegmentBytes)
	if _, err := file.ReadAt(raw, 0); err != nil {
		f.Fatal(err)
	}
	if err := file.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(bytes.TrimRight(raw[headerLen:], "\x00"), false)
	f.Add(bytes.TrimRight(raw[headerLen:], "\x00"), true)
	f.Fuzz(func(t *testing.T, body []byte, sealed bool) {
		b := make([]byte, fuzzHeader.size)
		end := headerLen + copy(b[copy(b, fuzzHeader.encode()):], body)
		if sealed {
			sealAll(b[:end])
		}
		fs := copyLog(t, map[string][]byte{segmentName(1, segmentSuffix): b})
		l, err := Open(testOptions(fs))
		if err != nil {
			return
		}
		m, err := observe(l)
		if err != nil {
			t.Fatal(err)
		}
		mustClose(t, l)
		again := mustOpen(t, testOptions(fs))
		checkModel(t, again, m)
		mustClose(t, again)
	})
}

// sealAll gives a valid checksum to everything of plausible length.
func sealAll(b []byte) {
	for off := int64(headerLen); off+prefixLen <= int64(len(b)); {
		n := int64(binary.LittleEndian.Uint32(b[off+4:]))
		if n < markLen || off+n > int64(len(b)) {
			return
		}
		seal(b[off:off+n], fuzzHeader, off)
		off += n
	}
}

// FuzzHeader decodes arbitrary bytes as a segment header; a decoded header encodes to the
// same block.
func FuzzHeader(f *testing.F) {
	f.Add(fuzzHeader.encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := decodeSegmentHeader(b)
		if err == nil && !bytes.Equal(h.encode()[16:40], b[16:40]) {
			t.Fatal("header changed")
		}
	})
}

// FuzzSegmentName: only the name of a segment with that number makes a file a segment.
func FuzzSegmentName(f *testing.F) {
	f.Add(segmentName(0xab, segmentSuffix))
	f.Add(segmentName(1, ".tmp"))
	f.Add("+00000000000000a" + segmentSuffix)
	f.Fuzz(func(t *testing.T, name string) {
		if seq, ok := parseSegmentName(name); ok && !strings.EqualFold(segmentName(seq, segmentSuffix), name) {
			t.Fatalf("%q is taken for segment %d", name, seq)
		}
	})
}
