package results

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/loadtest"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files")

// golden compares text with a file in testdata, or writes it with -rewrite.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *rewrite {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not as before; run with -rewrite if it should not be\ngot:\n%s", file, got)
	}
}

func histogram(t *testing.T, text string) *loadtest.Histogram {
	t.Helper()
	h := new(loadtest.Histogram)
	if err := h.UnmarshalText([]byte(text)); err != nil {
		t.Fatal(err)
	}
	return h
}

// sample is a run of so many puts a second, each of which took so long.
func sample(t *testing.T, name string, perSecond float64, micros int64) Run {
	t.Helper()
	cfg := loadtest.DefaultConfig()
	cfg.Endpoints = []string{"http://10.0.0.1:2379", "http://10.0.0.2:2379"}
	cfg.ServerMetrics = []string{"http://10.0.0.1:2379/metrics"}
	puts := histogram(t, fmt.Sprintf("%d:98 %d:2", micros, 4*micros))
	lag := histogram(t, "100:1000")
	return Run{Name: name, Report: loadtest.Report{
		Format: reportFormat, Started: time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC), Settings: cfg, ElapsedSeconds: 10,
		Versions:   loadtest.Versions{Loadtest: "v0.1.0", Commit: "0123abcd", Go: "go1.26.8", Client: "v3.7.3", Servers: []loadtest.ServerVersion{{Endpoint: cfg.Endpoints[0], Version: "3.7.3"}}},
		Machine:    loadtest.Machine{Host: "bench", OS: "linux", Arch: "amd64", CPU: "A CPU", CPUs: 4, MemoryBytes: 16 << 30},
		Operations: 100, Throughput: perSecond, Put: puts.Summary(),
		Histograms: map[string]*loadtest.Histogram{"put": puts, "scheduling lag": lag},
		CPU: loadtest.CPU{
			SelfSeconds: 10, SelfPerOp: 20, Processors: 4, MachineBusy: 0.3, SchedulingLag: lag.Summary(), ServersPerOp: 1e5 / perSecond,
			Servers: []loadtest.ServerCPU{{URL: cfg.ServerMetrics[0], Seconds: 12, PerOp: 1e5 / perSecond, ResidentBytes: 1 << 28}},
		},
		Seconds: []loadtest.Second{
			{At: 1, Length: 1, Operations: int64(perSecond), P50: micros, P99: 4 * micros, Max: 5 * micros},
			{At: 2, Length: 1, Operations: int64(perSecond) / 2, P50: 2 * micros, P99: 8 * micros, Max: 50 * micros, Failed: 1},
			{At: 3, Length: 1, Operations: int64(perSecond), P50: micros, P99: 3 * micros, Max: 4 * micros},
		},
	}}
}

func write(t *testing.T, dir string, run Run) string {
	t.Helper()
	name := filepath.Join(dir, run.Name)
	if err := run.WriteJSON(name, nil); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestCompareGolden(t *testing.T) {
	var text bytes.Buffer
	show := func(title string, a, b []Run, o Options) {
		fmt.Fprintf(&text, "-- %s\n", title)
		c, err := Compare(a, b, o)
		if err != nil {
			fmt.Fprintln(&text, err)
			return
		}
		if err := c.Write(&text); err != nil {
			t.Error(err)
		}
	}
	a := []Run{sample(t, "a1.json", 1000, 2000), sample(t, "a2.json", 1100, 1900), sample(t, "a3.json", 1050, 2100)}
	b := []Run{sample(t, "b1.json", 2000, 1000), sample(t, "b2.json", 2210, 940), sample(t, "b3.json", 2080, 1070)}
	show("one run of each", a[:1], b[:1], Options{})
	show("groups", a, b, Options{})
	show("pairs", a, b, Options{Paired: true})
	show("a side against itself", a, []Run{a[1], a[2], a[0]}, Options{})
	show("pairs of unequal sides", a, b[:2], Options{Paired: true})

	other := sample(t, "other.json", 900, 50)
	other.Settings.Clients, other.Settings.Kubernetes.Pods = 50, 5
	other.Machine.CPUs, other.Versions.Commit = 2, "4567cdef"
	other.CPU.SelfSeconds, other.CPU.SchedulingLag, other.Failed, other.Interrupted = 39, histogram(t, "9000:100").Summary(), 7, true
	show("different settings", a[:1], []Run{other, b[1]}, Options{})
	show("different settings all the same", a[:1], []Run{other, b[1]}, Options{Different: true})
	none := sample(t, "none.json", 0, 100)
	none.CPU, none.Histograms = loadtest.CPU{}, nil
	show("nothing to compare", a[:1], []Run{none}, Options{})
	golden(t, "compare.txt", text.Bytes())
}

// TestSameSettings: where the servers are, and what is no part of the load, makes no difference.
func TestSameSettings(t *testing.T) {
	a, b := sample(t, "a", 10, 10), sample(t, "b", 10, 10)
	s := &b.Settings
	s.Endpoints, s.ServerMetrics, s.Seed, s.Cleanup, s.SLO = []string{"x:1", "y:2"}, nil, 7, true, "p99<1s"
	s.User, s.DataPath, b.Machine.Host, b.Machine.Kernel = "load", "/", "other", "7.1"
	if c, err := Compare([]Run{a}, []Run{b}, Options{}); err != nil || len(c.Differing)+len(c.Versions) != 0 {
		t.Errorf("%v, %+v", err, c)
	}
	s.Endpoints = s.Endpoints[:1]
	if _, err := Compare([]Run{a}, []Run{b}, Options{}); err == nil || !strings.Contains(err.Error(), "number_of_endpoints: 2 and 1") {
		t.Errorf("fewer endpoints: %v", err)
	}
}

// TestAPIs: two APIs are different settings, and are named. A report of old, which names none, is of etcd's.
func TestAPIs(t *testing.T) {
	etcd, old, pipe := sample(t, "etcd", 10, 10), sample(t, "old", 10, 10), sample(t, "pipe", 10, 10)
	old.Settings.API, pipe.Settings.API = "", loadtest.APIPipe
	if c, err := Compare([]Run{etcd}, []Run{old}, Options{}); err != nil || len(c.Differing) != 0 {
		t.Errorf("%v, %+v", err, c)
	}
	if _, err := Compare([]Run{old}, []Run{pipe}, Options{}); err == nil || !strings.Contains(err.Error(), "\n  api: \"etcd\" and \"pipe\"") {
		t.Error(err)
	}
	var text, page bytes.Buffer
	c, err := Compare([]Run{old}, []Run{pipe}, Options{Different: true})
	if err != nil || c.Write(&text) != nil || !strings.Contains(text.String(), "differing settings:\n  api: \"etcd\" and \"pipe\"\n") {
		t.Errorf("%v\n%s", err, &text)
	}
	if err := WritePage(&page, []Run{etcd, pipe}); err != nil || strings.Count(page.String(), "put by the pipe") != 1 {
		t.Errorf("%v\n%s", err, &page)
	}
}

// TestMargin: the intervals are those that tables and books have.
func TestMargin(t *testing.T) {
	near := func(got, want float64) bool { return math.Abs(got-want) < 0.0005*want }
	a, b := []float64{1, 2, 3, 4, 5}, []float64{2, 4, 6, 8, 10}
	// Welch: variances 2.5 and 10, error √2.5 = 1.5811, 5.88 degrees of freedom, of which 5 are counted: 2.571.
	if m, ok := margin(a, b, false); !ok || !near(m, 2.571*1.58114) {
		t.Errorf("groups: %g, %v", m, ok)
	}
	// The differences are 1 to 5: error √(2.5/5) = 0.7071, 4 degrees: 2.776.
	if m, ok := margin(a, b, true); !ok || !near(m, 2.776*0.70711) {
		t.Errorf("pairs: %g, %v", m, ok)
	}
	if m, ok := margin([]float64{1, 1}, []float64{2, 2}, false); !ok || m != 0 {
		t.Errorf("no scatter: %g, %v", m, ok)
	}
	if _, ok := margin(a[:1], b, false); ok {
		t.Error("one run has an interval")
	}
	if student(0.5) != 12.706 || student(2) != 4.303 || student(1e9) != 2.042 {
		t.Error("wrong quantiles")
	}
}

func TestReadSide(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a2.json", "a1.json", "b.json"} {
		write(t, dir, sample(t, name, 10, 10))
	}
	runs, err := ReadSide(filepath.Join(dir, "a*.json") + "," + filepath.Join(dir, "b.json"))
	var got []string
	for _, r := range runs {
		got = append(got, filepath.Base(r.Name))
	}
	if err != nil || strings.Join(got, " ") != "a1.json a2.json b.json" || runs[0].Histograms["put"].Count() != 100 || runs[0].Throughput != 10 {
		t.Errorf("%v: %v", got, err)
	}
	for name, text := range map[string]string{"broken": "{", "empty": "{}", "idle": `{"format":1}`, "later": `{"format":99,"settings":{"workload":"put"}}`} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadSide(file); err == nil || !strings.Contains(err.Error(), file+": no report of loadtest") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, side := range []string{filepath.Join(dir, "no-such.json"), filepath.Join(dir, "c*"), "[", ""} {
		if _, err := ReadSide(side); err == nil {
			t.Errorf("%q passes", side)
		}
	}
	twice := filepath.Join(dir, "a*.json") + "," + dir + "/./a1.json"
	if _, err := ReadSide(twice); err == nil || !strings.Contains(err.Error(), "a1.json: it is named twice") {
		t.Errorf("%s: %v", twice, err)
	}
	var c Comparison
	compared, err := Compare(runs[:1], runs[1:], Options{})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "out.json")
	if err := compared.WriteJSON(file, nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil || json.Unmarshal(text, &c) != nil || len(c.Rows) != len(compared.Rows) || c.Rows[0].Ratio != 1 {
		t.Errorf("%v: %s", err, text)
	}
}
