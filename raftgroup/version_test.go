package raftgroup

import (
	"errors"
	"testing"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// TestAnotherVersionIsNamed: data of an earlier build is refused by its version, and the
// error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	for what, c := range map[string]struct {
		reads uint64
		err   error
	}{
		"snapshot":             {snapshotVersion, second(decodeSnapshotHeader([]byte{snapshotVersion - 1, 1, 1, 2, 1}))},
		"configuration change": {confContextVersion, earlierConf(t)},
	} {
		var v *keyspace.VersionError
		if !errors.As(c.err, &v) || v.Found != c.reads-1 || v.Newest != c.reads {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func earlierConf(t *testing.T) error {
	t.Helper()
	cc := encodeConf(1, []ConfChange{{Type: AddLearner, Replica: 4, Node: 4}}, nil)
	cc.Context[0] = confContextVersion - 1
	b, err := proto.Marshal(cc)
	if err != nil {
		t.Fatal(err)
	}
	return second(decodeConfEntry(&pb.Entry{Type: pb.EntryConfChangeV2.Enum(), Data: b}))
}
