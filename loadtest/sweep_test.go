package loadtest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/loadtest/fakekv"
)

func sweepConfig(over SweepOver, steps ...float64) SweepConfig {
	cfg := smallConfig("fake")
	cfg.Rate = 0
	return SweepConfig{Run: cfg, Over: over, Steps: steps, P99: 50 * time.Millisecond}
}

// TestSweepGolden: the sweep ends two steps beyond the knee, and says why each is not good.
func TestSweepGolden(t *testing.T) {
	var text bytes.Buffer
	type result struct {
		throughput float64
		p99        int64
		failed     int64
		self       float64
	}
	for _, c := range []struct {
		name    string
		results []result
		knee    int
		steps   int
	}{
		{"a step without luck", []result{{1000, 1000, 0, 1}, {900, 1000, 0, 1}, {2000, 2000, 0, 1}, {2050, 4000, 0, 1}, {2090, 60_000, 0, 1}, {9000, 1, 0, 1}}, 2, 5},
		{"the last step is good", []result{{1000, 1000, 0, 1}, {2000, 1000, 0, 1}}, 1, 2},
		{"the first is too much", []result{{1000, 50_100, 0, 1}, {2000, 60_000, 0, 1}, {4000, 10, 0, 1}}, -1, 2},
		{"failures", []result{{1000, 1000, 0, 1}, {2000, 1000, 2, 1}, {4000, 1000, 90, 1}}, 0, 3},
		{"the generator is the bottleneck", []result{{1000, 1000, 0, 1}, {2000, 1000, 1, 19}}, 1, 2},
	} {
		text.WriteString("-- " + c.name + "\n")
		cfg := sweepConfig(SweepClients, 1, 2, 4, 8, 16, 32)
		cfg.Steps = cfg.Steps[:len(c.results)]
		cfg.Run.Fill, cfg.Run.Cleanup = true, true
		i := 0
		r, err := sweep(t.Context(), cfg, &text, func(_ context.Context, run Config) (Report, error) {
			if run.Clients != int(cfg.Steps[i]) || run.Conns > run.Clients || run.Fill != (i == 0) || run.Cleanup {
				t.Errorf("step %d: %+v", i, run)
			}
			x := c.results[i]
			i++
			return Report{
				Operations: 1000, Failed: x.failed, Throughput: x.throughput, ElapsedSeconds: 10, Histograms: map[string]*Histogram{"put": histogramFrom(x.p99)},
				CPU: CPU{Processors: 2, SelfSeconds: x.self, ServersPerOp: 20},
			}, nil
		})
		if err != nil || r.Knee != c.knee || len(r.Steps) != c.steps {
			t.Errorf("%s: knee %d, %d steps, %v", c.name, r.Knee, len(r.Steps), err)
		}
	}
	golden(t, "sweep.txt", text.Bytes())
}

// TestSweep: a sweep against a server, over clients and over rates.
func TestSweep(t *testing.T) {
	s := &fakekv.Store{}
	endpoint := serve(t, s)
	cfg := sweepConfig(SweepClients, 1, 2)
	cfg.Run.Endpoints, cfg.Run.Fill, cfg.Run.Cleanup, cfg.Run.Duration, cfg.Run.Total = []string{endpoint}, true, true, 0, 50
	r, err := Sweep(t.Context(), cfg, io.Discard)
	if err != nil || len(r.Steps) != 2 || r.Steps[1].Report.Operations != 50 || r.Steps[1].Report.Settings.Clients != 2 || s.Len() != 0 || r.Broken() != nil {
		t.Errorf("%v, %d keys, %+v", err, s.Len(), r)
	}
	cfg.Over, cfg.Steps = SweepRate, []float64{500, 1000}
	r, err = Sweep(t.Context(), cfg, io.Discard)
	if err != nil || len(r.Steps) != 2 || r.Steps[1].Report.OpenLoop.Offered != 1000 {
		t.Errorf("%v, %+v", err, r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = sweep(ctx, cfg, io.Discard, func(context.Context, Config) (Report, error) { return Report{Interrupted: true}, nil })
	if err == nil || !strings.Contains(err.Error(), "interrupted in step 500") {
		t.Error(err)
	}
	_, err = sweep(t.Context(), cfg, io.Discard, func(context.Context, Config) (Report, error) { return Report{}, io.ErrUnexpectedEOF })
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}

func TestSweepConfig(t *testing.T) {
	for want, change := range map[string]func(*SweepConfig){
		`over: "x"`:                       func(c *SweepConfig) { c.Over = "x" },
		"steps: 0 are not":                func(c *SweepConfig) { c.Steps = nil },
		"steps: 1.5 is not a number":      func(c *SweepConfig) { c.Steps = []float64{1.5} },
		"steps: 0 is not above 0":         func(c *SweepConfig) { c.Steps = []float64{0} },
		"steps: 2 after 2 does not grow":  func(c *SweepConfig) { c.Steps = []float64{2, 2} },
		"a rate of 104 after 100":         func(c *SweepConfig) { c.Over, c.Steps = SweepRate, []float64{100, 104} },
		"rate: a sweep over clients sets": func(c *SweepConfig) { c.Run.Rate = 5 },
		"p99: 0s is not above 0":          func(c *SweepConfig) { c.P99 = 0 },
		"kubernetes cannot be swept":      func(c *SweepConfig) { c.Run.Workload = Kubernetes },
		"clients: 1048577 is not between": func(c *SweepConfig) { c.Steps = []float64{1, 1e20} },
		"keys: 0 is not between":          func(c *SweepConfig) { c.Run.Keys = 0 },
	} {
		cfg := sweepConfig(SweepClients, 1, 2)
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	for _, over := range []SweepOver{SweepClients, SweepRate} {
		cfg := sweepConfig(over, DefaultSteps(over)...)
		if err := cfg.Validate(); err != nil {
			t.Error(err)
		}
	}
}
