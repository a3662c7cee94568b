package shard

import (
	"context"
	"runtime"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/idalloc"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/load/heat"
	"github.com/skeindb/skein/shard/pipeline"
)

// NewStore returns a store without replicas. Open brings in those of the engine.
func NewStore(cfg Config) *Store {
	cfg.Limits.fill()
	if cfg.Workers == 0 {
		cfg.Workers = runtime.GOMAXPROCS(0)
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	s := &Store{
		cfg: cfg, log: cfg.Logger, metrics: cfg.Metrics,
		replicas: make(map[keyspace.RangeID]*Replica), hashing: make(chan struct{}, 1), cutting: make(chan struct{}, cutReads),
		timers: make(map[*alarm]struct{}), cache: eval.NewVersionCache(cfg.Limits.VersionCacheBytes),
	}
	s.reads = eval.NewReadLimit(cfg.Limits.ScanBytes, cfg.Limits.ReadBytes)
	s.compacted.Store(-1)
	s.held.Store(int64(keyspace.MaxRevision))
	if cfg.Holds {
		s.held.Store(-1) // not known yet
	}
	s.metrics.compacted.Set(-1)
	s.metrics.scraped.Store(&scraped{s.Floor, s.liveKeys})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.pipes = s.newPipes()
	s.readers = eval.ReadShared{
		Cache: s.cache, Pages: eval.NewPageCounts(cfg.Limits.Pages), AnswerBytes: cfg.Limits.AnswerBytes, Compacted: s.Compacted,
		Metrics: s.metrics.reads,
	}
	s.pushes = newPushes(s)
	s.unpins = &unpins{store: s, held: map[*Replica]struct{}{}}
	s.heat = heat.NewStore(cfg.Engine, s.log)
	s.recorder = heat.NewRecorder(s.keepHeat)
	s.meter = load.NewMeter(load.Config{
		Clock: cfg.Clock, Store: loadStore{cfg.Engine}, MaxBytes: cfg.Limits.RangeMaxBytes, MaxLoad: cfg.Limits.RangeSplitLoad,
		Some: s.someLoads, Metrics: cfg.Metrics.load, Heat: s.recorder,
	})
	s.feeds = newFeeds(s)
	s.maintenance, s.ids = newMaintenance(s), idalloc.New(cfg.IDs, cfg.Clock)
	s.client = rangeapi.NewClient(cfg.Self, s, cfg.Bus)
	s.admins = &AdminClient{self: cfg.Self, local: s, bus: cfg.Bus}
	s.removal.Clock, s.removal.Nodes = cfg.Clock, removalNodes{s.admins}
	s.lifecycle = newLifecycle(s)
	s.pipes.Pool.Start(cfg.Workers)
	s.wg.Go(func() { s.maintenance.run(s.ctx) })
	s.wg.Go(func() { s.ids.Run(s.ctx) })
	s.wg.Go(s.runMeter)
	s.wg.Go(s.cutTables)
	s.lifecycle.Start(s.ctx, s.wg.Go)
	return s
}

// newPipes returns what the pipelines of all replicas share.
func (s *Store) newPipes() pipeline.Shared {
	l := &s.cfg.Limits
	var overloaded func() bool
	if s.cfg.Disk != nil {
		overloaded = s.cfg.Disk.Overloaded
	}
	return pipeline.Shared{
		Epoch: clock.StartStopwatch(),
		Limits: pipeline.Limits{
			RangePendingBytes: l.RangePendingBytes, BatchRequests: l.BatchRequests, MaxEntryBytes: l.MaxEntryBytes,
			InflightBatches: l.InflightBatches, EvaluateTurn: l.EvaluateTurn, FateTimeout: l.FateTimeout,
		},
		Pool: pipeline.NewPool(s.cfg.Clock), Budget: pipeline.NewBudget(s.cfg.Self, l.PendingBytes, overloaded, s.metrics.pipeline),
		Reads: s.reads, Cache: s.cache, Metrics: s.metrics.pipeline, After: s.after,
	}
}

// Open opens every replica that the engine holds. It is called once, before
// requests come.
func (s *Store) Open() error {
	err := s.lifecycle.Open(s.ctx)
	s.cutTablesNow()
	return err
}

// Do serves one request to a replica of this node. It returns when the request is
// answered or ctx has ended; a write that is under way then is still carried out.
func (s *Store) Do(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, error) {
	resp, record, err := s.do(ctx, req)
	if record != nil {
		stages.Of(ctx).Note(record)
	}
	return resp, err
}

// do is Do. It returns where the time went of a request that took long or asks for it.
func (s *Store) do(ctx context.Context, req *rangeapi.Request) (*rangeapi.Response, *stages.Record, error) {
	r := s.Replica(req.Range)
	if r == nil {
		return nil, nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", req.Range, s.cfg.Self)
	}
	if err := rangeapi.CheckRequest(req.Op, s.cfg.Limits.MaxRequestBytes, s.cfg.Limits.MaxTxnOps); err != nil {
		return nil, nil, err
	}
	watch := clock.StartStopwatch()
	if !rangeapi.CanWrite(req.Op) {
		w := waits{}
		w.Begin(stages.Evaluation, watch.After(s.pipes.Epoch))
		resp, err := r.read(ctx, req, &w)
		took := watch.Elapsed()
		s.metrics.readSeconds.Observe(took.Seconds())
		return resp, r.recordRead(ctx, req, &w, watch, took), err
	}
	c := r.pipe.NewRequest(ctx, req)
	resp, err := r.pipe.Run(c, watch)
	return resp, r.written(ctx, c, watch, err), err
}

// Start is Do of a change without the wait, see [pipeline.Pipeline.Start]. The caller calls wait once, after answered was called
// or the context has ended. It is nil where nothing has happened: Do serves what has to wait, or is refused.
func (s *Store) Start(ctx context.Context, req *rangeapi.Request, answered func(ok bool)) (wait func() (*rangeapi.Response, error)) {
	r := s.Replica(req.Range)
	if r == nil || !rangeapi.CanWrite(req.Op) || rangeapi.CheckRequest(req.Op, s.cfg.Limits.MaxRequestBytes, s.cfg.Limits.MaxTxnOps) != nil {
		return nil
	}
	c, watch := r.pipe.NewRequest(ctx, req), clock.StartStopwatch()
	if !r.pipe.Start(c, watch, answered) {
		return nil
	}
	return func() (*rangeapi.Response, error) {
		resp, err := r.pipe.Wait(c)
		if record := r.written(ctx, c, watch, err); record != nil {
			stages.Of(ctx).Note(record)
		}
		return resp, err
	}
}

// written counts a change that has ended, and returns its record as recordCall does.
func (r *Replica) written(ctx context.Context, c *pipeline.Call, watch clock.Stopwatch, err error) *stages.Record {
	took, m := watch.Elapsed(), r.store.metrics
	m.writeSeconds.Observe(took.Seconds())
	if err != nil {
		m.failed.Inc()
	} else {
		m.committed.Inc()
	}
	return r.recordCall(ctx, c, took)
}

// Stop ends the node's goroutines and answers every request that is under way.
// Replicas go on applying what their host gives them. It is called before the host
// stops.
func (s *Store) Stop() {
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return
	}
	s.stopped = true
	for a := range s.timers {
		if a.t.Stop() {
			s.wg.Done()
			delete(s.timers, a)
		}
	}
	s.mu.Unlock()
	s.cancel()
	s.pipes.Pool.Stop()
	for _, r := range s.Replicas() {
		r.stop()
	}
	s.wg.Wait()
}
