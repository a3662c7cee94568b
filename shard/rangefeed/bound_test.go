package rangefeed

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/shard/rangefeed/feedtest"
)

// wholes checks that no revision at or above rev is resolved before all n events of rev have
// been sent, with the versions before them. It returns how many events came.
func wholes(t *testing.T, g *feedtest.Gateway, limit int, rev keyspace.Revision, n int, prev bool) (events int) {
	t.Helper()
	seen := map[string]bool{}
	for ps := g.Message(limit); ps != nil; ps = g.Message(limit) {
		for _, p := range ps {
			for _, e := range p.Events {
				events++
				if e.Mod == rev {
					seen[string(e.Key)] = true
				}
				if prev && e.Mod == rev && e.Prev == nil {
					t.Errorf("%s@%d came without the version before", e.Key, e.Mod)
				}
			}
			if p.Resolved >= rev && len(seen) < n {
				t.Fatalf("resolved revision %d behind %d of %d events of revision %d", p.Resolved, len(seen), n, rev)
			}
		}
	}
	if len(seen) != n {
		t.Errorf("%d of %d events of revision %d came", len(seen), n, rev)
	}
	return events
}

// large writes n keys with values of size, and deletes all of them in one transaction. The
// deletion has the revision that is returned.
func (w *fakeRange) large(n, size int, before func()) keyspace.Revision {
	w.t.Helper()
	for i := range n {
		w.put(fmt.Sprintf("k%03d", i), strings.Repeat("v", size))
	}
	before()
	var vs []mvcc.Version
	for i := range n {
		v := w.version(fmt.Sprintf("k%03d", i), "", w.next, true)
		v.Sub = uint32(i)
		vs = append(vs, v)
	}
	w.next++
	w.apply(true, vs...)
	return w.next - 1
}

// However large the versions before are, messages have a bound.
func TestFeedWithVersionsBeforeHasABound(t *testing.T) {
	for _, fresh := range []bool{true, false} {
		onRange(t, func(t *testing.T, w *fakeRange) {
			const n, size = 40, 2000
			w.server.bounds.message = 10 << 10
			g := w.gateway()
			defer g.Close()
			open := func() {
				o := order(1, n+2)
				o.Prev = true
				g.Order(o)
			}
			rev := w.large(n, size, func() {
				if fresh {
					open()
				}
			})
			if !fresh {
				open()
			}
			if events := wholes(t, g, 10<<10, rev, n, true); events != n {
				t.Errorf("live %v: %d events of %d", fresh, events, n)
			}
		})
	}
}

// A revision that is larger than a message, and than a page, comes in several.
func TestFeedDividesARevision(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		const n, bound = 100, 4 << 10
		w.server.bounds.message, w.server.bounds.page = bound, bound
		g := w.gateway()
		defer g.Close()
		g.Order(order(1, n+2))
		rev := w.large(n, 10, func() {})
		if events := wholes(t, g, bound, rev, n, false); events != 2*n {
			t.Errorf("live: %d events of %d", events, 2*n)
		}
		g.Order(order(2, rev-3))
		if events := wholes(t, g, bound, rev, n, false); events != n+3 {
			t.Errorf("from the store: %d events of %d", events, n+3)
		}
	})
}

// Beside an old lock nothing above it is resolved. A feed that cannot keep up then does not
// read the same events again and again: it comes further all the time.
func TestFeedBesideAnOldLockReadsOnce(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		w.server.bounds = bounds{queue: 2000, conn: 1 << 20, page: 2000, message: 2000}
		lock := w.lock()
		value := strings.Repeat("v", 500)
		written := 0
		put := func(n int) {
			for range n {
				w.put("v", value)
				written++
			}
		}
		put(50)
		g := w.gateway()
		defer g.Close()
		g.Order(order(1, 2))
		seen := map[keyspace.Revision]bool{}
		take := func() bool {
			ps := g.Message(2000)
			for _, p := range ps {
				for _, e := range p.Events {
					seen[e.Mod] = true
				}
				if !seen[lock] && p.Resolved >= lock {
					t.Fatalf("revision %d has not come", lock)
				}
			}
			return ps != nil
		}
		for range 200 { // it takes one message while more is written than it can queue
			put(1)
			if take(); written%8 == 0 {
				put(6)
			}
		}
		if len(seen) < 150 { // of each message one event at least, but for a few
			t.Errorf("%d of %d events came beside the lock", len(seen), written)
		}
		w.apply(true, w.version("k", "", lock, false))
		for take() {
		}
		for rev := keyspace.Revision(2); rev < w.next; rev++ {
			if !seen[rev] {
				t.Errorf("revision %d has not come", rev)
			}
		}
		if behind := testutil.ToFloat64(w.server.cfg.Metrics.behind); behind < 5 {
			t.Errorf("the feed was cut off %v times", behind)
		}
		if read := testutil.ToFloat64(w.server.cfg.Metrics.read); read > 2*float64(written) {
			t.Errorf("%v events were read of %d", read, written)
		}
	})
}
