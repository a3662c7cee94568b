package etcdapi

import (
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/adminpb"
)

// The list says who watches what, and for how long. Those furthest behind come first, and those whose rights were taken are not in it.
func TestWatchersAreListed(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		if l := g.s.Watchers(10); l.GetTotal() != 0 || len(l.GetWatchers()) != 0 {
			t.Errorf("without watchers: %v", l)
		}
		rest, endRest := g.open("root", 10)
		defer endRest()
		rest.send(createWatch(&pb.WatchCreateRequest{
			Key: []byte("z"), RangeEnd: []byte{0}, PrevKv: true, ProgressNotify: true, WatchId: 7,
			Filters: []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NODELETE},
		}))
		synctest.Wait()
		time.Sleep(time.Minute)
		long := strings.Repeat("y", toldKeyBytes+1)
		rest.send(createWatch(&pb.WatchCreateRequest{Key: []byte(long), StartRevision: 1 << 40, WatchId: 8}))
		synctest.Wait()
		time.Sleep(time.Minute)
		slow, endSlow := g.open("u", 1)
		defer endSlow()
		slow.watches(1, "k") // which takes a second
		for range 4 {        // one is with the client, one on its way, two wait
			g.o.put("k")
			synctest.Wait()
		}
		want := []*adminpb.Watcher{
			{User: "u", Id: 1, Key: []byte("k"), Behind: 2, QueuedEvents: 2, AgeMs: 1000},
			{User: "root", Id: 7, Key: []byte("z"), RangeEnd: []byte{0}, PrevKv: true, ProgressNotify: true, NoDelete: true, AgeMs: 121_000},
			{User: "root", Id: 8, Key: []byte(long[1:]), Cut: true, StartRevision: 1 << 40, AgeMs: 61_000},
		}
		got := g.s.Watchers(10)
		if got.GetTotal() != 3 || len(got.GetWatchers()) != 3 {
			t.Fatalf("%v", got)
		}
		for i, w := range got.GetWatchers() {
			if (w.GetQueuedBytes() > 0) != (w.GetQueuedEvents() > 0) {
				t.Errorf("%d events have %d bytes", w.GetQueuedEvents(), w.GetQueuedBytes())
			}
			w.QueuedBytes = 0
			if !proto.Equal(w, want[i]) {
				t.Errorf("watcher %d: %v, want %v", i, w, want[i])
			}
		}
		if l := g.s.Watchers(1); l.GetTotal() != 3 || len(l.GetWatchers()) != 1 || l.GetWatchers()[0].GetUser() != "u" {
			t.Errorf("one of them: %v", l)
		}
		g.users.do(t, "forbid own k")
		if l := g.s.Watchers(10); l.GetTotal() != 2 {
			t.Errorf("when one may not watch any more: %v", l)
		}
	})
}

// Of many watchers the list keeps those furthest behind, here the oldest ones, in whatever order it comes by them.
func TestWatchersAreCut(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		const each, streams, most = 700, 3, 900
		for range streams {
			v, end := g.open("root", each)
			defer end()
			for id := range each {
				v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: int64(id + 1)}))
			}
			synctest.Wait()
			time.Sleep(time.Second)
		}
		for _, most := range []int{most, 1, 0} {
			l := g.s.Watchers(most)
			if l.GetTotal() != each*streams || len(l.GetWatchers()) != most {
				t.Fatalf("%d of %d watchers", len(l.GetWatchers()), l.GetTotal())
			}
			for i, w := range l.GetWatchers() {
				if w.GetId() != int64(i%each+1) || w.GetAgeMs() != int64(streams-i/each)*1000 {
					t.Fatalf("watcher %d: %v", i, w)
				}
			}
		}
	})
}

// While a list waits for a stream, others begin and end.
func TestStreamsBeginDuringAList(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		v, end := g.open("root", 1)
		defer end()
		v.watches(1, "k")
		streams := &g.s.watchers
		busy := streams.streams()[0]
		busy.mu.Lock()
		total := make(chan uint64)
		go func() { total <- g.s.Watchers(1).GetTotal() }()
		for streams.listing.TryLock() {
			streams.listing.Unlock()
			runtime.Gosched()
		}
		for range 1000 { // until it waits for that stream
			runtime.Gosched()
		}
		streams.add(&watchStream{})
		if all := streams.streams(); len(all) != 2 {
			t.Errorf("%d streams", len(all))
		}
		for _, st := range streams.streams() {
			if st != busy {
				streams.remove(st)
			}
		}
		busy.mu.Unlock()
		if n := <-total; n != 1 {
			t.Errorf("%d watchers", n)
		}
	})
}
