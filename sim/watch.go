package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/judge"
	"github.com/skeindb/skein/watch"
)

// watchedSpans are the spans of a run's watchers: everything, a part in several ranges,
// and one key.
var watchedSpans = []keyspace.Span{{}, {Start: []byte("d"), End: []byte("p")}, {Start: []byte("u0"), End: []byte("u0\x00")}}

const (
	// watchersOfSpan is how many watchers each span has that are alone on their streams.
	watchersOfSpan = 3
	// crowds is how many streams have a watcher of each span.
	crowds = 2
	// After how many responses a watcher asks for progress: alone on its stream, and in
	// a crowd.
	askEach, askEachOfCrowd = 16, 4
)

// watchAll runs watchers until stop is called, which returns them. Some watch from the
// first revision on and some begin during the run, alone or several on a stream.
func watchAll(c *cluster) (stop func() []*judge.Watcher) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var all []*judge.Watcher
	start := func(late int, askEach int, ws ...*judge.Watcher) {
		rng := rand.New(rand.NewPCG(c.cfg.Seed, uint64(1000+len(all))))
		all = append(all, ws...)
		wg.Go(func() {
			c.sleep(time.Duration(late) * 2 * time.Second)
			for ctx.Err() == nil {
				// Mostly its own node, so that each node has watchers of everything most of
				// the time.
				at := late % len(c.machines)
				if rng.IntN(3) == 0 {
					at = rng.IntN(len(c.machines))
				}
				watchAt(ctx, c.machines[at], askEach, ws)
				c.sleep(time.Duration(1+rng.IntN(50)) * time.Millisecond)
			}
		})
	}
	for i, span := range watchedSpans {
		for late := range watchersOfSpan {
			start(late, askEach, judge.NewWatcher(fmt.Sprintf("watcher %d.%d", i, late), span))
		}
	}
	for late := range crowds {
		var ws []*judge.Watcher
		for i, span := range watchedSpans {
			ws = append(ws, judge.NewWatcher(fmt.Sprintf("watcher %d of crowd %d", i, late), span))
		}
		start(late, askEachOfCrowd, ws...)
	}
	return func() []*judge.Watcher {
		cancel()
		wg.Wait()
		return all
	}
}

// watchAt runs watchers at one node, on one stream, until that ends.
func watchAt(ctx context.Context, m *machine, askEach int, ws []*judge.Watcher) {
	r := m.current()
	if r == nil {
		return
	}
	// Sometimes a client changes the node by itself.
	sctx, cancel := context.WithTimeout(r.ctx, 10*time.Second)
	defer cancel()
	end := context.AfterFunc(ctx, cancel)
	defer end()
	s, order := r.core.Watches().NewStream(), judge.NewStream()
	defer s.Close()
	var there []*watch.Watcher
	for id, w := range ws {
		start := w.Next()
		hw, _, err := s.Watch(sctx, int64(id), watch.Request{Span: w.Span, Start: keyspace.Revision(start)})
		if err != nil {
			return
		}
		there = append(there, hw)
		order.Created(int64(id), start)
		w.Begins(start)
	}
	by := fmt.Sprintf("%s on the stream of %v", m.name, m.c.elapsed())
	for n := 0; ; n++ {
		switch n % askEach {
		case askEach / 2:
			_ = s.RequestProgress(sctx) // without it they receive none
		case askEach - 1:
			for id, hw := range there { // as watchers receive it that do not ask
				if rev, ok := hw.Progress(); ok {
					ws[id].Judge(by, m.c.elapsed(), order.Progress(int64(id), int64(rev)))
					ws[id].ToldProgress(by, m.c.elapsed(), int64(rev))
				}
			}
		}
		d, err := s.Next(sctx)
		if err != nil || r.ctx.Err() != nil {
			return
		}
		now := m.c.elapsed()
		if d.Watcher == nil {
			ws[0].Judge(by, now, order.Progress(judge.AllWatchers, int64(d.Revision)))
			for _, w := range ws {
				w.ToldProgress(by, now, int64(d.Revision))
			}
			continue
		}
		w := ws[d.Watcher.ID]
		if d.Compacted != 0 {
			w.Compacted(int64(d.Compacted))
			return
		}
		if n := len(d.Events); n > 0 {
			w.Judge(by, now, order.Events(d.Watcher.ID, d.Events[0].GetKv().GetModRevision(), d.Events[n-1].GetKv().GetModRevision()))
			w.Told(by, now, d.Events)
		}
	}
}
