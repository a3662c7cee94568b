package router

import (
	"context"
	"errors"
	"fmt"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// The revisions that a transaction may read are known from before its first range pins anything
// until its answer is made, or its client has none.
func TestTransactionsSayWhatTheyMayRead(t *testing.T) {
	at := func(rev int64) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k"), Revision: rev}}}
	}
	for name, c := range map[string]struct {
		txn    *pb.TxnRequest
		answer error
		low    keyspace.Revision
	}{
		"no revision is named": {txn: &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2"), getAt("k")}}, low: 7},
		"a revision is named":  {txn: &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2"), at(5)}}, low: 5},
		"by one inside, where it fails": {
			txn: &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2"), inside(&pb.TxnRequest{Failure: []*pb.RequestOp{at(6), at(3)}})}},
			low: 3,
		},
		"it is refused": {
			txn: &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}}, answer: kverror.New(kverror.NoSpace, ""), low: 7,
		},
	} {
		f, r := newRanges()
		if _, err := r.Current(internal(t)); err != nil { // so that revision 7 is known
			t.Fatal(err)
		}
		asked := 0
		f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			if _, ok := op.(*rangeapi.Prepare); !ok {
				return nil, nil
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			asked++
			if !r.coordinator.readsBelow(c.low+1) || r.coordinator.readsBelow(c.low) {
				t.Errorf("%s: the transaction is not known to read at %d and above", name, c.low)
			}
			return nil, c.answer
		}
		if _, err := r.Txn(internal(t), c.txn); !errors.Is(err, c.answer) {
			t.Errorf("%s: %v, want %v", name, err, c.answer)
		}
		if asked == 0 || r.coordinator.readsBelow(keyspace.MaxRevision) {
			t.Errorf("%s: %d prepares; it still reads when it is answered", name, asked)
		}
		r.Stop()
	}
}

// busOf answers for each node.
type busOf func(node keyspace.NodeID, below keyspace.Revision) ([]byte, error)

func (b busOf) Call(_ context.Context, to keyspace.NodeID, _ transport.Method, p []byte) ([]byte, error) {
	below, err := decodeReads(p)
	if err != nil {
		return nil, err
	}
	return b(to, below)
}

// Every live node has to say that it reads nothing below a revision.
func TestAllNodesAreAskedWhatTheyRead(t *testing.T) {
	no, yes, lost := []byte{readsWireVersion, 0}, []byte{readsWireVersion, 1}, errors.New("lost")
	for i, c := range []struct {
		one, three []byte
		err        error // of node 3
		dead       bool  // node 3 is dead
		dies       bool  // it is found dead after the question
		want       bool
		error      bool
	}{
		{one: no, three: no},
		{one: no, three: yes, want: true},
		{one: no, err: lost, error: true},
		{one: no, err: lost, dead: true},
		{one: no, err: lost, dies: true},
		{one: no, three: []byte{9, 9}, error: true},
	} {
		asked := false
		r := newRouter(newCluster(1))
		r.cfg.Alive = func(n keyspace.NodeID) bool { return n != 3 || !c.dead && !(c.dies && asked) }
		r.cfg.Bus = busOf(func(node keyspace.NodeID, below keyspace.Revision) ([]byte, error) {
			if below != 300 {
				return nil, fmt.Errorf("asked below %d", below)
			}
			if node == 1 {
				return c.one, nil
			}
			asked = true
			return c.three, c.err
		})
		got, err := r.Reads(internal(t), []keyspace.NodeID{1, 2, 3}, 300)
		if got != c.want && !c.error || (err != nil) != c.error {
			t.Errorf("case %d: %t, %v", i, got, err)
		}
	}
}
