package shard

import (
	"testing"
	"testing/synctest"

	"github.com/skeindb/skein/kverror"
)

// A range is not split where its leader's node has no memory for the child. A node that
// starts with more replicas than it would take opens them.
func TestNoSplitWithoutRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorldWith(t, Limits{StandingBytes: 2*(replicaBytes+rowBytes) - 1})
		defer w.stop()
		w.serve(1, 5)
		_, err := w.store.Replica(1).Split(t.Context(), 1, []byte("m"))
		if e := kverror.Of(err); err == nil || e.Kind != kverror.TooManyRequests {
			t.Errorf("split without room: %v", err)
		}
		w.limits.StandingBytes = 1
		w.stop()
		w.start()
		if w.store.Replica(1) == nil {
			t.Error("the replica is not opened at the next start")
		}
	})
}
