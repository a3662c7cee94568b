package shard

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// sampleRecord, sampleBatch and sampleSplit are in the golden files.
func sampleRecord() record {
	return record{
		rangeID: 7, generation: 3, span: keyspace.Span{Start: []byte("a"), End: []byte("m")},
		last: link{5, 9}, lastRevision: 300, compacted: 200, live: -4, counted: true, hash: 0x0102030405060708, fence: 77,
	}
}

func sampleBatch() []byte {
	b := appendHeader(nil, header{commandBatch, 5, 3})
	b = appendBatchHeader(b, &batchCommand{prev: link{4, 8}, number: 1, hash: 0xa1, first: 300, txns: 2})
	b = binary.AppendUvarint(b, 2)
	b = appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}, prior{})
	b = appendVersion(b, &mvcc.Version{Key: []byte("l"), Mod: 300, Tombstone: true}, prior{lived: true, lease: -9})
	b = binary.AppendUvarint(b, 3)
	b = appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 301, Create: 290, Version: 5, Lease: 9, Value: []byte("w")}, prior{lived: true, lease: 9})
	b = appendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Tombstone: true}, prior{replaced: true})
	return appendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Create: 301, Version: 1}, prior{lived: true})
}

func sampleSplit() []byte {
	return appendSplit(appendHeader(nil, header{commandSplit, 5, 3}), &splitCommand{
		key: []byte("g"), child: 8, confIndex: 10, replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2, Role: keyspace.RoleLearner}},
	})
}

// TestGolden holds the formats still: a change of one is a new version of it.
// Write the files anew with SKEIN_REWRITE=1.
func TestGolden(t *testing.T) {
	rec := sampleRecord()
	formats := map[string][]byte{
		"record.v3": appendRecord(nil, &rec), "batch.v6": sampleBatch(), "split.v6": sampleSplit(),
		"compact.v6": binary.AppendVarint(appendHeader(nil, header{commandCompact, 5, 3}), 200),
		"count.v6":   binary.AppendVarint(appendHeader(nil, header{commandCount, 5, 3}), -4),
	}
	maps.Copy(formats, goldenTxn())
	maps.Copy(formats, goldenMerge())
	golden.Formats(t, formats)
}

func TestRoundTrip(t *testing.T) {
	rec := sampleRecord()
	got, err := decodeRecord(appendRecord(nil, &rec))
	if err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
		t.Errorf("record %+v, %v", got, err)
	}
	if want := "term=5 batch 1 on 4/8 k@300=v(create=290 version=4) lease=9 l@300† was=-9 " +
		"k@301=w(create=290 version=5) lease=9 was=9 m@301† replaced m@301=(create=301 version=1)"; entryText(5, sampleBatch()) != want {
		t.Errorf("batch %s", entryText(5, sampleBatch()))
	}
	if entryText(5, sampleSplit()) != "term=5 split at g into 8" {
		t.Errorf("split %s", entryText(5, sampleSplit()))
	}
	for n := range sampleBatch() {
		if text := entryText(5, sampleBatch()[:n]); !strings.HasPrefix(text, "broken") {
			t.Errorf("a batch of %d bytes: %s", n, text)
		}
	}
}

func FuzzCommand(f *testing.F) {
	f.Add(sampleBatch())
	f.Add(sampleSplit())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, body, err := decodeHeader(b)
		if err != nil {
			return
		}
		_ = entryText(h.term, b)
		if c, err := decodeMergeCommand(h.kind, body); h.kind >= commandBind && err == nil {
			if d, err := decodeMergeCommand(h.kind, appendMergeCommand(nil, h.kind, &c)); err != nil || fmt.Sprint(c) != fmt.Sprint(d) {
				t.Fatalf("%+v became %+v, %v", c, d, err)
			}
		}
		if c, err := decodeSplit(body); h.kind == commandSplit && err == nil {
			if d, err := decodeSplit(appendSplit(nil, &c)); err != nil || !bytes.Equal(d.key, c.key) || d.child != c.child {
				t.Fatalf("%v became %v, %v", c, d, err)
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	for _, m := range sampleMerges() {
		rec := sampleRecord()
		rec.merge = m
		f.Add(appendRecord(nil, &rec))
	}
	r := sampleRecord()
	f.Add(appendRecord(nil, &r))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			return
		}
		if s, err := decodeRecord(appendRecord(nil, &r)); err != nil || fmt.Sprint(s) != fmt.Sprint(r) {
			t.Fatalf("%v became %v, %v", r, s, err)
		}
	})
}

func FuzzAdminAnswer(f *testing.F) {
	f.Add([]byte("\x01\x00{}"))
	f.Fuzz(func(_ *testing.T, b []byte) { _, _ = decodeAdminAnswer(b) })
}
