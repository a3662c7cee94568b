package transport

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// poolEndpoint returns an endpoint with so many bytes for all peers. It does not give up peers that
// answer no pings.
func poolEndpoint(t testing.TB, bytes int64) *Endpoint {
	t.Helper()
	return newTestEndpoint(t, func(c *Config) { c.QueueBytes, c.PingInterval = bytes, time.Hour })
}

// blocked attaches both sessions of a peer whose carrier never takes anything.
func blocked(t testing.TB, e *Endpoint, id keyspace.NodeID) (sessions []*Session) {
	t.Helper()
	e.AddPeer(id)
	for _, k := range []Kind{KindMain, KindBulk} {
		s, err := e.Attach(SessionConfig{Peer: id, Boot: 9, Kind: k, MaxMessageBytes: 32 << 20, StreamWindowBytes: 1 << 16})
		if err != nil {
			t.Fatal(err)
		}
		sessions = append(sessions, s)
	}
	return sessions
}

// fill sends messages of so many bytes in each class until all of the peer's queues refuse one.
func fill(sessions []*Session, messageBytes int) {
	for _, s := range sessions {
		for _, l := range s.Lanes() {
			h := messageFrame(testSend)
			for l.enqueue(&h, make([]byte, messageBytes), false, nil) == nil {
				h = messageFrame(testSend)
			}
		}
	}
}

func queued(e *Endpoint) (bytes int64) {
	for c := range e.metrics.class {
		bytes += e.metrics.class[c].queued.Load()
	}
	return bytes
}

func heapBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// The full queues of 48 peers together stay within what all may take, whatever the size of the
// messages. Once the peers are gone, nothing is held.
func TestQueuesOfAllPeersAreBoundedTogether(t *testing.T) {
	for _, messageBytes := range []int{100, 40 << 10, 6 << 20} {
		t.Run(fmt.Sprint(messageBytes), func(t *testing.T) {
			const most = 200 << 20
			before := heapBytes()
			e := poolEndpoint(t, most)
			var all [][]*Session
			for id := range keyspace.NodeID(48) {
				all = append(all, blocked(t, e, id+2))
			}
			for _, sessions := range all {
				fill(sessions, messageBytes)
			}
			if got := queued(e); got > most || got < most/4 {
				t.Errorf("%d MiB wait for 48 blocked peers, of at most %d", got>>20, most>>20)
			}
			// A message of a little more than half a chunk leaves the rest of it empty.
			heap := heapBytes() - before
			t.Logf("%d MiB queued take %d MiB of heap", queued(e)>>20, heap>>20)
			if heap > 2*most {
				t.Errorf("%d MiB of heap for %d MiB that are queued", heap>>20, queued(e)>>20)
			}
			for _, sessions := range all {
				for _, s := range sessions {
					s.End(errGone)
				}
			}
			if got, used := queued(e), e.queues.beyond.Load(); got != 0 || used != 0 {
				t.Errorf("%d bytes are queued and %d of the pool taken when all sessions have ended", got, used)
			}
		})
	}
}

// However many peers are blocked, raft's data, requests and a put of 1.5 MiB pass to the next one,
// and each class keeps its floor.
func TestBlockedPeersDoNotStarveOthers(t *testing.T) {
	e := poolEndpoint(t, 200<<20)
	const peers = 48
	for id := range keyspace.NodeID(peers) {
		e.AddPeer(id + 2)
	}
	floor := e.queues.floor.Load()
	if floor < 256<<10 {
		t.Fatalf("a floor of %d bytes", floor)
	}
	for id := range keyspace.NodeID(peers) {
		sessions := blocked(t, e, id+2)
		for _, s := range sessions {
			for _, l := range s.Lanes() {
				h := messageFrame(testSend)
				if id == peers-1 && l.class != ClassControl {
					if err := l.enqueue(&h, make([]byte, 1600<<10), false, nil); err != nil {
						t.Errorf("a large message to the empty queue %s of a peer beside %d blocked ones: %v", l.class, id, err)
					}
					continue
				}
				for held := int64(0); held < floor-64<<10; held += 32 << 10 {
					if err := l.enqueue(&h, make([]byte, 30<<10), false, nil); err != nil {
						t.Fatalf("%d bytes to the queue %s of a peer beside %d blocked ones: %v", held, l.class, id, err)
					}
				}
			}
		}
		fill(sessions, 64<<10)
		fill(sessions, 1<<10)
	}
	if got := queued(e); got > 200<<20 {
		t.Errorf("%d MiB wait, of at most 200", got>>20)
	}
}

// A queue may be empty and still have to wait, for bytes that other peers hold. Their release wakes it.
func TestWaitForOthersBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := poolEndpoint(t, 8<<20)
		var all [][]*Session
		for id := range keyspace.NodeID(8) {
			all = append(all, blocked(t, e, id+2))
			fill(all[id], 64<<10)
		}
		s := blocked(t, e, 20)[0]
		waited := make(chan error, 1)
		go func() {
			h := messageFrame(testSend)
			waited <- s.lanes[ClassRequest][0].enqueueWait(context.Background(), &h, make([]byte, 3<<20))
		}()
		synctest.Wait()
		select {
		case err := <-waited:
			t.Fatalf("did not wait: %v", err)
		default:
		}
		for _, sessions := range all {
			for _, s := range sessions {
				s.End(errGone)
			}
		}
		if err := <-waited; err != nil {
			t.Error(err)
		}
	})
}

// The handlers of one peer's calls hold no more than its part; the calls of another peer run.
func TestHandlersAreBoundedByBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 24 << 20
		e := poolEndpoint(t, most)
		s, other := blocked(t, e, 2)[0], blocked(t, e, 3)[0]
		call := func(s *Session, id uint64, payload string) {
			if err := s.Receive(ClassRequest, encodeFrame(&frame{kind: frameCall, id: id, method: testCall, payload: []byte(payload)})); err != nil {
				t.Fatal(err)
			}
		}
		running := func(id keyspace.NodeID) int { return int(e.peer(id).handlers[0].Load()) }
		for id := range uint64(4000) {
			call(s, id+1, "wait")
		}
		synctest.Wait()
		if n := running(2); n < 200 || n*handlerBytes > most/3 {
			t.Errorf("%d handlers of one peer", n)
		}
		// What the handlers wait for passes beside them.
		h := messageFrame(testSend)
		if err := s.lanes[ClassRaft][0].enqueue(&h, make([]byte, 6<<20), false, nil); err != nil {
			t.Errorf("a large message of raft's beside as many handlers as there may be: %v", err)
		}
		call(other, 1, "wait")
		synctest.Wait()
		if n := running(3); n != 1 {
			t.Errorf("%d handlers of the other peer, want 1", n)
		}
		s.End(errGone)
		other.End(errGone)
		synctest.Wait()
		if used := e.handling.beyond.Load(); used != 0 {
			t.Errorf("%d bytes are held after the end", used)
		}
	})
}

// Small frames pass behind a full queue up to their own bound, and have it again when the queue was
// sent.
func TestForcedRoomComesBack(t *testing.T) {
	e := poolEndpoint(t, 1<<20)
	s := blocked(t, e, 2)[0]
	l := s.lanes[ClassRequest][0]
	for range 3 {
		fill([]*Session{s}, 1<<10)
		forced := 0
		for {
			h := messageFrame(testSend)
			if err := l.enqueue(&h, make([]byte, 1<<10), true, nil); err != nil {
				if !errors.Is(err, ErrQueueFull) {
					t.Fatal(err)
				}
				break
			}
			forced++
		}
		if forced < forcedBytes/1100 || forced > forcedBytes/1000 {
			t.Errorf("%d KiB pass behind the full queue, want about %d", forced, forcedBytes>>10)
		}
		for !l.budget.empty() {
			b, _ := l.Take()
			b.Done()
		}
	}
}

// The windows of all peers' streams together are half of QueueBytes, within what a stream needs.
func TestStreamWindows(t *testing.T) {
	for _, test := range []struct {
		total int64
		peers int
		want  int64
	}{
		{1 << 40, 2, maxStreamWindow},
		{100 << 20, 2, 100 << 20 / 2 / 20},
		{200 << 20, 48, 200 << 20 / 2 / 480},
		{10 << 20, 48, leastStreamWindow},
		{10 << 20, 0, 10 << 20 / 2 / 10},
	} {
		if got := streamWindow(&Config{QueueBytes: test.total}, 10, test.peers); got != test.want {
			t.Errorf("%d bytes, %d peers: %d, want %d", test.total, test.peers, got, test.want)
		}
	}
}
