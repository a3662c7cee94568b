package results

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/skeindb/skein/loadtest"
)

// maxPageRuns is how many runs a page shows: as many colours can be told apart.
const maxPageRuns = 8

//go:embed page.html
var pageText string

// The template escapes whatever a report says.
var pageTemplate = template.Must(template.New("page").Parse(pageText))

// page is what the template shows.
type page struct {
	Runs   []pageRun
	Charts []*chart
	Bars   []bar
	Fields []field
	Kinds  []kindRow
}

type pageRun struct {
	Number                         int
	Name, Started, Workload, Load  string
	Throughput, P50, P99, P999     string
	Max, Failed, Servers, Own, Lag string
	Warnings, Wrong                []string
	SLO                            []loadtest.Objective
}

// bar is a run's processor time for each operation.
type bar struct {
	Run                   int
	Name                  string
	Y, Servers, Own, OwnX float64
	Text                  string
}

// field is one setting of all runs.
type field struct {
	Name   string
	Values []string
	Same   bool
}

type kindRow struct {
	Run                                   int
	Name, Kind                            string
	Count                                 int64
	Mean, P50, P90, P99, P999, P9999, Max string
}

// WritePage writes one HTML page about the runs. It needs nothing besides itself, and runs no script.
func WritePage(out io.Writer, runs []Run) error {
	if len(runs) < 1 || len(runs) > maxPageRuns {
		return fmt.Errorf("report: %d reports are not between 1 and %d", len(runs), maxPageRuns)
	}
	p := &page{Fields: fieldsOf(runs), Bars: barsOf(runs)}
	for i := range runs {
		p.Runs = append(p.Runs, runOf(i, &runs[i]))
		p.Kinds = append(p.Kinds, kindRowsOf(i, &runs[i])...)
	}
	for _, c := range []*chart{latencyChart(runs), throughputChart(runs), percentileChart(runs)} {
		if c != nil {
			p.Charts = append(p.Charts, c)
		}
	}
	return pageTemplate.Execute(out, p)
}

// WritePageFile writes the page to a file.
func WritePageFile(name string, runs []Run) error {
	var out bytes.Buffer
	if err := WritePage(&out, runs); err != nil {
		return err
	}
	return os.WriteFile(name, out.Bytes(), 0o644)
}

func label(r *Run) string { return filepath.Base(r.Name) }

func runOf(i int, r *Run) pageRun {
	all := r.All()
	p := pageRun{
		Number: i, Name: label(r), Started: r.Started.UTC().Format("2006-01-02 15:04:05 UTC"), Workload: workloadOf(&r.Settings),
		Throughput: strconv.FormatFloat(r.Throughput, 'f', 1, 64), Failed: strconv.FormatInt(r.Failed, 10),
		P50: duration(float64(all.Percentile(50))), P99: duration(float64(all.Percentile(99))), P999: duration(float64(all.Percentile(99.9))),
		Max: duration(float64(all.Percentile(100))), Servers: duration(r.CPU.ServersPerOp), Own: fmt.Sprintf("%.0f %%", 100*r.SelfShare()),
		Warnings: r.Saturated(), SLO: r.SLO,
		Load: fmt.Sprintf("closed loop, %d clients", r.Settings.Clients),
	}
	if r.Settings.Rate > 0 {
		p.Load = fmt.Sprintf("%g/s, %d clients", r.Settings.Rate, r.Settings.Clients)
	}
	if lag := r.CPU.SchedulingLag; lag != nil {
		p.Lag = duration(float64(lag.P99))
	}
	if r.Interrupted {
		p.Wrong = append(p.Wrong, "The run was interrupted.")
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		p.Wrong = append(p.Wrong, fmt.Sprintf("%d × %s", r.Errors[kind], kind))
	}
	if v := r.Verify; v != nil && v.Violations > 0 {
		p.Wrong = append(p.Wrong, fmt.Sprintf("%d promises broken", v.Violations))
		p.Wrong = append(p.Wrong, v.First...)
	}
	return p
}

// workloadOf names the workload, and the API if it is not etcd's.
func workloadOf(s *loadtest.Config) string {
	if s.API == loadtest.APIPipe {
		return string(s.Workload) + " by the pipe"
	}
	return string(s.Workload)
}

// duration prints microseconds; "–" if there are none.
func duration(micros float64) string {
	switch {
	case micros <= 0:
		return "–"
	case micros < 1000:
		return fmt.Sprintf("%.4g µs", micros)
	case micros < 1e6:
		return fmt.Sprintf("%.3g ms", micros/1e3)
	default:
		return fmt.Sprintf("%.3g s", micros/1e6)
	}
}

func perSecond(v float64) string {
	if v >= 10_000 {
		return fmt.Sprintf("%gk/s", math.Round(v/100)/10)
	}
	return fmt.Sprintf("%g/s", math.Round(v*10)/10)
}

func kindRowsOf(i int, r *Run) (rows []kindRow) {
	for _, kind := range slices.Sorted(maps.Keys(r.Histograms)) {
		l := r.Histograms[kind].Summary()
		if l == nil {
			continue
		}
		us := func(v int64) string { return duration(float64(v)) }
		rows = append(rows, kindRow{
			i, label(r), kind, l.Count, duration(l.Mean), us(l.P50), us(l.P90), us(l.P99), us(l.P999), us(l.P9999), us(l.Max),
		})
	}
	return rows
}

// merged is some seconds of a run together.
type merged struct{ at, length, operations, p50, p99 float64 }

// secondsOf returns the seconds of a run, several together where there are too many. Of latencies the longest counts.
func secondsOf(r *Run) (out []merged) {
	each := (len(r.Seconds) + maxPoints - 1) / maxPoints
	for i, s := range r.Seconds {
		if i%max(each, 1) == 0 {
			out = append(out, merged{})
		}
		m := &out[len(out)-1]
		m.at, m.length, m.operations = s.At, m.length+s.Length, m.operations+float64(s.Operations)
		// Reports of old have no latencies of all kinds together.
		m.p50, m.p99 = max(m.p50, float64(cmp.Or(s.P50, s.PutP50, s.GetP50))), max(m.p99, float64(cmp.Or(s.P99, s.PutP99, s.GetP99)))
	}
	return out
}

// timeTicks returns round moments up to the end of the longest run.
func timeTicks(runs []Run) (ticks []tick, end float64) {
	for i := range runs {
		if n := len(runs[i].Seconds); n > 0 {
			end = max(end, runs[i].Seconds[n-1].At)
		}
	}
	if end <= 0 {
		return nil, 0
	}
	marks, _ := evenMarks(end)
	for _, m := range marks {
		if m <= end {
			ticks = append(ticks, tick{m, moment(m)})
		}
	}
	return ticks, end
}

func moment(seconds float64) string {
	return time.Duration(math.Round(seconds*10) / 10 * float64(time.Second)).String()
}

func latencyChart(runs []Run) *chart {
	ticks, end := timeTicks(runs)
	var curves []curve
	for i := range runs {
		var p50, p99 []point
		for _, s := range secondsOf(&runs[i]) {
			if s.p99 > 0 {
				p50, p99 = append(p50, point{s.at, s.p50}), append(p99, point{s.at, s.p99})
			}
		}
		curves = append(curves, curve{i, label(&runs[i]) + ", p99", false, p99}, curve{i, label(&runs[i]) + ", p50", true, p50})
	}
	return draw(&plot{
		title: "Latency over time", note: "Of the operations answered in each second: p99, and p50 as a dashed line. Logarithmic.",
		curves: curves, logarithmic: true, xticks: ticks, xhigh: end, label: duration, name: moment,
	})
}

func throughputChart(runs []Run) *chart {
	ticks, end := timeTicks(runs)
	var curves []curve
	for i := range runs {
		var points []point
		for _, s := range secondsOf(&runs[i]) {
			// The rest behind the last full second is too short for a rate.
			if s.length > 0.5 {
				points = append(points, point{s.at, s.operations / s.length})
			}
		}
		curves = append(curves, curve{i, label(&runs[i]), false, points})
	}
	return draw(&plot{
		title: "Throughput", note: "Operations that succeeded, a second.",
		curves: curves, xticks: ticks, xhigh: end, label: perSecond, name: moment,
	})
}

// nines is where a percentile stands: each nine takes the same width.
func nines(percentile float64) float64 { return -math.Log10(1 - percentile/100) }

func percentileChart(runs []Run) *chart {
	var ticks []tick
	most := 1.0
	for i := range runs {
		if n := runs[i].All().Count(); n > 1 {
			most = max(most, math.Log10(float64(n)))
		}
	}
	most = min(most, 6)
	for _, p := range []float64{0, 50, 90, 99, 99.9, 99.99, 99.999} {
		if nines(p) <= most {
			ticks = append(ticks, tick{nines(p), strconv.FormatFloat(p, 'f', -1, 64)})
		}
	}
	var curves []curve
	for i := range runs {
		h := runs[i].All()
		if h.Count() == 0 {
			continue
		}
		c := curve{run: i, name: label(&runs[i])}
		// Beyond its last nine a run has only its maximum.
		own := min(most, max(1, math.Log10(float64(h.Count()))))
		for n := 0.0; n <= own+1e-9; n += 0.05 {
			n = math.Round(n*100) / 100
			c.points = append(c.points, point{n, float64(h.Percentile(100 * (1 - math.Pow(10, -n))))})
		}
		curves = append(curves, c)
	}
	return draw(&plot{
		title: "Percentiles", note: "The latency that so many percent of the operations do not exceed. Both axes logarithmic: each nine takes the same width.",
		curves: curves, logarithmic: true, xticks: ticks, xhigh: most, label: duration,
		name: func(n float64) string { return fmt.Sprintf("p%.6g", 100*(1-math.Pow(10, -n))) },
	})
}

// The place of the bars of processor time.
const (
	barHeight = 26.0
	barWidth  = 520.0
)

func barsOf(runs []Run) (bars []bar) {
	most := 0.0
	for i := range runs {
		most = max(most, runs[i].CPU.ServersPerOp+runs[i].CPU.SelfPerOp)
	}
	if most <= 0 {
		return nil
	}
	for i := range runs {
		c := &runs[i].CPU
		servers := round(c.ServersPerOp / most * barWidth)
		bars = append(bars, bar{
			Run: i, Name: label(&runs[i]), Y: float64(i) * barHeight, Servers: servers, OwnX: servers, Own: round(c.SelfPerOp / most * barWidth),
			Text: fmt.Sprintf("servers %s, generator %s", duration(c.ServersPerOp), duration(c.SelfPerOp)),
		})
	}
	return bars
}

// fieldsOf returns settings, versions and machine of all runs.
func fieldsOf(runs []Run) (fields []field) {
	values := make([]map[string]string, len(runs))
	names := map[string]bool{}
	for i := range runs {
		r := &runs[i]
		values[i] = flat(map[string]any{
			"settings": r.Settings, "versions": r.Versions, "machine": r.Machine, "file_system": r.FileSystem,
		})
		for name := range values[i] {
			names[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		f := field{Name: name, Same: true}
		for i := range runs {
			f.Values = append(f.Values, values[i][name])
			f.Same = f.Same && values[i][name] == values[0][name]
		}
		fields = append(fields, f)
	}
	// What differs is what a reader looks for.
	slices.SortStableFunc(fields, func(a, b field) int { return boolOrder(a.Same) - boolOrder(b.Same) })
	return fields
}

func boolOrder(same bool) int {
	if same {
		return 1
	}
	return 0
}
