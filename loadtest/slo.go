package loadtest

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Objectives is what a run must reach: clauses separated by commas. A clause is
//
//   - pN, mean or max, < or <=, and a duration: of the operations that succeeded. With a kind and a dot before it, of
//     that kind alone: put.p99<10ms. The kind delay is that of events at watchers;
//   - errors, < or <=, and a percentage: of all operations, those that were never sent included;
//   - throughput, > or >=, and a number: of operations a second.
type Objectives []objective

type objective struct {
	text     string
	kind     string // empty for all operations
	figure   string // p99, mean, max, errors or throughput
	relation string
	bound    float64 // in µs, percent, or per second
}

// Objective is what became of one clause.
type Objective struct {
	Clause string `json:"clause"`
	// Figure is what the run reached, for people.
	Figure string `json:"figure"`
	Met    bool   `json:"met"`
}

// sloForm is what is understood. The explanation is part of errors.
var sloForm = regexp.MustCompile(`^(?:([a-z]+)\.)?(p[0-9]+(?:\.[0-9]+)?|mean|max|errors|throughput) *(<=|>=|<|>) *([0-9.]+ *[a-zµ%]*)$`)

const sloHelp = "understood are clauses like p99<10ms, p99.9<=50ms, mean<2ms, max<1s, put.p99<5ms, errors<0.1% and throughput>1000, separated by commas"

// ParseObjectives reads clauses.
func ParseObjectives(text string) (Objectives, error) {
	var out Objectives
	for clause := range strings.SplitSeq(text, ",") {
		o, err := parseObjective(strings.TrimSpace(clause))
		if err != nil {
			return nil, fmt.Errorf("slo: %q: %w; %s", clause, err, sloHelp)
		}
		out = append(out, o)
	}
	return out, nil
}

func parseObjective(text string) (o objective, err error) {
	m := sloForm.FindStringSubmatch(text)
	if m == nil {
		return o, errors.New("is no clause")
	}
	o = objective{text: text, kind: m[1], figure: m[2], relation: m[3]}
	latency := o.figure != "errors" && o.figure != "throughput"
	switch {
	case o.kind != "" && !latency:
		return o, fmt.Errorf("%s is counted over all kinds", o.figure)
	case o.kind != "" && o.kind != kindDelay && !isOperation(o.kind):
		return o, fmt.Errorf("there is no kind %s", o.kind)
	case (o.figure == "throughput") != (o.relation[0] == '>'):
		return o, errors.New("latencies and errors are bounded from above, throughput from below")
	case o.figure[0] == 'p':
		if p, err := strconv.ParseFloat(o.figure[1:], 64); err != nil || p <= 0 || p > 100 {
			return o, fmt.Errorf("%s is not a percentile above 0 and up to 100", o.figure)
		}
	}
	number, isPercent := strings.CutSuffix(m[4], "%")
	switch {
	case latency:
		var d time.Duration
		d, err = time.ParseDuration(m[4])
		o.bound = float64(d) / float64(time.Microsecond)
	case (o.figure == "errors") != isPercent:
		err = errors.New("the bound of errors is a percentage, that of throughput a number")
	default:
		o.bound, err = strconv.ParseFloat(strings.TrimSpace(number), 64)
	}
	return o, err
}

// BoundErrors says whether a clause bounds the errors.
func (s Objectives) BoundErrors() bool {
	return slices.ContainsFunc(s, func(o objective) bool { return o.figure == "errors" })
}

// Judge returns what became of each clause in a run.
func (s Objectives) Judge(r *Report) (out []Objective) {
	for _, o := range s {
		value, figure, ok := o.of(r)
		met := ok
		switch o.relation {
		case "<":
			met = met && value < o.bound
		case "<=":
			met = met && value <= o.bound
		case ">":
			met = met && value > o.bound
		default:
			met = met && value >= o.bound
		}
		out = append(out, Objective{o.text, figure, met})
	}
	return out
}

// of returns the clause's figure, also as a text. It is not ok if there is none.
func (o *objective) of(r *Report) (value float64, text string, ok bool) {
	switch o.figure {
	case "errors":
		if r.Operations+r.Failed == 0 {
			return 0, "no operation", false
		}
		value = 100 * float64(r.Failed) / float64(r.Operations+r.Failed)
		return value, fmt.Sprintf("%.4g%%", value), true
	case "throughput":
		return r.Throughput, fmt.Sprintf("%.1f/s", r.Throughput), true
	}
	h := r.All()
	if o.kind != "" {
		h = r.Histograms[o.kind]
	}
	if h.Count() == 0 {
		return 0, "no operation of this kind succeeded", false
	}
	switch o.figure {
	case "mean":
		value = h.Summary().Mean
	case "max":
		value = float64(h.Summary().Max)
	default:
		// parseObjective has read it.
		p, _ := strconv.ParseFloat(o.figure[1:], 64)
		value = float64(h.Percentile(p))
	}
	return value, micros(int64(value)), true
}

// Missed returns an error that names the clauses of Config.SLO that the run has not met, and nil if it has met all.
func (r *Report) Missed() error {
	var missed []string
	for _, o := range r.SLO {
		if !o.Met {
			missed = append(missed, fmt.Sprintf("%s: %s", o.Clause, o.Figure))
		}
	}
	if missed == nil {
		return nil
	}
	return fmt.Errorf("slo not met: %s", strings.Join(missed, "; "))
}
