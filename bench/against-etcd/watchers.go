package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const (
	// A value begins with the time at which its put was due.
	stampBytes = 8
	// maxDelay is the longest delay that is told from longer ones, delayUnit is how
	// finely.
	maxDelay  = 10 * time.Second
	delayUnit = time.Millisecond / 4
	// drainLimit is how long events may come after the last put.
	drainLimit = 5 * time.Second
	// putsUnderWay bounds the puts of a step.
	putsUnderWay = 2000
)

// delays count how long events took to come.
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

// quantile is the delay within which so many of a thousand of all events came; those
// that did not come took for ever.
func (d *delays) quantile(ofThousand, all int) time.Duration {
	need := (all*ofThousand + 999) / 1000
	for i, n := range d.counts {
		if need -= n; need <= 0 {
			return time.Duration(i+1) * delayUnit
		}
	}
	return maxDelay
}

// watchers are streams with watchers on them. They read raw messages: clientv3 would cost
// more than what is measured.
type watchers struct {
	cancel context.CancelFunc
	conns  []*grpc.ClientConn
	each   []*delays
	events atomic.Int64
	read   sync.WaitGroup
	mu     sync.Mutex
	err    error // guarded by mu: what ended a stream
}

// openWatchers makes so many watchers of a prefix, and returns when all are there.
func openWatchers(ctx context.Context, endpoints []string, prefix string, n, streams int) (*watchers, error) {
	ctx, cancel := context.WithCancel(ctx)
	w := &watchers{cancel: cancel}
	streams = min(n, streams)
	for i := range streams {
		// The i-th stream's share of n.
		share := n/streams + min(1, max(0, n%streams-i))
		if err := w.open(ctx, endpoints[i%len(endpoints)], prefix, share); err != nil {
			return nil, errors.Join(err, w.close())
		}
	}
	return w, nil
}

// open opens one stream.
func (w *watchers) open(ctx context.Context, endpoint, prefix string, n int) error {
	conn, err := grpc.NewClient(strings.TrimPrefix(endpoint, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	w.conns = append(w.conns, conn)
	stream, err := pb.NewWatchClient(conn).Watch(ctx)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	request := &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{
		Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix)),
	}}}
	for range n {
		if err := stream.Send(request); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
	}
	for range n {
		r, err := stream.Recv()
		if err != nil || !r.Created || r.Canceled {
			return fmt.Errorf("watch: not created: %v, %w", r, err)
		}
	}
	d := &delays{}
	w.each = append(w.each, d)
	w.read.Go(func() {
		err := w.receive(stream, d)
		if ctx.Err() == nil {
			w.mu.Lock()
			w.err = errors.Join(w.err, fmt.Errorf("a stream ended: %w", err))
			w.mu.Unlock()
		}
	})
	return nil
}

// receive reads until the stream ends.
func (w *watchers) receive(stream pb.Watch_WatchClient, d *delays) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if r.Canceled {
			return fmt.Errorf("canceled: %s", r.CancelReason)
		}
		now := time.Now().UnixNano()
		for _, e := range r.Events {
			if len(e.Kv.Value) >= stampBytes {
				d.add(time.Duration(now - int64(binary.BigEndian.Uint64(e.Kv.Value))))
			}
		}
		w.events.Add(int64(len(r.Events)))
	}
}

// drain waits for so many events, but not for long.
func (w *watchers) drain(ctx context.Context, events int) {
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	// What does not come in time is counted by who asks for a quantile.
	_ = waitUntil(ctx, pollEvery/10, func() error {
		if w.events.Load() < int64(events) {
			return errMissing
		}
		return nil
	})
}

var errMissing = errors.New("events are missing")

// delays ends all streams and returns what they saw.
func (w *watchers) delays() *delays {
	w.cancel()
	w.read.Wait()
	all := &delays{}
	for _, d := range w.each {
		all.merge(d)
	}
	return all
}

// close ends all streams and says what ended one before.
func (w *watchers) close() error {
	w.cancel()
	w.read.Wait()
	for _, c := range w.conns {
		c.Close()
	}
	return w.err
}

// steadyPuts puts at a rate, whatever becomes of those under way, and returns how long
// each took from when it was due, and how many a second were made.
func steadyPuts(ctx context.Context, clients []*clientv3.Client, rate int, over time.Duration, valueBytes int) ([]time.Duration, float64, error) {
	total := int(over.Seconds() * float64(rate))
	took, errs := make([]time.Duration, total), make([]error, total)
	room := make(chan struct{}, putsUnderWay)
	var work sync.WaitGroup
	begin, made := time.Now(), 0
	for made < total && ctx.Err() == nil {
		due := begin.Add(time.Duration(made) * over / time.Duration(total))
		time.Sleep(time.Until(due))
		if time.Since(begin) > over+over/10 {
			break // the rate is not kept
		}
		room <- struct{}{}
		i := made
		made++
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
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return nil, 0, fmt.Errorf("puts: %w", err)
	}
	return took[:made], float64(made) / max(time.Since(begin), over).Seconds(), nil
}
