package watch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A watcher for which there is no room is refused. Those that exist go on, and one that leaves makes
// room for another. Long keys count, and so does a stream.
func TestWatchersBeyondTheBoundAreRefused(t *testing.T) {
	change := func(c *Config) { c.IdleBytes = 2*streamBytes + 10*watcherBytes }
	quiet(t, change, func(t *testing.T, w *world, h *Hub) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var wg sync.WaitGroup
		first := watchAll(ctx, h, &wg, &observer{name: "first"})
		s, key := h.NewStream(), keyspace.Span{Start: []byte("a"), End: []byte("b")}
		var watchers []*Watcher
		watch := func(s *Stream, span keyspace.Span) error {
			hw, _, err := s.Watch(ctx, 1, Request{Span: span})
			if err == nil {
				watchers = append(watchers, hw)
			}
			return err
		}
		for watch(s, key) == nil {
			if len(watchers) > 10 {
				t.Fatal("no watcher is refused")
			}
		}
		if len(watchers) != 8 {
			t.Errorf("%d watchers beside another one, want 8 where 10 fit but for their keys", len(watchers))
		}
		other := h.NewStream()
		if err := watch(other, key); !errors.Is(err, ErrTooMany) {
			t.Errorf("a watcher of another stream: %v", err)
		}
		w.write("aa")
		time.Sleep(time.Second)
		if n := first.count(); n != 1 {
			t.Errorf("the first watcher got %d events", n)
		}
		if d, ok, err := s.TryNext(); !ok || err != nil || !slices.Contains(watchers, d.Watcher) {
			t.Errorf("a watcher of the full stream got %v, %v", d, err)
		}
		s.Cancel(watchers[0])
		if err := watch(s, keyspace.Span{Start: slices.Repeat([]byte("a"), watcherBytes)}); !errors.Is(err, ErrTooMany) {
			t.Errorf("a watcher of a long key: %v", err)
		}
		if err := watch(s, key); err != nil {
			t.Errorf("when another has left: %v", err)
		}
		s.Close()
		if err := watch(other, key); err != nil {
			t.Errorf("when the stream has ended: %v", err)
		}
		other.Close()
		cancel()
		wg.Wait()
		if h.idleBytes != 0 {
			t.Errorf("%d bytes without watchers", h.idleBytes)
		}
	})
}
