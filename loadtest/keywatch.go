package loadtest

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
)

// watchersEach is how many of a run's watchers share a connection.
const watchersEach = 100

// keyWatch is the watchers of all keys of a run, and how many of its puts were acknowledged.
type keyWatch struct {
	findings
	cfg          *Config
	values       *values
	clients      []*clientv3.Client
	watchers     []*keyWatcher
	cancel       context.CancelFunc
	work         sync.WaitGroup
	keysEach     int                     // of a put
	acknowledged atomic.Int64            // keys that were put
	from         atomic.Int64            // the clock.Time of the measured phase's begin; 0 before it
	delay        *hdrhistogram.Histogram // of all watchers, once they are judged
}

// keyWatcher is one of them.
type keyWatcher struct {
	watch *keyWatch
	ours  atomic.Int64  // events of this run, each counted once
	ended chan struct{} // closed when the watcher gets nothing more

	// The rest belongs to the goroutine that receives, and when that has ended to whoever stopped it.
	high                  int64 // the highest revision of an event of this run, of which atHigh have come
	atHigh                int
	duplicate, disordered int64
	delay                 *hdrhistogram.Histogram
	err                   error
}

// startKeyWatch opens the watchers, and returns when all are there: they get every put that is sent then.
func startKeyWatch(ctx context.Context, cfg *Config, space *keySpace, v *values) (*keyWatch, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	k := &keyWatch{cfg: cfg, values: v, keysEach: cfg.keysEach(), cancel: cancel}
	for i := range cfg.Watchers {
		if i%watchersEach == 0 || len(k.clients) < len(cfg.Endpoints) {
			client, err := cfg.connect(cfg.Endpoints[len(k.clients)%len(cfg.Endpoints)], nil)
			if err != nil {
				k.stop()
				return nil, err
			}
			k.clients = append(k.clients, client)
		}
		client := k.clients[i%len(k.clients)]
		channel := client.Watch(own, string(space.appendKey(nil, 0)), clientv3.WithRange(string(space.end())), clientv3.WithCreatedNotify())
		opened, done := context.WithTimeout(ctx, cfg.Timeout)
		err := created(opened, channel)
		done()
		if err != nil {
			k.stop()
			return nil, fmt.Errorf("watch: %w", err)
		}
		w := &keyWatcher{watch: k, ended: make(chan struct{}), delay: newHistogram()}
		k.watchers = append(k.watchers, w)
		k.work.Go(func() { w.receive(channel) })
	}
	return k, nil
}

// stop ends all watchers. It may be called twice.
func (k *keyWatch) stop() {
	k.cancel()
	for _, client := range k.clients {
		// Nothing is under way that would be lost.
		_ = client.Close()
	}
	k.clients = nil
	k.work.Wait()
}

func (w *keyWatcher) receive(channel clientv3.WatchChan) {
	defer close(w.ended)
	for answer := range channel {
		if w.err = answer.Err(); w.err != nil {
			return
		}
		for _, e := range answer.Events {
			w.take(e)
		}
	}
}

// take notes an event. All keys of a put have one revision, which no other put has.
func (w *keyWatcher) take(e *clientv3.Event) {
	op, ours, intact := w.watch.values.recognise(e.Kv.Value)
	if !ours || e.Type != mvccpb.PUT {
		return
	}
	revision := e.Kv.ModRevision
	switch {
	case revision > w.high:
		w.high, w.atHigh = revision, 0
	case revision < w.high:
		w.disordered++
		w.watch.violation("a watcher got the event of revision %d behind revision %d", revision, w.high)
	case w.atHigh == w.watch.keysEach:
		w.duplicate++
		w.watch.violation("a watcher got more events of revision %d than keys were put", revision)
		return
	}
	w.atHigh++
	if !intact {
		w.watch.violation("the value of %q came changed to a watcher, at revision %d", e.Kv.Key, revision)
	}
	// What was put before the measured phase may come within it.
	sent := clock.Time(op)
	if from := clock.Time(w.watch.from.Load()); from != 0 && sent >= from {
		micros := int64(w.watch.cfg.Clock.Now().Sub(sent) / time.Microsecond)
		// The value lies within the histogram's bounds, so there is no error.
		_ = w.delay.RecordValue(min(max(micros, 1), longestMicros))
	}
	w.ours.Add(1)
}

// judge waits until each watcher has as many events as puts were acknowledged, for a timeout at most, and ends all. A put that failed
// may have its events too, and they are not told from the others: after failures, what is lost is a lower bound. To know better,
// each watcher would have to keep the revisions that came.
func (k *keyWatch) judge(ctx context.Context) *Watched {
	all := k.acknowledged.Load()
	end := k.cfg.Clock.Now().Add(k.cfg.Timeout)
	for _, w := range k.watchers {
		for w.ours.Load() < all && !isClosed(w.ended) && k.cfg.Clock.Now() < end {
			if clock.Sleep(ctx, k.cfg.Clock, time.Millisecond) != nil {
				break
			}
		}
	}
	k.stop()
	out, tally := &Watched{Watchers: len(k.watchers)}, errorTally{}
	k.delay = newHistogram()
	for _, w := range k.watchers {
		got := w.ours.Load()
		out.Events, out.Disordered, out.Duplicate = out.Events+got, out.Disordered+w.disordered, out.Duplicate+w.duplicate
		if w.err != nil {
			out.Failed++
			tally.add(errorKind(w.err), 1)
		}
		if lost := all - got; lost > 0 {
			out.Lost += lost
			k.violation("a watcher did not get %d of %d events%s", lost, all, because(w.err))
		}
		k.delay.Merge(w.delay)
	}
	out.Delay, out.Errors = summary(k.delay), maps.Clone(tally.kinds)
	return out
}
