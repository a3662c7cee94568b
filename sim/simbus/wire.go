package simbus

import (
	"container/heap"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/transport"
)

// inFlightBytes is how much a lane's path holds before its writer waits, in place of
// QUIC's flow control.
const inFlightBytes = 1 << 20

// wire carries the frames of one lane from one end of a session to the other.
type wire struct {
	net     *Network
	d       direction
	buses   [2]*Bus // both ends
	class   transport.Class
	rand    *rand.Rand  // used by carry alone
	arrived wake.Signal // carry put a frame
	room    wake.Signal // deliver took one

	mu    sync.Mutex // guards what follows
	queue flights
	bytes int
	put   uint64
	last  clock.Time // when the last frame that keeps its order arrives
}

// flight is a frame under way.
type flight struct {
	at    clock.Time
	seq   uint64
	frame []byte
}

// flights is a heap by time of arrival, then by order of departure.
type flights []flight

func (f flights) Len() int { return len(f) }
func (f flights) Less(i, j int) bool {
	if f[i].at != f[j].at {
		return f[i].at < f[j].at
	}
	return f[i].seq < f[j].seq
}
func (f flights) Swap(i, j int) { f[i], f[j] = f[j], f[i] }
func (f *flights) Push(x any)   { *f = append(*f, x.(flight)) }
func (f *flights) Pop() any {
	old := *f
	x := old[len(old)-1]
	old[len(old)-1] = flight{}
	*f = old[:len(old)-1]
	return x
}

// errBroken ends a session by the fault of that name.
var errBroken = errors.New("simbus: session broken by a fault")

// carry takes batches from the lane and decides the fate of each frame.
func (w *wire) carry(from *transport.Session, l *transport.Lane) {
	for {
		b, ok := l.Take()
		if !ok {
			return
		}
		f := w.net.faultsOf(w.d)
		for frame := range transport.SplitFrames(b.Bytes()) {
			if !w.dispatch(from, &f, slices.Clone(frame)) {
				b.Done()
				return
			}
		}
		b.Done()
	}
}

// dispatch puts one frame on its way. It says whether the session goes on.
func (w *wire) dispatch(from *transport.Session, f *Faults, frame []byte) bool {
	s, r := &w.net.stats, w.rand
	if chance(r, f.Break) {
		s.broken.Add(1)
		from.End(errBroken)
		return false
	}
	delay := f.Delay.draw(r)
	if !transport.IsMessage(frame) {
		return w.send(from, delay, true, frame)
	}
	lost, twice, overtaken := chance(r, f.Loss), chance(r, f.Duplicate), chance(r, f.Reorder) && f.ReorderBy > 0
	again, back := f.Delay.draw(r), time.Duration(0)
	if overtaken {
		back = time.Duration(r.Int64N(int64(f.ReorderBy)))
	}
	if lost {
		s.lost.Add(1)
		return true
	}
	if overtaken {
		s.reordered.Add(1)
	}
	if twice {
		s.duplicated.Add(1)
		if !w.send(from, delay+again, false, slices.Clone(frame)) {
			return false
		}
	}
	return w.send(from, delay+back, !overtaken, frame)
}

func chance(r *rand.Rand, p float64) bool { return p > 0 && r.Float64() < p }

// send puts a frame under way once there is room.
func (w *wire) send(from *transport.Session, delay time.Duration, inOrder bool, frame []byte) bool {
	for {
		w.mu.Lock()
		if w.bytes == 0 || w.bytes+len(frame) <= inFlightBytes {
			break
		}
		w.mu.Unlock()
		select {
		case <-w.room:
		case <-from.Done():
			return false
		}
	}
	at := w.net.clock.Now().Add(delay)
	if inOrder {
		at = max(at, w.last)
		w.last = at
	}
	w.put++
	w.bytes += len(frame)
	heap.Push(&w.queue, flight{at, w.put, frame})
	w.mu.Unlock()
	w.arrived.Set()
	return true
}

// deliver passes frames to the receiving end when their time has come.
func (w *wire) deliver(to *transport.Session) {
	if !to.BeginRead(w.class) {
		return
	}
	defer to.EndRead(w.class)
	t := w.net.clock.NewTimer(time.Hour)
	defer t.Stop()
	for !ended(to) {
		st := w.net.path(w.d, w.buses)
		if st.gone {
			return
		}
		frame, wait := w.next(st.cut, st.held)
		if frame != nil {
			w.net.stats.delivered.Add(1)
			if to.Receive(w.class, frame) != nil {
				return
			}
			continue
		}
		t.Reset(wait)
		select {
		case <-t.C():
		case <-w.arrived:
		case <-st.changed:
		case <-to.Done():
		}
	}
}

// next returns the frame whose time has come, or the time until the next one.
func (w *wire) next(cut, held bool) ([]byte, time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) > 0 && !held {
		head := &w.queue[0]
		if wait := head.at.Sub(w.net.clock.Now()); wait > 0 {
			return nil, wait
		}
		drop := cut && transport.IsMessage(head.frame)
		if cut && !drop {
			break
		}
		frame := heap.Pop(&w.queue).(flight).frame
		w.bytes -= len(frame)
		w.room.Set()
		if !drop {
			return frame, 0
		}
		w.net.stats.cutOff.Add(1)
	}
	return nil, time.Hour
}
