package shard

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// FuzzBatch: a batch that is accepted is the same when it is written again, its
// versions lie within what is possible, and no more is allocated than came.
func FuzzBatch(f *testing.F) {
	_, body, err := decodeHeader(sampleBatch())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add(appendBatchHeader(nil, &batchCommand{number: 1, first: 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		var again []byte
		var c batchCommand
		measure.Claims(t, b, func() {
			var err error
			var rest []byte
			if c, rest, err = decodeBatchHeader(b); err != nil {
				return
			}
			counts := make([]uint64, c.txns)
			versions := make([][]byte, c.txns)
			items, err := visitBatch(&c, rest, func(txn int, v *mvcc.Version, before prior) error {
				if v.Mod != c.first+keyspace.Revision(txn) || uint64(v.Sub) != counts[txn] || !v.Tombstone && (v.Create < 1 || v.Create > v.Mod || v.Version < 1) {
					t.Fatalf("version %+v of transaction %d from revision %d", v, txn, c.first)
				}
				counts[txn]++
				versions[txn] = appendVersion(versions[txn], v, before)
				return nil
			})
			if err != nil {
				return
			}
			in, out := newCursor(items), []byte(nil)
			for in.Len() > 0 {
				it := in.item()
				out = appendItem(out, &it)
			}
			if in.Err() != nil {
				return
			}
			again = appendBatchHeader(nil, &c)
			for i, n := range counts {
				again = append(binary.AppendUvarint(again, n), versions[i]...)
			}
			again = append(again, out...)
		})
		if again == nil {
			return
		}
		d, rest, err := decodeBatchHeader(again)
		if err != nil || c != d {
			t.Fatalf("%+v became %+v, %v", c, d, err)
		}
		items, err := visitBatch(&d, rest, func(int, *mvcc.Version, prior) error { return nil })
		if err != nil {
			t.Fatalf("%x: %v", again, err)
		}
		in := newCursor(items)
		for in.Len() > 0 {
			in.item()
		}
		if in.Err() != nil {
			t.Fatalf("%x: %v", again, in.Err())
		}
		// Integers may be written longer than they need to be, and a key as a span with an
		// end; otherwise these are the bytes.
		if len(items) == 0 && len(again) == len(b) && !bytes.Equal(again, b) {
			t.Fatalf("%x became %x", b, again)
		}
	})
}

// FuzzNumber: compact and count commands hold one number and nothing else.
func FuzzNumber(f *testing.F) {
	f.Add(binary.AppendVarint(nil, 300))
	f.Add(binary.AppendVarint(nil, -1))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := decodeNumber(b)
		if err != nil {
			return
		}
		if again, err := decodeNumber(binary.AppendVarint(nil, n)); err != nil || again != n {
			t.Fatalf("%d became %d, %v", n, again, err)
		}
	})
}

// FuzzApply gives a replica an entry of any bytes: it applies or is refused, and what
// stands in the applied record afterwards can be read.
func FuzzApply(f *testing.F) {
	term1 := func(kind commandKind) []byte { return appendHeader(nil, header{kind, 5, 1}) }
	f.Add(append(term1(commandBatch), func() []byte {
		b := appendBatchHeader(nil, &batchCommand{number: 1, first: 2, txns: 1})
		return appendVersion(binary.AppendUvarint(b, 1), &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1}, prior{})
	}()...))
	f.Add(func() []byte {
		b := appendBatchHeader(term1(commandBatch), &batchCommand{number: 1, first: 2, txns: 1})
		b = appendVersion(binary.AppendUvarint(b, 1), &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Lease: 9}, prior{lease: 8})
		return appendItem(b, &txnItem{kind: itemMark, mark: rangeapi.Attachment{Lease: 9, Incarnation: 2}})
	}())
	f.Add(func() []byte {
		b := binary.AppendUvarint(appendBatchHeader(term1(commandBatch), &batchCommand{number: 1, first: 2, txns: 1}), 3)
		b = appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1}, prior{replaced: true})
		b = appendVersion(b, &mvcc.Version{Key: []byte("l"), Mod: 2, Create: 2, Version: 1}, prior{})
		return appendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 2, Tombstone: true}, prior{})
	}())
	f.Add(appendSplit(term1(commandSplit), &splitCommand{key: []byte("g"), child: 8, replicas: testDescriptor.Replicas}))
	f.Add(binary.AppendVarint(term1(commandCompact), 2))
	f.Add(binary.AppendVarint(term1(commandCount), 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return // raft's own entry
		}
		w := newFakeWorld(t)
		defer w.stop()
		g := w.groups.group(1)
		if err := g.apply(raftgroup.Entry{Term: 5}); err != nil {
			t.Fatal(err)
		}
		if err := g.apply(raftgroup.Entry{Term: 5, Data: data}); err != nil {
			return
		}
		a, ok, err := w.engine.Applied(1)
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		if _, err := decodeRecord(a.Payload); err != nil {
			t.Fatalf("after %s: %v", entryText(5, data), err)
		}
	})
}

// FuzzAdmin: any request of method 17 gets an answer that decodes.
func FuzzAdmin(f *testing.F) {
	for _, q := range []adminRequest{
		{Op: adminList},
		{Op: adminShow, Range: 1},
		{Op: adminLook, Range: 1},
		{Op: adminHash, Range: 1, Revision: 5, Compacted: 1},
		{Op: adminCreate, Descriptors: []keyspace.Descriptor{testDescriptor}},
		{Op: adminCreate, Descriptors: []keyspace.Descriptor{{Range: 2, Generation: 1, Span: keyspace.Span{Start: []byte("b"), End: []byte("a")}}}},
		{Op: adminSplit, Range: 1, Generation: 1, Key: []byte("k")},
	} {
		b, err := json.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append([]byte{adminVersion}, b...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newFakeWorld(t)
		defer w.stop()
		a, err := w.node.handleAdmin(t.Context(), 2, b)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeAdminAnswer(a)
		var failed *kverror.Error
		if err != nil {
			failed = kverror.Of(err)
		}
		if (got == nil) == (failed == nil) {
			t.Fatalf("%q is answered with %q: %v", b, a, err)
		}
	})
}
