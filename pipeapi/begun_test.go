package pipeapi

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// TestBegunHaveNoWorker: what is begun by the reader has no worker, whether it is answered at once or later, and one answer.
func TestBegunHaveNoWorker(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("here/slow")
		var ops []*pipepb.Operation
		for tag := range uint64(100) {
			ops = append(ops, put(tag, "here/slow"), put(1000+tag, "here/k"))
		}
		s.send(t, ops...)
		got := s.answers(t, 100)
		for tag := range uint64(100) {
			if got[1000+tag].GetPut().GetHeader().GetRevision() != 7 {
				t.Error(got[1000+tag])
			}
		}
		synctest.Wait()
		release()
		got = s.answers(t, 100)
		for tag := range uint64(100) {
			if got[tag].GetPut().GetHeader().GetRevision() != 7 {
				t.Error(got[tag])
			}
		}
		synctest.Wait()
		if n := r.waiting.Load(); n != 0 {
			t.Errorf("there are %d workers", n)
		}
		if begun, waited := r.ops.starts(); begun != 200 || waited != 0 {
			t.Errorf("%d are begun, %d waited for", begun, waited)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestBegunAreCancelled: what is begun ends by its tag and by its time, to the millisecond, and is answered once: what its range says
// later is nobody's. Its place in the window, and its tag, are free again.
func TestBegunAreCancelled(t *testing.T) {
	bubble(t, func(o *Options) { o.WindowOperations = 2 }, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("here/slow")
		s.send(t, put(1, "here/slow"), put(2, "here/slow"))
		s.frame(t, &pipepb.ClientFrame{Cancels: []uint64{1, 1}})
		if got := s.answers(t, 1); codes.Code(got[1].GetError().GetCode()) != codes.Canceled {
			t.Error(got)
		}
		for _, timeout := range []time.Duration{time.Millisecond, 2 * patience, 1500 * time.Millisecond} {
			timed := put(1, "here/slow")
			timed.TimeoutMs = uint32(timeout.Milliseconds())
			begin := time.Now()
			s.send(t, timed)
			if got := s.answers(t, 1); codes.Code(got[1].GetError().GetCode()) != codes.DeadlineExceeded || time.Since(begin) != timeout {
				t.Error(timeout, got, time.Since(begin))
			}
		}
		release()
		if got := s.answers(t, 1); got[2].GetPut() == nil {
			t.Error(got)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestBegunThatLast: what lasts long has a worker that waits for it, and one only, also if it comes while others are watched.
func TestBegunThatLast(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("here/slow")
		s.send(t, put(1, "here/slow"))
		time.Sleep(patience / 2)
		s.send(t, put(2, "here/slow"))
		time.Sleep(patience)
		if _, waited := r.ops.starts(); waited != 0 {
			t.Errorf("%d are waited for too early", waited)
		}
		time.Sleep(10 * patience)
		s.send(t, put(3, "here/slow"))
		time.Sleep(10 * patience)
		if _, waited := r.ops.starts(); waited != 3 {
			t.Errorf("%d of 3 are waited for", waited)
		}
		release()
		s.answers(t, 3)
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestBegunWithoutTheirClient: with the client what was begun ends, though nobody answers it. An answer that comes after the pipe is
// nobody's, and nothing is left.
func TestBegunWithoutTheirClient(t *testing.T) {
	for name, over := range map[string]func(*fakeStream){
		"gone": func(s *fakeStream) { s.cancel() },
		"bad":  func(s *fakeStream) { s.in <- []byte{0xff} },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, nil, func(t *testing.T, r *rig) {
				s := r.pipe()
				release := r.ops.hold("here/slow")
				for tag := range uint64(50) {
					s.send(t, put(tag, "here/slow"), put(100+tag, "here/k"))
				}
				if name == "bad" { // who takes nothing is told nothing
					s.answers(t, 50)
				}
				synctest.Wait()
				over(s)
				if err := <-s.ended; err == nil {
					t.Error("the pipe ended well")
				}
				release()
				synctest.Wait()
			})
		})
	}
}

// TestBegunCount: what is begun counts in the window, and who ignores that loses the pipe.
func TestBegunCount(t *testing.T) {
	bubble(t, func(o *Options) { o.WindowOperations = 3 }, func(t *testing.T, r *rig) {
		s := r.pipe()
		release := r.ops.hold("here/slow")
		defer release()
		s.send(t, put(1, "here/slow"), put(2, "here/slow"), put(3, "here/slow"))
		s.send(t, put(4, "here/k"))
		if err := <-s.ended; status.Code(err) != codes.ResourceExhausted {
			t.Error(err)
		}
		if begun, _ := r.ops.starts(); begun != 3 {
			t.Errorf("%d are begun", begun)
		}
	})
}

// TestBegunThatFail: an error is no answer before a worker has seen to it: it may try on. The worker asks for the place too, which
// what is answered here needs not.
func TestBegunThatFail(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		s := r.pipe()
		r.ops.places = map[string]*pipepb.Place{"here/k": {Node: 5}, "here/fails": {Node: 6}}
		release := r.ops.hold("here/fails/slow")
		ops := []*pipepb.Operation{put(1, "here/k"), put(2, "here/fails"), put(3, "here/fails/slow")}
		for _, op := range ops {
			op.Locate = true
		}
		s.send(t, ops...)
		got := s.answers(t, 2)
		if got[1].GetPut() == nil || got[1].GetPlace() != nil || got[2].GetPut() == nil || got[2].GetPlace().GetNode() != 6 {
			t.Error(got)
		}
		release()
		if got := s.answers(t, 1); got[3].GetPut() == nil {
			t.Error(got)
		}
		if _, waited := r.ops.starts(); waited != 2 {
			t.Errorf("%d of 2 are waited for", waited)
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
}

// TestBegunNeedRoom: while the client takes nothing, nothing is begun.
func TestBegunNeedRoom(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		ops, err := p.admitted(put(1, "here/k"), put(2, "here/k"), put(3, "here/k"))
		if err != nil {
			t.Fatal(err)
		}
		begun := func(want int, when string) {
			t.Helper()
			synctest.Wait()
			if got, _ := r.ops.starts(); got != want {
				t.Errorf("%d operations are begun %s, want %d", got, when, want)
			}
		}
		ops[0].begin()
		begun(1, "with room")
		p.mu.Lock()
		p.again++ // an answer waits for room
		p.mu.Unlock()
		ops[1].begin()
		begun(1, "without room")
		p.mu.Lock()
		p.again--
		p.room.Broadcast()
		p.mu.Unlock()
		ops[2].begin()
		begun(2, "with room again")
	})
}

// TestBegunAtTheEnd: an operation that is begun while its pipe ends is ended with it, whichever comes first.
func TestBegunAtTheEnd(t *testing.T) {
	r := newRig(t, nil)
	defer r.stop()
	release := r.ops.hold("here/slow")
	defer release()
	for i := range 200 {
		s := r.pipe()
		s.send(t, put(1, "here/slow"), put(2, fmt.Sprintf("here/%d", i)), put(3, "here/slow"))
		s.cancel()
		if err := <-s.ended; err == nil {
			t.Fatal("the pipe ended well")
		}
	}
}

// TestBegunWhileItIsCancelled: who cancels an operation while the reader begins it finds nothing to give up yet. It ends all the same.
func TestBegunWhileItIsCancelled(t *testing.T) {
	bubble(t, nil, func(t *testing.T, r *rig) {
		p := newPipe(r.Service, &fakeStream{ctx: t.Context()})
		defer p.end()
		release := r.ops.hold("here/slow")
		defer release()
		ops, err := p.admitted(put(1, "here/slow"))
		if err != nil {
			t.Fatal(err)
		}
		r.ops.beginning = func() { p.cancelAll([]uint64{1}) }
		ops[0].begin()
		synctest.Wait()
		f, n := p.take()
		f.free()
		if n != 1 {
			t.Error("it is not answered")
		}
	})
}

// BenchmarkBegun: what an operation costs here that is begun and answered at once.
func BenchmarkBegun(b *testing.B) {
	for _, key := range []string{"here/k", "k"} {
		b.Run(key, func(b *testing.B) {
			r := newRig(b, nil)
			defer r.stop()
			p := newPipe(r.Service, &fakeStream{ctx: b.Context()})
			defer p.end()
			frame, err := proto.Marshal(&pipepb.ClientFrame{Operations: []*pipepb.Operation{put(1, key)}})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				ops, err := p.receivedBytes(frame)
				if err != nil {
					b.Fatal(err)
				}
				ops[0].begin()
				<-p.wake
				f, _ := p.take()
				f.free()
			}
		})
	}
}
