package results

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/skeindb/skein/loadtest"
)

// Comparison is the ratios of two sides.
type Comparison struct {
	// A and B are the files of the sides.
	A []string `json:"a"`
	B []string `json:"b"`
	// Paired says that run i of B was taken as the partner of run i of A.
	Paired bool `json:"paired"`
	// Differing are the settings that are not the same in all runs, Versions the versions that are not.
	Differing []Difference `json:"differing_settings,omitempty"`
	Versions  []Difference `json:"versions,omitempty"`
	Rows      []Row        `json:"rows"`
	// Warnings say which runs show the load generator rather than the servers.
	Warnings []string `json:"warnings,omitempty"`
}

// Difference is one setting that is not the same in all runs.
type Difference struct {
	Name string `json:"name"`
	// A and B are the values of each side, as JSON; a side with several has them separated by commas.
	A string `json:"a"`
	B string `json:"b"`
}

// Row compares one figure.
type Row struct {
	Figure string `json:"figure"`
	Unit   string `json:"unit"`
	// A and B are geometric means, Ratio is B's to A's.
	A     float64 `json:"a"`
	B     float64 `json:"b"`
	Ratio float64 `json:"ratio"`
	// Low and High bound the ratio with a confidence of 95 %; both 0 where there are too few runs to tell.
	Low  float64 `json:"low,omitempty"`
	High float64 `json:"high,omitempty"`
	// MoreIsBetter tells throughput from costs.
	MoreIsBetter bool `json:"more_is_better"`
}

// figure is one that reports are compared by. It is 0 where a report has none.
type figure struct {
	name, unit string
	more       bool
	of         func(*loadtest.Report) float64
}

// figures returns the figures that all runs have.
func figures(runs []Run) []figure {
	all := []figure{{"throughput", "/s", true, func(r *loadtest.Report) float64 { return r.Throughput }}}
	for _, kind := range kindsOf(runs) {
		for _, p := range []float64{50, 99, 99.9} {
			all = append(all, figure{fmt.Sprintf("%s p%g", kind, p), "µs", false, func(r *loadtest.Report) float64 {
				return float64(r.Histograms[kind].Percentile(p))
			}})
		}
	}
	return append(all,
		figure{"servers' CPU per operation", "µs", false, func(r *loadtest.Report) float64 { return r.CPU.ServersPerOp }},
		figure{"generator's CPU per operation", "µs", false, func(r *loadtest.Report) float64 { return r.CPU.SelfPerOp }},
	)
}

// kindsOf returns the kinds of latencies that all runs have, those of failures and of the generator itself left out.
func kindsOf(runs []Run) (kinds []string) {
	for kind := range runs[0].Histograms {
		if kind != "failed" && kind != "lateness" && kind != "scheduling lag" {
			kinds = append(kinds, kind)
		}
	}
	slices.Sort(kinds)
	return slices.DeleteFunc(kinds, func(kind string) bool {
		return slices.ContainsFunc(runs, func(r Run) bool { return r.Histograms[kind].Count() == 0 })
	})
}

// Options say how two sides are compared.
type Options struct {
	// Paired takes run i of each side as partners, which ran one after the other. What slows down a while then
	// slows down both of a pair.
	Paired bool
	// Different compares also runs of different settings.
	Different bool
}

// Compare returns the ratios of side B to side A. Runs that differ in more than where their servers are, are refused unless
// Options.Different.
func Compare(a, b []Run, o Options) (*Comparison, error) {
	if o.Paired && len(a) != len(b) {
		return nil, fmt.Errorf("compare: pairs need as many runs of each side, and there are %d and %d", len(a), len(b))
	}
	c := &Comparison{A: names(a), B: names(b), Paired: o.Paired, Differing: differences(a, b, settingsOf), Versions: differences(a, b, versionsOf)}
	if len(c.Differing) > 0 && !o.Different {
		var text strings.Builder
		for _, d := range c.Differing {
			fmt.Fprintf(&text, "\n  %s: %s and %s", d.Name, d.A, d.B)
		}
		return nil, fmt.Errorf("compare: the runs differ in their settings, so their figures say nothing about the servers alone; --different compares them all the same:%s", text.String())
	}
	both := slices.Concat(a, b)
	for _, f := range figures(both) {
		la, okA := logs(a, f)
		lb, okB := logs(b, f)
		if okA && okB {
			c.Rows = append(c.Rows, f.compare(la, lb, o.Paired))
		}
	}
	if len(c.Rows) == 0 {
		return nil, errors.New("compare: no figure is above 0 in all runs")
	}
	for i := range both {
		r := &both[i]
		for _, why := range r.Saturated() {
			c.Warnings = append(c.Warnings, r.Name+": "+why)
		}
		if r.Failed > 0 {
			c.Warnings = append(c.Warnings, fmt.Sprintf("%s: %d of %d operations failed; latencies are those of the others", r.Name, r.Failed, r.Failed+r.Operations))
		}
		if r.Interrupted {
			c.Warnings = append(c.Warnings, r.Name+": the run was interrupted")
		}
	}
	return c, nil
}

func names(runs []Run) (out []string) {
	for _, r := range runs {
		out = append(out, r.Name)
	}
	return out
}

// logs returns the logarithms of a figure of each run. It is not ok if one of them has none.
func logs(runs []Run, f figure) (out []float64, ok bool) {
	for i := range runs {
		v := f.of(&runs[i].Report)
		if !(v > 0) {
			return nil, false
		}
		out = append(out, math.Log(v))
	}
	return out, len(out) > 0
}

// compare makes the row of a figure from its logarithms.
func (f figure) compare(a, b []float64, paired bool) Row {
	ma, mb := mean(a), mean(b)
	row := Row{Figure: f.name, Unit: f.unit, A: math.Exp(ma), B: math.Exp(mb), Ratio: math.Exp(mb - ma), MoreIsBetter: f.more}
	if margin, ok := margin(a, b, paired); ok {
		row.Low, row.High = math.Exp(mb-ma-margin), math.Exp(mb-ma+margin)
	}
	return row
}

// margin returns half the width of the 95 % confidence interval of mean(b) - mean(a). Ratios of times are compared by their
// logarithms, whose means stay the same whichever side is divided by the other (Fleming and Wallace, How not to lie with
// statistics, CACM 1986). The interval is Student's, of the differences of pairs or, for two groups, with Welch's degrees
// of freedom (The generalization of Student's problem, Biometrika 1947), which does not assume that both sides scatter
// alike. It needs two runs of each side.
func margin(a, b []float64, paired bool) (m float64, ok bool) {
	if len(a) < 2 || len(b) < 2 {
		return 0, false
	}
	if paired {
		d := make([]float64, len(a))
		for i := range a {
			d[i] = b[i] - a[i]
		}
		n := float64(len(d))
		return student(n-1) * math.Sqrt(variance(d)/n), true
	}
	na, nb := float64(len(a)), float64(len(b))
	va, vb := variance(a)/na, variance(b)/nb
	if va+vb == 0 {
		return 0, true
	}
	freedom := (va + vb) * (va + vb) / (va*va/(na-1) + vb*vb/(nb-1))
	return student(freedom) * math.Sqrt(va+vb), true
}

func mean(x []float64) (m float64) {
	for _, v := range x {
		m += v
	}
	return m / float64(len(x))
}

func variance(x []float64) (s float64) {
	m := mean(x)
	for _, v := range x {
		s += (v - m) * (v - m)
	}
	return s / float64(len(x)-1)
}

// students are the 97.5 % quantiles of Student's distribution for 1 to 30 degrees of freedom.
var students = []float64{
	12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
	2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
	2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
}

// student returns the quantile for the whole degrees of freedom, which is not below that for a part more.
func student(freedom float64) float64 {
	// Rounding may leave a whole number a little short.
	return students[min(max(int(freedom+1e-9), 1), len(students))-1]
}

// settingsOf returns what runs that are compared must have in common: settings and machine. Where the servers are, which
// keys are drawn first, and what is done after the measurement may differ.
func settingsOf(r *loadtest.Report) any {
	s := r.Settings
	s.API = cmp.Or(s.API, loadtest.APIEtcd) // reports of old do not say it
	s.Endpoints, s.ServerMetrics, s.User, s.DataPath, s.SLO, s.Seed, s.Cleanup = nil, nil, "", "", "", 0, false
	m := r.Machine
	m.Host, m.Kernel, m.MemoryBytes = "", "", 0
	return struct {
		loadtest.Config
		Endpoints int              `json:"number_of_endpoints"`
		Machine   loadtest.Machine `json:"generators_machine"`
	}{s, len(r.Settings.Endpoints), m}
}

// versionsOf returns the versions of the load generator.
func versionsOf(r *loadtest.Report) any {
	v := r.Versions
	v.Servers = nil
	return v
}

// differences returns the fields that are not the same in all runs.
func differences(a, b []Run, of func(*loadtest.Report) any) (out []Difference) {
	va, vb := valuesOf(a, of), valuesOf(b, of)
	var fields []string
	for _, side := range []map[string][]string{va, vb} {
		for field := range side {
			fields = append(fields, field)
		}
	}
	slices.Sort(fields)
	for _, field := range slices.Compact(fields) {
		x, y := va[field], vb[field]
		if len(x) != 1 || len(y) != 1 || x[0] != y[0] {
			out = append(out, Difference{field, orNone(x), orNone(y)})
		}
	}
	return out
}

func orNone(values []string) string {
	if len(values) == 0 {
		return "none"
	}
	return strings.Join(values, ", ")
}

// valuesOf returns the different values of each field over the runs, as JSON, "none" for a field that only some have.
func valuesOf(runs []Run, of func(*loadtest.Report) any) map[string][]string {
	counts, out := map[string]int{}, map[string][]string{}
	for i := range runs {
		for field, value := range flat(of(&runs[i].Report)) {
			counts[field]++
			if !slices.Contains(out[field], value) {
				out[field] = append(out[field], value)
			}
		}
	}
	for field, n := range counts {
		if n < len(runs) {
			out[field] = append(out[field], "none")
		}
		slices.Sort(out[field])
	}
	return out
}

// flat returns the fields of a value by their path in its JSON.
func flat(v any) map[string]string {
	out := map[string]string{}
	// What came from JSON goes back into it.
	text, _ := json.Marshal(v)
	var fields map[string]any
	_ = json.Unmarshal(text, &fields)
	flatten("", fields, out)
	return out
}

func flatten(path string, v any, out map[string]string) {
	fields, ok := v.(map[string]any)
	if !ok {
		var text strings.Builder
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false) // people read it
		// What came from JSON goes back into it.
		_ = e.Encode(v)
		out[path] = strings.TrimSuffix(text.String(), "\n")
		return
	}
	for name, field := range fields {
		if path != "" {
			name = path + "." + name
		}
		flatten(name, field, out)
	}
}

// Write writes the comparison for people.
func (c *Comparison) Write(out io.Writer) error {
	how := "groups"
	if c.Paired {
		how = "pairs"
	}
	fmt.Fprintf(out, "A: %s\nB: %s\n%d and %d runs, compared as %s; B ÷ A\n\n", strings.Join(c.A, ", "), strings.Join(c.B, ", "), len(c.A), len(c.B), how)
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tA\tB\tratio\t95 % interval\tB is")
	for _, r := range c.Rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%.3f\t%s\t%s\n", r.Figure, number(r.A, r.Unit), number(r.B, r.Unit), r.Ratio, r.interval(), r.verdict())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(c.A) < 2 || len(c.B) < 2 {
		fmt.Fprintln(out, "\nOne run says nothing about the scatter: run each side several times, by turns, to have intervals.")
	}
	writeDifferences(out, "differing settings", c.Differing)
	writeDifferences(out, "differing versions of the load generator", c.Versions)
	for _, w := range c.Warnings {
		fmt.Fprintf(out, "\nWARNING: %s\n", w)
	}
	return nil
}

func writeDifferences(out io.Writer, title string, all []Difference) {
	if len(all) == 0 {
		return
	}
	fmt.Fprintf(out, "\n%s:\n", title)
	for _, d := range all {
		fmt.Fprintf(out, "  %s: %s and %s\n", d.Name, d.A, d.B)
	}
}

func (r *Row) interval() string {
	if r.High == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f to %.3f", r.Low, r.High)
}

// verdict says what the interval shows.
func (r *Row) verdict() string {
	switch {
	case r.High == 0:
		return "not known"
	case r.Low <= 1 && r.High >= 1:
		return "no different, as far as this shows"
	case (r.Ratio > 1) == r.MoreIsBetter:
		return "better"
	default:
		return "worse"
	}
}

// number prints a figure with its unit.
func number(v float64, unit string) string {
	switch {
	case unit == "µs" && v >= 10_000:
		return fmt.Sprintf("%.1f ms", v/1000)
	case unit == "/s":
		return fmt.Sprintf("%.1f/s", v)
	default:
		return fmt.Sprintf("%.1f %s", v, unit)
	}
}

// WriteJSON writes the comparison to a file, or to stdout for "-".
func (c *Comparison) WriteJSON(name string, stdout io.Writer) error {
	return loadtest.WriteJSON(c, name, stdout)
}
