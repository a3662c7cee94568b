package raftgroup

import (
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/confentry"
)

const confContextVersion = confentry.Version

// appliedConf is one applied configuration change.
type appliedConf struct {
	confentry.Entry
	// after is the configuration behind the change, index the index of its entry.
	after []keyspace.Replica
	index uint64
}

// encodeConf builds raft's change from a validated list of changes.
func encodeConf(number uint64, changes []ConfChange, payload []byte) *pb.ConfChangeV2 {
	steps := make([]confentry.Change, len(changes))
	for i, c := range changes {
		steps[i] = confentry.Change(c)
	}
	return confentry.Encode(number, steps, payload)
}

// decodeConfEntry decodes an entry that changes the configuration.
func decodeConfEntry(e *pb.Entry) (appliedConf, error) {
	c, err := confentry.Decode(e)
	return appliedConf{Entry: c}, err
}
