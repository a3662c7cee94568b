package watch

import (
	"context"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// Under load many watchers of one span get several events at a time, a few milliseconds later than
// a single watcher. The first event after a pause comes at once. Nothing is missing, and no
// progress comes before an event.
func TestManyWatchersAreToldTogether(t *testing.T) {
	const many, events = 200, 300
	quiet(t, nil, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		alone, crowd := h.NewStream(), h.NewStream()
		defer alone.Close()
		defer crowd.Close()
		if _, _, err := alone.Watch(ctx, 0, Request{Span: keyspace.Single([]byte("aa"))}); err != nil {
			t.Fatal(err)
		}
		for id := range int64(many) {
			if _, _, err := crowd.Watch(ctx, id, Request{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		told := map[keyspace.Revision]time.Time{}
		single := func() {
			for {
				d, ok, err := alone.TryNext()
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					return
				}
				for _, e := range d.Events {
					told[keyspace.Revision(e.Kv.ModRevision)] = time.Now()
				}
			}
		}
		got, deliveries, worst := map[int64][]int64{}, 0, time.Duration(0)
		take := func() {
			single()
			for {
				d, ok, err := crowd.TryNext()
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					return
				}
				if d.Watcher == nil {
					due := 0
					for rev := range told {
						if rev <= d.Revision {
							due++
						}
					}
					for id := range int64(many) {
						if n := len(got[id]); n < due {
							t.Fatalf("progress %d, and watcher %d was told %d of %d events", d.Revision, id, n, due)
						}
					}
					continue
				}
				deliveries++
				for _, e := range d.Events {
					rev := e.Kv.ModRevision
					got[d.Watcher.ID] = append(got[d.Watcher.ID], rev)
					worst = max(worst, time.Since(told[keyspace.Revision(rev)]))
				}
			}
		}
		pass := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); {
				time.Sleep(100 * time.Microsecond)
				take()
			}
		}
		w.write("aa")
		pass(100 * time.Millisecond)
		if worst > 0 || deliveries != many {
			t.Errorf("the first event was told %v late, in %d deliveries", worst, deliveries)
		}
		for i := range events {
			w.write("aa")
			if i%10 == 0 {
				if err := crowd.RequestProgress(ctx); err != nil {
					t.Fatal(err)
				}
			}
			pass(time.Millisecond)
		}
		pass(100 * time.Millisecond)
		for id := range int64(many) {
			if n := len(got[id]); n != events+1 {
				t.Fatalf("watcher %d was told %d of %d events", id, n, events+1)
			}
		}
		if most := pace(many) + time.Millisecond; worst > most {
			t.Errorf("an event was told %v late, at most %v", worst, most)
		}
		if each := deliveries / many; each > events*int(time.Millisecond)/int(pace(many))*3/2 {
			t.Errorf("%d deliveries for each", each)
		}
	})
}

// Few watchers wait for nothing, and no number of them waits for long.
func TestPace(t *testing.T) {
	for n, want := range map[int]time.Duration{1: 0, 33: 0, 100: 3 * time.Millisecond, 100_000: pauseMost} {
		if got := pace(n); got != want {
			t.Errorf("%d watchers: %v, want %v", n, got, want)
		}
	}
}
