package loadtest

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// golden compares text with a file in testdata, or writes it with -rewrite. That flag
// is datadriven's, whose stories stand beside these files.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if flag.Lookup("rewrite").Value.String() == "true" {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not as before; run with -rewrite if it should not be\ngot:\n%s\nwant:\n%s", file, got, want)
	}
}

// fullReport is a report with every field set.
func fullReport() Report {
	cfg := DefaultConfig()
	cfg.Endpoints = []string{"http://127.0.0.1:12379", "http://127.0.0.1:22379"}
	cfg.Workload, cfg.Rate, cfg.Verify = Mixed, 20_000, true
	cfg.ServerMetrics = []string{"http://127.0.0.1:12379/metrics", "http://127.0.0.1:22379/metrics"}
	put := &Latencies{Count: 20_000, Mean: 5120.4, Min: 800, P50: 4800, P75: 6000, P90: 8000, P95: 9100, P99: 15_000, P999: 120_000, P9999: 1_000_000, Max: 12_000_000}
	get := &Latencies{Count: 180_000, Mean: 1234.5, Min: 90, P50: 900, P75: 1500, P90: 2500, P95: 3000, P99: 7000, P999: 20_000, P9999: 40_000, Max: 40_500}
	return Report{
		Format: reportFormat, Started: time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC), Settings: cfg,
		Versions: Versions{
			Loadtest: "v0.1.0", Commit: "0123abcd", Go: "go1.26.8", Client: "v3.7.3",
			Servers: []ServerVersion{
				{Endpoint: cfg.Endpoints[0], Version: "3.7.3", HTTP: map[string]string{"etcdserver": "3.7.3"}},
				{Endpoint: cfg.Endpoints[1], Version: "3.7.3"},
			},
		},
		Machine: Machine{
			Host: "bench", OS: "linux", Arch: "amd64", Kernel: "6.12.0", CPU: "A CPU", CPUs: 2, MemoryBytes: 16 << 30,
		},
		FileSystem:     FileSystem{Path: "/data", Type: "ext4", Source: "/dev/vda", Options: "rw,relatime"},
		Measured:       time.Date(2026, 11, 21, 12, 0, 5, 0, time.UTC),
		ElapsedSeconds: 10, Operations: 200_000, Failed: 13, Throughput: 19_990.5,
		Put: put, Get: get,
		FailedLatency: &Latencies{Count: 8, Mean: 1e7, Min: 1e7, P50: 1e7, P75: 1e7, P90: 1e7, P95: 1e7, P99: 1e7, P999: 1e7, P9999: 1e7, Max: 1e7},
		Errors: map[string]int64{
			"Unavailable: etcdserver: request timed out": 6, neverStarted: 5, "Unavailable: etcdserver: no leader": 2,
		},
		ErrorsBefore: map[string]int64{"Unavailable: etcdserver: leader changed": 1},
		OpenLoop:     &OpenLoop{Offered: 20_000, NeverStarted: 5, Lateness: &Latencies{Count: 9, Mean: 400, Min: 1, P50: 300, P75: 500, P90: 900, P95: 1000, P99: 1100, P999: 2000, P9999: 2000, Max: 2000}},
		CPU: CPU{
			SelfSeconds: 19, SelfPerOp: 20, ServersPerOp: 0, Processors: 2, MachineBusy: 0.98,
			SchedulingLag: &Latencies{Count: 999, Mean: 400, Min: 1, P50: 300, P75: 500, P90: 900, P95: 1000, P99: 2000, P999: 2000, P9999: 2000, Max: 2000},
			Servers: []ServerCPU{
				{URL: cfg.ServerMetrics[0], Seconds: 8, PerOp: 40, ResidentBytes: 100 << 20},
				{URL: cfg.ServerMetrics[1], Error: "restarted during the run: its CPU time began anew"},
			},
		},
		SLO:        []Objective{{"p99<10ms", "7.00ms", true}, {"errors<0.001%", "0.0065%", false}},
		Histograms: map[string]*Histogram{"put": histogramFrom(900, 15_000), "failed": histogramFrom(10_000_000)},
		Seconds:    []Second{{At: 1, Length: 1, Operations: 20_000, Failed: 3, P50: 1000, P99: 9000, Max: 20_000, PutP50: 4800, PutP99: 15_000, PutMax: 20_000, GetP50: 900, GetP99: 7000, GetMax: 9000}},
		Verify:     &Verified{Keys: 100_000, Acknowledged: 90_000, Unknown: 8, Violations: 22, First: []string{"key 1: absent; put 1 was acknowledged at revision 5", "key 2: …"}},
	}
}

func TestReportGolden(t *testing.T) {
	full := fullReport()
	var text bytes.Buffer
	full.WriteText(&text)
	text.WriteString("\n-- a second\n" + full.Seconds[0].line("run", false) + "\n")
	text.WriteString("\n-- Err\n" + full.Err().Error() + "\n")

	plain := fullReport()
	plain.Settings.Workload, plain.Settings.Rate = Put, 0
	plain.Get, plain.FailedLatency, plain.OpenLoop, plain.Errors, plain.ErrorsBefore = nil, nil, nil, nil, nil
	plain.Failed, plain.CPU.Servers, plain.Verify, plain.SLO, plain.Histograms = 0, nil, nil, nil, nil
	plain.CPU = CPU{SelfPerOp: plain.CPU.SelfPerOp}
	text.WriteString("\n-- puts, closed loop\n")
	plain.WriteText(&text)
	if err := plain.Err(); err != nil {
		t.Errorf("a clean run is not: %v", err)
	}

	kube := plain
	kube.Settings.Workload, kube.Settings.Cleanup, kube.Put, kube.CleanedUp = Kubernetes, true, nil, 11_000
	kube.Kinds = []KindReport{{"renew", 1500.25, *plain.Put}, {"page", 30, *fullReport().Get}}
	kube.Watch = &Watched{
		Watchers: 9, Events: 100, Progress: 7, Delay: fullReport().Get,
		Lost: 1, Duplicate: 2, Disordered: 3, Unasked: 4, Failed: 5, Errors: map[string]int64{"Unknown: compacted": 5},
	}
	text.WriteString("\n-- kubernetes\n")
	kube.WriteText(&text)
	piped := plain
	piped.Settings.API, piped.Settings.Conns = APIPipe, 3
	text.WriteString("\n-- by the pipe\n")
	piped.WriteText(&text)
	golden(t, "report.txt", text.Bytes())

	file := filepath.Join(t.TempDir(), "report.json")
	if err := full.WriteJSON(file, nil); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "report.json", got)
	var again Report
	if err := json.Unmarshal(got, &again); err != nil || again.Put.P9999 != full.Put.P9999 || again.Settings.Clients != 1000 {
		t.Errorf("the JSON does not read back: %v", err)
	}
	var stdout bytes.Buffer
	if err := full.WriteJSON("-", &stdout); err != nil || !bytes.Equal(stdout.Bytes(), got) {
		t.Errorf("to stdout: %v", err)
	}
	if err := full.WriteJSON(filepath.Join(t.TempDir(), "no", "such"), nil); err == nil {
		t.Error("a report that cannot be written passes")
	}
}

// histogramFrom makes a histogram of latencies in microseconds.
func histogramFrom(micros ...int64) *Histogram {
	h := &Histogram{newHistogram()}
	for _, m := range micros {
		_ = h.h.RecordValue(m)
	}
	return h
}

func TestErrorKindsAreBounded(t *testing.T) {
	var tally errorTally
	for i := range 200 {
		tally.add(strings.Repeat("x", i), 2)
	}
	kinds, n := tally.all()
	if n != 400 || len(kinds) != maxErrorKinds+1 || kinds[otherErrors] != 2*(200-maxErrorKinds) {
		t.Errorf("%d errors in %d kinds, %d others", n, len(kinds), kinds[otherErrors])
	}
	if kind := errorKind(os.ErrClosed); kind != "Unknown: file already closed" {
		t.Error(kind)
	}
	if kind := errorKind(errorString(strings.Repeat("é\xff", 500))); len(kind) > maxErrorText+20 {
		t.Errorf("a kind of %d bytes", len(kind))
	}
}

type errorString string

func (e errorString) Error() string { return string(e) }
