package command

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

var sampleName = rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 300, Node: 0xabc, Boot: 0x0102030405060708, Counter: 4}, Attempt: 9}

func sampleLock() *Lock {
	return &Lock{
		ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}, Name: sampleName, Anchor: []byte("k"), Floor: 300,
		Spans: []LockSpan{
			{Span: keyspace.Single([]byte("k")), Mode: Exclusive},
			{Span: keyspace.Span{Start: []byte("a"), End: []byte("c")}},
			{Span: keyspace.Span{Start: []byte("x")}, Mode: Sweep, Sub: 3},
		},
		Writes: []Intent{
			{V: mvcc.Version{Key: []byte("k"), Sub: 1, Create: 290, Version: 4, Lease: 9, Value: []byte("v")}, Before: Prior{Lived: true}},
			{V: mvcc.Version{Key: []byte("l"), Sub: 2, Version: 1}},
			{V: mvcc.Version{Key: []byte("m"), Sub: 1, Version: 1, Lease: 9}, Before: Prior{Replaced: true}},
			{V: mvcc.Version{Key: []byte("m"), Sub: 2, Tombstone: true}, Before: Prior{Lived: true, Lease: -9}},
		},
		Revoke: rangeapi.Attachment{Lease: -9, Incarnation: 2},
	}
}

func sampleTxnRecord() *CommitRecord {
	return &CommitRecord{Name: sampleName, Anchor: []byte("k"), Revision: 310, Locks: []rangeapi.LockRef{
		{ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}, Span: keyspace.Span{Start: []byte("a"), End: []byte("m")}},
		{ID: rangeapi.LockID{Range: 8, Term: 6, Number: 1, Index: 0}, Span: keyspace.Single([]byte("z"))},
	}}
}

func sampleItems() []TxnItem {
	return []TxnItem{
		{Kind: ItemLock, Lock: sampleLock()},
		{Kind: ItemResolve, ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}, Revision: 310},
		{Kind: ItemCommit, ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}, Record: sampleTxnRecord()},
		{Kind: ItemFence, Fence: 9, IDs: []rangeapi.LockID{{Range: 7, Term: 5, Number: 11, Index: 2}}},
		{Kind: ItemForget, Name: sampleName},
		{Kind: ItemSweep, ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}, Revision: 310, SpanIndex: 2, Next: []byte("y"), Keys: [][]byte{[]byte("x"), []byte("xx")}, Leases: []keyspace.LeaseID{0, 9}},
		{Kind: ItemAttach, Attachment: rangeapi.Attachment{Lease: 9, Incarnation: 2}},
		{Kind: ItemDetach, Attachment: rangeapi.Attachment{Lease: 9, Incarnation: 2}},
		{Kind: ItemRelease, ID: rangeapi.LockID{Range: 7, Term: 5, Number: 11, Index: 2}},
	}
}

// goldenTxn are the formats of transactions over several ranges, for TestGolden.
func goldenTxn() map[string][]byte {
	all := map[string][]byte{
		"lock.v3":   AppendLock([]byte{txnVersion}, sampleLock()),
		"record.v3": AppendCommitRecord([]byte{txnVersion}, sampleTxnRecord()),
		"lock-key":  LockKey(7, sampleLock().ID), "record-key": RecordKey(7, sampleName),
		"attachment-key": AttachmentKey(7, 9), "attachment.v3": binary.AppendUvarint([]byte{txnVersion}, 2),
	}
	for _, it := range sampleItems() {
		all["item-"+it.Kind.String()+".v7"] = AppendItem(nil, &it)
	}
	out := map[string][]byte{}
	for name, b := range all {
		out["txn-"+name] = b
	}
	return out
}

func TestTxnRoundTrip(t *testing.T) {
	for _, it := range sampleItems() {
		b := AppendItem(nil, &it)
		c := NewCursor(b)
		got := c.Item()
		err := c.End()
		if again := AppendItem(nil, &got); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%s: %v: %x became %x", it.Kind, err, b, again)
		}
		for n := range b {
			if c := NewCursor(b[:n]); true {
				if c.Item(); c.End() == nil {
					t.Errorf("%s: %d of %d bytes are an item", it.Kind, n, len(b))
				}
			}
		}
	}
}

// FuzzTxnState: what a range keeps of transactions is read or refused.
func FuzzTxnState(f *testing.F) {
	f.Add(LockKey(7, sampleLock().ID)[9:], AppendLock([]byte{txnVersion}, sampleLock()))
	f.Add(RecordKey(7, sampleName)[9:], AppendCommitRecord([]byte{txnVersion}, sampleTxnRecord()))
	f.Add(AttachmentKey(7, -9)[9:], []byte{txnVersion, 2})
	f.Fuzz(func(t *testing.T, suffix, value []byte) {
		var s TxnState
		measure.Claims(t, append(suffix, value...), func() {
			var s TxnState
			_ = s.decodeStored(suffix, value)
		})
		if s.decodeStored(suffix, value) != nil {
			return
		}
		for _, l := range s.Locks {
			left, right := l.Cut([]byte("k"))
			for _, half := range []*Lock{left, right} {
				if half != nil && half.ID != l.ID {
					t.Fatalf("%+v was cut from %+v", half, l)
				}
			}
		}
	})
}
