package shard

import (
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/rangeapi"
)

// The intents of a transaction count from its evaluation on, since its lock may wait long to
// be applied.
func TestPendingLockCountsItsIntents(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const size = 50_000
		writes := []rangeapi.Write{{Number: 1, Op: &pb.PutRequest{Key: []byte("k"), Value: make([]byte, size)}}}
		done := make(chan error, 1)
		go func() {
			_, err := w.store.Txn(t.Context(), 1, 1, &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writes})
			done <- err
		}()
		synctest.Wait()
		if n := w.store.locks.Bytes(); n < size {
			t.Errorf("%d bytes are counted for a pending lock", n)
		}
		w.settle()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if n := w.store.locks.Bytes(); n < size || n > 2*size {
			t.Errorf("%d bytes are counted for a lock", n)
		}
		if a := w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1)}); a.err != nil {
			t.Fatal(a.err)
		}
		if n := w.store.locks.Bytes(); n != 0 {
			t.Errorf("%d bytes are counted for no lock", n)
		}
	})
}
