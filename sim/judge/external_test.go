package judge

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// externalRun is a small history of an external rig, and its events.
func externalRun() (*History, []*mvccpb.Event) {
	s := newScript()
	s.do(put("c0", "1.1"))
	s.do(&pb.TxnRequest{Success: []*pb.RequestOp{putOp("c0", []byte("1.2")), putOp("u0", []byte("1.3"))}})
	s.do(&pb.DeleteRangeRequest{Key: []byte("c0"), PrevKv: true})
	s.do(everything())
	s.do(put("i0", "1.4"))
	var events []*mvccpb.Event
	for _, v := range s.disks {
		e := &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte(v.Key), ModRevision: v.Mod}, Type: mvccpb.Event_DELETE}
		if !v.Deleted {
			e = &mvccpb.Event{Kv: s.past[v.Mod].keys[v.Key]}
		}
		events = append(events, e)
	}
	return s.h, events
}

// judgeExternal judges a history with the events that one watcher received, response by
// response.
func judgeExternal(h *History, told ...[]*mvccpb.Event) []string {
	w := NewWatcher("outside", keyspace.Span{})
	w.Begin()
	for _, events := range told {
		w.Told("n1", 0, events)
	}
	return Check(&Evidence{
		Faulty: true, History: h, Failures: 1,
		Versions: w.Versions(), Watchers: []*Watcher{w},
	})
}

// A rig without disks takes its versions from a watcher, and the checkers find errors
// in these.
func TestVersionsOfAWatcherAreJudged(t *testing.T) {
	h, events := externalRun()
	if bad := judgeExternal(h, events); len(bad) > 0 {
		t.Fatalf("nothing is wrong: %q", bad)
	}
	without := func(i int) []*mvccpb.Event { return slices.Delete(slices.Clone(events), i, i+1) }
	for i := range events {
		if len(judgeExternal(h, without(i))) == 0 {
			t.Errorf("without %v nothing is found", events[i])
		}
	}
	swapped := slices.Clone(events)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	other := slices.Clone(events)
	other[1] = proto.CloneOf(other[1])
	other[1].Kv.Value = []byte("nobody's")
	for what, told := range map[string][][]*mvccpb.Event{
		"an event twice":              {events, events[len(events)-1:]},
		"a revision divided":          {events[:2], events[2:]},
		"out of order":                {swapped},
		"a value that nobody wrote":   {other},
		"an event that nobody caused": {append(slices.Clone(events), &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("z0"), Value: []byte("x"), ModRevision: 9, CreateRevision: 9, Version: 1}})},
	} {
		if len(judgeExternal(h, told...)) == 0 {
			t.Errorf("%s: nothing is found", what)
		}
	}
}

// A watcher that receives progress ahead of an event is found.
func TestProgressAheadIsFound(t *testing.T) {
	_, events := externalRun()
	w := NewWatcher("outside", keyspace.Span{})
	w.Begin()
	w.Told("n1", time.Second, events[:1])
	w.ToldProgress("n2", 2*time.Second, 3)
	w.Told("n3", 3*time.Second, events[1:])
	if bad := checkWatchers([]*Watcher{w}, w.Versions(), nil); len(bad) != 1 || !strings.Contains(bad[0], "progress") || !strings.Contains(bad[0], "told by n2 at 2s") {
		t.Errorf("found %q", bad)
	}
}

// Any number of deletions of unknown fate leaves porcupine able to answer. Those that
// did nothing are left out, and the others ended before anybody saw their effect.
// Errors are still found.
func TestManyDeletionsOfUnknownFate(t *testing.T) {
	const deletions = 60
	build := func(stale bool) []string {
		s := newScript()
		get := &pb.RangeRequest{Key: []byte("c0")}
		s.do(put("c0", "1.1"))
		for range deletions {
			s.lose(s.call(&pb.DeleteRangeRequest{Key: []byte("c0")}), false)
			s.do(get)
		}
		before, _ := s.now.apply(get, s.now.rev)
		s.lose(s.call(&pb.DeleteRangeRequest{Key: []byte("c0")}), true)
		s.do(get)
		if stale {
			s.h.End(s.call(get), before, nil, false, s.at)
		}
		s.do(put("c0", "1.2"))
		for range deletions {
			s.do(get)
		}
		p, _ := checkReplay(s.h.Ops(), s.disks, nil)
		return checkKeys(p.decided(s.h.Ops()), s.disks, p, nil)
	}
	if bad := build(false); len(bad) > 0 {
		t.Errorf("nothing is wrong: %q", bad)
	}
	if bad := build(true); len(bad) != 1 || !strings.Contains(bad[0], "not linearizable") {
		t.Errorf("a read of what is deleted: %q", bad)
	}
}

// If all writes overlap, as in a range that was without a leader for a while, porcupine
// would try every subset of them. With the intervals that their revisions allow there
// is little to try. Errors are still found.
func TestNarrowedIntervalsSparePorcupine(t *testing.T) {
	const writes = 40
	build := func(stale bool) (ops []*Op, p *replay, vs []Version) {
		s := newScript()
		var waiting []*Op
		for i := range writes {
			waiting = append(waiting, s.call(&pb.PutRequest{Key: []byte("c0"), Value: fmt.Appendf(nil, "1.%d", i)}))
		}
		// The last call takes effect first, and all are answered at the end.
		answers := map[*Op]proto.Message{}
		var before *pb.RangeResponse
		for _, o := range slices.Backward(waiting) {
			answers[o] = s.apply(o.Request)
			if read := s.do(get("c0")); before == nil {
				before = proto.CloneOf(read.Response.(*pb.RangeResponse))
			}
		}
		if stale { // under a revision that contradicts no other
			before.Header.Revision = s.now.rev
			s.h.End(s.call(get("c0")), before, nil, false, s.at)
		}
		for _, o := range waiting {
			s.h.End(o, answers[o], nil, false, s.at)
		}
		p, _ = checkReplay(s.h.Ops(), s.disks, nil)
		return s.h.Ops(), p, s.disks
	}
	judge := func(ops []*Op, vs []Version, patience time.Duration) porcupine.CheckResult {
		written := map[string]bool{"": true}
		for _, v := range vs {
			written[v.Value] = true
		}
		return porcupine.CheckOperationsTimeout(keyModel, historyOf(ops, vs, written, "c0"), patience)
	}
	ops, p, vs := build(false)
	if got := judge(ops, vs, 100*time.Millisecond); got != porcupine.Unknown {
		t.Errorf("the intervals as they are: %s; this test is to have some that overlap too much", got)
	}
	if got := judge(p.narrowed(ops), vs, judgeTimeout); got != porcupine.Ok {
		t.Errorf("nothing is wrong: %s", got)
	}
	ops, p, vs = build(true)
	if got := judge(p.narrowed(ops), vs, judgeTimeout); got != porcupine.Illegal {
		t.Errorf("a read of what was overwritten: %s", got)
	}
}
