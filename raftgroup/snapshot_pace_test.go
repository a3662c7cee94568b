package raftgroup

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// TestLimiterSteps: a limiter admits bytes step by step however many callers wait, and
// loses nothing of its rate while some do. It makes up for a pause by limiterBurst at
// most.
func TestLimiterSteps(t *testing.T) {
	const rate = 64 << 20
	for _, streams := range []int{1, 16} {
		t.Run(fmt.Sprint(streams), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := clock.Virtual()
				l := limiter{clock: c, perSecond: rate}
				time.Sleep(time.Minute)
				const over, slot = 2 * time.Second, limiterStep
				time.Sleep(slot - time.Duration(c.Now())%slot)
				began := time.Now()
				woke := map[time.Duration]bool{} // guarded by mu
				var mu sync.Mutex
				var slots [over / slot]int // bytes
				var wg sync.WaitGroup
				for range streams {
					wg.Go(func() {
						for {
							if err := l.wait(t.Context(), chunkBytes); err != nil {
								t.Error(err)
								return
							}
							at := time.Since(began) / slot
							if int(at) >= len(slots) {
								return
							}
							mu.Lock()
							slots[at] += chunkBytes
							woke[time.Since(began)] = true
							mu.Unlock()
						}
					})
				}
				wg.Wait()
				all := 0
				for i, n := range slots {
					all += n
					bound := int(int64(rate)*int64(slot)/int64(time.Second)) + chunkBytes
					if i == 0 {
						bound += int(int64(rate) * int64(limiterBurst) / int64(time.Second))
					}
					if n > bound {
						t.Errorf("%d bytes in the %v from %v on, bound %d", n, slot, time.Duration(i)*slot, bound)
					}
				}
				want := int(int64(rate) * int64(over) / int64(time.Second))
				if made := int(int64(rate) * int64(limiterBurst) / int64(time.Second)); all < want*99/100 || all > want*101/100+made {
					t.Errorf("%d bytes in %v, want %d and %d", all, over, want, made)
				}
				if len(woke) > len(slots) {
					t.Errorf("somebody woke at %d moments in %d steps", len(woke), len(slots))
				}
			})
		})
	}
}

// messageBus counts the messages of the streams opened over it.
type messageBus struct {
	Bus
	sent func(payload []byte)
}

type messageStream struct {
	transport.Stream
	sent func([]byte)
}

func (b *messageBus) OpenStream(ctx context.Context, to keyspace.NodeID, m transport.Method, first []byte) (transport.Stream, error) {
	s, err := b.Bus.OpenStream(ctx, to, m, first)
	if err != nil {
		return nil, err
	}
	return &messageStream{s, b.sent}, nil
}

func (s *messageStream) Send(ctx context.Context, p []byte) error {
	s.sent(p)
	return s.Stream.Send(ctx, p)
}

// TestCopyComesInFewMessages: a snapshot travels in messages of chunkBytes, whatever the
// block sizes of its tables.
func TestCopyComesInFewMessages(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const size = 2 << 20
		var mu sync.Mutex
		chunks, ends, bytes, large := 0, 0, 0, 0
		r := newRig(t, 3, func(c *Config) {
			c.Bus = &messageBus{c.Bus, func(p []byte) {
				mu.Lock()
				defer mu.Unlock()
				switch p[0] {
				case snapChunk:
					chunks, bytes, large = chunks+1, bytes+len(p)-1, max(large, len(p)-1)
				case snapTable:
					ends++
				}
			}}
		})
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		_, f := r.cutOffFollower(1, 5)
		r.heavy(1, size)
		f.start()
		r.equal(1)
		mu.Lock()
		defer mu.Unlock()
		if bytes < size || large != chunkBytes || chunks > bytes/chunkBytes+ends {
			t.Errorf("%d bytes of %d tables in %d messages, the largest of %d", bytes, ends, chunks, large)
		}
	})
}

// TestFetchesTakeTurns: the first fetchesAtOnce have their turn, and the others follow in
// order of arrival, whichever ends.
func TestFetchesTakeTurns(t *testing.T) {
	s := &snapshots{}
	var line []chan struct{}
	for range fetchesAtOnce + 4 {
		line = append(line, s.queue())
	}
	check := func(step string, want int) {
		t.Helper()
		for i, turn := range line {
			select {
			case <-turn:
				if i >= want {
					t.Errorf("%s: number %d of the line has its turn, of %d", step, i, want)
				}
			default:
				if i < want {
					t.Errorf("%s: number %d of the line has no turn, of %d", step, i, want)
				}
			}
		}
	}
	leave := func(i int) {
		s.leave(line[i])
		line = slices.Delete(line, i, i+1)
	}
	check("at first", fetchesAtOnce)
	leave(fetchesAtOnce + 1)
	check("one that waited leaves", fetchesAtOnce)
	leave(1)
	check("one that had its turn leaves", fetchesAtOnce)
	for len(line) > 1 {
		leave(0)
		check("the first leaves", min(fetchesAtOnce, len(line)))
	}
	leave(0)
	line = append(line, s.queue())
	check("one comes behind all", 1)
}

// copiesThatWait starts a node whose two copies wait because all turns are taken. waiting says how
// many do.
func copiesThatWait(r *rig) (snaps *snapshots, turns []chan struct{}, waiting func() int) {
	f := lagging(r)
	f.start()
	snaps = &f.host.snaps
	for range fetchesAtOnce {
		turns = append(turns, snaps.queue())
	}
	waiting = func() int {
		snaps.mu.Lock()
		defer snaps.mu.Unlock()
		return len(snaps.mu.fetches) - fetchesAtOnce
	}
	r.eventually("copies wait", 10*time.Second, func() bool { return waiting() == 2 })
	return snaps, turns, waiting
}

// TestCopyWaitsForItsTurn: a snapshot may wait for its turn longer than the stall
// timeout, and does not fail.
func TestCopyWaitsForItsTurn(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		snaps, turns, waiting := copiesThatWait(r)
		before := r.snapshotsFailed()
		time.Sleep(3 * stallTimeout)
		if n := waiting(); n != 2 {
			t.Errorf("%d copies wait, wanted 2", n)
		}
		if n := r.snapshotsFailed() - before; n > 0 {
			t.Errorf("%d snapshots failed while they waited", n)
		}
		for _, turn := range turns {
			snaps.leave(turn)
		}
		r.equal(1)
		r.equal(2)
	})
}

// TestWaitingCopyYields: a wal that is too long is not kept for a snapshot that waits for
// its turn. The snapshot begins anew, from a newer state.
func TestWaitingCopyYields(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		snaps, turns, waiting := copiesThatWait(r)
		l := r.leader(1)
		g := l.host.Group(1)
		at, _ := g.log.Base()
		r.write(1, "while it waits")
		r.must(l.eng.Flush(context.Background()))
		r.eventually("durable", time.Second, func() bool { return g.Status().DurableApplied == g.Status().Applied })
		g.w.flag(g, flagTruncate)
		synctest.Wait()
		if base, _ := g.log.Base(); base != at {
			t.Fatalf("truncated from %d to %d although the log is not too long", at, base)
		}
		before := r.snapshotsFailed()
		g.w.flag(g, flagCutOff)
		synctest.Wait()
		if base, _ := g.log.Base(); base != g.Status().Applied {
			t.Errorf("truncated to %d of %d", base, g.Status().Applied)
		}
		r.eventually("both wait again, after one failed at both its ends", 10*time.Second, func() bool { return waiting() == 2 && r.snapshotsFailed() == before+2 })
		for _, turn := range turns {
			snaps.leave(turn)
		}
		r.equal(1)
		r.equal(2)
	})
}

// TestWaitForTheTurnIsBounded: a receiver that sends keepalives for ever does not hold
// the sender's slot for ever.
func TestWaitForTheTurnIsBounded(t *testing.T) {
	long(t, "lasts many virtual minutes")
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		f := lagging(r)
		f.start()
		var told, ended atomic.Int64
		r.bus.set(func(*testBus) {
			f.end.stream[transport.MethodRaftSnapshot] = func(ctx context.Context, _ keyspace.NodeID, _ []byte, s transport.Stream) error {
				defer ended.Add(1)
				for {
					if err := s.Send(ctx, []byte{snapKeepalive}); err != nil {
						return err
					}
					told.Add(1)
					if err := clock.Sleep(ctx, f.host.cfg.Clock, keepaliveInterval); err != nil {
						return err
					}
				}
			}
		})
		r.eventually("they are told to wait", 10*time.Second, func() bool { return told.Load() >= 2 })
		time.Sleep(3 * stallTimeout)
		if n := ended.Load(); n > 0 {
			t.Errorf("%d copies were given up within %v", n, 3*stallTimeout)
		}
		r.eventually("both are given up", keepalivesMax*keepaliveInterval, func() bool { return ended.Load() >= 2 })
	})
}
