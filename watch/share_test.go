package watch

import (
	"bytes"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// The watchers of one span share encoded events, which are those that each is told. A watcher
// alone, or with a filter, gets none.
func TestEventsAreEncodedOnceForAll(t *testing.T) {
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		for id, r := range []Request{{}, {}, {NoPut: true}} {
			if _, _, err := s.Watch(t.Context(), int64(id), r); err != nil {
				t.Fatal(err)
			}
		}
		alone := h.NewStream()
		defer alone.Close()
		if _, _, err := alone.Watch(t.Context(), 3, Request{Span: keyspace.Span{Start: []byte("aa"), End: []byte("ab")}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		w.write("aa")
		var first []byte
		for range 2 {
			d, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			parts, ok := d.AppendEncoded(nil)
			want, err := proto.Marshal(&pb.WatchResponse{Events: d.Events})
			if err != nil || !ok || len(parts) != 1 || !bytes.Equal(parts[0], want) {
				t.Fatalf("watcher %d: encoded %v, %q, not %q, %v", d.Watcher.ID, ok, parts, want, err)
			}
			if first != nil && &first[0] != &parts[0][0] {
				t.Error("each watcher's events were encoded anew")
			}
			first = parts[0]
		}
		if d, err := alone.Next(t.Context()); err != nil || len(d.Events) != 1 {
			t.Fatal(d, err)
		} else if _, ok := d.AppendEncoded(nil); ok {
			t.Error("the events of one watcher were encoded for others")
		}
	})
}

// A client that is behind gets its queue in one delivery, within the bounds of one. The events that
// others get too are still encoded once.
func TestWhatWaitsIsDeliveredTogether(t *testing.T) {
	quiet(t, func(c *Config) { c.WatcherBytes = 8 << 20 }, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		defer s.Close()
		for id := range 2 {
			if _, _, err := s.Watch(t.Context(), int64(id), Request{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		const writes = maxDeliveryRevisions + 200
		for range writes {
			w.write("aa")
			w.wg.Wait()
		}
		time.Sleep(time.Second)
		got := map[int64][]int{}
		for len(got[0]) < 2 || len(got[1]) < 2 {
			d, err := s.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			parts, ok := d.AppendEncoded(nil)
			want, err := proto.Marshal(&pb.WatchResponse{Events: d.Events})
			if err != nil || !ok || !bytes.Equal(slices.Concat(parts...), want) {
				t.Fatalf("%d events are encoded as something else: %v, %v", len(d.Events), ok, err)
			}
			if last := d.Events[len(d.Events)-1].Kv.ModRevision; int64(d.Revision) < last {
				t.Errorf("a delivery up to %d has revision %d", last, d.Revision)
			}
			got[d.Watcher.ID] = append(got[d.Watcher.ID], len(d.Events))
		}
		for id, n := range got {
			if !slices.Equal(n, []int{maxDeliveryRevisions, 200}) {
				t.Errorf("watcher %d got deliveries of %v events", id, n)
			}
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.queuedBytes != 0 {
			t.Errorf("%d bytes are counted of what was taken", h.queuedBytes)
		}
	})
}
