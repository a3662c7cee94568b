package loadtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// SweepConfig describes a sweep: runs of a load that grows step by step, until the servers can do no more.
type SweepConfig struct {
	// Run is each step's run, apart from what Over says. Only the first step fills, and the keys are deleted after the last.
	Run Config `json:"run"`
	// Over is what grows.
	Over SweepOver `json:"over"`
	// Steps are the rates or the numbers of clients, in growing order.
	Steps []float64 `json:"steps"`
	// P99 is the bound of the operations' p99.
	P99 time.Duration `json:"p99_bound_ns"`
}

// SweepOver is what grows from step to step.
type SweepOver string

// What can grow: the rate of an open loop, or the number of clients of a closed loop.
const (
	SweepRate    SweepOver = "rate"
	SweepClients SweepOver = "clients"
)

const (
	// sweepGrowth is how much more a step must bring than the best before it.
	sweepGrowth = 1.05
	// sweepFailures is the share of operations that may fail in a step.
	sweepFailures = 0.001
	// sweepBeyond is how many steps in a row beyond the knee end a sweep: one may have had bad luck.
	sweepBeyond = 2
	// maxSweepSteps bounds the steps.
	maxSweepSteps = 1000
)

// DefaultSteps returns steps that double.
func DefaultSteps(over SweepOver) (steps []float64) {
	first := 1.0
	if over == SweepRate {
		first = 1000
	}
	for i := range 13 {
		steps = append(steps, first*math.Pow(2, float64(i)))
	}
	return steps
}

// Validate returns all errors of the SweepConfig at once.
func (c *SweepConfig) Validate() error {
	var wrong []error
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if c.Over != SweepRate && c.Over != SweepClients {
		bad("over: %q is none of rate, clients", c.Over)
	}
	if len(c.Steps) < 1 || len(c.Steps) > maxSweepSteps {
		bad("steps: %d are not between 1 and %d", len(c.Steps), maxSweepSteps)
	}
	for i, step := range c.Steps {
		switch {
		case c.Over == SweepClients && step != math.Trunc(step):
			bad("steps: %g is not a number of clients", step)
		case step <= 0:
			bad("steps: %g is not above 0", step)
		case i > 0 && c.Over == SweepRate && step < c.Steps[i-1]*sweepGrowth:
			bad("steps: a rate of %g after %g is not %g times as much, so the throughput cannot show whether it grows", step, c.Steps[i-1], sweepGrowth)
		case i > 0 && step <= c.Steps[i-1]:
			bad("steps: %g after %g does not grow", step, c.Steps[i-1])
		}
	}
	if c.Run.Rate != 0 {
		bad("rate: a sweep over %s sets it itself: 0 for clients", c.Over)
	}
	if c.P99 <= 0 {
		bad("p99: %s is not above 0", c.P99)
	}
	if c.Run.Workload == Kubernetes {
		bad("workload: kubernetes cannot be swept")
	}
	if len(wrong) > 0 {
		return errors.Join(wrong...)
	}
	for _, i := range []int{0, len(c.Steps) - 1} {
		run := c.step(i)
		wrong = append(wrong, run.Validate())
	}
	return errors.Join(wrong...)
}

// step returns the run of step i.
func (c *SweepConfig) step(i int) Config {
	run := c.Run
	if c.Over == SweepRate {
		run.Rate = c.Steps[i]
	} else {
		run.Clients = int(min(c.Steps[i], maxClients+1))
		run.Conns = min(run.Conns, run.Clients)
	}
	run.Fill, run.Cleanup = run.Fill && i == 0, false
	return run
}

// SweepReport is the result of a sweep. Its JSON form is meant to be kept.
type SweepReport struct {
	Config SweepConfig `json:"config"`
	// Knee is the last good step, from 0; -1 if there is none. Beyond says that the sweep has gone beyond it: otherwise
	// the servers can do more than the last step.
	Knee   int         `json:"knee"`
	Beyond bool        `json:"beyond"`
	Steps  []SweepStep `json:"steps"`
}

// SweepStep is one step. It is good if the p99 is in its bound, next to nothing failed, Config.SLO is met, and the throughput
// is 1.05 times the best before or more.
type SweepStep struct {
	Value  float64 `json:"value"`
	Good   bool    `json:"good"`
	Why    string  `json:"why,omitempty"` // it is not
	Report Report  `json:"report"`
}

// Sweep runs the steps until two in a row are not good, and writes a line for each to out.
// An error means that a step could not be done; a sweep that is interrupted returns the steps so far and an error.
func Sweep(ctx context.Context, cfg SweepConfig, out io.Writer) (*SweepReport, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	report, err := sweep(ctx, cfg, out, func(ctx context.Context, run Config) (Report, error) { return Run(ctx, run, io.Discard) })
	if cfg.Run.Cleanup {
		err = errors.Join(err, sweepClean(context.WithoutCancel(ctx), cfg.Run))
	}
	return report, err
}

// sweepClean deletes the keys of all steps.
func sweepClean(ctx context.Context, cfg Config) error {
	s, err := dial(&cfg)
	if err != nil {
		return err
	}
	defer s.close()
	space := newKeySpace(&cfg)
	_, err = cleanup(ctx, &cfg, s.kvs, &space)
	return err
}

func sweep(ctx context.Context, cfg SweepConfig, out io.Writer, do func(context.Context, Config) (Report, error)) (*SweepReport, error) {
	report := &SweepReport{Config: cfg, Knee: -1}
	fmt.Fprintf(out, "%10s %12s %10s %10s %10s %9s %8s %6s\n", cfg.Over, "throughput", "p50", "p99", "p99.9", "servers'", "failed", "own")
	fmt.Fprintf(out, "%10s %12s %10s %10s %10s %9s %8s %6s\n", "", "per second", "", "", "", "CPU/op", "", "CPU")
	best, beyond := 0.0, 0
	for i, value := range cfg.Steps {
		r, err := do(ctx, cfg.step(i))
		if err != nil {
			return report, fmt.Errorf("sweep: step %g: %w", value, err)
		}
		if r.Interrupted {
			return report, fmt.Errorf("sweep: interrupted in step %g", value)
		}
		step := SweepStep{Value: value, Report: r, Why: cfg.judge(&r, best)}
		step.Good = step.Why == ""
		best = max(best, r.Throughput)
		report.Steps = append(report.Steps, step)
		fmt.Fprintln(out, step.line())
		for _, why := range r.Saturated() {
			fmt.Fprintf(out, "%10s WARNING: %s\n", "", why)
		}
		if beyond++; step.Good {
			report.Knee, beyond = i, 0
		}
		if beyond == sweepBeyond {
			break
		}
	}
	report.Beyond = beyond > 0
	report.conclude(out)
	return report, nil
}

// judge says why a step is not good, and nothing if it is. best is the highest throughput before it.
func (c *SweepConfig) judge(r *Report, best float64) string {
	var why []string
	all := r.All()
	if p99 := all.Percentile(99); all.Count() == 0 {
		why = append(why, "nothing succeeded")
	} else if p99 > c.P99.Microseconds() {
		why = append(why, "p99 above "+micros(c.P99.Microseconds()))
	}
	if r.Throughput < best*sweepGrowth {
		why = append(why, "throughput does not grow")
	}
	if float64(r.Failed) > sweepFailures*float64(r.Failed+r.Operations) {
		why = append(why, fmt.Sprintf("more than %g %% failed", 100*sweepFailures))
	}
	if err := r.Broken(); err != nil {
		why = append(why, err.Error())
	}
	if err := r.Missed(); err != nil {
		why = append(why, err.Error())
	}
	return strings.Join(why, ", ")
}

func (s *SweepStep) line() string {
	all, servers := s.Report.All(), "-"
	if s.Report.CPU.ServersPerOp > 0 {
		servers = fmt.Sprintf("%.1fµs", s.Report.CPU.ServersPerOp)
	}
	text := fmt.Sprintf("%10g %12.1f %10s %10s %10s %9s %8d %5.0f%%", s.Value, s.Report.Throughput,
		micros(all.Percentile(50)), micros(all.Percentile(99)), micros(all.Percentile(99.9)), servers, s.Report.Failed, 100*s.Report.SelfShare())
	if !s.Good {
		text += "  " + s.Why
	}
	return text
}

// conclude says where the knee is.
func (r *SweepReport) conclude(out io.Writer) {
	switch {
	case r.Knee < 0:
		fmt.Fprintf(out, "\nno knee: no step was good; begin with less (--steps), or accept a longer --p99\n")
	default:
		knee := &r.Steps[r.Knee]
		fmt.Fprintf(out, "\nknee: %s %g, %.1f/s with a p99 of %s\n", r.Config.Over, knee.Value, knee.Report.Throughput, micros(knee.Report.All().Percentile(99)))
		if !r.Beyond {
			fmt.Fprintln(out, "It is the last step: the servers may do more.")
		}
		if len(knee.Report.Saturated()) > 0 {
			fmt.Fprintln(out, "WARNING: it may be that of the load generator or of its machine; see the step.")
		}
	}
}

// Broken returns the broken promises of all steps, or nil.
func (r *SweepReport) Broken() error {
	i := slices.IndexFunc(r.Steps, func(s SweepStep) bool { return s.Report.Broken() != nil })
	if i < 0 {
		return nil
	}
	return r.Steps[i].Report.Broken()
}

// WriteJSON writes the report to a file, or to stdout for "-".
func (r *SweepReport) WriteJSON(name string, stdout io.Writer) error {
	return WriteJSON(r, name, stdout)
}
