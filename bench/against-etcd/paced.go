package main

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/bench/against-etcd/rawwatch"
)

// A pace describes a load of puts: their keys and clients.
type pace struct {
	endpoints      []string
	conns, clients int
	keys           [][]byte
	// pick draws the number of a key.
	pick  func(*rand.Rand) int
	value int // bytes
	// rate is the rate of all clients, a second, independent of the puts under way; 0 is
	// a closed loop.
	rate float64
}

// pacedDeadline bounds each put. No client retries a failed put.
const pacedDeadline = 10 * time.Second

// A pacedLoad makes the puts of a pace and records every one.
type pacedLoad struct {
	pace
	began  time.Time
	drawn  atomic.Int64
	hands  []*hand
	dialed []*grpc.ClientConn
	cancel context.CancelFunc
	work   sync.WaitGroup
}

// A hand is one client of a load: it makes one put at a time.
type hand struct {
	kv     pb.KVClient
	random *rand.Rand
	mu     sync.Mutex
	puts   []put     // guarded by mu: the acknowledged ones, ascending by due
	failed []failure // guarded by mu
}

// put is an acknowledged put.
type put struct {
	due  time.Duration // since the load began
	took uint32        // µs from then to the answer
	key  uint32
}

func (p *put) acked() time.Duration { return p.due + time.Duration(p.took)*time.Microsecond }

// failure is a put that was not acknowledged.
type failure struct {
	due time.Duration
	err string
}

// noise is the source of values. Values do not compress, so the stored size is the size
// of the puts.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 8*mebibyte)
	_, _ = crand.Read(b) // it never fails
	return b
})

// cut returns a value, which nobody changes.
func cut(r *rand.Rand, size int) []byte {
	at := r.IntN(len(noise()) - size)
	return noise()[at : at+size]
}

// start begins the load; stop ends it.
func (p pace) start(ctx context.Context) (*pacedLoad, error) {
	if p.value >= len(noise()) || p.conns < 1 || p.clients < p.conns || len(p.keys) == 0 {
		return nil, fmt.Errorf("%d clients on %d connections put values of %d bytes to %d keys: no less than one of each, and at most %d bytes",
			p.clients, p.conns, p.value, len(p.keys), len(noise())-1)
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &pacedLoad{pace: p, cancel: cancel}
	for i := range p.conns {
		conn, err := rawwatch.Connect(p.endpoints[i%len(p.endpoints)])
		if err != nil {
			l.stop()
			return nil, err
		}
		l.dialed = append(l.dialed, conn)
	}
	l.began = time.Now()
	for i := range p.clients {
		h := &hand{kv: pb.NewKVClient(l.dialed[i%p.conns]), random: rand.New(rand.NewPCG(1, uint64(i)))}
		l.hands = append(l.hands, h)
		l.work.Go(func() { l.run(ctx, h) })
	}
	return l, nil
}

// stop ends the load and waits for it. It may be called twice.
func (l *pacedLoad) stop() {
	l.cancel()
	l.work.Wait()
	for _, conn := range l.dialed {
		_ = conn.Close() // nothing is under way any more
	}
	l.dialed = nil
}

func (l *pacedLoad) now() time.Duration { return time.Since(l.began) }

// run makes a hand's puts until ctx is done.
func (l *pacedLoad) run(ctx context.Context, h *hand) {
	for ctx.Err() == nil {
		due := l.now()
		if l.rate > 0 {
			at := time.Duration(float64(l.drawn.Add(1)-1) / l.rate * float64(time.Second))
			if sleep(ctx, at-due) != nil {
				return
			}
			due = at
		}
		l.put(ctx, h, due)
	}
}

func (l *pacedLoad) put(ctx context.Context, h *hand, due time.Duration) {
	key := l.pick(h.random)
	call, cancel := context.WithTimeout(ctx, pacedDeadline)
	_, err := h.kv.Put(call, &pb.PutRequest{Key: l.keys[key], Value: cut(h.random, l.value)})
	cancel()
	took := l.now() - due
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		h.puts = append(h.puts, put{due, uint32(min(took.Microseconds(), math.MaxUint32)), uint32(key)})
	case ctx.Err() == nil:
		h.failed = append(h.failed, failure{due, err.Error()})
	}
}

// each calls f with the acknowledged puts that were due between two times.
func (l *pacedLoad) each(from, to time.Duration, f func(*put)) {
	for _, h := range l.hands {
		h.mu.Lock()
		i, _ := slices.BinarySearchFunc(h.puts, from, func(p put, t time.Duration) int { return int(p.due - t) })
		for ; i < len(h.puts) && h.puts[i].due < to; i++ {
			f(&h.puts[i])
		}
		h.mu.Unlock()
	}
}

// p99 is the 99th percentile of the puts that were due between two times.
func (l *pacedLoad) p99(from, to time.Duration) time.Duration { return quantile(l.took(from, to), 990) }

// took is how long each of the puts took that were due between two times.
func (l *pacedLoad) took(from, to time.Duration) (took []time.Duration) {
	l.each(from, to, func(p *put) { took = append(took, p.acked()-p.due) })
	return took
}

// madeRate is how many of the puts that were due between two times were acknowledged, a
// second.
func (l *pacedLoad) madeRate(from, to time.Duration) float64 {
	n := 0
	l.each(from, to, func(*put) { n++ })
	return float64(n) / (to - from).Seconds()
}

// gap is the longest time between two times without an acknowledged put to the keys
// with numbers from low to below high.
func (l *pacedLoad) gap(low, high int, from, to time.Duration) time.Duration {
	var acks []time.Duration
	// A put that was due long before may be answered only now.
	l.each(from-pacedDeadline, to, func(p *put) {
		if int(p.key) >= low && int(p.key) < high {
			acks = append(acks, p.acked())
		}
	})
	slices.Sort(acks)
	return longestGap(acks, from, to).Length
}

// failures counts the failed puts that were due between two times, by error text.
func (l *pacedLoad) failures(from, to time.Duration) (n int, err error) {
	texts := map[string]int{}
	for _, h := range l.hands {
		h.mu.Lock()
		for _, f := range h.failed {
			if f.due >= from && f.due < to {
				texts[f.err]++
				n++
			}
		}
		h.mu.Unlock()
	}
	if n == 0 {
		return 0, nil
	}
	var lines []string
	for _, text := range slices.Sorted(maps.Keys(texts)) {
		lines = append(lines, fmt.Sprintf("%d: %s", texts[text], text))
	}
	return n, errors.New(strings.Join(lines, "; "))
}

// most measures the rate of a closed loop: the highest rate of the servers.
func (p pace) most(ctx context.Context, warmup, over time.Duration) (float64, error) {
	p.rate = 0
	l, err := p.start(ctx)
	if err != nil {
		return 0, err
	}
	defer l.stop()
	if err := sleep(ctx, warmup+over); err != nil {
		return 0, err
	}
	if n, err := l.failures(0, warmup+over); n > 0 {
		return 0, fmt.Errorf("%d puts failed: %w", n, err)
	}
	return l.madeRate(warmup, warmup+over), nil
}

// fill puts each key once, with a value of size bytes, by so many clients at a time.
func (p pace) fill(ctx context.Context, size func(key int) int) error {
	var conns []*grpc.ClientConn
	defer func() {
		for _, conn := range conns {
			_ = conn.Close() // nothing is under way any more
		}
	}()
	for i := range p.conns {
		conn, err := rawwatch.Connect(p.endpoints[i%len(p.endpoints)])
		if err != nil {
			return err
		}
		conns = append(conns, conn)
	}
	return inParallel(ctx, len(p.keys), p.clients, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, fillDeadline)
		defer cancel()
		value := cut(rand.New(rand.NewPCG(2, uint64(i))), size(i))
		_, err := pb.NewKVClient(conns[i%len(conns)]).Put(ctx, &pb.PutRequest{Key: p.keys[i], Value: value})
		if err != nil {
			return fmt.Errorf("fill: put of %q: %w", p.keys[i], err)
		}
		return nil
	})
}

// fillDeadline bounds a put while a cluster is filled: nothing is measured then.
const fillDeadline = time.Minute

// evenlyOf draws each of n keys equally often.
func evenlyOf(n int) func(*rand.Rand) int {
	return func(r *rand.Rand) int { return r.IntN(n) }
}
