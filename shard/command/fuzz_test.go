package command

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// FuzzBatch: a batch that is accepted is the same when it is written again. The store takes all
// its versions. The decoder allocates no more than it gets.
func FuzzBatch(f *testing.F) {
	_, body, err := DecodeHeader(sampleBatch())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add(AppendBatchHeader(nil, &Batch{Number: 1, First: 2}))
	// Refused: a transaction at revision 0, and a version without a key.
	tombstone := func(first keyspace.Revision, key string) []byte {
		b := append(AppendBatchHeader(nil, &Batch{Number: 1, Txns: 1, First: first}), 1)
		return AppendVersion(b, &mvcc.Version{Key: []byte(key), Mod: first, Tombstone: true}, Prior{})
	}
	f.Add(tombstone(0, "k"))
	f.Add(tombstone(1, ""))
	f.Fuzz(func(t *testing.T, b []byte) {
		var again []byte
		var c Batch
		measure.Claims(t, b, func() {
			var err error
			var rest []byte
			if c, rest, err = DecodeBatchHeader(b); err != nil {
				return
			}
			counts := make([]uint64, c.Txns)
			versions := make([][]byte, c.Txns)
			items, err := VisitBatch(&c, rest, func(txn int, v *mvcc.Version, before Prior) error {
				v.AppendValue(nil) // panics on a version that the store does not take
				if v.Mod != c.First+keyspace.Revision(txn) || uint64(v.Sub) != counts[txn] {
					t.Fatalf("version %+v of transaction %d from revision %d", v, txn, c.First)
				}
				counts[txn]++
				versions[txn] = AppendVersion(versions[txn], v, before)
				return nil
			})
			if err != nil {
				return
			}
			in, out := NewCursor(items), []byte(nil)
			for in.Len() > 0 {
				it := in.Item()
				out = AppendItem(out, &it)
			}
			if in.Err() != nil {
				return
			}
			again = AppendBatchHeader(nil, &c)
			for i, n := range counts {
				again = append(binary.AppendUvarint(again, n), versions[i]...)
			}
			again = append(again, out...)
		})
		if again == nil {
			return
		}
		d, rest, err := DecodeBatchHeader(again)
		if err != nil || c != d {
			t.Fatalf("%+v became %+v, %v", c, d, err)
		}
		items, err := VisitBatch(&d, rest, func(int, *mvcc.Version, Prior) error { return nil })
		if err != nil {
			t.Fatalf("%x: %v", again, err)
		}
		in := NewCursor(items)
		for in.Len() > 0 {
			in.Item()
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
		n, err := DecodeNumber(b)
		if err != nil {
			return
		}
		if again, err := DecodeNumber(binary.AppendVarint(nil, n)); err != nil || again != n {
			t.Fatalf("%d became %d, %v", n, again, err)
		}
	})
}
