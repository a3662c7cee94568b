package lease

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// Leases with keys that nobody reaches do not keep others from ending, by expiry or by a
// client's revoke.
func TestUnreachableKeysHoldUpNobodyElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.lead(w.nodes[0], true)
		for id := keyspace.LeaseID(1); id <= 400; id++ {
			w.hanging[id] = true
			w.grant(id, 5, 1)
		}
		w.grant(1000, 8, 1)
		w.grant(1001, 300, 1)
		ends := func(id keyspace.LeaseID, within time.Duration) {
			time.Sleep(within)
			synctest.Wait()
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.records[id] != nil {
				t.Errorf("lease %d is there at %v", id, w.now())
			}
		}
		ends(1000, 50*time.Second)
		w.grant(2000, 2, 1)
		ends(2000, 6*time.Second)
		w.revoke(1001, 0)
		ends(1001, 3*time.Second)
		w.finish()
		w.stop()
	})
}

// A merge of ranges while a lease's keys are deleted may bring its attachment back to a range that
// has lost it by then. The merge changes the record, though it lists the same spans, and the lease
// is ended once more before the record goes.
func TestMergeBesideTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "a")
		w.lead(w.nodes[0], true)
		w.grant(1, 5, 2)
		w.revoke(1, 0)
		time.Sleep(2 * time.Millisecond)
		w.mu.Lock()
		merged := *w.records[1]
		w.records[1] = &merged
		w.mu.Unlock()
		time.Sleep(time.Second)
		got, want := w.take(), 2
		if n := strings.Count(got, "the keys of lease 1 are deleted"); n != want || !strings.HasSuffix(got, "lease 1 is gone") {
			t.Errorf("the keys are deleted %d times, want %d:\n%s", n, want, got)
		}
		w.finish()
		w.stop()
	})
}
