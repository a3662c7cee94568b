package transport

import (
	"bytes"
	"slices"
	"testing"
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
