package loadtest

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
)

func TestObjectives(t *testing.T) {
	r := Report{Operations: 999, Failed: 1, Throughput: 500, Histograms: map[string]*Histogram{
		"put": histogramFrom(1000, 2000, 3000, 4000), "get": histogramFrom(10), kindFailed: histogramFrom(1_000_000), kindDelay: histogramFrom(70_000),
	}}
	for clause, want := range map[string]bool{
		"p50<2.01ms": true, "p50<1ms": false, "p50 <= 2.01ms": true,
		"max<4.01ms":     true, // what failed is not in it
		"put.mean<2.6ms": true, "put.mean<2.4ms": false, "mean<2.1ms": true,
		"get.p99.9<11µs": true, "get.p100<10us": false, "get.max<=10us": true,
		"errors<0.11%": true, "errors<0.1%": false, "errors<=0.1 %": true,
		"throughput>499": true, "throughput>500": false, "throughput>=500": true,
		"delay.p99<71ms": true, "delay.p99<69ms": false,
		"renew.p99<1h": false, // there was none
	} {
		o, err := ParseObjectives(clause)
		if err != nil {
			t.Error(err)
			continue
		}
		if got := o.Judge(&r); len(got) != 1 || got[0].Met != want || got[0].Figure == "" {
			t.Errorf("%s: %+v", clause, got)
		}
	}
	if o, err := ParseObjectives("p99<1s, errors<1%"); err != nil || len(o) != 2 || !o.BoundErrors() || o[:1].BoundErrors() {
		t.Errorf("%v, %v", o, err)
	}
	if o, _ := ParseObjectives("p50<1s,errors<1%,throughput>1"); o.Judge(&Report{})[1].Met {
		t.Error("a run without operations has met a bound of errors")
	}
	for text, want := range map[string]string{
		"": "is no clause", "p99": "is no clause", "p99<": "is no clause", "p99=1ms": "is no clause", "p99<1ms,,": "is no clause",
		"p0<1ms": "p0 is not a percentile", "p101<1ms": "p101 is not", "p99>1ms": "bounded from above", "throughput<5": "throughput from below",
		"p99<10": "missing unit", "p99<10%": "unknown unit", "errors<1": "errors is a percentage", "errors<1ms": "errors is a percentage",
		"throughput>10%": "a number", "throughput>5x": "invalid syntax", "walk.p99<1s": "there is no kind walk", "put.errors<1%": "over all kinds",
	} {
		if _, err := ParseObjectives(text); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "understood are") {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestHistogramText: a histogram reads back from its text as it was, and broken texts are refused.
func TestHistogramText(t *testing.T) {
	h := histogramFrom(1, 1, 2, 1023, 4807, 4808, 1_000_003, longestMicros)
	text, err := json.Marshal(h)
	var again Histogram
	if err != nil || json.Unmarshal(text, &again) != nil || !again.h.Equals(h.h) || *again.Summary() != *h.Summary() {
		t.Fatalf("%v, %s", err, text)
	}
	again.Merge(h)
	if again.Count() != 2*h.Count() || again.Percentile(50) != h.Percentile(50) || again.Summary().Max != h.Summary().Max {
		t.Errorf("merged: %+v", again.Summary())
	}
	var empty Histogram
	if text, err := json.Marshal(empty); err != nil || string(text) != `""` || empty.Summary() != nil || empty.Percentile(50) != 0 {
		t.Errorf("empty: %s, %v", text, err)
	}
	for _, broken := range []string{"1", "x:1", "0:1", "5:0", "5:-1", "3600000001:1", "1:9223372036854775807 2:1", "1:1,2:1"} {
		if err := empty.UnmarshalText([]byte(broken)); err == nil {
			t.Errorf("%q passes", broken)
		}
	}
}

func FuzzHistogram(f *testing.F) {
	f.Add("1:5 4807:2")
	f.Add("0:1")
	f.Fuzz(func(t *testing.T, text string) {
		var h, again Histogram
		if h.UnmarshalText([]byte(text)) != nil {
			return
		}
		if out, err := h.MarshalText(); err != nil || again.UnmarshalText(out) != nil || again.Count() != h.Count() {
			t.Errorf("%q becomes %q, %v", text, out, err)
		}
	})
}

// TestSaturated: each way in which the generator can be the bottleneck is named.
func TestSaturated(t *testing.T) {
	quiet := Report{ElapsedSeconds: 10, Histograms: map[string]*Histogram{"put": histogramFrom(20_000)}}
	quiet.CPU = CPU{SelfSeconds: 5, Processors: 2, MachineBusy: 0.5, SchedulingLag: histogramFrom(500).Summary()}
	if why := quiet.Saturated(); why != nil {
		t.Errorf("%v", why)
	}
	for want, change := range map[string]func(c *CPU){
		"used 95 % of its 2 processors": func(c *CPU) { c.SelfSeconds, c.MachineBusy = 19, 0.99 },
		"was 97 % busy, 25 % by":        func(c *CPU) { c.MachineBusy = 0.97 },
		"woke late: p99 3.00ms":         func(c *CPU) { c.SchedulingLag = histogramFrom(3000).Summary() },
	} {
		r := quiet
		change(&r.CPU)
		if why := r.Saturated(); len(why) != 1 || !strings.Contains(why[0], want) {
			t.Errorf("%q, want %q", why, want)
		}
	}
	if why := (&Report{}).Saturated(); why != nil {
		t.Errorf("a report of old says %v", why)
	}
}

func TestMachineTime(t *testing.T) {
	before, after := parseMachineTime("cpu  100 0 100 800 0 0 0 0 50 0"), parseMachineTime("cpu  160 0 120 810 5 1 2 2 60 0")
	if got := after.share(before); math.Abs(got-0.85) > 1e-9 {
		t.Errorf("%g of the time was busy", got)
	}
	for _, line := range []string{"", "cpu 1 2", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2 3 4 x 6 7 8"} {
		if got := parseMachineTime(line); got != (machineTime{}) {
			t.Errorf("%q: %v", line, got)
		}
	}
	if got := before.share(after); got != 0 {
		t.Errorf("a clock that goes back: %g", got)
	}
}

// TestLagProbe: who is not held up wakes in time.
func TestLagProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := startLagProbe(clock.Virtual())
		time.Sleep(time.Second + lagEach/2)
		if got := summary(p.end()); got == nil || got.Count != 100 || got.Max > 1 {
			t.Errorf("%+v", got)
		}
	})
}
