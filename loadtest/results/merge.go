package results

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/loadtest"
)

// mergeOverlap is how much of the longest run all runs must have in common: throughputs add up only while all of them run.
const mergeOverlap = 0.9

// Merge makes one report of several generators that drove the same servers at a time, each from a machine or a process of its
// own. Counts, throughput, clients and rates add up, latencies are those of all operations. Of each second's percentiles the
// longest counts, than which that of all cannot be longer. The servers' processor time was seen by each generator that read their
// metrics, and counts once.
func Merge(runs []Run) (*loadtest.Report, error) {
	if len(runs) < 2 {
		return nil, errors.New("merge: at least two reports")
	}
	if err := mergeable(runs); err != nil {
		return nil, err
	}
	out := runs[0].Report
	out.Histograms, out.Errors, out.ErrorsBefore, out.OpenLoop, out.Verify, out.Watch, out.SLO = nil, nil, nil, nil, nil, nil, nil
	out.Interrupted, out.Operations, out.Failed, out.Throughput, out.CleanedUp = false, 0, 0, 0, 0
	s := &out.Settings
	s.Clients, s.Conns, s.Rate, s.Total = 0, 0, 0, 0
	for i := range runs {
		r := &runs[i]
		out.Interrupted = out.Interrupted || r.Interrupted
		out.Operations, out.Failed, out.CleanedUp = out.Operations+r.Operations, out.Failed+r.Failed, out.CleanedUp+r.CleanedUp
		out.Throughput += r.Throughput
		out.ElapsedSeconds = max(out.ElapsedSeconds, r.ElapsedSeconds)
		s.Clients, s.Conns, s.Rate, s.Total = s.Clients+r.Settings.Clients, s.Conns+r.Settings.Conns, s.Rate+r.Settings.Rate, s.Total+r.Settings.Total
		out.Errors, out.ErrorsBefore = add(out.Errors, r.Errors), add(out.ErrorsBefore, r.ErrorsBefore)
		out.Histograms = mergeHistograms(out.Histograms, r.Histograms)
		out.OpenLoop = mergeOpenLoop(out.OpenLoop, r.OpenLoop)
		out.Verify, out.Watch = mergeVerified(out.Verify, r.Verify), mergeWatched(out.Watch, r.Watch)
		out.Generators = append(out.Generators, loadtest.Generator{Name: label(r), Machine: r.Machine, CPU: r.CPU, Saturated: r.Saturated()})
	}
	out.Seconds = mergeSeconds(runs)
	out.CPU = mergeCPU(runs, float64(out.Operations)+float64(out.Histograms["failed"].Count()))
	summarise(&out, runs)
	if s.SLO != "" {
		objectives, err := loadtest.ParseObjectives(s.SLO)
		if err != nil {
			return nil, fmt.Errorf("merge: the settings of the reports: %w", err)
		}
		out.SLO = objectives.Judge(&out)
	}
	return &out, nil
}

// mergeable says why runs cannot be merged.
func mergeable(runs []Run) error {
	if d := differences(runs[:1], runs[1:], func(r *loadtest.Report) any {
		s := r.Settings
		s.Endpoints, s.ServerMetrics, s.User, s.DataPath, s.Seed, s.Cleanup, s.Clients, s.Conns, s.Rate, s.Total, s.Fill = nil, nil, "", "", 0, false, 0, 0, 0, 0, false
		s.KeyPrefix, s.KeyBytes = "", s.KeyBytes-len(s.KeyPrefix)
		return s
	}); len(d) > 0 {
		var names []string
		for _, one := range d {
			names = append(names, fmt.Sprintf("%s (%s and %s)", one.Name, one.A, one.B))
		}
		return fmt.Errorf("merge: the generators did not do the same: they differ in %s", strings.Join(names, ", "))
	}
	var first, last time.Time
	for i := range runs {
		r := &runs[i]
		if len(r.Histograms) == 0 || r.Measured.IsZero() {
			return fmt.Errorf("merge: %s has no histograms; a loadtest of today writes them", r.Name)
		}
		if len(r.Generators) > 0 {
			return fmt.Errorf("merge: %s is merged already; give the reports that it was made of", r.Name)
		}
		end := r.Measured.Add(seconds(r.ElapsedSeconds))
		if i == 0 || r.Measured.After(first) {
			first = r.Measured
		}
		if i == 0 || end.Before(last) {
			last = end
		}
	}
	for i := range runs {
		if whole := seconds(runs[i].ElapsedSeconds); last.Sub(first) < time.Duration(mergeOverlap*float64(whole)) {
			return fmt.Errorf("merge: the generators did not run at a time: all of them ran for %s of the %s of %s; compare takes runs one after the other",
				max(0, last.Sub(first)).Round(time.Millisecond), whole.Round(time.Millisecond), runs[i].Name)
		}
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// add adds counts.
func add(to, from map[string]int64) map[string]int64 {
	if to == nil && len(from) > 0 {
		to = map[string]int64{}
	}
	for name, n := range from {
		to[name] += n
	}
	return to
}

func mergeHistograms(to, from map[string]*loadtest.Histogram) map[string]*loadtest.Histogram {
	if to == nil {
		to = map[string]*loadtest.Histogram{}
	}
	for name, h := range from {
		if to[name] == nil {
			to[name] = &loadtest.Histogram{}
		}
		to[name].Merge(h)
	}
	return to
}

func mergeOpenLoop(to, from *loadtest.OpenLoop) *loadtest.OpenLoop {
	switch {
	case from == nil:
		return to
	case to == nil:
		to = &loadtest.OpenLoop{}
	}
	to.Offered += from.Offered
	to.NeverStarted += from.NeverStarted
	return to
}

func mergeVerified(to, from *loadtest.Verified) *loadtest.Verified {
	switch {
	case from == nil:
		return to
	case to == nil:
		to = &loadtest.Verified{}
	}
	to.Keys, to.Acknowledged, to.Unknown = to.Keys+from.Keys, to.Acknowledged+from.Acknowledged, to.Unknown+from.Unknown
	to.Violations += from.Violations
	to.First = append(to.First, from.First...)
	return to
}

func mergeWatched(to, from *loadtest.Watched) *loadtest.Watched {
	switch {
	case from == nil:
		return to
	case to == nil:
		to = &loadtest.Watched{}
	}
	to.Watchers, to.Events, to.Progress = to.Watchers+from.Watchers, to.Events+from.Events, to.Progress+from.Progress
	to.Lost, to.Duplicate, to.Disordered = to.Lost+from.Lost, to.Duplicate+from.Duplicate, to.Disordered+from.Disordered
	to.Unasked, to.Failed, to.Errors = to.Unasked+from.Unasked, to.Failed+from.Failed, add(to.Errors, from.Errors)
	return to
}

// mergeSeconds adds up the seconds at the same time after the first begin.
func mergeSeconds(runs []Run) []loadtest.Second {
	begin := slices.MinFunc(runs, func(a, b Run) int { return a.Measured.Compare(b.Measured) }).Measured
	all := map[int]*loadtest.Second{}
	for i := range runs {
		offset := runs[i].Measured.Sub(begin).Seconds()
		for _, s := range runs[i].Seconds {
			// The middle of a second says to which of all it belongs.
			at := int(math.Floor(s.At - s.Length/2 + offset))
			to := all[at]
			if to == nil {
				to = &loadtest.Second{At: float64(at + 1)}
				all[at] = to
			}
			to.Length = max(to.Length, s.Length)
			to.Operations, to.Failed = to.Operations+s.Operations, to.Failed+s.Failed
			to.P50, to.P99, to.Max = max(to.P50, s.P50), max(to.P99, s.P99), max(to.Max, s.Max)
			to.PutP50, to.PutP99, to.PutMax = max(to.PutP50, s.PutP50), max(to.PutP99, s.PutP99), max(to.PutMax, s.PutMax)
			to.GetP50, to.GetP99, to.GetMax = max(to.GetP50, s.GetP50), max(to.GetP99, s.GetP99), max(to.GetMax, s.GetMax)
		}
	}
	var out []loadtest.Second
	for _, at := range slices.Sorted(maps.Keys(all)) {
		out = append(out, *all[at])
	}
	return out
}

// mergeCPU adds up the generators' time. Each server counts once, with the longest of the times that were seen.
func mergeCPU(runs []Run, operations float64) (out loadtest.CPU) {
	servers, machines := map[string]loadtest.ServerCPU{}, map[string]bool{}
	for i := range runs {
		c := &runs[i].CPU
		out.SelfSeconds += c.SelfSeconds
		// Generators on one machine share its processors.
		if host := runs[i].Machine.Host; host == "" || !machines[host] {
			machines[host] = true
			out.Processors += c.Processors
		}
		for _, s := range c.Servers {
			if old, ok := servers[s.URL]; !ok || s.Seconds > old.Seconds {
				servers[s.URL] = s
			}
		}
	}
	out.SelfPerOp = out.SelfSeconds * 1e6 / max(operations, 1)
	known := true
	for _, url := range slices.Sorted(maps.Keys(servers)) {
		s := servers[url]
		s.PerOp = s.Seconds * 1e6 / max(operations, 1)
		out.Servers = append(out.Servers, s)
		out.ServersPerOp += s.PerOp
		known = known && s.Error == ""
	}
	if !known {
		out.ServersPerOp = 0
	}
	return out
}

// summarise makes what a report says of each kind from the merged histograms.
func summarise(out *loadtest.Report, runs []Run) {
	out.Put, out.Get, out.FailedLatency = out.Histograms["put"].Summary(), out.Histograms["get"].Summary(), out.Histograms["failed"].Summary()
	if out.OpenLoop != nil {
		out.OpenLoop.Lateness = out.Histograms["lateness"].Summary()
	}
	if out.Watch != nil {
		out.Watch.Delay = out.Histograms["delay"].Summary()
	}
	out.CPU.SchedulingLag = out.Histograms["scheduling lag"].Summary()
	throughput := map[string]float64{}
	var kinds []string
	for i := range runs {
		for _, k := range runs[i].Kinds {
			if _, ok := throughput[k.Kind]; !ok {
				kinds = append(kinds, k.Kind)
			}
			throughput[k.Kind] += k.Throughput
		}
	}
	out.Kinds = nil
	for _, kind := range kinds {
		if l := out.Histograms[kind].Summary(); l != nil {
			out.Kinds = append(out.Kinds, loadtest.KindReport{Kind: kind, Throughput: throughput[kind], Latency: *l})
		}
	}
}
