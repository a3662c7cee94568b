package main

import (
	"slices"
	"testing"
)

func TestKubeFigures(t *testing.T) {
	const report = `{"kinds": [{"kind": "renew", "throughput_per_second": 1200.5, "latency": {"p50_us": 2500, "p99_us": 40000}}],
		"watch": {"delay": {"p50_us": 1000, "p99_us": 9000}}}`
	f := figureSet{}
	for _, part := range []string{"renew", kubeMix} {
		if err := kubeFigures([]byte(report), part, f); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]float64{
		"renew, 1/s": 1200.5, "renew p50, ms": 2.5, "renew p99, ms": 40, "in the mix: renew p99, ms": 40, "in the mix: an event's delay p99, ms": 9,
	} {
		if f[name] != want {
			t.Errorf("%s: %g, want %g", name, f[name], want)
		}
	}
	if err := kubeFigures([]byte("{"), kubeMix, f); err == nil {
		t.Error("half a report passes")
	}
}

// The keys at which ranges begin differ, and are in order.
func TestKubeSplits(t *testing.T) {
	keys := kubeSplits()
	if len(keys) != 11 || !slices.IsSorted(keys) || len(slices.Compact(slices.Clone(keys))) != 11 {
		t.Errorf("%q", keys)
	}
	if err := kubernetes(t.Context(), &bench{}, kubeOptions{ranges: "many"}); err == nil {
		t.Error("--ranges many passes")
	}
}
