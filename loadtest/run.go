package loadtest

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Run executes cfg and writes the report to out, after a line per second if cfg.Live is
// set.
//
// An error means that the run could not be done: a wrong setting, an endpoint or a page of
// metrics that does not answer at the start, a fill with errors, a verification that could not read.
// Failed operations and broken promises are part of the report: see Report.Err. When
// ctx is done while the load runs, Run stops, reports the figures so far, marked
// Interrupted, and returns no error.
func Run(ctx context.Context, cfg Config, out io.Writer) (Report, error) {
	if err := cfg.Validate(); err != nil {
		return Report{}, err
	}
	// First of all: who cannot be reached is told before anybody waits for connections.
	serverVersions, err := versions(ctx, &cfg)
	if err != nil {
		return Report{}, err
	}
	s, err := dial(&cfg)
	if err != nil {
		return Report{}, err
	}
	defer s.close()
	var id [8]byte
	// crypto/rand.Read never fails.
	_, _ = rand.Read(id[:])
	// A long run is not lost to a wrong URL.
	for i, u := range s.usages(ctx, cfg.ServerMetrics) {
		if u.err != nil {
			return Report{}, fmt.Errorf("server-metrics %s: %w", cfg.ServerMetrics[i], u.err)
		}
	}
	r := newRun(cfg, s.kvs, s, binary.BigEndian.Uint64(id[:]), out)
	r.report.Versions = buildVersions()
	r.report.Versions.Servers = serverVersions
	r.report.Machine = thisMachine()
	r.report.FileSystem = fileSystemOf(cfg.DataPath)
	err = r.do(ctx)
	if cfg.Cleanup {
		// An interrupted run cleans up too.
		err = errors.Join(err, r.cleanup(context.WithoutCancel(ctx)))
	}
	if err != nil {
		return r.report, err
	}
	if cfg.SLO != "" {
		// Validate has read it.
		objectives, _ := ParseObjectives(cfg.SLO)
		r.report.SLO = objectives.Judge(&r.report)
	}
	r.report.WriteText(out)
	return r.report, nil
}

// cleanup deletes the run's keys.
func (r *run) cleanup(ctx context.Context) (err error) {
	if r.kube != nil {
		r.report.CleanedUp, err = r.kube.clear(ctx)
		return err
	}
	if err := revokeAll(ctx, r.clients); err != nil {
		return err
	}
	r.report.CleanedUp, err = cleanup(ctx, &r.cfg, r.kvs, &r.space)
	return err
}

// meter reads the servers' CPU time. servers satisfies it.
type meter interface {
	usages(ctx context.Context, urls []string) []usage
}

// run is one run: its clients, which live through all phases, and its report.
type run struct {
	cfg      Config
	kvs      []kv
	meter    meter
	out      io.Writer
	space    keySpace
	values   *values
	ledger   *ledger
	watchers *keyWatch // nil without Config.Watchers
	kube     *kubeRun  // in workload kubernetes
	clients  []*client
	before   errorTally // of fill and warm-up
	report   Report
}

func newRun(cfg Config, kvs []kv, m meter, id uint64, out io.Writer) *run {
	r := &run{cfg: cfg, kvs: kvs, meter: m, out: out, space: newKeySpace(&cfg)}
	v := newValues(id, cfg.ValueBytes)
	r.values = v
	switch {
	case cfg.Workload == Kubernetes:
		r.kube = newKubeRun(&r.cfg, kvs, id)
	case cfg.Verify:
		r.ledger = newLedger(cfg.Keys, v)
	}
	turn := new(atomic.Uint64)
	for i := range cfg.Clients {
		c := newClient(i, &r.cfg, kvs[i%len(kvs)], &r.space, v, r.ledger, turn)
		if r.kube != nil {
			c.kube = r.kube.worker(i, c.kv, c.rng)
		}
		r.clients = append(r.clients, c)
	}
	r.report.Format, r.report.Settings, r.report.Started = reportFormat, cfg, cfg.Clock.Wall()
	return r
}

// do runs the phases in their order.
func (r *run) do(ctx context.Context) error {
	if r.kube != nil {
		defer r.kube.end()
		if err := r.kube.begin(ctx); err != nil {
			return err
		}
	}
	if r.cfg.Watchers > 0 && r.kube == nil {
		if err := r.startWatchers(ctx); err != nil {
			return err
		}
		defer r.watchers.stop()
	}
	if err := r.fill(ctx); err != nil {
		return err
	}
	if r.cfg.Warmup > 0 && ctx.Err() == nil {
		p := r.newPhase("warm-up", r.cfg.Warmup, 0, r.cfg.Rate)
		p.errors = &r.before
		r.runPhase(ctx, p, nil)
	}
	r.report.ErrorsBefore, _ = r.before.all()
	if ctx.Err() == nil {
		if err := r.measure(ctx); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		r.report.Interrupted = true
		return nil
	}
	var err error
	switch {
	case r.kube != nil:
		r.report.Watch, r.report.Verify, err = r.kube.judge(ctx)
		if w := r.kube.watch; w != nil {
			r.keep(kindDelay, w.delay)
		}
		return err
	case r.watchers != nil:
		r.judgeWatchers(ctx)
		return nil
	case r.ledger == nil:
		return nil
	}
	r.report.Verify, err = verify(ctx, &r.cfg, r.kvs, &r.space, r.ledger)
	return err
}

// startWatchers opens the watchers of the run's keys.
func (r *run) startWatchers(ctx context.Context) (err error) {
	r.watchers, err = startKeyWatch(ctx, &r.cfg, &r.space, r.values)
	for _, c := range r.clients {
		c.watch = r.watchers
	}
	return err
}

// judgeWatchers writes what they got into the report.
func (r *run) judgeWatchers(ctx context.Context) {
	r.report.Watch = r.watchers.judge(ctx)
	r.keep(kindDelay, r.watchers.delay)
	v := &Verified{}
	if v.Violations, v.First = r.watchers.violations(); v.Violations > 0 {
		r.report.Verify = v
	}
}

// fill writes each key once.
func (r *run) fill(ctx context.Context) error {
	n := r.cfg.Keys
	switch {
	case r.kube != nil:
		n = r.cfg.Kubernetes.Nodes + r.cfg.Kubernetes.Pods
	case !r.cfg.Fill:
		return nil
	}
	p := r.newPhase("fill", 0, int64(n), 0)
	p.fill = true
	r.runPhase(ctx, p, nil)
	if kinds, failed := p.errors.all(); failed > 0 && ctx.Err() == nil {
		return fmt.Errorf("fill: %d of %d puts failed: %v", failed, n, kinds)
	}
	return nil
}

// measure runs the measured phase between two readings of all CPU times.
func (r *run) measure(ctx context.Context) error {
	usedBefore := r.meter.usages(ctx, r.cfg.ServerMetrics)
	selfBefore, err := selfCPU()
	if err != nil {
		return err
	}
	machineBefore := readMachineTime()
	lag := startLagProbe(r.cfg.Clock)
	if r.kube != nil {
		r.kube.measuring.Store(true)
	}
	if r.watchers != nil {
		r.watchers.from.Store(int64(r.cfg.Clock.Now()))
	}
	p := r.newPhase("run", r.cfg.Duration, r.cfg.Total, r.cfg.Rate)
	began := p.schedule.start
	r.report.Measured = r.cfg.Clock.Wall()
	r.runPhase(ctx, p, func(s Second) {
		if len(r.report.Seconds) < maxSeconds {
			r.report.Seconds = append(r.report.Seconds, s)
		}
	})
	r.summariseMachine(readMachineTime().share(machineBefore), lag.end())
	elapsed := r.cfg.Clock.Now().Sub(began)
	switch whole := p.schedule.end.Sub(began); {
	case p.schedule.end == 0:
	case ctx.Err() != nil:
		elapsed = min(elapsed, whole)
	default:
		elapsed = whole // the last operation of an open loop is due, and answered, before its end
	}
	selfAfter, err := selfCPU()
	if err != nil {
		return err
	}
	// The last reading is taken also if the run was interrupted.
	usedAfter := r.meter.usages(context.WithoutCancel(ctx), r.cfg.ServerMetrics)
	r.summarise(ctx, p, elapsed)
	r.summariseCPU(selfAfter-selfBefore, usedBefore, usedAfter)
	return nil
}

// summarise writes the results of the measured phase into the report.
func (r *run) summarise(ctx context.Context, p *phase, elapsed time.Duration) {
	h := &p.recorder.total
	out := &r.report
	if r.cfg.Rate > 0 {
		o := &OpenLoop{Offered: r.cfg.Rate, Lateness: summary(h[classLate])}
		if ctx.Err() == nil {
			o.NeverStarted = p.schedule.neverStarted()
		}
		if o.NeverStarted > 0 {
			p.errors.add(neverStarted, o.NeverStarted)
		}
		out.OpenLoop = o
	}
	out.ElapsedSeconds = elapsed.Seconds()
	out.Put, out.Get, out.FailedLatency = summary(h[classPut]), summary(h[classGet]), summary(h[classFailed])
	out.Operations = countOf(p.recorder.total, succeeded...)
	out.Errors, out.Failed = p.errors.all()
	if elapsed > 0 {
		out.Throughput = float64(p.recorder.answeredInWindow(succeeded...)) / elapsed.Seconds()
	}
	r.keep(kindFailed, h[classFailed])
	r.keep(kindLateness, h[classLate])
	for _, k := range operationKinds {
		r.keep(k.name, h[k.class])
		if k.class == classPut || k.class == classGet {
			continue
		}
		if l := summary(h[k.class]); l != nil {
			rate := float64(p.recorder.answeredInWindow(k.class)) / max(elapsed.Seconds(), 1e-9)
			out.Kinds = append(out.Kinds, KindReport{k.name, rate, *l})
		}
	}
}

// summariseMachine writes what the load generator's machine had to do into the report.
func (r *run) summariseMachine(busy float64, lag *hdrhistogram.Histogram) {
	c := &r.report.CPU
	c.Processors, c.MachineBusy, c.SchedulingLag = runtime.GOMAXPROCS(0), busy, summary(lag)
	r.keep(kindLag, lag)
}

// keep puts a histogram into the report, if it is not empty.
func (r *run) keep(name string, h *hdrhistogram.Histogram) {
	if kept := histogramOf(h); kept != nil {
		if r.report.Histograms == nil {
			r.report.Histograms = map[string]*Histogram{}
		}
		r.report.Histograms[name] = kept
	}
}

// summariseCPU writes the processor time of the measured phase into the report.
func (r *run) summariseCPU(self time.Duration, before, after []usage) {
	c := &r.report.CPU
	// A failed operation costs as much as a successful one; one that was never started
	// costs nothing.
	operations := float64(r.report.Operations)
	if r.report.FailedLatency != nil {
		operations += float64(r.report.FailedLatency.Count)
	}
	perOp := func(seconds float64) float64 { return seconds * 1e6 / max(operations, 1) }
	c.SelfSeconds, c.SelfPerOp = self.Seconds(), perOp(self.Seconds())
	known := true
	for i, url := range r.cfg.ServerMetrics {
		s := ServerCPU{URL: url}
		switch err := errors.Join(before[i].err, after[i].err); {
		case err != nil:
			s.Error = err.Error()
		case after[i].startSeconds != before[i].startSeconds || after[i].cpuSeconds < before[i].cpuSeconds:
			s.Error = "restarted during the run: its CPU time began anew"
		default:
			s.Seconds = after[i].cpuSeconds - before[i].cpuSeconds
			s.PerOp = perOp(s.Seconds)
			s.ResidentBytes = int64(after[i].residentBytes)
		}
		known = known && s.Error == ""
		c.ServersPerOp += s.PerOp
		c.Servers = append(c.Servers, s)
	}
	if !known {
		c.ServersPerOp = 0
	}
}

// newPhase makes a phase that begins now.
func (r *run) newPhase(name string, d time.Duration, total int64, rate float64) *phase {
	return &phase{
		name:     name,
		schedule: newSchedule(r.cfg.Clock.Now(), d, total, rate),
		recorder: newRecorder(),
		errors:   &errorTally{},
	}
}

// runPhase sends all clients through a phase, and reports each second.
func (r *run) runPhase(ctx context.Context, p *phase, second func(Second)) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { r.watch(p, second, stop) })
	runClients(ctx, r.clients, p)
	close(stop)
	wg.Wait()
}

// watch drains the phase's recorder each second until stop is closed, and then the
// rest, so that the seconds add up to the phase.
func (r *run) watch(p *phase, second func(Second), stop <-chan struct{}) {
	var failed int64
	last := p.schedule.start
	next := last
	tell := func(rest bool) {
		p.recorder.drain()
		_, all := p.errors.all()
		now := r.cfg.Clock.Now()
		s := secondOf(p.recorder, now.Sub(p.schedule.start), now.Sub(last), all-failed)
		if rest && s.Operations == 0 && s.Failed == 0 {
			return
		}
		failed, last = all, now
		if second != nil {
			second(s)
		}
		if r.cfg.Live {
			fmt.Fprintln(r.out, s.line(p.name, rest))
		}
	}
	timer := r.cfg.Clock.NewTimer(time.Second)
	defer timer.Stop()
	for {
		next = next.Add(time.Second)
		timer.Reset(next.Sub(r.cfg.Clock.Now()))
		select {
		case <-timer.C():
			tell(false)
		case <-stop:
			tell(true)
			return
		}
	}
}

// secondOf describes the last drain of a recorder.
func secondOf(rec *recorder, at, length time.Duration, failed int64) Second {
	s := Second{At: at.Seconds(), Length: length.Seconds(), Failed: failed}
	put, get, all := rec.second[classPut], rec.second[classGet], newHistogram()
	for _, c := range succeeded {
		if rec.second[c].TotalCount() > 0 {
			all.Merge(rec.second[c])
		}
	}
	if all.TotalCount() > 0 {
		s.P50, s.P99, s.Max = all.ValueAtPercentile(50), all.ValueAtPercentile(99), all.Max()
	}
	s.Operations = countOf(rec.second, succeeded...)
	if put.TotalCount() > 0 {
		s.PutP50, s.PutP99, s.PutMax = put.ValueAtPercentile(50), put.ValueAtPercentile(99), put.Max()
	}
	if get.TotalCount() > 0 {
		s.GetP50, s.GetP99, s.GetMax = get.ValueAtPercentile(50), get.ValueAtPercentile(99), get.Max()
	}
	return s
}

// line is the second as a line for people. The rest at a phase's end is no whole
// second, so its line gives its length.
func (s Second) line(phase string, rest bool) string {
	text := fmt.Sprintf("%-7s %4.0fs %9d/s", phase, s.At, s.Operations)
	if rest {
		text = fmt.Sprintf("%-7s %4.3gs %9d in %.3fs", phase, s.At, s.Operations, s.Length)
	}
	if s.PutMax > 0 {
		text += fmt.Sprintf("   put p50 %s p99 %s max %s", micros(s.PutP50), micros(s.PutP99), micros(s.PutMax))
	}
	if s.GetMax > 0 {
		text += fmt.Sprintf("   get p50 %s p99 %s max %s", micros(s.GetP50), micros(s.GetP99), micros(s.GetMax))
	}
	if s.Failed > 0 {
		text += fmt.Sprintf("   %d failed", s.Failed)
	}
	return text
}
