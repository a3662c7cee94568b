package pipeline

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
)

// Each put makes a call: that there are locks and leases costs it no memory, and its stages cost 32 bytes. 320 is a size
// class.
func TestCallKeepsItsSize(t *testing.T) {
	if n := unsafe.Sizeof(Call{}); n > 320 {
		t.Errorf("a call has %d bytes", n)
	}
}

// A call that is in a batch goes into no other one, and one that was answered nowhere.
func TestCallIsInOnePlace(t *testing.T) {
	w := newWorld(t)
	p := &w.p
	panics := func(what string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s: no panic", what)
			}
		}()
		f()
	}
	newOne := func() *Call {
		c := NewCall(t.Context(), &rangeapi.Request{Op: &pb.PutRequest{Key: []byte("a")}}, (*request)(p), 0)
		c.place = placeEvaluation
		return c
	}
	c := newOne()
	p.Append(c)
	b := p.filling
	p.filling = nil
	panics("appended twice", func() { p.Append(c) })
	panics("in the list of another batch", func() {
		other := newBatch(9, p.lead)
		other.calls = []*Call{c}
		other.answer(&Answers{}, kverror.Dropped)
	})
	p.Requeue(c)
	panics("requeued twice", func() { p.Requeue(c) })
	panics("requeued and in the batch", func() { b.answer(&Answers{}, kverror.Dropped) })
	var out Answers
	c = newOne()
	out.Add(c, kverror.Dropped)
	panics("answered twice", func() { out.Add(c, nil) })
	panics("answered and appended", func() { p.Append(c) })
}

// A pass whose turn is over sends what it has on its way, and evaluates the rest afterwards.
func TestPassSendsWhatItHas(t *testing.T) {
	// Each put visits a key.
	for _, c := range []struct {
		name  string
		turn  time.Duration
		first int
	}{{"the turn is long", time.Hour, 100}, {"the turn is over at once", -1, evaluateLook / 2}} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, func(l *Limits) { l.EvaluateTurn = c.turn })
			var calls []*Call
			for i := range 100 {
				calls = append(calls, w.send(&pb.PutRequest{Key: fmt.Appendf(nil, "k%d", i)}))
			}
			w.pass()
			if n := w.asks[0].req.Count; n != c.first {
				t.Errorf("revisions are asked for %d first, want %d", n, c.first)
			}
			for len(w.asks) > 0 {
				w.settle(nil)
			}
			for len(w.log) > 0 {
				w.apply(true)
			}
			for _, c := range calls {
				w.want("all are applied", c, nil)
			}
			w.empty()
			if w.counted != 100 {
				t.Errorf("%d calls were counted", w.counted)
			}
		})
	}
}

// Writes have the revisions of their places. Each is answered when its own entry is applied, in
// the order of the log, whatever becomes of those behind it.
func TestOrderOfAnswers(t *testing.T) {
	w := newWorld(t)
	a := w.put("a") // asks for its revision
	b, c := w.put("b"), w.put("c")
	w.settle(nil) // a is proposed, b and c ask together
	w.settle(nil)
	if len(w.log) != 2 {
		t.Fatalf("%d entries are proposed", len(w.log))
	}
	w.open("nothing is applied", a, placeBatch)
	w.apply(true)
	w.want("its entry is applied", a, nil)
	w.open("its entry is not applied", b, placeBatch)
	w.apply(true)
	for i, x := range []*Call{a, b, c} {
		w.want("all are applied", x, nil)
		if rev := x.draft.Op.(*pb.PutResponse).GetHeader().GetRevision(); rev != int64(2+i) {
			t.Errorf("put %d has revision %d", i, rev)
		}
	}
	w.empty()
}

// S3: what has seen a version that is not applied is answered behind it, and not at all as it was
// drafted if the version never is.
func TestAnswersAreHeldBack(t *testing.T) {
	for _, ok := range []bool{true, false} {
		w := newWorld(t)
		put := w.put("a")
		seen := w.send(see("a"))
		w.pass()
		w.settle(nil) // the put is proposed, what has seen it asks for its place
		w.settle(nil)
		w.open("the put is not applied", seen, placeHeld)
		w.lease = false
		w.apply(ok)
		if !ok {
			w.want("the entry was a no-op", put, kverror.Dropped)
			w.want("what it has seen is discarded", seen, kverror.Dropped)
			w.empty()
			continue
		}
		w.want("the entry is applied", put, nil)
		w.open("there is no lease", seen, placeConfirming)
		w.reads[0](0, nil)
		w.want("the leadership is confirmed", seen, nil)
		if !seen.draft.Op.(*pb.TxnResponse).GetSucceeded() {
			t.Error("it has not seen the put")
		}
		w.empty()
	}
}

// A confirmation that comes from another leadership confirms nothing.
func TestConfirmationOfAnotherTerm(t *testing.T) {
	w := newWorld(t)
	w.lease = false
	c := w.send(see("a"))
	w.pass()
	w.settle(nil)
	w.open("there is no lease", c, placeConfirming)
	w.lose()
	w.become(7)
	w.reads[0](0, nil)
	w.want("another term has begun", c, kverror.Dropped)
	w.empty()
}

// Trap 78: a batch that the sequencer refuses takes with it what was evaluated on top of it. The
// leadership goes on from the batch before, and a late answer is nobody's.
func TestSequencerRefuses(t *testing.T) {
	w := newWorld(t)
	a := w.put("a")
	w.settle(nil) // proposed
	b := w.put("b")
	parked := w.send(ifMod("b", never))
	c := w.put("c") // fills
	w.open("its key has no revision yet", parked, placeParked)
	late := w.asks[0].done
	w.settle(errors.New("no majority"))
	w.want("the sequencer refused", b, kverror.Dropped)
	w.want("it was evaluated on the refused one", c, kverror.Dropped)
	w.open("it is evaluated again", parked, placeBatch)
	late(keyspace.SequenceAnswer{First: 90, Current: 90})
	w.settle(nil)
	w.want("nothing is pending of its key", parked, nil)
	w.apply(true)
	w.want("it was proposed before", a, nil)
	d := w.put("d")
	w.settle(nil)
	w.apply(true)
	w.want("the chain goes on", d, nil)
	w.empty()
}

// permitted sends a put with a permit, and evaluates it.
func (w *world) permitted(at keyspace.AccessIndex, key string) *Call {
	w.t.Helper()
	c := w.sendPermitted(context.Background(), keyspace.PermitAt(at), &pb.PutRequest{Key: []byte(key), Value: []byte("v")})
	w.pass()
	return c
}

// Traps 81 and 82: the sequencer refuses a batch for the calls whose permits have ended. Those are told so, also in the
// next batch. All other requests of the two batches are evaluated again, in their order: those of users who lost
// nothing, and what was evaluated on the refused writes. A command is sent again by its sender. No revision is lost.
func TestPermitsThatHaveEnded(t *testing.T) {
	w := newWorld(t)
	w.access = 10
	before := w.permitted(10, "a")
	w.settle(nil)
	if len(w.log) != 1 {
		t.Fatal("not proposed")
	}
	w.permitted(10, "x") // keeps the next ones together
	w.access = 20
	old := w.permitted(15, "b")
	same := w.permitted(20, "c")
	own := w.put("d")
	command, m := w.mark()
	read := w.send(see("b"))
	w.pass()
	w.sequence(kverror.New(kverror.NoLeader, "the batch before")) // and all on top of it
	for _, c := range []*Call{old, same, own, command, read} {
		w.want("the batch before was refused", c, kverror.NoLeader)
	}
	if m.undone != 1 {
		t.Errorf("undone %d times", m.undone)
	}

	w.access = 30
	first := w.permitted(30, "x") // asks by itself
	old = w.permitted(25, "b")
	older := w.permitted(21, "e")
	same = w.permitted(30, "c")
	own = w.put("d")
	command, m = w.mark()
	write := w.sendPermitted(context.Background(), keyspace.PermitAt(30), &pb.TxnRequest{
		Compare: see("b").Compare, Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("f")}}}},
	})
	w.pass()
	w.sequence(nil) // of x alone; the rest asks
	if got := w.asks[0].req; got.Permit != keyspace.PermitAt(21) || got.Count != 5 {
		t.Errorf("the batch asks by %+v, want the oldest permit of its 5 changes", got)
	}
	next := w.permitted(30, "b") // fills, on top of the refused b
	last := w.last
	// By now the range knows the index, and what had ended before comes into no batch.
	w.want("old, and on top", w.permitted(29, "g"), kverror.AccessChanged)
	w.sequence(nil)
	for name, c := range map[string]*Call{"old": old, "older": older} {
		w.want(name, c, kverror.AccessChanged)
	}
	w.want("a command", command, kverror.Dropped)
	if m.undone != 1 || m.answered != 1 {
		t.Errorf("undone %d times, answered %d times", m.undone, m.answered)
	}
	w.pass() // the others go again, in their order
	w.settle(nil)
	for len(w.asks) > 0 {
		w.settle(nil)
	}
	for len(w.log) > 0 {
		w.apply(true)
	}
	for name, c := range map[string]*Call{
		"before": before, "x": first, "permitted since": same, "the cluster's own": own, "on top of a refused write": write, "in the next batch": next,
	} {
		w.want(name, c, nil)
	}
	if w.last != last+3 {
		t.Errorf("%d revisions are used, want 3: without the refused write the transaction changes nothing", w.last-last)
	}
	if c, d, b := w.store["c"].Mod, w.store["d"].Mod, w.store["b"].Mod; c != last+1 || d != last+2 || b != last+3 {
		t.Errorf("c is at %d, d at %d and b at %d, after %d", c, d, b, last)
	}
	w.empty()
}

// A call is counted once, as what it is, however often it is evaluated: one that asks for the current revision first, and one
// whose batch was refused for another call.
func TestEachCallCountsOnce(t *testing.T) {
	w := newWorld(t)
	drive := func() {
		w.pass()
		for len(w.asks) > 0 {
			w.settle(nil)
		}
		for len(w.log) > 0 {
			w.apply(true)
		}
	}
	w.put("a")
	drive()
	explicit := w.send(&pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("a"), Revision: int64(w.last)}}},
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("b")}}},
	}})
	drive()
	w.want("at an explicit revision", explicit, nil)
	if w.counted != 2 || w.changed != 2 {
		t.Errorf("%d calls are counted, %d as writes", w.counted, w.changed)
	}
	w.access = 30
	first := w.permitted(30, "x") // asks by itself
	old, same := w.permitted(25, "c"), w.permitted(30, "d")
	drive()
	w.want("first", first, nil)
	w.want("old", old, kverror.AccessChanged)
	w.want("with it", same, nil)
	if w.counted != 5 || w.changed != 5 {
		t.Errorf("%d calls are counted, %d as writes", w.counted, w.changed)
	}
	w.empty()
}

// A read whose permit has ended is refused, also if it was sent alone, and no other with it.
func TestReadsWhosePermitsHaveEnded(t *testing.T) {
	w := newWorld(t)
	w.access = 20
	look := func(p keyspace.Permit) *Call {
		c := w.sendPermitted(context.Background(), p, see("a"))
		w.pass()
		return c
	}
	alone := look(keyspace.PermitAt(19))
	w.settle(nil)
	w.want("alone", alone, kverror.AccessChanged)
	w.access = 30
	look(keyspace.PermitAt(30)) // asks by itself
	old, same, own := look(keyspace.PermitAt(29)), look(keyspace.PermitAt(30)), look(keyspace.Internal)
	w.settle(nil)
	for len(w.asks) > 0 {
		w.settle(nil)
	}
	w.want("old", old, kverror.AccessChanged)
	w.want("permitted since", same, nil)
	w.want("the cluster's own", own, nil)
	w.empty()
}

// The sequencer's own errors reach the callers if they say that nothing was applied.
func TestNotProposed(t *testing.T) {
	for _, c := range []struct {
		err  error
		want kverror.Kind
	}{
		{kverror.New(kverror.NoLeader, ""), kverror.NoLeader},
		{kverror.New(kverror.LeaderChanged, ""), kverror.Dropped},
		{kverror.New(kverror.BadRequest, ""), kverror.Dropped},
		{errors.New("?"), kverror.Dropped},
	} {
		if got := kverror.Of(NotProposed(c.err)).Kind; got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}

// TestLeadershipEnds ends a leadership while a call is in each of its places.
func TestLeadershipEnds(t *testing.T) {
	for _, s := range []struct {
		at place
		// bring brings a call there.
		bring func(w *world) *Call
		want  error
		// fate says that only the log can tell.
		fate bool
	}{
		{placeQueue, func(w *world) *Call { w.shut = true; return w.put("a") }, kverror.NotLeader, false},
		{placeBlocked, func(w *world) *Call { w.lock("a"); return w.put("a") }, kverror.NotLeader, false},
		{placeParked, func(w *world) *Call { w.put("a"); c := w.send(ifMod("a", never)); w.pass(); return c }, kverror.Dropped, false},
		{placeBatch, func(w *world) *Call { return w.put("a") }, kverror.Dropped, false},
		{placeBatch, func(w *world) *Call { w.put("a"); return w.put("b") }, kverror.Dropped, false},
		{placeBatch, func(w *world) *Call { w.full = true; c := w.put("a"); w.settle(nil); return c }, kverror.Dropped, false},
		{placeBatch, func(w *world) *Call { c := w.put("a"); w.settle(nil); return c }, nil, true},
		{placeHeld, func(w *world) *Call {
			w.put("a")
			c := w.send(see("a"))
			w.pass()
			w.settle(nil)
			w.settle(nil)
			return c
		}, kverror.Dropped, false},
	} {
		t.Run(s.at.String(), func(t *testing.T) {
			w := newWorld(t)
			c := s.bring(w)
			w.open("before", c, s.at)
			w.lose()
			if !s.fate {
				w.want("the leadership ended", c, s.want)
				w.pass()
				return
			}
			w.open("the log tells its fate", c, placeBatch)
			if !c.lost.Load() {
				t.Error("it is not known that its leadership ended")
			}
			w.apply(true)
			w.want("its entry is applied all the same", c, nil)
			w.empty()
		})
	}
}

// A lost batch of a former leadership is answered by its entry, by an entry of a newer term, by a
// snapshot, or by the timeout.
func TestFateOfLostBatches(t *testing.T) {
	for name, s := range map[string]struct {
		end  func(w *world)
		want error
	}{
		"applied":             {func(w *world) { w.apply(true) }, nil},
		"a no-op":             {func(w *world) { w.apply(false) }, kverror.Dropped},
		"dropped":             {func(w *world) { w.log[0].dropped(raftgroup.ErrDropped) }, kverror.Dropped},
		"a newer term":        {func(w *world) { w.become(7) }, kverror.Dropped},
		"in a snapshot":       {func(w *world) { w.rec.Last.Term, w.rec.Last.Number = 5, 1; w.replaced(5) }, nil},
		"not in a snapshot":   {func(w *world) { w.rec.Last.Term = 5; w.replaced(6) }, kverror.Dropped},
		"before a snapshot":   {func(w *world) { w.rec.Last.Term = 6; w.replaced(6) }, kverror.LeaderChanged},
		"unknown for so long": {func(w *world) { w.timers[0].f() }, kverror.LeaderChanged},
		"the node stops":      {func(w *world) { w.under(w.p.Abandon) }, kverror.LeaderChanged},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c := w.put("a")
			w.settle(nil)
			w.lose()
			if len(w.timers) != 1 || w.timers[0].after != w.shared.Limits.FateTimeout {
				t.Fatalf("%d timers", len(w.timers))
			}
			s.end(w)
			w.want(name, c, s.want)
			w.empty()
		})
	}
}

func (w *world) replaced(term uint64) {
	w.under(func(out *Answers) { w.p.Replaced(term, out) })
}

// A proposal that is dropped in a term that goes on cuts the chain. Proposals before it apply,
// proposals behind it apply nowhere.
func TestDroppedProposal(t *testing.T) {
	w := newWorld(t)
	var calls []*Call
	for _, key := range []string{"a", "b", "c"} {
		calls = append(calls, w.put(key))
		w.settle(nil)
	}
	w.log[1].dropped(raftgroup.ErrDropped)
	w.want("its proposal was dropped", calls[1], kverror.Dropped)
	w.want("it was evaluated on the dropped one", calls[2], kverror.Dropped)
	w.log = append(w.log[:1], w.log[2])
	w.apply(true)
	w.want("it was proposed before", calls[0], nil)
	w.apply(true) // a no-op: its predecessor is not there
	d := w.put("d")
	w.settle(nil)
	w.apply(true)
	w.want("the chain goes on", d, nil)
	w.empty()
}

// A group without room is offered the entry again after a moment, and nothing overtakes it.
func TestGroupIsFull(t *testing.T) {
	w := newWorld(t)
	w.full = true
	a := w.put("a")
	w.settle(nil)
	b := w.put("b")
	if len(w.timers) != 1 || w.timers[0].after != refusedRetry || len(w.asks) != 0 {
		t.Fatalf("%d timers, %d questions", len(w.timers), len(w.asks))
	}
	w.timers[0].f()
	w.full = false
	w.timers[1].f()
	w.settle(nil)
	w.apply(true)
	w.apply(true)
	w.want("there was room at last", a, nil)
	w.want("it came behind", b, nil)
	w.timers[0].f() // late: it was proposed
	w.empty()
}

// A call that is put back again and again is evaluated before all that came after it.
func TestPatience(t *testing.T) {
	w := newWorld(t)
	w.put("a")
	c := w.send(ifMod("a", never))
	w.pass()
	for range patience {
		w.open("the key's newest version has no revision", c, placeParked)
		w.put("a") // fills: the next pending version of the key
		w.settle(nil)
	}
	w.open("it was put back too often", c, placeParked)
	late := w.put("a")
	w.open("nothing goes before it", late, placeQueue)
	w.settle(nil)
	w.settle(nil)
	for len(w.log) > 0 {
		w.apply(true)
	}
	w.want("it had its turn", c, nil)
	for len(w.asks) > 0 {
		w.settle(nil)
	}
	for len(w.log) > 0 {
		w.apply(true)
	}
	w.want("and so had what came after it", late, nil)
	w.empty()
}

// A call that meets a lock waits for its end, or until its caller gives up.
func TestBlockedCalls(t *testing.T) {
	w := newWorld(t)
	l := w.lock("a")
	a, given := w.put("a"), w.put("a")
	b := w.put("b")
	w.open("its key is locked", a, placeBlocked)
	w.p.giveUp(given, context.Canceled)
	w.want("its caller gave up", given, kverror.Of(context.Canceled).Kind)
	w.unlock(l)
	w.pass()
	w.settle(nil)
	w.settle(nil)
	w.apply(true)
	w.apply(true)
	w.want("the lock has ended", a, nil)
	w.want("its key was free", b, nil)
	w.empty()
}

// Items alone need no revision. An operation that leaves one is undone if its batch is discarded,
// and told when it is answered.
func TestItems(t *testing.T) {
	w := newWorld(t)
	c, m := w.mark()
	if len(w.asks) != 0 || len(w.log) != 1 {
		t.Fatalf("%d questions, %d entries", len(w.asks), len(w.log))
	}
	w.log[0].dropped(raftgroup.ErrDropped)
	w.want("it was dropped", c, kverror.Dropped)
	if m.undone != 1 || m.answered != 1 {
		t.Errorf("undone %d times, answered %d times", m.undone, m.answered)
	}
	w.log = nil
	put := w.put("a") // asks
	c, m = w.mark()   // fills, together with
	other := w.put("b")
	w.settle(nil)
	w.settle(nil)
	w.apply(true)
	w.apply(true)
	for _, c := range []*Call{put, c, other} {
		w.want("all are applied", c, nil)
	}
	if m.undone != 0 || m.answered != 1 {
		t.Errorf("undone %d times, answered %d times", m.undone, m.answered)
	}
	w.empty()
}

// A pipeline that is closed evaluates nothing, and says when it is idle.
func TestClose(t *testing.T) {
	w := newWorld(t)
	a := w.put("a")
	w.p.Close()
	b := w.put("b")
	w.open("it is closed", b, placeQueue)
	if w.p.Idle() {
		t.Error("a batch is under way")
	}
	w.settle(nil)
	w.apply(true)
	w.want("it was under way", a, nil)
	if !w.p.Idle() {
		t.Error("nothing is under way")
	}
	w.p.Drain()
	w.pass()
	w.want("the node stops", b, kverror.Busy)
	w.empty()
}

// Calls that wait for evaluation are bounded for each range, all calls for the node. A single
// request always has room.
func TestBounds(t *testing.T) {
	w := newWorld(t, func(l *Limits) { l.RangePendingBytes = 250 })
	w.shared.Budget = NewBudget(1, 350, nil, w.shared.Metrics)
	w.shut = true
	refused := func(when string, bytes int64) {
		t.Helper()
		_, err := w.p.Run(NewCall(t.Context(), &rangeapi.Request{Op: &pb.PutRequest{Key: []byte("a")}}, (*request)(&w.p), bytes), clock.StartStopwatch())
		if kverror.Of(err).Kind != kverror.TooManyRequests {
			t.Errorf("%s: %v", when, err)
		}
	}
	w.put("a")
	w.put("b")
	refused("the range has 200 of 250", 100)
	w.shut = false
	w.pass()
	w.put("c")
	refused("the node has 300 of 350", 100)
	w.lose()
	w.empty()
	w.become(7)
	c := NewCall(t.Context(), &rangeapi.Request{Op: &pb.PutRequest{Key: []byte("a")}}, (*request)(&w.p), 1000)
	if err := w.p.enqueue(c); err != nil {
		t.Errorf("a large request alone: %v", err)
	}
}

// No more batches than the bound are with the log.
func TestInflight(t *testing.T) {
	w := newWorld(t, func(l *Limits) { l.InflightBatches = 2 })
	w.put("a")
	w.settle(nil)
	w.put("b")
	w.settle(nil)
	c := w.put("c")
	w.open("two batches are proposed", c, placeQueue)
	w.apply(true)
	w.open("one is", c, placeBatch)
}

// TestEveryCallIsAnsweredOnce takes random ways through the pipeline. In the end every call has
// its answer, and what was answered with success is applied. That no call is answered twice the
// places assert.
func TestEveryCallIsAnsweredOnce(t *testing.T) {
	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { randomWalk(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func randomWalk(t *testing.T, rng *rand.Rand) {
	t.Helper()
	w := newWorld(t, func(l *Limits) { l.BatchRequests, l.InflightBatches = 1+rng.IntN(5), 1+rng.IntN(4) })
	var calls []*Call
	term := uint64(5)
	key := func() string { return string(rune('a' + rng.IntN(3))) }
	for range 300 {
		switch n := rng.IntN(20); {
		case n < 6 && w.p.Leads():
			ops := []proto.Message{&pb.PutRequest{Key: []byte(key()), Value: []byte("v")}, see(key()), ifMod(key(), w.last+2)}
			calls = append(calls, w.send(ops[rng.IntN(len(ops))]))
		case n < 7 && w.p.Leads():
			c, _ := w.mark()
			calls = append(calls, c)
		case n < 10:
			w.pass()
		case n < 13 && len(w.asks) > 0:
			var err error
			if rng.IntN(6) == 0 {
				err = errors.New("no majority")
			}
			w.settle(err)
		case n < 16 && len(w.log) > 0:
			w.apply(true)
		case n < 17:
			w.full = !w.full
		case n < 18 && len(w.timers) > 0:
			f := w.timers[0].f
			w.timers = w.timers[1:]
			f()
		case n < 19 && len(w.log) > 0:
			i := rng.IntN(len(w.log))
			e := w.log[i]
			w.log = append(w.log[:i:i], w.log[i+1:]...)
			e.dropped(raftgroup.ErrDropped)
		case n == 19 && rng.IntN(3) == 0:
			if w.p.Leads() {
				w.lose()
				break
			}
			for rng.IntN(2) == 0 && len(w.log) > 0 {
				w.apply(true)
			}
			w.log = nil // the new leader has the rest not
			term += 2
			w.become(term)
		}
	}
	if w.p.Leads() {
		w.lose()
	}
	w.log = nil
	w.become(term + 2)
	w.pass()
	for len(w.asks) > 0 {
		w.settle(nil)
	}
	for _, c := range calls {
		if !c.answered() {
			t.Errorf("a %T is %s", c.Req.Op, c.place)
		}
	}
	w.empty()
}

// A batch on its way holds back compactions and declarations of void: it may still bring a
// revision above its floor. A batch that only asks for the current revision holds back nothing.
func TestWhatIsUnderWayHoldsBack(t *testing.T) {
	w := newWorld(t)
	check := func(when string, floor keyspace.Revision, at keyspace.Revision, mayAppear bool) {
		t.Helper()
		if got := w.p.LowestFloor(10); got != floor {
			t.Errorf("%s: the lowest floor is %d, want %d", when, got, floor)
		}
		if got := w.p.MayAppear(at) != nil; got != mayAppear {
			t.Errorf("%s: revision %d may appear: %t, want %t", when, at, got, mayAppear)
		}
	}
	check("nothing is under way", 10, 5, false)
	w.send(ifMod("a", 1))
	w.pass()
	if b := w.p.sequencing; b == nil || b.txns != 0 {
		t.Fatal("no batch without changes is being sequenced")
	}
	check("a batch asks for the current revision", 10, 5, false)
	w.settle(nil)

	w.last = 5
	w.put("a")
	check("a batch with floor 5 awaits its revision", 5, 6, true)
	check("its floor shows that revision 5 was known", 5, 5, false)
	w.p.sequencing.floor = 12
	check("a batch with floor 12 awaits its revision", 10, 11, false)
	w.p.sequencing.floor = 5
	w.settle(nil)
	check("revision 6 is proposed", 10, 6, true)
	check("what is proposed is above", 10, 5, false)
	w.apply(true)
	check("it is applied", 10, 6, false)
	w.empty()
}
