package rangeapi

import (
	"bytes"
	"encoding/hex"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

func sampleTxnCommands() []TxnCommand {
	return []TxnCommand{
		&Prepare{
			Name: sampleTxn, Anchor: []byte("k"), WaitForOlder: true, Pin: true, PinAt: 12,
			Guards: []Guard{{Compare: &pb.Compare{Key: []byte("a"), RangeEnd: []byte("c")}, Want: WantFails}},
			Writes: []Write{
				{Number: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}},
				{Number: 3, Op: &pb.DeleteRangeRequest{Key: []byte("x"), RangeEnd: []byte{0}, PrevKv: true}},
			},
			Revoke: 9, Incarnation: 2, Absent: []keyspace.LeaseID{7},
		},
		&Commit{Name: sampleTxn, Anchor: []byte("k"), AnchorLock: LockID{7, 5, 11, 2}, Revision: 310, Locks: sampleLocks()},
		&Resolve{Name: sampleTxn, Lock: LockID{8, 6, 1, 0}, Revision: 310, Detach: 9, Incarnation: 2},
		&Decide{Name: sampleTxn, Anchor: []byte("k")},
		&Forget{Name: sampleTxn, Anchor: []byte("k")},
		&Revoke{Lease: 9, Incarnation: 2},
		&Revoke{Lease: 9, Incarnation: 2, Checked: keyspace.KeyCheck{At: 300, Term: 5}},
		&Prepare{Name: sampleTxn, Anchor: []byte("k"), Guards: []Guard{}, Writes: []Write{}, Revoke: 9, Incarnation: 2, Checked: keyspace.KeyCheck{At: 300, Term: 5}},
		&LeaseKeys{Lease: 9, Span: keyspace.Span{Start: []byte("a"), End: []byte("m")}, At: 310},
	}
}

func sampleTxnAnswers() []TxnAnswer {
	return []TxnAnswer{
		&Prepared{
			Held: true, Lock: LockID{8, 6, 1, 0}, Facts: []Fact{{Found: true}, {Holds: true}}, Changes: true,
			Results: []WriteResult{
				{Number: 1, Lived: true, Version: 4, Create: 290, Lease: 9, Value: []byte("v")},
				{Number: 3, Deleted: 1, Uncounted: true, Prevs: []*mvccpb.KeyValue{{Key: []byte("x"), ModRevision: 7}}},
			},
		},
		&Prepared{Fence: 12, Facts: []Fact{{}}, Refused: kverror.New(kverror.KeyNotFound, "k"), RefusedAt: 2, Results: []WriteResult{}},
		&Decided{Revision: 310, Locks: sampleLocks()},
		&Resolved{More: true},
		&Revoked{Revision: 310, TooMany: true},
		&Attached{Keys: [][]byte{[]byte("a"), []byte("b")}, More: true},
		&Resolved{Intact: true},
	}
}

func FuzzTxnCommand(f *testing.F) {
	for _, op := range sampleTxnCommands() {
		b, _ := AppendTxnCommand(nil, 7, 3, op)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var op TxnCommand
		var err error
		measure.Claims(t, b, func() { _, _, op, err = DecodeTxnCommand(b) })
		if err != nil {
			return
		}
		again, err := AppendTxnCommand(nil, 7, 3, op)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, p, err := DecodeTxnCommand(again); err != nil || p.Kind() != op.Kind() {
			t.Fatalf("%v became %v, %v", op, p, err)
		}
		_ = CheckTxnCommand(op)
	})
}

func FuzzTxnAnswer(f *testing.F) {
	for _, a := range sampleTxnAnswers() {
		b, _ := AppendTxnAnswer(nil, a, nil)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() { _, _, _ = DecodeTxnAnswer(b) })
		a, failed, err := DecodeTxnAnswer(b)
		if err != nil || failed != nil {
			return
		}
		again, err := AppendTxnAnswer(nil, a, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := DecodeTxnAnswer(again); err != nil {
			t.Fatalf("%x became %x: %v", b, again, err)
		}
	})
}

func TestTxnCommandRoundTrip(t *testing.T) {
	for _, op := range sampleTxnCommands() {
		b, err := AppendTxnCommand(nil, 7, 3, op)
		if err != nil {
			t.Fatal(err)
		}
		id, g, got, err := DecodeTxnCommand(b)
		again, _ := AppendTxnCommand(nil, id, g, got)
		if err != nil || id != 7 || g != 3 || !bytes.Equal(again, b) {
			t.Errorf("%T: %v: %x became %x", op, err, b, again)
		}
	}
	for _, a := range sampleTxnAnswers() {
		b, err := AppendTxnAnswer(nil, a, nil)
		if err != nil {
			t.Fatal(err)
		}
		got, failed, err := DecodeTxnAnswer(b)
		again, _ := AppendTxnAnswer(nil, got, nil)
		if err != nil || failed != nil || !bytes.Equal(again, b) {
			t.Errorf("%T: %v %v: %s", a, failed, err, hex.EncodeToString(again))
		}
	}
}

var sampleTxn = TxnName{TxnID{Start: 300, Node: 0xabc, Boot: 0x0102030405060708, Counter: 4}, 9}

func sampleLocks() []LockRef {
	return []LockRef{
		{LockID{7, 5, 11, 2}, keyspace.Span{Start: []byte("a"), End: []byte("m")}},
		{LockID{8, 6, 1, 0}, keyspace.Single([]byte("z"))},
	}
}
