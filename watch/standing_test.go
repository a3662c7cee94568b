package watch

import (
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A watcher is behind by what its client has not taken, whether that waits in memory or is to be read from history. One without
// events is not.
func TestStandings(t *testing.T) {
	change := func(c *Config) { c.WatcherBytes, c.RecentBytes = 2<<10, 4<<10 }
	quiet(t, change, func(t *testing.T, w *world, h *Hub) {
		s := h.NewStream()
		begin := func(id int64, start keyspace.Revision, from, to string) *Watcher {
			t.Helper()
			wr, _, err := s.Watch(t.Context(), id, Request{Span: keyspace.Span{Start: []byte(from), End: []byte(to)}, Start: start})
			if err != nil {
				t.Fatal(err)
			}
			return wr
		}
		all := []*Watcher{begin(1, 0, "a", "b"), begin(2, 0, "c", "d"), begin(3, keyspace.MaxRevision, "a", "b"), begin(4, 0, "a", "b")}
		time.Sleep(time.Second)
		if !s.Cancel(all[3]) {
			t.Fatal("it had ended")
		}
		write := func(n int) {
			for range n {
				w.write("aa")
				w.wg.Wait()
			}
			time.Sleep(time.Second)
		}
		write(3)
		got := h.Standings(all)
		if g := got[0]; g.Behind != 3 || g.Queued != 3 || g.Bytes <= 0 || g.Lags || g.Ended {
			t.Errorf("with three events in memory: %+v", g)
		}
		for i, want := range []Standing{1: {}, 2: {}, 3: {Ended: true}} {
			if i > 0 && got[i] != want {
				t.Errorf("watcher %d: %+v, want %+v", i+1, got[i], want)
			}
		}
		if _, ok, err := s.TryNext(); !ok || err != nil {
			t.Fatalf("%t, %v", ok, err)
		}
		if g := h.Standings(all[:1])[0]; g != (Standing{}) {
			t.Errorf("when its client has taken all: %+v", g)
		}
		const many = 200
		write(many)
		if g := h.Standings(all[:1])[0]; g.Behind != many || g.Queued == 0 || g.Queued >= many || !g.Lags {
			t.Errorf("with more events than it may have in memory: %+v", g)
		}
		for {
			_, ok, err := s.TryNext()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				if time.Sleep(time.Second); h.Standings(all[:1])[0] == (Standing{}) {
					break
				}
			}
		}
		s.Close()
		if g := h.Standings(all); !g[0].Ended || len(g) != 4 {
			t.Errorf("when its stream is closed: %+v", g)
		}
		if g := h.Standings(make([]*Watcher, 0)); len(g) != 0 {
			t.Errorf("of none: %+v", g)
		}
	})
}
