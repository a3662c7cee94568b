package etcdapi

import (
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
