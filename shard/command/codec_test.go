package command

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
func sampleRecord() Record {
	return Record{
		RangeID: 7, Generation: 3, Span: keyspace.Span{Start: []byte("a"), End: []byte("m")},
		Last: Link{5, 9}, LastRevision: 300, Compacted: 200, Live: -4, Counted: true, Hash: 0x0102030405060708, Fence: 77,
	}
}

func sampleBatch() []byte {
	b := AppendHeader(nil, Header{KindBatch, 5, 3})
	b = AppendBatchHeader(b, &Batch{Prev: Link{4, 8}, Number: 1, Hash: 0xa1, First: 300, Txns: 2})
	b = binary.AppendUvarint(b, 2)
	b = AppendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}, Prior{})
	b = AppendVersion(b, &mvcc.Version{Key: []byte("l"), Mod: 300, Tombstone: true}, Prior{Lived: true, Lease: -9})
	b = binary.AppendUvarint(b, 3)
	b = AppendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 301, Create: 290, Version: 5, Lease: 9, Value: []byte("w")}, Prior{Lived: true, Lease: 9})
	b = AppendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Tombstone: true}, Prior{Replaced: true})
	return AppendVersion(b, &mvcc.Version{Key: []byte("m"), Mod: 301, Create: 301, Version: 1}, Prior{Lived: true})
}

func sampleSplit() []byte {
	return AppendSplit(AppendHeader(nil, Header{KindSplit, 5, 3}), &Split{
		Key: []byte("g"), Child: 8, ConfIndex: 10, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2, Role: keyspace.RoleLearner}},
	})
}

// TestGolden holds the formats still: a change of one is a new version of it.
// Write the files anew with SKEIN_REWRITE=1.
func TestGolden(t *testing.T) {
	rec := sampleRecord()
	formats := map[string][]byte{
		"record.v4": AppendRecord(nil, &rec), "batch.v7": sampleBatch(), "split.v7": sampleSplit(),
		"compact.v7": binary.AppendVarint(AppendHeader(nil, Header{KindCompact, 5, 3}), 200),
		"count.v7":   binary.AppendVarint(AppendHeader(nil, Header{KindCount, 5, 3}), -4),
	}
	maps.Copy(formats, goldenTxn())
	maps.Copy(formats, goldenMerge())
	maps.Copy(formats, goldenLoad())
	golden.Formats(t, formats)
}

func TestRoundTrip(t *testing.T) {
	rec := sampleRecord()
	got, err := DecodeRecord(AppendRecord(nil, &rec))
	if err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
		t.Errorf("record %+v, %v", got, err)
	}
	if want := "term=5 batch 1 on 4/8 k@300=v(create=290 version=4) lease=9 l@300† was=-9 " +
		"k@301=w(create=290 version=5) lease=9 was=9 m@301† replaced m@301=(create=301 version=1)"; Describe(5, sampleBatch()) != want {
		t.Errorf("batch %s", Describe(5, sampleBatch()))
	}
	if Describe(5, sampleSplit()) != "term=5 split at g into 8" {
		t.Errorf("split %s", Describe(5, sampleSplit()))
	}
	for n := range sampleBatch() {
		if text := Describe(5, sampleBatch()[:n]); !strings.HasPrefix(text, "broken") {
			t.Errorf("a batch of %d bytes: %s", n, text)
		}
	}
}

func FuzzCommand(f *testing.F) {
	f.Add(sampleBatch())
	f.Add(sampleSplit())
	f.Fuzz(func(t *testing.T, b []byte) {
		h, body, err := DecodeHeader(b)
		if err != nil {
			return
		}
		_ = Describe(h.Term, b)
		if c, err := DecodeMergeCommand(h.Kind, body); h.Kind >= KindBind && err == nil {
			if d, err := DecodeMergeCommand(h.Kind, AppendMergeCommand(nil, h.Kind, &c)); err != nil || fmt.Sprint(c) != fmt.Sprint(d) {
				t.Fatalf("%+v became %+v, %v", c, d, err)
			}
		}
		if c, err := DecodeSplit(body); h.Kind == KindSplit && err == nil {
			if d, err := DecodeSplit(AppendSplit(nil, &c)); err != nil || !bytes.Equal(d.Key, c.Key) || d.Child != c.Child {
				t.Fatalf("%v became %v, %v", c, d, err)
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	for _, l := range sampleLoadStates() {
		rec := sampleRecord()
		rec.Load = l
		f.Add(AppendRecord(nil, &rec))
	}
	for _, m := range sampleMerges() {
		rec := sampleRecord()
		rec.Merge = m
		f.Add(AppendRecord(nil, &rec))
	}
	r := sampleRecord()
	f.Add(AppendRecord(nil, &r))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRecord(b)
		if err != nil {
			return
		}
		if s, err := DecodeRecord(AppendRecord(nil, &r)); err != nil || fmt.Sprint(s) != fmt.Sprint(r) {
			t.Fatalf("%v became %v, %v", r, s, err)
		}
	})
}
