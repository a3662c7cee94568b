package loadtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// reportFormat is the version of the report's JSON form. It changes when a field
// changes its meaning or disappears, not when one is added.
const reportFormat = 1

// maxSeconds bounds the seconds that a report lists one by one.
const maxSeconds = 24 * 60 * 60

// Report is the result of a run. Its JSON form is meant to be kept.
type Report struct {
	Format     int        `json:"format"`
	Started    time.Time  `json:"started"`
	Settings   Config     `json:"settings"`
	Versions   Versions   `json:"versions"`
	Machine    Machine    `json:"machine"`
	FileSystem FileSystem `json:"file_system"`

	// Interrupted says that the run was ended from outside. The figures end there, and
	// nothing was verified.
	Interrupted bool `json:"interrupted,omitempty"`
	// Measured is when the measured phase began, ElapsedSeconds how long it took.
	Measured       time.Time `json:"measured,omitzero"`
	ElapsedSeconds float64   `json:"elapsed_seconds"`
	// Operations counts the measured operations that succeeded. Failed counts those that
	// did not, including those that an open loop never started. Throughput counts the
	// successes within the measured time.
	Operations int64   `json:"operations"`
	Failed     int64   `json:"failed"`
	Throughput float64 `json:"throughput_per_second"`

	// Put and Get are the latencies of the successes, FailedLatency those of the
	// failures; nil where there was none.
	Put           *Latencies `json:"put,omitempty"`
	Get           *Latencies `json:"get,omitempty"`
	FailedLatency *Latencies `json:"failed_latency,omitempty"`
	// Errors counts the failures of the measured phase by code and text.
	Errors map[string]int64 `json:"errors,omitempty"`
	// ErrorsBefore are the failures of fill and warm-up.
	ErrorsBefore map[string]int64 `json:"errors_before,omitempty"`

	OpenLoop *OpenLoop `json:"open_loop,omitempty"`
	CPU      CPU       `json:"cpu"`
	Seconds  []Second  `json:"seconds,omitempty"`
	Verify   *Verified `json:"verify,omitempty"`
	// Histograms are the latencies of each kind, and those of failures ("failed"), of events at watchers ("delay"),
	// and of the generator's own ("lateness", "scheduling lag").
	Histograms map[string]*Histogram `json:"histograms,omitempty"`
	// SLO says what became of each clause of the settings' SLO.
	SLO []Objective `json:"slo,omitempty"`

	// Kinds are the operations that are neither puts nor gets, by kind, and Watch what its watchers got.
	Kinds []KindReport `json:"kinds,omitempty"`
	Watch *Watched     `json:"watch,omitempty"`
	// Generators are the load generators of a merged report, which has no MachineBusy of its own.
	Generators []Generator `json:"generators,omitempty"`
	// CleanedUp is how many keys the clean-up has deleted.
	CleanedUp int64 `json:"cleaned_up,omitempty"`
}

// KindReport describes the successes of one kind of operation.
type KindReport struct {
	Kind       string    `json:"kind"`
	Throughput float64   `json:"throughput_per_second"`
	Latency    Latencies `json:"latency"`
}

// Watched is what the watchers of workload kubernetes, or of a run with Config.Watchers, got. A change that was acknowledged must come to each watcher
// of its resource exactly once, in the order of revisions, and before a progress notification with its revision.
type Watched struct {
	Watchers int `json:"watchers"`
	// Events and Progress count what came to all watchers together, over the whole run.
	Events   int64 `json:"events"`
	Progress int64 `json:"progress_notifications"`
	// Delay is the time from before a put was sent until its event came, of the measured phase.
	Delay *Latencies `json:"delay,omitempty"`
	// Lost changes did not come, Duplicate ones came twice, Disordered ones came behind a later revision. Unasked
	// ones were acknowledged to nobody, and there are more of them than puts of unknown fate. With Config.Watchers, Lost is a lower
	// bound if operations failed: watchers may get the events of failed puts too, and each hides a lost one.
	Lost       int64 `json:"lost"`
	Duplicate  int64 `json:"duplicate"`
	Disordered int64 `json:"disordered"`
	Unasked    int64 `json:"unasked"`
	// Failed watchers ended with an error; Errors counts these by text.
	Failed int64            `json:"failed"`
	Errors map[string]int64 `json:"errors,omitempty"`
}

// Generator is one of several load generators.
type Generator struct {
	Name      string   `json:"name"`
	Machine   Machine  `json:"machine"`
	CPU       CPU      `json:"cpu"`
	Saturated []string `json:"saturated,omitempty"`
}

// OpenLoop describes a run with a rate.
type OpenLoop struct {
	Offered float64 `json:"offered_per_second"`
	// NeverStarted counts operations that were due and still unsent at the end of the run. If it
	// is not 0 the true percentiles are higher than the reported ones.
	NeverStarted int64 `json:"never_started"`
	// Lateness is the generator's own part of the latencies: how long after they were
	// due requests left although a client was free. Requests without a free client are
	// not in it.
	Lateness *Latencies `json:"lateness,omitempty"`
}

// CPU is processor time over the measured phase.
type CPU struct {
	SelfSeconds float64 `json:"self_seconds"`
	SelfPerOp   float64 `json:"self_us_per_operation"`
	// Processors is how many the load generator could use at once, and MachineBusy how much of all processors of its machine
	// was used, by whomever, 0 to 1; 0 if unknown. SchedulingLag is how late the generator woke when a timer had fired:
	// answers wait as long until it sees them.
	Processors    int        `json:"processors,omitempty"`
	MachineBusy   float64    `json:"machine_busy,omitempty"`
	SchedulingLag *Latencies `json:"scheduling_lag,omitempty"`
	// Servers has one element for each metrics URL. ServersPerOp is their sum per
	// operation, 0 if a URL did not answer.
	Servers      []ServerCPU `json:"servers,omitempty"`
	ServersPerOp float64     `json:"servers_us_per_operation,omitempty"`
}

// ServerCPU is the CPU time of one server.
type ServerCPU struct {
	URL           string  `json:"url"`
	Seconds       float64 `json:"seconds"`
	PerOp         float64 `json:"us_per_operation"`
	ResidentBytes int64   `json:"resident_bytes"`
	Error         string  `json:"error,omitempty"`
}

// Second is one second of the measured phase, or the shorter rest at its end. Latencies
// are those of the operations answered in it, of all kinds and of puts and gets, in microseconds.
type Second struct {
	// At is its end, from the begin of the phase, and Length its length.
	At         float64 `json:"at_seconds"`
	Length     float64 `json:"length_seconds"`
	Operations int64   `json:"operations"`
	Failed     int64   `json:"failed"`
	P50        int64   `json:"p50_us,omitempty"`
	P99        int64   `json:"p99_us,omitempty"`
	Max        int64   `json:"max_us,omitempty"`
	PutP50     int64   `json:"put_p50_us,omitempty"`
	PutP99     int64   `json:"put_p99_us,omitempty"`
	PutMax     int64   `json:"put_max_us,omitempty"`
	GetP50     int64   `json:"get_p50_us,omitempty"`
	GetP99     int64   `json:"get_p99_us,omitempty"`
	GetMax     int64   `json:"get_max_us,omitempty"`
}

// Verified says how the servers kept their promises.
type Verified struct {
	// Keys is the number of keys read back. Acknowledged is how many of them had an
	// acknowledged put of this run, Unknown the number of puts of unknown fate.
	Keys         int64 `json:"keys"`
	Acknowledged int64 `json:"acknowledged"`
	Unknown      int64 `json:"unknown"`
	// Violations counts the broken promises; First are the first of them.
	Violations int64    `json:"violations"`
	First      []string `json:"first,omitempty"`
}

// Err returns the faults of the run: failed operations, including those before the
// measured phase, and broken promises. It is nil for a clean run.
func (r *Report) Err() error {
	var all []error
	if r.Interrupted {
		all = append(all, errors.New("the run was interrupted"))
	}
	if r.Failed > 0 {
		all = append(all, fmt.Errorf("%d of %d operations failed", r.Failed, r.Failed+r.Operations))
	}
	if n := len(r.ErrorsBefore); n > 0 {
		all = append(all, fmt.Errorf("operations failed before the measured phase, in %d ways", n))
	}
	return errors.Join(append(all, r.Broken())...)
}

// Broken returns only the broken promises, or nil. A run that disturbs its servers
// expects failed operations, but never these.
func (r *Report) Broken() error {
	if r.Verify == nil || r.Verify.Violations == 0 {
		return nil
	}
	return fmt.Errorf("%d promises broken, the first: %s", r.Verify.Violations, r.Verify.First[0])
}

// WriteJSON writes the report to a file, or to stdout for "-".
func (r *Report) WriteJSON(name string, stdout io.Writer) error { return WriteJSON(r, name, stdout) }

// WriteJSON writes anything as JSON to a file, or to stdout for "-".
func WriteJSON(report any, name string, stdout io.Writer) error {
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	text = append(text, '\n')
	if name == "-" {
		_, err = stdout.Write(text)
	} else {
		err = os.WriteFile(name, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// WriteText writes the report for people.
func (r *Report) WriteText(out io.Writer) {
	c := &r.Settings
	links := "connections"
	if c.API == APIPipe {
		links = "pipes"
	}
	fmt.Fprintf(out, "%s: %d clients, %d %s, %d endpoints; %s\n", r.workload(), c.Clients, c.Conns, links, len(c.Endpoints), c.data())
	fmt.Fprintf(out, "%.1f/s: %d operations in %.2f s, %d failed\n",
		r.Throughput, r.Operations, r.ElapsedSeconds, r.Failed)
	if r.OpenLoop != nil {
		fmt.Fprintf(out, "offered %.1f/s, latency from the moment an operation was due; %d never sent\n",
			r.OpenLoop.Offered, r.OpenLoop.NeverStarted)
	}
	fmt.Fprintln(out)
	r.writeLatencies(out)
	r.writeCPU(out)
	r.writeWatched(out)
	writeErrors(out, "errors", r.Errors)
	writeErrors(out, "errors before the measured phase", r.ErrorsBefore)
	if v := r.Verify; v != nil {
		fmt.Fprintf(out, "\nverified %d keys: %d with an acknowledged put, %d puts of unknown fate, %d violations\n",
			v.Keys, v.Acknowledged, v.Unknown, v.Violations)
		for _, text := range v.First {
			fmt.Fprintf(out, "  VIOLATION %s\n", text)
		}
		if more := v.Violations - int64(len(v.First)); more > 0 {
			fmt.Fprintf(out, "  … and %d more\n", more)
		}
	}
	r.writeSLO(out)
	for _, why := range r.Saturated() {
		fmt.Fprintf(out, "\nWARNING: %s\n", why)
	}
	if r.Settings.Cleanup {
		fmt.Fprintf(out, "\ncleaned up: %d keys deleted\n", r.CleanedUp)
	}
	if r.Interrupted {
		fmt.Fprintln(out, "\nThe run was interrupted; nothing was verified.")
	}
}

// writeSLO says what became of each clause.
func (r *Report) writeSLO(out io.Writer) {
	if len(r.SLO) == 0 {
		return
	}
	fmt.Fprintln(out, "\nslo:")
	for _, o := range r.SLO {
		word := "met"
		if !o.Met {
			word = "NOT MET"
		}
		fmt.Fprintf(out, "  %-7s  %s: %s\n", word, o.Clause, o.Figure)
	}
}

// writeWatched says what the watchers got.
func (r *Report) writeWatched(out io.Writer) {
	w := r.Watch
	if w == nil {
		return
	}
	fmt.Fprintf(out, "\n%d watchers: %d events, %d progress notifications; %d events lost, %d duplicate, %d out of order, %d unasked; %d watchers failed\n",
		w.Watchers, w.Events, w.Progress, w.Lost, w.Duplicate, w.Disordered, w.Unasked, w.Failed)
	if r.Settings.Workload != Kubernetes && (r.Failed > 0 || len(r.ErrorsBefore) > 0) {
		fmt.Fprintln(out, "the lost events are a lower bound: operations failed, and an event of a failed put hides a lost one")
	}
	writeErrors(out, "errors of watchers", w.Errors)
}

// data describes keys and values.
func (c *Config) data() string {
	if c.Workload == Kubernetes {
		k := &c.Kubernetes
		return fmt.Sprintf("%d nodes, %d pods at the begin, %d watchers of each resource; %s", k.Nodes, k.Pods, k.Watchers, k.Mix)
	}
	dist := string(c.Dist)
	if c.Dist == Hot {
		dist = fmt.Sprintf("%d hot ones get %d%%", c.HotKeys, c.HotPercent)
		if c.HotMove > 0 {
			dist += fmt.Sprintf(", for %s", c.HotMove)
		}
	}
	return fmt.Sprintf("%d keys (%s) of %d B, values of %d B", c.Keys, dist, c.KeyBytes, c.ValueBytes)
}

// workload names the workload, and the API if it is not etcd's.
func (r *Report) workload() string {
	if r.Settings.API == APIPipe {
		return r.requests() + " by the pipe"
	}
	return r.requests()
}

// requests says what is sent.
func (r *Report) requests() string {
	c := &r.Settings
	switch {
	case c.Workload == Mixed:
		return fmt.Sprintf("mixed, %d%% gets", c.ReadPercent)
	case c.Workload == Get && c.Serializable:
		return "serializable get"
	case c.Workload == Txn && c.TxnKeys > 1:
		return fmt.Sprintf("txn of %d keys", c.TxnKeys)
	case c.Workload == Range:
		return fmt.Sprintf("range, pages of %d keys", c.PageKeys)
	default:
		return string(c.Workload)
	}
}

func (r *Report) writeLatencies(out io.Writer) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tcount\tmean\tp50\tp75\tp90\tp95\tp99\tp99.9\tp99.99\tmax\t")
	row := func(name string, l *Latencies) {
		if l == nil {
			return
		}
		fmt.Fprintf(t, "%s\t%d\t%s", name, l.Count, micros(int64(l.Mean)))
		for _, v := range []int64{l.P50, l.P75, l.P90, l.P95, l.P99, l.P999, l.P9999, l.Max} {
			fmt.Fprintf(t, "\t%s", micros(v))
		}
		fmt.Fprintln(t, "\t")
	}
	for _, k := range r.Kinds {
		row(fmt.Sprintf("%s, %.1f/s", k.Kind, k.Throughput), &k.Latency)
	}
	if r.Watch != nil {
		row("event's delay", r.Watch.Delay)
	}
	row("put", r.Put)
	row("get", r.Get)
	row("failed", r.FailedLatency)
	if r.OpenLoop != nil {
		row("own lateness", r.OpenLoop.Lateness)
	}
	row("own lag", r.CPU.SchedulingLag)
	// The writer below returns its own error when it is used again.
	_ = t.Flush()
}

func (r *Report) writeCPU(out io.Writer) {
	fmt.Fprintf(out, "\nCPU per operation: %.1f µs here", r.CPU.SelfPerOp)
	if r.CPU.ServersPerOp > 0 {
		fmt.Fprintf(out, ", %.1f µs at the servers", r.CPU.ServersPerOp)
	}
	fmt.Fprintln(out)
	for _, s := range r.CPU.Servers {
		if s.Error != "" {
			fmt.Fprintf(out, "  %s: %s\n", s.URL, s.Error)
			continue
		}
		fmt.Fprintf(out, "  %s: %.2f s, %.1f µs, %.1f MiB resident\n",
			s.URL, s.Seconds, s.PerOp, float64(s.ResidentBytes)/(1<<20))
	}
	if r.CPU.Processors > 0 {
		fmt.Fprintf(out, "processors here: %.0f %% of %d used by the generator", 100*r.SelfShare(), r.CPU.Processors)
		if r.CPU.MachineBusy > 0 {
			fmt.Fprintf(out, ", machine %.0f %% busy", 100*r.CPU.MachineBusy)
		}
		fmt.Fprintln(out)
	}
}

func writeErrors(out io.Writer, title string, kinds map[string]int64) {
	if len(kinds) == 0 {
		return
	}
	fmt.Fprintf(out, "\n%s:\n", title)
	for _, kind := range slices.SortedFunc(maps.Keys(kinds), func(a, b string) int {
		if kinds[a] != kinds[b] {
			return int(kinds[b] - kinds[a])
		}
		return strings.Compare(a, b)
	}) {
		fmt.Fprintf(out, "%8d  %s\n", kinds[kind], kind)
	}
}
