package stages

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// The stages of a request add up to its time, whatever the order of the readings.
func TestTimesAddUp(t *testing.T) {
	var times Times
	times.Begin(Queued, 10*time.Millisecond)
	times.Enter(Evaluation, 15*time.Millisecond)
	times.Enter(Blocked, 12*time.Millisecond) // a reading from before
	times.Enter(Evaluation, 100*time.Millisecond)
	times.Enter(Batch, 101*time.Millisecond)
	times.Enter(Quorum, 111*time.Millisecond)
	r := times.Record(151 * time.Millisecond)
	r.Split(Quorum, Apply, 5*time.Millisecond)
	r.Split(Quorum, Disk, time.Hour)
	want := [Count]time.Duration{
		Queued: 5 * time.Millisecond, Blocked: 85 * time.Millisecond, Evaluation: time.Millisecond,
		Batch: 10 * time.Millisecond, Disk: 35 * time.Millisecond, Apply: 5 * time.Millisecond,
	}
	if r.Spent != want || r.Took != 141*time.Millisecond || r.Longest() != Blocked {
		t.Errorf("%v in %v, longest %s; want %v", r.Spent, r.Took, r.Longest(), want)
	}
}

func sample() *Record {
	r := &Record{Range: 7, Node: 0xabcdef0123, Last: 3, Lock: "5.1.2.3/1", Turns: 2}
	for s := range Count {
		r.Spent[s] = time.Duration(s) * time.Millisecond
		r.Took += r.Spent[s]
	}
	return r
}

// A record arrives with the answer behind it. Without one the answer is as it was.
func TestRecordsTravel(t *testing.T) {
	for _, want := range []*Record{nil, {Range: 1}, sample()} {
		answer, got, err := Cut(want.Before([]byte("\x03answer")))
		if err != nil || string(answer) != "\x03answer" || !reflect.DeepEqual(got, want) {
			t.Errorf("%q with %+v, %v; want %+v", answer, got, err, want)
		}
	}
	if b, asked := CutAsked(append(AppendAsked(nil), 3)); !asked || !bytes.Equal(b, []byte{3}) {
		t.Errorf("%v, asked %t", b, asked)
	}
	if b, asked := CutAsked([]byte{3}); asked || !bytes.Equal(b, []byte{3}) {
		t.Errorf("%v, asked %t", b, asked)
	}
	long := sample()
	long.Lock = strings.Repeat("x", 2*maxLockBytes)
	if _, got, err := Cut(long.Before(nil)); err != nil || len(got.Lock) != maxLockBytes {
		t.Errorf("%+v, %v", got, err)
	}
}

// Stages of a later build are left out; what is no record is refused.
func TestOddRecords(t *testing.T) {
	odd := func(pairs ...byte) []byte {
		body := append((&Record{Range: 1}).append(nil), pairs...)
		return append(append([]byte{prefixRecord}, byte(len(body))), body...)
	}
	if _, r, err := Cut(odd(200, 5, byte(Apply), 9)); err != nil || r.Took != 9*time.Microsecond {
		t.Errorf("%+v, %v", r, err)
	}
	for what, b := range map[string][]byte{
		"a stage twice": odd(byte(Apply), 9, byte(Apply), 9), "a stage without its time": odd(byte(Apply)),
		"a year":  odd(append([]byte{byte(Apply)}, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f)...),
		"nothing": {prefixRecord}, "too short": {prefixRecord, 9, 1},
	} {
		if _, r, err := Cut(b); err == nil {
			t.Errorf("%s: %+v", what, r)
		}
	}
}

func FuzzCut(f *testing.F) {
	f.Add(sample().Before([]byte{3, 0}))
	f.Add([]byte{3, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		answer, r, err := Cut(b)
		if err != nil || r == nil {
			return
		}
		again, same, err := Cut(r.Before(answer))
		if err != nil || !bytes.Equal(again, answer) || !reflect.DeepEqual(same, r) {
			t.Errorf("%x: %+v, then %+v, %v", b, r, same, err)
		}
	})
}

// cause tells how a request went that took so long, and returns what Slow says of it.
func cause(t *testing.T, took time.Duration, tell func(c *Call)) Slow {
	t.Helper()
	var s Slow
	synctest.Test(t, func(t *testing.T) {
		watch := clock.StartStopwatch()
		c := NewCall(t.Context(), watch, false)
		tell(c)
		if left := took - watch.Elapsed(); left > 0 {
			time.Sleep(left)
		}
		s, _ = c.Slow(1, watch.Elapsed())
	})
	return s
}

// Each stage is named when it takes longest, with the range, the node and the transaction, and the parts add up.
func TestTheLongestStageIsNamed(t *testing.T) {
	at := func(s Stage, change ...func(*Record)) func(*Call) {
		return func(c *Call) {
			r := &Record{Range: 7, Node: 2, Took: 420 * time.Millisecond}
			r.Spent[Queued], r.Spent[s] = 8*time.Millisecond, 412*time.Millisecond
			if s == Queued {
				r.Took = 412 * time.Millisecond
			}
			for _, f := range change {
				f(r)
			}
			c.Note(r)
			c.Note(&Record{Range: 8, Node: 3, Took: 60 * time.Millisecond}) // a range that was quicker
		}
	}
	short := func(n keyspace.NodeID) *Record {
		r := &Record{Range: 7, Node: n, Took: 69 * time.Millisecond}
		r.Spent[Evaluation] = r.Took
		return r
	}
	for _, c := range []struct {
		want string
		tell func(*Call)
	}{
		{"queued behind other requests of range 7 for 412 ms", at(Queued)},
		{"evaluation in range 7: 412 ms", at(Evaluation)},
		{"waited 412 ms for a write before it in range 7", at(Parked)},
		{"waited 412 ms for the lock of transaction 5.1.2.3/1 in range 7", at(Blocked, func(r *Record) { r.Lock = "5.1.2.3/1" })},
		{"waited 412 ms for the registration of a lease in range 7", at(Blocked)},
		{"queued behind the batch before it in range 7 for 412 ms", at(Batch)},
		{"waited 412 ms for a revision in range 7", at(Revision)},
		{"waited 412 ms until a write before it was applied in range 7", at(Held)},
		{"node 2 asked a quorum of range 7 for 412 ms whether it still leads", at(Confirming)},
		{"quorum: 412 ms in range 7", at(Quorum)},
		{"quorum: node 3 last, 412 ms in range 7", at(Quorum, func(r *Record) { r.Last = 3 })},
		{"quorum: the disk of node 2 last, 412 ms in range 7", at(Quorum, func(r *Record) { r.Last = 2 })},
		{"disk of node 2: 412 ms later than a quorum of range 7", at(Disk)},
		{"applied 412 ms after its commit in range 7 on node 2", at(Apply)},
		{"bus: 431 ms to node 2 and back", func(c *Call) { c.Note(short(2)) }},
		{"the gateway itself: 431 ms", func(c *Call) { c.Note(short(1)) }},
		{"the gateway itself: 500 ms", func(*Call) {}},
		{"bus to node 5, or the gateway: 500 ms, unless that node has more slow requests than it records", func(c *Call) { c.Asked(5) }},
		{"bus to node 5, or the gateway: 431 ms, unless that node has more slow requests than it records", func(c *Call) {
			c.Note(short(1))
			c.Asked(5)
		}},
		{"bus: 431 ms to node 2 and back", func(c *Call) {
			c.Asked(2)
			c.Note(short(2))
		}},
		{"node 1 has more slow requests than it records: 500 ms in a range of it, or the gateway", func(c *Call) { c.Asked(1) }},
		{"waited 300 ms for the current revision: no leader", func(c *Call) { c.Waited(300*time.Millisecond, errors.New("no leader")) }},
		{"waited 300 ms for the current revision", func(c *Call) { c.Waited(300*time.Millisecond, nil) }},
		{"no leader known for range 9 for 400 ms (2 attempts, the last: not leader at node 3)", func(c *Call) {
			c.Retry(9, 2, false, "busy")
			time.Sleep(400 * time.Millisecond)
			c.Retry(9, 3, true, "not leader")
		}},
		{"sent again to range 9 for 400 ms (1 attempt, the last: wrong range at node 3)", func(c *Call) {
			time.Sleep(400 * time.Millisecond)
			c.Retry(9, 3, false, "wrong range")
		}},
		{"no answer for range 9 from node 3 for 500 ms", func(c *Call) { c.Silent(9, 3) }},
	} {
		s := cause(t, 500*time.Millisecond, c.tell)
		if s.Cause != c.want {
			t.Errorf("%q, want %q", s.Cause, c.want)
		}
		if s.sum() != s.Took {
			t.Errorf("%s: the parts %v add up to %v of %v", c.want, s.Parts, s.sum(), s.Took)
		}
	}
	if s := cause(t, 80*time.Millisecond, func(*Call) {}); s.Cause != "no stage is known that took longer than 50 ms" {
		t.Errorf("a request that was slow nowhere: %q", s.Cause)
	}
}

// A request that another node has given up is told by the leader.
func TestALeaderTellsOfARequestThatWasGivenUp(t *testing.T) {
	r := &Record{Range: 7, Node: 2, Took: 5 * time.Second, Lock: "5.1.2.3/1"}
	r.Spent[Blocked] = 5 * time.Second
	s := r.Alone("put")
	if s.Method != "put" || s.Range != 7 || s.Took != 5*time.Second || s.Cause != "waited 5000 ms for the lock of transaction 5.1.2.3/1 in range 7" || len(s.Parts) != 1 {
		t.Errorf("%+v", s)
	}
}

// Whoever serves a request finds its Call in the context, in the process's own work there is none, and that takes
// everything.
func TestACallIsFoundInItsContext(t *testing.T) {
	c := NewCall(t.Context(), clock.StartStopwatch(), true)
	permitted := keyspace.WithPermit(c, keyspace.PermitAt(4))
	if permitted != context.Context(c) {
		t.Error("a permit takes a context of its own")
	}
	ctx, cancel := context.WithCancel(permitted)
	defer cancel()
	if p, ok := keyspace.PermitOf(ctx); Of(ctx) != c || !ok || p != keyspace.PermitAt(4) || !Of(ctx).Traced() {
		t.Errorf("%v, permit %d %t", Of(ctx), p, ok)
	}
	again := keyspace.WithPermit(permitted, keyspace.PermitAt(9))
	if p, _ := keyspace.PermitOf(again); p != keyspace.PermitAt(9) || Of(again) != c {
		t.Errorf("a second permit: %d", p)
	}
	if p, _ := keyspace.PermitOf(permitted); p != keyspace.PermitAt(4) {
		t.Errorf("a second permit has changed the first: %d", p)
	}
	if Of(c.In(context.Background())) != c {
		t.Error("work that goes on without the client is not the request's")
	}
	none := Of(t.Context())
	none.Note(sample())
	none.Retry(1, 1, true, "x")
	none.Silent(1, 1)
	none.Asked(1)
	none.Waited(time.Second, nil)
	if none.Traced() || none.In(ctx) != ctx {
		t.Error("nobody's request is traced")
	}
	if s, records := none.Slow(1, time.Second); s.Took != time.Second || len(records) > 0 {
		t.Errorf("%+v", s)
	}
}

// A call keeps the longest of its records, whatever goroutine brings them.
func TestACallKeepsTheLongestRecords(t *testing.T) {
	c := NewCall(t.Context(), clock.StartStopwatch(), false)
	var wg sync.WaitGroup
	for i := range 4 * maxRecords {
		wg.Go(func() { c.Note(&Record{Range: keyspace.RangeID(i), Took: time.Duration(i)}) })
	}
	wg.Wait()
	_, records := c.Slow(1, time.Second)
	if len(records) != maxRecords {
		t.Fatalf("%d records", len(records))
	}
	for _, r := range records {
		if r.Took < 3*maxRecords {
			t.Errorf("kept one of %d, of 0 to %d", r.Took, 4*maxRecords)
		}
	}
}

// The ring keeps the newest requests.
func TestRing(t *testing.T) {
	var r Ring
	const all = ringLength + 10
	for i := range all {
		r.Add(Slow{Unix: int64(i)})
	}
	kept := r.All()
	seen := map[int64]bool{}
	for _, s := range kept {
		seen[s.Unix] = true
	}
	for i := int64(all - ringLength); i < all; i++ {
		if !seen[i] {
			t.Errorf("%d is missing", i)
		}
	}
	if len(kept) != ringLength {
		t.Errorf("%d are kept", len(kept))
	}
}

// A request that nothing was noted of takes no memory beyond its Call, which takes the place of the permit's context.
func TestAFastCallTakesOneAllocation(t *testing.T) {
	parent, watch := t.Context(), clock.StartStopwatch()
	var ctx context.Context
	if n := testing.AllocsPerRun(100, func() { ctx = keyspace.WithPermit(NewCall(parent, watch, false), keyspace.PermitAt(1)) }); n != 1 {
		t.Errorf("%v allocations", n)
	}
	if _, ok := keyspace.PermitOf(ctx); !ok {
		t.Error("no permit")
	}
}
