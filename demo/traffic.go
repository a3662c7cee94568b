package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// writers is how many clients write at a time. Their keys lie all over the keyspace.
const writers = 8

// attemptTimeout bounds an attempt to write.
const attemptTimeout = 10 * time.Second

// verifyPage is how many keys a read of the check asks for.
const verifyPage = 1000

// traffic is writes and watchers beside a fault.
type traffic struct {
	run string // in the keys, as the directory may have those of another run
	// client writes by all nodes.
	client    *clientv3.Client
	observers []*observer
	// stop ends the writers, cancel the watchers too.
	stop, cancel context.CancelFunc
	writing, all sync.WaitGroup
	wrote        chan struct{} // has a value after a write behind mark

	mu sync.Mutex // guards what follows
	// acked are the keys of the acknowledged writes.
	acked []string
	last  clock.Time // of the last acknowledged write
	// still is the longest time without any acknowledged write, and longest that of one write, both since mark.
	still, longest time.Duration
	marked         bool
}

// observer watches everything at one node.
type observer struct {
	client *clientv3.Client
	where  string
	ended  chan struct{} // closed with the last event, or when the watch ended
	// What follows belongs to its goroutine until ended is closed.
	seen     map[string]bool
	revision int64
	wrong    error
	complete bool
}

// beginTraffic starts to watch, then to write.
func beginTraffic(ctx context.Context, endpoints []string) (_ *traffic, err error) {
	ctx, cancel := context.WithCancel(ctx)
	writing, stop := context.WithCancel(ctx)
	w := &traffic{run: rand.Text()[:8], cancel: cancel, stop: stop, wrote: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			w.end()
		}
	}()
	if w.client, err = clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()}); err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	now, err := w.client.Get(ctx, w.key(0, 0))
	if err != nil {
		return nil, fmt.Errorf("demo: the revision to watch from: %w", err)
	}
	for _, e := range endpoints {
		cl, err := clientv3.New(clientv3.Config{Endpoints: []string{e}, Logger: zap.NewNop()})
		if err != nil {
			return nil, fmt.Errorf("demo: %w", err)
		}
		o := &observer{client: cl, where: e, ended: make(chan struct{}), seen: map[string]bool{}}
		w.observers = append(w.observers, o)
		w.all.Go(func() { o.watch(ctx, w, now.Header.Revision+1) })
	}
	w.last = clock.System().Now()
	for i := range writers {
		w.writing.Go(func() { w.write(writing, i) })
	}
	return w, nil
}

// key is the n-th key of a writer. It begins with a character of its own, so that the writers' keys are in different ranges.
func (w *traffic) key(writer, n int) string {
	return fmt.Sprintf("%cdemo/%s/%d/%08d", ' '+1+writer*94/writers, w.run, writer, n)
}

// endKey is written last.
func (w *traffic) endKey() string { return "~demo/" + w.run + "/end" }

// write writes one key after the other. One whose fate is unknown is written again: that changes nothing.
func (w *traffic) write(ctx context.Context, writer int) {
	for n := 0; ctx.Err() == nil; n++ {
		began := clock.System().Now()
		for w.put(ctx, w.key(writer, n)) != nil {
			if clock.Sleep(ctx, clock.System(), readyPause) != nil {
				return
			}
		}
		w.note(w.key(writer, n), began)
	}
}

func (w *traffic) put(ctx context.Context, key string) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	_, err := w.client.Put(ctx, key, key)
	return err
}

// note takes in an acknowledged write.
func (w *traffic) note(key string, began clock.Time) {
	now := clock.System().Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acked = append(w.acked, key)
	if w.marked {
		w.still, w.longest = max(w.still, now.Sub(w.last)), max(w.longest, now.Sub(began))
		select {
		case w.wrote <- struct{}{}:
		default:
		}
	}
	w.last = now
}

// mark begins to measure, and returns how many writes were acknowledged before.
func (w *traffic) mark() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.marked = true
	return len(w.acked)
}

// awaitWrite waits for one write from each writer behind the mark, so that none of them still waits for a leader.
func (w *traffic) awaitWrite(ctx context.Context) error {
	timer := clock.System().NewTimer(goOnTimeout)
	defer timer.Stop()
	w.mu.Lock()
	before := len(w.acked)
	w.mu.Unlock()
	for {
		select {
		case <-w.wrote:
		case <-timer.C():
			return fmt.Errorf("demo: no writes within %v after the kill", goOnTimeout)
		case <-ctx.Done():
			return errStopped
		}
		w.mu.Lock()
		enough := len(w.acked) > before+2*writers // those that were acknowledged before the kill was noticed aside
		w.mu.Unlock()
		if enough {
			return nil
		}
	}
}

// gap returns the longest time since the mark without an acknowledged write, and that of one write.
func (w *traffic) gap() (still, longest time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.still, w.longest
}

// finish ends the writers, waits until the watchers have everything, and returns what was acknowledged.
func (w *traffic) finish(ctx context.Context) ([]string, error) {
	w.stop()
	w.writing.Wait()
	ctx, cancel := context.WithTimeout(ctx, goOnTimeout)
	defer cancel()
	for w.put(ctx, w.endKey()) != nil {
		if clock.Sleep(ctx, clock.System(), readyPause) != nil {
			return nil, errors.New("demo: nothing can be written at the end")
		}
	}
	for _, o := range w.observers {
		select {
		case <-o.ended:
		case <-ctx.Done():
			return nil, fmt.Errorf("demo: the watcher at %s has not got the last event", o.where)
		}
	}
	return w.acked, nil // nobody writes any more
}

// lost returns which of the acknowledged writes cannot be read.
func (w *traffic) lost(ctx context.Context, all []string) (lost []string, err error) {
	have := map[string]bool{}
	for i := range writers {
		from, end := w.key(i, 0), clientv3.GetPrefixRangeEnd(w.key(i, 0)[:len(w.key(i, 0))-8])
		for more := true; more; {
			r, err := w.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(verifyPage))
			if err != nil {
				return nil, fmt.Errorf("demo: read the writes back: %w", err)
			}
			for _, kv := range r.Kvs {
				have[string(kv.Key)] = string(kv.Value) == string(kv.Key)
				from = string(kv.Key) + "\x00"
			}
			more = r.More
		}
	}
	for _, key := range all {
		if !have[key] {
			lost = append(lost, key)
		}
	}
	return lost, nil
}

// end ends everything that finish has not. It may be called twice.
func (w *traffic) end() {
	w.cancel()
	w.writing.Wait()
	w.all.Wait()
	for _, o := range w.observers {
		_ = o.client.Close()
	}
	if w.client != nil {
		_ = w.client.Close()
	}
}

// watch takes events in until the last one.
func (o *observer) watch(ctx context.Context, w *traffic, from int64) {
	defer close(o.ended)
	for r := range o.client.Watch(ctx, "", clientv3.WithPrefix(), clientv3.WithRev(from)) {
		if err := r.Err(); err != nil {
			o.wrong = err
			return
		}
		for _, e := range r.Events {
			o.take(e)
			if string(e.Kv.Key) == w.endKey() {
				o.complete = true
				return
			}
		}
	}
}

// take takes one event in. Each write has a revision of its own.
func (o *observer) take(e *clientv3.Event) {
	if e.Type == mvccpb.PUT {
		o.seen[string(e.Kv.Key)] = true
	}
	if o.wrong == nil && e.Kv.ModRevision <= o.revision {
		o.wrong = fmt.Errorf("the event of revision %d came behind that of %d", e.Kv.ModRevision, o.revision)
	}
	o.revision = max(o.revision, e.Kv.ModRevision)
}

// judge says what the observer lacks of the acknowledged writes.
func (o *observer) judge(all []string) error {
	switch {
	case o.wrong != nil:
		return fmt.Errorf("demo: the watcher at %s: %w", o.where, o.wrong)
	case !o.complete:
		return fmt.Errorf("demo: the watch at %s ended", o.where)
	}
	for _, key := range all {
		if !o.seen[key] {
			return fmt.Errorf("demo: the watcher at %s has not got the event of %q", o.where, key)
		}
	}
	return nil
}
