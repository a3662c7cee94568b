package pipeline

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// onPool returns worlds whose pipelines share a running pool with two slots. The disk of the
// slow ones answers when it is told to.
func onPool(t *testing.T, slow, fast int) (p *Pool, disk chan struct{}, slows, fasts []*world) {
	t.Helper()
	p, disk = NewPool(clock.Virtual()), make(chan struct{})
	for i := range slow + fast {
		w := newWorld(t)
		w.shared.Pool = p
		if i < slow {
			w.disk = disk
			slows = append(slows, w)
		} else {
			fasts = append(fasts, w)
		}
	}
	p.Start(2)
	t.Cleanup(p.Stop)
	return p, disk, slows, fasts
}

func (w *world) sendPut(key string) *Call {
	w.t.Helper()
	c := w.send(&pb.PutRequest{Key: []byte(key), Value: []byte("v")})
	w.p.Schedule()
	return c
}

// finish settles and applies everything, and checks that the calls are answered.
func (w *world) finish(calls ...*Call) {
	w.t.Helper()
	for len(w.asks)+len(w.log) > 0 {
		for len(w.asks) > 0 {
			w.sequence(nil)
			synctest.Wait()
		}
		for len(w.log) > 0 {
			w.apply(true)
			synctest.Wait()
		}
	}
	for _, c := range calls {
		w.want("it is answered", c, nil)
	}
	w.empty()
}

// TestSlowReadsLendTheirSlots: passes that wait for the disk hold no slot for the processor. The
// writes of other ranges go on, for as long as the disk may take and however many wait.
func TestSlowReadsLendTheirSlots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, disk, slows, fasts := onPool(t, 10, 3)
		calls := make([]*Call, len(slows))
		for i, w := range slows {
			calls[i] = w.sendPut("cold")
		}
		for round := range 5 {
			time.Sleep(20 * lendAfter)
			for i, w := range fasts {
				c := w.sendPut(fmt.Sprint("warm", round))
				time.Sleep(2 * lendAfter)
				synctest.Wait()
				if len(w.asks) != 1 {
					t.Fatalf("round %d: range %d waits for the disks of others", round, i)
				}
				w.finish(c)
			}
		}
		for _, w := range slows {
			if len(w.asks) > 0 {
				t.Fatal("it has not waited for the disk")
			}
		}
		close(disk)
		synctest.Wait()
		for i, w := range slows {
			w.finish(calls[i])
		}
		if p.busy != 0 {
			t.Errorf("%d slots are taken and nothing runs", p.busy)
		}
	})
}

// TestDiskWorkersAreBounded: only so many passes wait for the disk at a time. The others have
// their turn when it answers.
func TestDiskWorkersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, disk, slows, fasts := onPool(t, diskWorkers+2, 1)
		var calls []*Call
		for _, w := range slows {
			calls = append(calls, w.sendPut("cold"))
		}
		time.Sleep(time.Second)
		c := fasts[0].sendPut("warm")
		time.Sleep(time.Second)
		synctest.Wait()
		if len(fasts[0].asks) != 0 {
			t.Fatalf("more than %d passes run", diskWorkers+2)
		}
		disk <- struct{}{}
		synctest.Wait()
		fasts[0].finish(c)
		close(disk)
		synctest.Wait()
		for i, w := range slows {
			w.finish(calls[i])
		}
		if p.busy != 0 {
			t.Errorf("%d slots are taken and nothing runs", p.busy)
		}
	})
}

// TestQuickReadsLendNothing: passes that keep the processor busy hold their slots. No more
// than the slots run at a time.
func TestQuickReadsLendNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, disk, slows, fasts := onPool(t, 2, 1)
		var calls [2][]*Call
		for range 50 {
			for i, w := range slows {
				calls[i] = append(calls[i], w.sendPut(fmt.Sprint("k", len(calls[i]))))
			}
		}
		c := fasts[0].sendPut("warm")
		for range 49 {
			time.Sleep(lendAfter / 2)
			for range slows {
				disk <- struct{}{}
			}
			synctest.Wait()
			if p.busy != 2 || len(fasts[0].asks) > 0 {
				t.Fatalf("%d slots are taken by two passes that do not wait long", p.busy)
			}
		}
		close(disk)
		synctest.Wait()
		fasts[0].finish(c)
		for i, w := range slows {
			w.finish(calls[i]...)
		}
	})
}

// TestScanEndsTheTurn: a call is charged by the keys that it visits. A pass does not evaluate one
// scan after another beyond its turn.
func TestScanEndsTheTurn(t *testing.T) {
	w := newWorld(t, func(l *Limits) { l.EvaluateTurn = -1 })
	for i := range 100 {
		key := fmt.Sprintf("k%02d", i)
		w.store[key] = mvcc.Version{Key: []byte(key), Mod: 1, Create: 1, Version: 1}
	}
	w.rec.Span = keyspace.Span{}
	w.rec.Counted = false
	scan := &pb.TxnRequest{Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), Limit: 1}}},
		{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}},
	}}
	for range 3 {
		w.send(scan)
	}
	for i := range 3 {
		if again := w.p.evaluatePass(&worker{}); !again {
			t.Fatalf("pass %d ends by itself", i)
		}
		if w.p.sequencing == nil || w.counted != i+1 {
			t.Fatalf("%d calls are evaluated in %d passes", w.counted, i+1)
		}
	}
}

// TestSlowReadEndsTheTurn: a pass whose slot was lent does not begin another read behind the one that
// took its whole turn. What it has evaluated goes on.
func TestSlowReadEndsTheTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, disk, slows, fasts := onPool(t, 2, 1)
		w := slows[0]
		w.shared.Limits.EvaluateTurn = 5 * time.Millisecond
		w.disk = make(chan struct{})
		var calls []*Call
		for i := range 4 {
			calls = append(calls, w.sendPut(fmt.Sprint("cold", i)))
		}
		other := slows[1].sendPut("cold")
		warm := fasts[0].sendPut("warm")
		for i := range calls {
			time.Sleep(10 * time.Millisecond)
			w.disk <- struct{}{}
			synctest.Wait()
			if i == 0 {
				fasts[0].finish(warm)
				if len(w.asks) != 1 {
					t.Error("a pass goes on after a read of 10 ms, with a turn of 5 ms")
				}
			}
		}
		close(disk)
		synctest.Wait()
		w.finish(calls...)
		slows[1].finish(other)
		if p.busy != 0 {
			t.Errorf("%d slots are taken and nothing runs", p.busy)
		}
	})
}

// TestCallerEvaluates: a caller evaluates its call itself, where a slot is free and nothing else waits. It lends its
// slot as a worker does, evaluates nothing else then, and Stop waits for it.
func TestCallerEvaluates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, disk, slows, fasts := onPool(t, 3, 2)
		w := fasts[0]
		start := func(w *world) *Call {
			t.Helper()
			c := w.send(&pb.PutRequest{Key: []byte("k"), Value: []byte("v")})
			p.here(&w.p)
			return c
		}
		asks := func() int {
			p.mu.Lock() // before any worker that begins later
			defer p.mu.Unlock()
			return len(w.asks)
		}
		for range 3 {
			c := start(w)
			if asks() != 1 {
				t.Fatal("the call is evaluated by somebody else")
			}
			w.finish(c)
		}
		release := p.Hold()
		c := start(w)
		if asks() != 0 {
			t.Fatal("nobody may evaluate")
		}
		release()
		synctest.Wait()
		w.finish(c)

		// Two callers wait for the disk, and have all slots.
		slow := make([]*Call, 2)
		for i, s := range slows[:2] {
			go func() { slow[i] = start(s) }()
			synctest.Wait()
		}
		if p.busy != 2 {
			t.Fatalf("%d slots are taken by two callers", p.busy)
		}
		c = start(w)
		if asks() != 0 {
			t.Fatal("a third pass has a slot, and there are two")
		}
		time.Sleep(2 * lendAfter)
		synctest.Wait()
		w.finish(c)
		if p.busy != 0 {
			t.Fatalf("%d slots are taken, and all who run wait for the disk", p.busy)
		}
		// Nobody stands for a third caller that waits for the disk.
		third := start(slows[2])
		c = start(fasts[1])
		time.Sleep(2 * lendAfter)
		synctest.Wait()
		fasts[1].finish(c)

		stopped := make(chan struct{})
		go func() {
			p.Stop()
			close(stopped)
		}()
		time.Sleep(time.Second)
		select {
		case <-stopped:
			t.Error("Stop did not wait for those who evaluate")
		default:
		}
		close(disk)
		<-stopped
		synctest.Wait()
		for i, c := range append(slow, third) {
			slows[i].finish(c)
		}
		if p.busy != 0 || len(p.guests) != 2 {
			t.Errorf("%d slots are taken, and %d callers may evaluate", p.busy, len(p.guests))
		}
	})
}
