package judge

import (
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
)

// The check of watchers accepts a correct history and rejects each kind of error.
func TestCheckWatchersRejects(t *testing.T) {
	var vs []Version
	for i := range int64(6) {
		vs = append(vs, Version{Key: "a", Value: fmt.Sprint(i), Mod: 2 + i, Create: 2, Version: 1 + i})
	}
	// Revision 8 deletes the key and makes it again; 80 and 81 stand for that.
	vs = append(vs, Version{Key: "a", Mod: 8, Deleted: true}, Version{Key: "a", Value: "8", Mod: 8, Create: 8, Version: 1, Sub: 1})
	event := func(rev int64) *mvccpb.Event {
		switch rev {
		case 80:
			return &mvccpb.Event{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte("a"), ModRevision: 8}}
		case 81:
			return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("a"), Value: []byte("8"), ModRevision: 8, CreateRevision: 8, Version: 1}}
		}
		return &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("a"), Value: fmt.Append(nil, rev-2), ModRevision: rev, CreateRevision: 2, Version: rev - 1}}
	}
	// Each delivery is a list of revisions; a negative one is progress, 0 a compaction
	// at 5.
	for name, c := range map[string]struct {
		deliveries [][]int64
		want       string
	}{
		"right":                {[][]int64{{2, 3}, {-3}, {4}, {5, 6, 7}, {-7}, {80, 81}}, ""},
		"missing":              {[][]int64{{2, 3}, {5, 6, 7, 80, 81}}, "event 2 is"},
		"missing at the end":   {[][]int64{{2, 3}, {4, 5, 6, 7, 80}}, "event 7 is nothing"},
		"missing within":       {[][]int64{{2, 3}, {4, 5, 6, 7, 81}}, "event 6 is"},
		"out of order within":  {[][]int64{{2, 3}, {4, 5, 6, 7, 81, 80}}, "event 6 is"},
		"twice":                {[][]int64{{2, 3}, {3, 4, 5, 6, 7, 80, 81}}, "twice, out of order or divided"},
		"out of order":         {[][]int64{{2, 4, 3, 5, 6, 7, 80, 81}}, "revision 3 follows 4"},
		"one too many":         {[][]int64{{2, 3, 4, 5, 6, 7, 80, 81, 9}}, "which does not exist"},
		"progress too early":   {[][]int64{{2, 3}, {-4}, {4, 5, 6, 7, 80, 81}}, "progress 4 before revision 4"},
		"compacted in between": {[][]int64{{2}, {0}, {5, 6, 7, 80, 81}}, ""},
		"behind a compaction":  {[][]int64{{2}, {0}, {6, 7, 80, 81}}, "event 1 is"},
	} {
		w := &Watcher{Name: "w", from: 2, sessions: 1}
		for _, revs := range c.deliveries {
			switch {
			case revs[0] < 0:
				w.ToldProgress("n1", 0, -revs[0])
			case revs[0] == 0:
				w.Compacted(5)
			default:
				var events []*mvccpb.Event
				for _, rev := range revs {
					events = append(events, event(rev))
				}
				w.Told("n1", 0, events)
			}
		}
		got := strings.Join(checkWatchers([]*Watcher{w}, vs, nil), "; ")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// Only a watcher that began at a compacted revision may miss, and only there, a write
// that the same transaction replaced later.
func TestReplacedWriteMayBeCompacted(t *testing.T) {
	vs := []Version{{Key: "a", Value: "1", Mod: 5, Create: 5, Version: 1}, {Key: "a", Mod: 5, Deleted: true, Sub: 1}, {Key: "b", Value: "2", Mod: 6, Create: 6, Version: 1}}
	w := &Watcher{Name: "w", Span: keyspace.Span{Start: []byte("a")}, sessions: 1, starts: map[int64]bool{5: true}, told: []*mvccpb.Event{
		{Type: mvccpb.Event_DELETE, Kv: &mvccpb.KeyValue{Key: []byte("a"), ModRevision: 5}},
		{Kv: &mvccpb.KeyValue{Key: []byte("b"), Value: []byte("2"), ModRevision: 6, CreateRevision: 6, Version: 1}},
	}}
	if bad := checkWatchers([]*Watcher{w}, vs, map[int64]bool{5: true}); len(bad) > 0 {
		t.Errorf("compacted at 5: %v", bad)
	}
	for _, at := range []int64{4, 6} {
		if bad := checkWatchers([]*Watcher{w}, vs, map[int64]bool{at: true}); len(bad) != 1 {
			t.Errorf("compacted at %d: %v", at, bad)
		}
	}
	w.starts = map[int64]bool{4: true}
	if bad := checkWatchers([]*Watcher{w}, vs, map[int64]bool{5: true}); len(bad) != 1 {
		t.Errorf("compacted at 5, and begun below: %v", bad)
	}
}
