package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/alone"
	"github.com/skeindb/skein/transport"
)

// What Skein's hosts talk over. Both encrypt.
const (
	quicCarrier = "quic"
	tlsCarrier  = "tls"
)

// checkEach is how often a drive looks whether a leader was lost: what it has proposed may
// never be applied then.
const checkEach = 200 * time.Millisecond

// skein is three hosts of package raftgroup.
type skein struct {
	load   *alone.Load
	l      *latencies
	s      settings
	groups []requests
	count  atomic.Int64
}

// A request is a proposal whose fate somebody waits for.
type request struct {
	applied chan struct{} // capacity 1
}

var requestPool = sync.Pool{New: func() any { return &request{make(chan struct{}, 1)} }}

// requests are the proposals of a group that are under way. raftgroup keeps none: it
// applies those of one leader in the order in which they were made.
type requests struct {
	mu sync.Mutex // guards the fields below
	// ring has room for all. A place is used again when its request was answered.
	ring              []*request
	proposed, applied int
}

func (q *requests) add(r *request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ring[q.proposed%len(q.ring)] = r
	q.proposed++
}

// answer answers the oldest n.
func (q *requests) answer(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for range n {
		q.ring[q.applied%len(q.ring)].applied <- struct{}{}
		q.applied++
	}
}

func startSkein(ctx context.Context, s settings, l *latencies) (_ side, err error) {
	k := &skein{l: l, s: s, groups: make([]requests, s.Groups)}
	for g := range k.groups {
		k.groups[g].ring = make([]*request, s.Depth)
	}
	o := alone.Options{Dir: s.Dir, Groups: s.Groups, Depth: s.Depth, Observer: observer{k}}
	if s.Carrier == tlsCarrier {
		o.Carrier = transport.CarrierTLS
	}
	k.load, err = alone.Start(ctx, o)
	if err != nil {
		return nil, err
	}
	return k, nil
}

// drive has a goroutine for each group, as Dragonboat's has.
func (k *skein) drive(stop *atomic.Bool) error {
	ended := make(chan struct{})
	all, ctx := errgroup.WithContext(context.Background())
	var drivers sync.WaitGroup
	for g := range k.groups {
		drivers.Add(1)
		all.Go(func() error {
			defer drivers.Done()
			return k.driveGroup(ctx, g, stop)
		})
	}
	all.Go(func() error { return k.watch(ended) })
	drivers.Wait()
	close(ended)
	return all.Wait()
}

// watch returns an error when a leader was lost, and ends with the drivers.
func (k *skein) watch(ended <-chan struct{}) error {
	ticker := time.NewTicker(checkEach)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if err := k.load.Check(); err != nil {
				return err
			}
		case <-ended:
			return nil
		}
	}
}

// driveGroup keeps proposals of a group under way. It waits for the oldest, and takes all
// others that were applied meanwhile.
func (k *skein) driveGroup(ctx context.Context, group int, stop *atomic.Bool) error {
	propose := k.load.Proposer(keyspace.GroupID(group + 1))
	data := make([]byte, k.s.Bytes)
	waiting := make([]*request, k.s.Depth)
	var proposed, answered int
	for {
		for ; proposed-answered < len(waiting) && !stop.Load(); proposed++ {
			r := requestPool.Get().(*request)
			waiting[proposed%len(waiting)] = r
			k.groups[group].add(r)
			// Each proposal has data of its own. Dragonboat's Propose makes that copy itself.
			if err := propose(slices.Clone(data)); err != nil {
				return fmt.Errorf("group %d: %w", group+1, err)
			}
		}
		if proposed == answered {
			return nil
		}
		n := 0
		for ; answered < proposed; answered++ {
			r := waiting[answered%len(waiting)]
			known, err := r.wait(ctx, n == 0)
			if err != nil {
				return err
			}
			if !known {
				break
			}
			requestPool.Put(r)
			n++
		}
		k.count.Add(int64(n))
		k.l.applied(group, n)
	}
}

// wait returns whether the proposal is applied, or waits until it is.
func (r *request) wait(ctx context.Context, wait bool) (known bool, err error) {
	if wait {
		select {
		case <-r.applied:
			return true, nil
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	select {
	case <-r.applied:
		return true, nil
	default:
		return false, nil
	}
}

func (k *skein) applied() int64 { return k.count.Load() }
func (k *skein) check() error   { return k.load.Check() }
func (k *skein) close() error   { return k.load.Close() }

// observer times the proposals and answers the requests.
type observer struct{ k *skein }

func (o observer) Proposed(g keyspace.GroupID)       { o.k.l.proposed(int(g - 1)) }
func (o observer) Applied(g keyspace.GroupID, n int) { o.k.groups[g-1].answer(n) }
