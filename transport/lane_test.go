package transport

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
)

// TestLinger: a lane whose frames come alone stops lingering, retries now and then, and
// lingers again as soon as batches grow.
func TestLinger(t *testing.T) {
	var c linger
	waits := func(n, frames int) (waited int) {
		for range n {
			w := c.due()
			if w {
				waited++
			}
			c.note(frames, w)
		}
		return waited
	}
	if got := waits(aloneMax, 1); got != aloneMax {
		t.Errorf("waited %d times before it knew", got)
	}
	if got := waits(10*aloneRetry, 1); got != 10 {
		t.Errorf("waited %d times in vain, want 10", got)
	}
	if got := waits(1, 2); got > 1 || c.alone != 0 {
		t.Error("linger was not noticed")
	}
	if got := waits(aloneMax, 2); got != aloneMax {
		t.Errorf("waited %d times of %d with linger", got, aloneMax)
	}
}

// TestPast: of sixteen frames that come alone one takes the writer, which lingers then. If others came with it, all take the writer.
func TestPast(t *testing.T) {
	l := &Lane{tryWrite: func([]byte) error { return nil }}
	past := func() (n int) {
		for range 10 * aloneRetry {
			if l.linger.past() {
				n++
				continue
			}
			waited := l.lingers()
			if !waited {
				t.Error("the writer does not look whether frames come together")
			}
			l.linger.note(1, waited)
		}
		return n
	}
	if n := past(); n != 10*aloneRetry-aloneMax-6 {
		t.Errorf("%d of %d frames go past the writer, the first %d of which show that they come alone", n, 10*aloneRetry, aloneMax)
	}
	if n := past(); n != 10*(aloneRetry-1) {
		t.Errorf("%d of %d frames go past the writer", n, 10*aloneRetry)
	}
	l.linger.note(2, true)
	if l.linger.past() {
		t.Error("a frame goes past the writer, and they come together")
	}
}

// TestRoom: frames that wait gather in as few writes as 64 KiB allow, in their order,
// whatever memory the first of them got.
func TestRoom(t *testing.T) {
	for _, c := range []struct {
		frames []int // bytes of each
		chunks []int // bytes of each write
	}{
		{[]int{50}, []int{50}},
		{[]int{smallBytes, 1}, []int{smallBytes + 1}},
		{[]int{smallBytes / 2, smallBytes/2 + 1}, []int{smallBytes + 1}},
		{slices.Repeat([]int{500}, 100), []int{50_000}},
		{[]int{50, chunkBytes - 50, 1}, []int{chunkBytes, 1}},
		{[]int{50, chunkBytes - 49}, []int{50, chunkBytes - 49}},
		{[]int{50, chunkBytes, 50, 50}, []int{50, chunkBytes, 100}},
		{[]int{chunkBytes/2 + 1, 50}, []int{chunkBytes/2 + 1, 50}},
		{[]int{2 * maxPooledBytes, 50, 50}, []int{2 * maxPooledBytes, 100}},
	} {
		var l Lane
		var want, got []byte
		for i, n := range c.frames {
			frame := bytes.Repeat([]byte{byte(i)}, n)
			want = append(want, frame...)
			room := l.room(n)
			room.b = append(room.b, frame...)
		}
		var chunks []int
		for _, k := range l.queue {
			chunks, got = append(chunks, len(k.b)), append(got, k.b...)
			k.memory.done()
		}
		if !slices.Equal(chunks, c.chunks) || !bytes.Equal(got, want) {
			t.Errorf("frames of %d bytes became writes of %d, want %d", c.frames, chunks, c.chunks)
		}
	}
}

// TestLanesOfConnections: each lane of a session has one connection, the first, and all of a class say how many there are.
func TestLanesOfConnections(t *testing.T) {
	var m meetings
	one := m.enter(sessionKey{1})
	for _, step := range []struct {
		j    joining
		want bool
	}{
		{joining{class: ClassRaft, slot: 1, of: 4}, true},
		{joining{class: ClassRaft, slot: 1, of: 4}, false},
		{joining{class: ClassRaft, slot: 0, of: 1}, false},
		{joining{class: ClassRaft, slot: 0, of: 4}, true},
		{joining{class: ClassRequest, slot: 0, of: 1}, true},
		{joining{class: ClassRequest, slot: 1, of: 4}, false},
	} {
		if got := m.take(one, step.j); got != step.want {
			t.Errorf("connection %d of %d for %s: %t", step.j.slot, step.j.of, step.j.class, got)
		}
	}
}

// TestWriteNow: frames that come alone go past the writer, all but every sixteenth, and never past one another: not while the
// writer writes, nor where the carrier cannot take one. Once they come together they are the writer's again.
func TestWriteNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := poolEndpoint(t, 1<<20)
		s := blocked(t, e, 2)[0]
		lane := s.lanes[ClassRaft][0]
		var (
			out        []byte // the numbers of the frames, as they left
			past, full int
			would      error
			writing    = make(chan struct{}, 1000)
		)
		write := func(b []byte) {
			for ; len(b) > 0; b = b[lengthBytes+binary.BigEndian.Uint32(b):] {
				out = append(out, b[lengthBytes+binary.BigEndian.Uint32(b)-1])
			}
		}
		lane.setTryWrite(func(b []byte) error {
			if would != nil {
				full++
				return would
			}
			past++
			write(b)
			return nil
		})
		go func() {
			for {
				b, ok := lane.Take()
				if !ok {
					return
				}
				write(b.Bytes())
				<-writing
				b.Done()
			}
		}()
		defer s.End(ErrClosed)
		var sent []byte
		send := func(n int) {
			t.Helper()
			for range n {
				h := messageFrame(testSend)
				sent = append(sent, byte(len(sent)))
				if err := lane.enqueue(&h, sent[len(sent)-1:], false, nil); err != nil {
					t.Fatal(err)
				}
			}
		}
		alone := func(n int) {
			t.Helper()
			for range n {
				send(1)
				synctest.Wait()
				writing <- struct{}{}
				synctest.Wait()
				for len(writing) > 0 {
					<-writing
				}
			}
		}
		check := func(when string, wantPast int) {
			t.Helper()
			synctest.Wait()
			if past != wantPast || !bytes.Equal(out, sent) || lane.taken != lane.added || lane.metrics.queued.Load() != 0 {
				t.Fatalf("%s: %d of %d frames went past the writer, want %d; left %v, sent %v; %d bytes of %d taken, %d in the queues",
					when, past, len(sent), wantPast, out, sent, lane.taken, lane.added, lane.metrics.queued.Load())
			}
			past, out, sent = 0, nil, nil
		}

		alone(aloneMax)
		check("before it knows", 0)
		alone(10 * aloneRetry)
		if past < 9*(aloneRetry-1) {
			t.Fatalf("%d of %d frames went past the writer", past, len(sent))
		}
		check("alone", past)

		would = errors.New("full")
		alone(aloneRetry)
		if full == 0 {
			t.Fatal("nothing was tried")
		}
		check("a carrier that is full", 0)

		// The writer is in a write: what comes waits behind it.
		send(1)
		synctest.Wait()
		would = nil
		for past == 0 && lane.taken == lane.added { // until one is the writer's
			send(1)
		}
		before := past
		send(aloneRetry)
		for range aloneRetry {
			writing <- struct{}{}
		}
		synctest.Wait()
		for len(writing) > 0 {
			<-writing
		}
		check("behind the writer", before)
		alone(1)
		check("after some came together", 0)
	})
}
