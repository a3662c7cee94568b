package rangefeed

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/rangefeed/feedtest"
)

func TestFeedBeginsAnywhereAndGoesOn(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		for i := range 3 {
			w.put(fmt.Sprintf("k%d", i%2), fmt.Sprint(i))
		}
		g := w.gateway()
		defer g.Close()
		withPrev := order(3, 3)
		withPrev.Prev = true
		g.Order(order(1, 5), order(2, 3), withPrev)
		g.Want("openings", "1: |4; 2: k1@3=1 k0@4=2 |4; 2: |4; 3: k1@3=1 k0@4=2(0@2) |4; 3: |4")
		w.put("k1", "x")
		g.Want("a put", "1: k1@5=x |5; 2: k1@5=x |5; 3: k1@5=x(1@3) |5")
		g.Order(rangeapi.FeedOrder{ID: 2, Close: true})
		g.Want("an end", "")
		w.put("k2", "y")
		g.Want("a put after it", "1: k2@6=y |6; 3: k2@6=y |6")
	})
}

// A feed that cannot begin ends at once, and one whose range ends does so behind its events.
func TestFeedEnds(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		g := w.gateway()
		defer g.Close()
		other := order(2, 2)
		other.Generation = 2
		g.Order(order(1, 2), other, rangeapi.FeedOrder{ID: 3, Range: 8, Generation: 1})
		g.Want("openings", "1: |0; 2 ends: wrong range; 3 ends: range not here")
		w.put("k", "1")
		w.mu.Lock()
		w.why = kverror.New(kverror.Stopped, "the node stops")
		w.feeds.End(w.why)
		w.mu.Unlock()
		g.Want("the end", fmt.Sprintf("1: k@2=1 |2; 1 ends: %s", kverror.Stopped))
		g.Order(order(4, 2))
		g.Want("too late", fmt.Sprintf("4 ends: %s", kverror.Stopped))
		if w.feeds.Active() {
			t.Error("there are feeds behind the end")
		}
	})
}

// A gateway that does not take its messages makes a feed fall behind, whatever comes
// meanwhile; it misses nothing and gets nothing twice.
func TestFeedFallsBehindAndCatchesUp(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		g := w.gateway()
		defer g.Close()
		g.Order(order(1, 2))
		g.Want("an opening", "1: |0")
		value := strings.Repeat("v", 100<<10)
		for range 40 {
			w.put("k", value)
		}
		next, resolved := keyspace.Revision(2), keyspace.Revision(0)
		for resolved < 60 {
			ps := g.Message(1 << 30)
			if ps == nil {
				t.Fatalf("nothing comes behind revision %d", resolved)
			}
			for _, p := range ps {
				for _, e := range p.Events {
					if e.Mod != next {
						t.Fatalf("revision %d follows %d", e.Mod, next-1)
					}
					next++
				}
				if p.Resolved >= next || p.Resolved < resolved {
					t.Fatalf("resolved revision %d behind revision %d and %d", p.Resolved, next-1, resolved)
				}
				resolved = p.Resolved
			}
			if next < 62 {
				w.put("k", value[:next]) // while it catches up
			}
		}
		if n := testutil.ToFloat64(w.server.cfg.Metrics.behind); n == 0 {
			t.Error("the feed has never been behind")
		}
	})
}

// However many feeds are behind, what is read for them and not taken has a bound.
func TestPagesOfFeedsHaveABound(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		const size, feeds = 100 << 10, 60
		for range 10 {
			w.put("k", strings.Repeat("v", size))
		}
		g := w.gateway()
		defer g.Close()
		for i := range rangeapi.FeedID(feeds) {
			g.Order(order(1+i, 2))
		}
		synctest.Wait()
		if n := testutil.ToFloat64(w.server.cfg.Metrics.read) * size; n > float64(defaultBounds.conn+4*defaultBounds.page) {
			t.Errorf("%.0f bytes were read for who takes nothing", n)
		}
		if n := strings.Count(g.Take(), "@11="); n != feeds {
			t.Errorf("%d of %d feeds got everything", n, feeds)
		}
	})
}

// teller follows one feed and remembers what it was told.
type teller struct {
	t    *testing.T
	seen map[string]bool
	// order has the events. resolved and position are what the feed has claimed, each with the
	// number of events seen by then.
	order    []string
	resolved []claim
	position []claim
}

type claim struct {
	upTo uint64
	seen int
}

// take takes one message and says whether there was one.
func (c *teller) take(g *feedtest.Gateway) bool {
	ps := g.Message(1 << 30)
	for i := range ps {
		p := &ps[i]
		if p.Err != nil {
			c.t.Fatal(p.Err)
		}
		for _, e := range p.Events {
			if name := fmt.Sprintf("%s@%d", e.Key, e.Mod); !c.seen[name] {
				c.seen[name] = true
				c.order = append(c.order, name)
			}
		}
		c.resolved = append(c.resolved, claim{uint64(p.Resolved), len(c.order)})
		c.position = append(c.position, claim{p.Position.Number, len(c.order)})
	}
	return ps != nil
}

// Whatever comes to a range that nobody replicates, in whatever order, a feed tells every
// event, and nothing that it calls resolved, or applied up to a position, comes later.
func TestFeedOfAFakeRange(t *testing.T) {
	for seed := range uint64(25) {
		onRange(t, func(t *testing.T, w *fakeRange) {
			rng := rand.New(rand.NewPCG(seed, 1))
			w.server.bounds = bounds{queue: 300, conn: 400, page: 200, message: 150}
			type applied struct {
				name   string
				rev    keyspace.Revision
				number uint64
			}
			var all []applied
			apply := func(published bool, vs ...mvcc.Version) {
				w.apply(published, vs...)
				for _, v := range vs {
					all = append(all, applied{fmt.Sprintf("%s@%d", v.Key, v.Mod), v.Mod, w.number})
				}
			}
			g := w.gateway()
			defer g.Close()
			c := &teller{t: t, seen: map[string]bool{}}
			locks := 0
			for i := range 300 {
				switch n := rng.IntN(20); {
				case n < 9:
					var vs []mvcc.Version
					for range 1 + rng.IntN(3) {
						vs = append(vs, w.version(fmt.Sprintf("k%d", rng.IntN(5)), strings.Repeat("v", rng.IntN(80)), w.next, rng.IntN(4) == 0))
						w.next++
					}
					apply(rng.IntN(30) > 0, vs...)
				case n < 11:
					w.lock()
					locks++
				case n < 13:
					if len(w.locks) > 0 {
						l := w.locks[rng.IntN(len(w.locks))]
						apply(true, w.version(fmt.Sprintf("t%d", l), "t", l, false))
					}
				case i > 20:
					c.take(g)
				}
				if i == 20 {
					g.Order(order(1, 2))
				}
			}
			for len(w.locks) > 0 {
				apply(true, w.version(fmt.Sprintf("t%d", w.locks[0]), "t", w.locks[0], false))
			}
			for c.take(g) {
			}
			at := map[string]int{}
			for i, name := range c.order {
				at[name] = i
			}
			for _, a := range all {
				i, ok := at[a.name]
				if !ok {
					t.Fatalf("seed %d: %s has not come", seed, a.name)
				}
				for _, r := range c.resolved {
					if uint64(a.rev) <= r.upTo && i >= r.seen {
						t.Fatalf("seed %d: %s came behind the resolved revision %d", seed, a.name, r.upTo)
					}
				}
				for _, p := range c.position {
					if a.number <= p.upTo && i >= p.seen {
						t.Fatalf("seed %d: %s came behind position %d", seed, a.name, p.upTo)
					}
				}
			}
			if len(c.order) != len(all) || c.resolved[len(c.resolved)-1].upTo != uint64(w.next-1) {
				t.Errorf("seed %d: %d events of %d, resolved %v of %d", seed, len(c.order), len(all), c.resolved[len(c.resolved)-1], w.next-1)
			}
		})
	}
}

// A feed that cannot look for the versions before its events ends in front of them, also if the
// range's end is not known yet. The gateway's other feeds go on.
func TestFeedEndsInFrontOfAnUnknownVersionBefore(t *testing.T) {
	onRange(t, func(t *testing.T, w *fakeRange) {
		w.put("k", "1")
		g := w.gateway()
		defer g.Close()
		withPrev := order(1, 3)
		withPrev.Prev = true
		g.Order(withPrev, order(2, 3))
		g.Want("openings", "1: |2; 2: |2")
		w.put("k", "2")
		synctest.Wait() // it is being sent
		w.put("k", "3") // waits for that
		w.mu.Lock()
		w.why = kverror.New(kverror.WrongRange, "it was split")
		w.mu.Unlock()
		got := g.Take()
		if want := "1: k@3=2(1@2) |3; 1 ends: wrong range; 2: k@3=2 |3; 2: k@4=3 |4"; got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		w.mu.Lock()
		w.feeds.End(w.why)
		w.mu.Unlock()
		g.Want("the end", "2 ends: wrong range")
	})
}
