package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/bench/against-etcd/rawwatch"
)

const (
	// A value begins with the time at which its put was due.
	stampBytes = 8
	// maxDelay is the longest delay that is distinguished from longer ones; delayUnit is
	// the resolution.
	maxDelay  = 10 * time.Second
	delayUnit = time.Millisecond / 4
	// drainLimit is how long events may come after the last put. Later events are late
	// in any case.
	drainLimit = time.Second
	// putsUnderWay bounds the puts of a step; a load with more puts pending keeps no
	// rate.
	putsUnderWay = 2000
)

// delays count events by how long they took to come.
type delays struct {
	counts [maxDelay/delayUnit + 1]int
}

func (d *delays) add(delay time.Duration) {
	d.counts[min(max(delay, 0), maxDelay)/delayUnit]++
}

func (d *delays) merge(o *delays) {
	for i, n := range o.counts {
		d.counts[i] += n
	}
}

// quantile is the delay within which so many of a thousand of all events came. Missing
// events took for ever.
func (d *delays) quantile(ofThousand, all int) time.Duration {
	if all == 0 {
		return 0
	}
	need := (all*ofThousand + 999) / 1000
	for i, n := range d.counts {
		if need -= n; need <= 0 {
			return time.Duration(i+1) * delayUnit
		}
	}
	return maxDelay
}

// watchers are streams with watchers on them.
type watchers struct {
	cancel context.CancelFunc
	conns  []*grpc.ClientConn
	each   []*delays
	events atomic.Int64
	read   sync.WaitGroup
	mu     sync.Mutex
	err    error // guarded by mu: the error that ended a stream
}

// openWatchers makes so many watchers of a prefix on so many streams, which share a
// connection to each endpoint. It returns when all are created.
func openWatchers(ctx context.Context, endpoints []string, prefix string, n, streams int) (*watchers, error) {
	ctx, cancel := context.WithCancel(ctx)
	w := &watchers{cancel: cancel}
	for _, endpoint := range endpoints {
		conn, err := rawwatch.Connect(endpoint)
		if err != nil {
			return nil, errors.Join(err, w.close())
		}
		w.conns = append(w.conns, conn)
	}
	streams = min(n, streams)
	for i := range streams {
		// The i-th stream's share of n.
		share := n/streams + min(1, max(0, n%streams-i))
		if err := w.open(ctx, w.conns[i%len(w.conns)], prefix, share); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	return w, nil
}

// open opens one stream.
func (w *watchers) open(ctx context.Context, conn *grpc.ClientConn, prefix string, n int) error {
	d := &delays{}
	var now int64 // when the message came, 0 before its first event
	take := func(events int) {
		now = 0
		w.events.Add(int64(events))
	}
	event := func(value []byte) {
		if now == 0 {
			now = time.Now().UnixNano()
		}
		if len(value) >= stampBytes {
			d.add(time.Duration(now - int64(binary.BigEndian.Uint64(value))))
		}
	}
	request := &pb.WatchCreateRequest{Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix))}
	stream, err := rawwatch.Open(ctx, conn, request, n, take, event)
	if err != nil {
		return err
	}
	w.each = append(w.each, d)
	w.read.Go(func() {
		err := stream.Receive()
		if ctx.Err() == nil {
			w.mu.Lock()
			w.err = errors.Join(w.err, fmt.Errorf("a stream ended: %w", err))
			w.mu.Unlock()
		}
	})
	return nil
}

// drain waits for so many events, but not for long.
func (w *watchers) drain(ctx context.Context, events int) {
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	// quantile counts the events that do not come in time.
	_ = waitUntil(ctx, pollEvery/10, func() error {
		if w.events.Load() < int64(events) {
			return errMissing
		}
		return nil
	})
}

var errMissing = errors.New("events are missing")

// end ends all streams. It returns what they received and the error that ended one
// before.
func (w *watchers) end() (*delays, error) {
	err := w.close()
	all := &delays{}
	for _, d := range w.each {
		all.merge(d)
	}
	return all, err
}

// close ends all streams and returns the error that ended one before. It may be called
// again.
func (w *watchers) close() error {
	w.cancel()
	w.read.Wait()
	for _, c := range w.conns {
		c.Close()
	}
	return w.err
}

// putRun is the result of puts at a rate.
type putRun struct {
	took   []time.Duration // since each was due, of those that were made
	rate   float64         // of those that were made, a second
	failed int             // refused, or not answered in time
	err    error           // of one that failed
}

// steadyPuts puts at a rate, independent of the puts under way.
func steadyPuts(ctx context.Context, clients []*clientv3.Client, rate int, over time.Duration, valueBytes int) (r putRun, err error) {
	total := int(over.Seconds() * float64(rate))
	took, errs := make([]time.Duration, total), make([]error, total)
	room := make(chan struct{}, putsUnderWay)
	var work sync.WaitGroup
	begin, sent := time.Now(), 0
	for sent < total && ctx.Err() == nil {
		due := begin.Add(time.Duration(sent) * over / time.Duration(total))
		time.Sleep(time.Until(due))
		if time.Since(begin) > over+over/10 {
			break // the rate is not kept
		}
		room <- struct{}{}
		i := sent
		sent++
		work.Go(func() {
			defer func() { <-room }()
			put, cancel := context.WithTimeout(ctx, askLimit)
			defer cancel()
			value := make([]byte, valueBytes)
			binary.BigEndian.PutUint64(value, uint64(due.UnixNano()))
			_, errs[i] = clients[i%len(clients)].Put(put, spanKey(watchPrefix, i%10_000), string(value))
			took[i] = time.Since(due)
		})
	}
	work.Wait()
	for i, err := range errs[:sent] {
		if err != nil {
			r.failed, r.err = r.failed+1, err
			continue
		}
		r.took = append(r.took, took[i])
	}
	r.rate = float64(len(r.took)) / max(time.Since(begin), over).Seconds()
	return r, ctx.Err()
}
