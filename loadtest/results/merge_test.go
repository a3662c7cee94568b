package results

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/loadtest"
)

// generators are two that ran at a time, against the same servers.
func generators(t *testing.T) []Run {
	t.Helper()
	one, two := sample(t, "dir/one.json", 1000, 2000), sample(t, "dir/two.json", 500, 9000)
	one.Measured = time.Date(2026, 11, 28, 12, 0, 5, 0, time.UTC)
	two.Measured = one.Measured.Add(300 * time.Millisecond)
	one.Settings.KeyPrefix, two.Settings.KeyPrefix = "one/", "two/"
	one.Settings.SLO, two.Settings.SLO = "p50<5ms,p99<5ms", "p50<5ms,p99<5ms"
	for i, r := range []*Run{&one, &two} {
		r.Settings.Rate, r.Settings.Seed, r.Machine.Host = 1000, uint64(i), fmt.Sprint("bench", i)
		r.OpenLoop = &loadtest.OpenLoop{Offered: 1000, NeverStarted: 3, Lateness: histogram(t, "50:10").Summary()}
		r.Histograms["lateness"], r.Histograms["page"] = histogram(t, "50:10"), histogram(t, "100:5")
		r.Histograms["failed"] = histogram(t, "7000:2")
		r.Failed, r.Errors = 5, map[string]int64{"Unavailable: no leader": 2, fmt.Sprint("kind ", i): 3}
		r.Kinds = []loadtest.KindReport{{Kind: "page", Throughput: 5, Latency: *histogram(t, "100:5").Summary()}}
		r.Verify = &loadtest.Verified{Keys: 10, Acknowledged: 5, Violations: 1, First: []string{fmt.Sprint("key ", i)}}
		r.Watch = &loadtest.Watched{Watchers: 2, Events: 200, Lost: 1}
		r.Histograms["delay"] = histogram(t, "400:200")
	}
	two.CPU.SelfSeconds, two.CPU.Servers[0].Seconds = 38, 11
	return []Run{one, two}
}

func TestMergeGolden(t *testing.T) {
	runs := generators(t)
	r, err := Merge(runs)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	r.WriteText(&text)
	golden(t, "merge.txt", text.Bytes())
	if r.Settings.Clients != 2000 || r.Settings.Rate != 2000 || r.Throughput != 1500 || r.Operations != 200 || r.Put.Count != 200 || r.Failed != 10 {
		t.Errorf("%+v", r)
	}
	// The server's 12 s are those of both; 204 operations were answered.
	if got := r.CPU.ServersPerOp; got < 12e6/204-1 || got > 12e6/204+1 || r.CPU.SelfSeconds != 48 || r.CPU.Processors != 8 {
		t.Errorf("%+v", r.CPU)
	}
	shared := generators(t)
	shared[1].Machine.Host = shared[0].Machine.Host
	if r, err := Merge(shared); err != nil || r.CPU.Processors != 4 {
		t.Errorf("two generators on one machine: %v, %+v", err, r.CPU)
	}
	if len(r.Seconds) != 3 || r.Seconds[0].Operations != 1500 || r.Seconds[1].P99 != 72_000 || r.Seconds[2].At != 3 {
		t.Errorf("%+v", r.Seconds)
	}
	if r.Missed() == nil || !r.SLO[0].Met || r.SLO[1].Met {
		t.Errorf("%+v", r.SLO)
	}
	// What was merged is as it was.
	if runs[0].Histograms["put"].Count() != 100 || runs[0].Errors["kind 1"] != 0 || len(runs[0].Verify.First) != 1 {
		t.Errorf("%+v", runs[0])
	}
}

func TestMergeRefuses(t *testing.T) {
	for want, change := range map[string]func(r *Run){
		"differ in value_bytes (256 and 5)":                   func(r *Run) { r.Settings.ValueBytes = 5 },
		"differ in key_bytes (28 and 20)":                     func(r *Run) { r.Settings.KeyBytes = 24 },
		"all of them ran for 8.5s of the 10s of dir/one.json": func(r *Run) { r.Measured = r.Measured.Add(1200 * time.Millisecond) },
		"all of them ran for 0s of the 10s":                   func(r *Run) { r.Measured = r.Measured.Add(-time.Hour) },
		"dir/two.json has no histograms":                      func(r *Run) { r.Histograms = nil },
		"dir/two.json is merged already":                      func(r *Run) { r.Generators = make([]loadtest.Generator, 2) },
	} {
		runs := generators(t)
		change(&runs[1])
		if _, err := Merge(runs); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	runs := generators(t)
	runs[0].Settings.SLO, runs[1].Settings.SLO = "p99<", "p99<"
	if _, err := Merge(runs); err == nil || !strings.Contains(err.Error(), `slo: "p99<"`) {
		t.Errorf("an SLO that cannot be read: %v", err)
	}
	if _, err := Merge(generators(t)[:1]); err == nil {
		t.Error("one report is merged")
	}
}
