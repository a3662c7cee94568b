package wal

import (
	"math"
	"testing"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// TestMessageBytes compares the sum with what the library says.
func TestMessageBytes(t *testing.T) {
	numbers := []*uint64{nil}
	for _, n := range []uint64{0, 1, 127, 128, 1 << 20, math.MaxUint64} {
		numbers = append(numbers, &n)
	}
	for _, data := range [][]byte{nil, {}, make([]byte, 1), make([]byte, 127), make([]byte, 128), make([]byte, 1<<15)} {
		for _, kind := range []*raftpb.EntryType{nil, raftpb.EntryNormal.Enum(), raftpb.EntryConfChangeV2.Enum()} {
			for i, term := range numbers {
				e := &raftpb.Entry{Type: kind, Term: term, Index: numbers[len(numbers)-1-i], Data: data}
				if got, want := messageBytes(e), uint64(proto.Size(e)); got != want {
					t.Errorf("%d bytes of %v, want %d", got, e, want)
				}
			}
		}
	}
}
