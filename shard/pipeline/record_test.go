package pipeline

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
)

// timed runs a story of stages in virtual time.
func timed(t *testing.T, story func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.shared.Epoch = clock.StartStopwatch()
		time.Sleep(time.Hour) // the node has run for a while
		story(w)
	})
}

// come admits a request that comes now. record returns where its time went until then.
func (w *world) come(op proto.Message) (c *Call, record func() *stages.Record) {
	w.t.Helper()
	watch := clock.StartStopwatch()
	c = NewCall(context.Background(), &rangeapi.Request{Range: 7, Generation: 1, Op: op}, (*request)(&w.p), 100)
	c.come(&w.p, watch)
	if err := w.p.enqueue(c); err != nil {
		w.t.Fatal(err)
	}
	return c, func() *stages.Record { return w.p.Record(c, watch.Elapsed()) }
}

func (w *world) wantStages(r *stages.Record, want map[stages.Stage]time.Duration) {
	w.t.Helper()
	var sum time.Duration
	for s := range stages.Count {
		if r.Spent[s] != want[s] {
			w.t.Errorf("%s: %v, want %v", s, r.Spent[s], want[s])
		}
		sum += r.Spent[s]
	}
	if sum != r.Took || r.Range != 7 {
		w.t.Errorf("range %s: %v in all, %v together", r.Range, r.Took, sum)
	}
}

func put(key string) *pb.PutRequest { return &pb.PutRequest{Key: []byte(key), Value: []byte("v")} }

// A put waits for its turn, for the disk, for its revision, for a quorum, for the own disk and for being applied. Each
// has its time, and the quorum its last node.
func TestStagesOfAPut(t *testing.T) {
	timed(t, func(w *world) {
		c, record := w.come(put("a"))
		time.Sleep(10 * time.Millisecond)
		w.disk = make(chan struct{})
		time.AfterFunc(20*time.Millisecond, func() { close(w.disk) })
		w.pass()
		time.Sleep(30 * time.Millisecond)
		w.sequence(nil)
		time.Sleep(40 * time.Millisecond)
		w.commit = raftgroup.Commit{By: 3, Disk: 5 * time.Millisecond, Apply: 7 * time.Millisecond}
		w.apply(true)
		w.want("it is applied", c, nil)
		r := record()
		w.wantStages(r, map[stages.Stage]time.Duration{
			stages.Queued: 10 * time.Millisecond, stages.Evaluation: 20 * time.Millisecond, stages.Revision: 30 * time.Millisecond,
			stages.Quorum: 28 * time.Millisecond, stages.Disk: 5 * time.Millisecond, stages.Apply: 7 * time.Millisecond,
		})
		if r.Last != 3 {
			t.Errorf("node %s was last", r.Last)
		}
		w.empty()
	})
}

// A put behind a batch that has no revisions yet waits for that one, and then for its own.
func TestStagesBehindABatch(t *testing.T) {
	timed(t, func(w *world) {
		w.put("a")
		_, record := w.come(put("b"))
		w.pass()
		time.Sleep(30 * time.Millisecond)
		w.sequence(nil)
		time.Sleep(20 * time.Millisecond)
		w.sequence(nil)
		time.Sleep(time.Millisecond)
		w.wantStages(record(), map[stages.Stage]time.Duration{
			stages.Batch: 30 * time.Millisecond, stages.Revision: 20 * time.Millisecond, stages.Quorum: time.Millisecond,
		})
	})
}

// A put that met a lock says for whom it waited, also when it gave up.
func TestStagesBehindALock(t *testing.T) {
	timed(t, func(w *world) {
		l := w.lock("a")
		c, record := w.come(put("a"))
		w.pass()
		w.open("the lock stands", c, placeBlocked)
		time.Sleep(50 * time.Millisecond)
		r := record()
		w.wantStages(r, map[stages.Stage]time.Duration{stages.Blocked: 50 * time.Millisecond})
		if r.Lock != l.Name.String() {
			t.Errorf("the lock of %q, want %s", r.Lock, l.Name)
		}
		gone, goneRecord := w.come(put("a"))
		w.pass()
		time.Sleep(50 * time.Millisecond)
		w.under(func(out *Answers) { w.p.Leave(gone, context.DeadlineExceeded, out) })
		w.want("it has given up", gone, kverror.DeadlineExceeded)
		w.wantStages(goneRecord(), map[stages.Stage]time.Duration{stages.Blocked: 50 * time.Millisecond})
		w.under(func(*Answers) { w.unlock(l) })
		w.pass()
		w.settle(nil)
		w.apply(true)
		w.want("the lock has ended", c, nil)
		w.wantStages(record(), map[stages.Stage]time.Duration{stages.Blocked: 100 * time.Millisecond})
		w.empty()
	})
}

// A request that asks for a revision under way waits for it, and counts its turns. One that has seen a write waits until
// that is applied. One without a lease waits for a quorum too.
func TestStagesBehindAWrite(t *testing.T) {
	timed(t, func(w *world) {
		a := w.put("a")
		_, parked := w.come(ifMod("a", 2))
		held, heldRecord := w.come(see("a"))
		w.pass()
		time.Sleep(20 * time.Millisecond)
		w.settle(nil)
		if r := parked(); r.Spent[stages.Parked] != 20*time.Millisecond || r.Turns != 1 {
			t.Errorf("%v, %d turns", r.Spent, r.Turns)
		}
		w.settle(nil)
		w.open("its write is not applied", held, placeHeld)
		time.Sleep(30 * time.Millisecond)
		w.wantStages(heldRecord(), map[stages.Stage]time.Duration{stages.Batch: 20 * time.Millisecond, stages.Held: 30 * time.Millisecond})
		w.lease = false
		w.apply(true)
		w.want("its entry is applied", a, nil)
		time.Sleep(5 * time.Millisecond)
		w.wantStages(heldRecord(), map[stages.Stage]time.Duration{
			stages.Batch: 20 * time.Millisecond, stages.Parked: 30 * time.Millisecond, stages.Confirming: 5 * time.Millisecond,
		})
		for len(w.reads) > 0 {
			f := w.reads[0]
			w.reads = w.reads[1:]
			f(1, nil)
		}
		w.want("a quorum has confirmed", held, nil)
	})
}

// BenchmarkStages is what each put pays so that a slow one can say where its time went. That is the Call of its gateway, and the
// stages at its leader. Their times are the readings of the clock that its batch takes.
func BenchmarkStages(b *testing.B) {
	ctx, p := b.Context(), &Pipeline{shared: &Shared{Epoch: clock.StartStopwatch()}}
	for at := time.Duration(0); b.Loop(); {
		watch := clock.StartStopwatch()
		gateway := stages.NewCall(ctx, watch, false)
		c := &Call{}
		c.come(p, watch)
		for s := stages.Queued + 1; s <= stages.Quorum; s++ {
			at += 20 * time.Microsecond
			c.enter(s, at)
		}
		if watch.Elapsed() > stages.Threshold {
			gateway.Note(p.Record(c, watch.Elapsed()))
		}
		kept = c
	}
}

// kept has the compiler make the calls of a benchmark.
var kept *Call
