package watch

import (
	"iter"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// A kept event keeps only itself in memory, not the message that brought it with many others.
func TestEventsOwnTheirMemory(t *testing.T) {
	msg := []byte("....keyvalueolder....")
	e := newEvent(&rangeapi.Event{
		Version: mvcc.Version{Key: msg[4:7], Value: msg[7:12], Mod: 5, Create: 3, Version: 2},
		Looked:  true, Prev: &mvcc.Version{Key: msg[4:7], Value: msg[12:17], Mod: 3, Create: 3, Version: 1},
	})
	clear(msg)
	if kv, prev := e.plain.Kv, e.whole.PrevKv; string(kv.Key) != "key" || string(kv.Value) != "value" ||
		string(prev.Key) != "key" || string(prev.Value) != "older" {
		t.Errorf("%v before %v", prev, kv)
	}
}

// A list of events behaves like a sorted slice, in whatever order events come and go.
func TestEventList(t *testing.T) {
	at := func(rev int) *event {
		return newEvent(&rangeapi.Event{Version: mvcc.Version{Key: []byte("k"), Mod: keyspace.Revision(rev)}})
	}
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var l eventList
		var want []int
		for step := range 4000 {
			switch rev := 1 + rng.IntN(3000); {
			case step%1000 == 999:
				got := l.takeUpTo(keyspace.Revision(rev))
				n, _ := slices.BinarySearch(want, rev+1)
				if !slices.Equal(revisions(slices.Values(got)), want[:n]) {
					t.Fatalf("seed %d: took %d events up to %d, want %d", seed, len(got), rev, n)
				}
				want = slices.Delete(want, 0, n)
			case step%100 == 99 && len(want) > 0:
				if e := l.shift(); int(e.rev) != want[0] {
					t.Fatalf("seed %d: revision %d goes first, want %d", seed, e.rev, want[0])
				}
				want = want[1:]
			default:
				i, there := slices.BinarySearch(want, rev)
				if twin := l.insert(at(rev)); (twin != nil) != there || there && int(twin.rev) != rev {
					t.Fatalf("seed %d: revision %d is there: %v, twin %v", seed, rev, there, twin)
				}
				if !there {
					want = slices.Insert(want, i, rev)
				}
			}
			after := keyspace.Revision(rng.IntN(3000))
			lo, _ := slices.BinarySearch(want, int(after)+1)
			hi, _ := slices.BinarySearch(want, int(after)+51)
			if got := revisions(l.between(after, after+50)); !slices.Equal(got, want[lo:hi]) || l.len() != len(want) {
				t.Fatalf("seed %d: %d events, want %d; between %d and %d are %v, want %v", seed, l.len(), len(want), after, after+50, got, want[lo:hi])
			}
		}
	}
}

func revisions(events iter.Seq[*event]) (all []int) {
	for e := range events {
		all = append(all, int(e.rev))
	}
	return all
}

// An event below very many others moves few of them.
func TestEventListMovesFew(t *testing.T) {
	var l eventList
	for rev := range keyspace.Revision(20_000) {
		e := newEvent(&rangeapi.Event{Version: mvcc.Version{Key: []byte("k"), Mod: 1_000_000 - rev}})
		l.insert(e)
	}
	for _, c := range l.chunks {
		if len(c) > maxChunk {
			t.Fatalf("a chunk of %d events", len(c))
		}
	}
	if n := len(l.chunks); n > 3*20_000/maxChunk {
		t.Errorf("%d chunks for 20000 events", n)
	}
}
