package raftgroup

import (
	"testing"

	"go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/engine"
)

// TestNoPreVoteReachesRaft: otherwise the flag would be accepted and do nothing.
func TestNoPreVoteReachesRaft(t *testing.T) {
	for _, off := range []bool{false, true} {
		h := &Host{cfg: Config{NoPreVote: off, TickInterval: 1, ElectionTimeout: 10}}
		c := h.raftConfig(&Group{h: h}, &raftpb.HardState{}, engine.Applied{})
		if c.PreVote == off {
			t.Errorf("NoPreVote=%v, but raft's PreVote=%v", off, c.PreVote)
		}
	}
}
