package loadtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
)

// progressEach is how often an API server asks for progress while lists wait for its cache.
const progressEach = 100 * time.Millisecond

// kubeWatch is the watchers of workload Kubernetes.
type kubeWatch struct {
	run      *kubeRun
	clients  []*clientv3.Client
	watchers []*kubeWatcher
	cancel   context.CancelFunc
	work     sync.WaitGroup
	stopping sync.Once
	delay    *hdrhistogram.Histogram // of all watchers, once they are judged
}

// kubeWatcher is one watcher of one resource.
type kubeWatcher struct {
	run *kubeRun
	of  resource
	// high is the revision up to which everything has come: that of the last event or progress notification.
	high  atomic.Int64
	ended chan struct{} // closed when the watcher gets nothing more

	// The rest belongs to the goroutine that receives, and when that has ended to whoever stopped it.
	seen                                     revisionSet
	events, progress, duplicates, disordered int64
	delay                                    *hdrhistogram.Histogram
	err                                      error
}

// startWatch opens all watchers behind revision base, and returns when all are there.
func (k *kubeRun) startWatch(ctx context.Context, base int64) (*kubeWatch, error) {
	// The watchers outlive the call that opens them.
	own, cancel := context.WithCancel(clientv3.WithRequireLeader(context.WithoutCancel(ctx)))
	kw := &kubeWatch{run: k, cancel: cancel}
	for i := range k.cfg.Kubernetes.Watchers {
		client, err := k.cfg.connect(k.cfg.Endpoints[i%len(k.cfg.Endpoints)], nil)
		if err != nil {
			kw.stop()
			return nil, err
		}
		kw.clients = append(kw.clients, client)
		for of := range resourceCount {
			open := func(behind int64) clientv3.WatchChan {
				return client.Watch(own, resourcePrefix[of], clientv3.WithPrefix(), clientv3.WithRev(behind+1),
					clientv3.WithPrevKV(), clientv3.WithProgressNotify(), clientv3.WithCreatedNotify())
			}
			channel := open(base)
			w := &kubeWatcher{run: k, of: of, ended: make(chan struct{}), seen: revisionSet{base: base}, delay: newHistogram()}
			kw.watchers = append(kw.watchers, w)
			if err := created(ctx, channel); err != nil {
				kw.stop()
				return nil, fmt.Errorf("watch %s: %w", resourcePrefix[of], err)
			}
			w.high.Store(base)
			kw.work.Go(func() { w.receive(own, channel, open) })
		}
		kw.work.Go(func() {
			// clientv3 finds the stream of these watchers by the metadata of their context.
			for clock.Sleep(own, k.cfg.Clock, progressEach) == nil {
				// A stream that is broken has its watchers tell it, or finds another server.
				_ = client.RequestProgress(own)
			}
		})
	}
	return kw, nil
}

// created waits for the server's word that the watcher is there.
func created(ctx context.Context, channel clientv3.WatchChan) error {
	select {
	case answer, ok := <-channel:
		if !ok {
			return errors.New("the channel was closed")
		}
		return answer.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stop ends all watchers. It may be called twice.
func (kw *kubeWatch) stop() {
	kw.stopping.Do(func() {
		kw.cancel()
		for _, client := range kw.clients {
			// Nothing is under way that would be lost.
			_ = client.Close()
		}
		kw.work.Wait()
	})
}

// receive takes what comes until the watcher ends. It asks for a leader, as kube-apiserver does. Where there was none for a
// while, the node ends the watcher, and it is opened again behind what it has.
func (w *kubeWatcher) receive(ctx context.Context, channel clientv3.WatchChan, open func(behind int64) clientv3.WatchChan) {
	defer close(w.ended)
	for {
		w.err = w.receiveAll(channel)
		if w.err == nil || !strings.Contains(w.err.Error(), rpctypes.ErrorDesc(rpctypes.ErrGRPCNoLeader)) ||
			clock.Sleep(ctx, w.run.cfg.Clock, progressEach) != nil {
			return
		}
		channel = open(w.high.Load())
	}
}

// receiveAll takes what comes through a channel until it is closed or brings an error.
func (w *kubeWatcher) receiveAll(channel clientv3.WatchChan) error {
	for answer := range channel {
		if err := answer.Err(); err != nil {
			return err
		}
		for _, e := range answer.Events {
			w.take(e)
		}
		if answer.IsProgressNotify() {
			w.progress++
			w.raise(answer.Header.Revision)
		}
	}
	return nil
}

// take judges an event. A change of one object has a revision of its own.
func (w *kubeWatcher) take(e *clientv3.Event) {
	if w.of == kubeEvents && e.Type == mvccpb.DELETE {
		return // its lease has expired
	}
	w.events++
	revision := e.Kv.ModRevision
	switch {
	case w.seen.has(revision):
		w.duplicates++
		w.run.violation("a watcher of %s got the event of revision %d twice", resourcePrefix[w.of], revision)
	case revision <= w.high.Load():
		w.disordered++
		w.run.violation("a watcher of %s got the event of revision %d behind revision %d", resourcePrefix[w.of], revision, w.high.Load())
	}
	w.seen.add(revision)
	w.raise(revision)
	if op, ours, intact := w.run.values[w.of].recognise(e.Kv.Value); ours && e.Type == mvccpb.PUT {
		if !intact {
			w.run.violation("the value of %s came changed to a watcher, at revision %d", e.Kv.Key, revision)
		}
		if w.run.measuring.Load() {
			micros := int64(w.run.cfg.Clock.Now().Sub(clock.Time(op)) / time.Microsecond)
			// The value lies within the histogram's bounds, so there is no error.
			_ = w.delay.RecordValue(min(max(micros, 1), longestMicros))
		}
	}
}

func (w *kubeWatcher) raise(revision int64) {
	if revision > w.high.Load() {
		w.high.Store(revision)
	}
}

// judge waits until each watcher has got everything, ends all, and compares what came with what was acknowledged.
func (kw *kubeWatch) judge(ctx context.Context) *Watched {
	kw.wait(ctx)
	kw.stop()
	out := &Watched{Watchers: len(kw.watchers)}
	kw.delay = newHistogram()
	tally := errorTally{}
	for _, w := range kw.watchers {
		c := &kw.run.changes[w.of]
		out.Events, out.Progress = out.Events+w.events, out.Progress+w.progress
		out.Duplicate, out.Disordered = out.Duplicate+w.duplicates, out.Disordered+w.disordered
		if w.err != nil {
			out.Failed++
			tally.add(errorKind(w.err), 1)
		}
		if lost, first := c.revision.without(&w.seen); lost > 0 {
			out.Lost += lost
			kw.run.violation("a watcher of %s did not get %d events, the first that of revision %d; it had got everything up to revision %d%s",
				resourcePrefix[w.of], lost, first, w.high.Load(), because(w.err))
		}
		if unasked, first := w.seen.without(&c.revision); unasked > c.unknown.Load() {
			out.Unasked += unasked
			kw.run.violation("a watcher of %s got %d events of changes that were acknowledged to nobody, the first that of revision %d, and %d changes are of unknown fate",
				resourcePrefix[w.of], unasked, first, c.unknown.Load())
		}
		kw.delay.Merge(w.delay)
	}
	out.Delay, out.Errors = summary(kw.delay), maps.Clone(tally.kinds)
	return out
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return " when it ended: " + err.Error()
}

// wait waits until each watcher has ended or has got everything up to the last acknowledged change of any
// resource: so it must hear of progress, and a duplicate of its last event would have come. It waits for a timeout at most.
func (kw *kubeWatch) wait(ctx context.Context) {
	var last int64
	for i := range kw.run.changes {
		c := &kw.run.changes[i]
		c.mu.Lock()
		last = max(last, c.last)
		c.mu.Unlock()
	}
	end := kw.run.cfg.Clock.Now().Add(kw.run.cfg.Timeout)
	for _, w := range kw.watchers {
		for w.high.Load() < last && !isClosed(w.ended) && kw.run.cfg.Clock.Now() < end {
			if clock.Sleep(ctx, kw.run.cfg.Clock, time.Millisecond) != nil {
				return
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
