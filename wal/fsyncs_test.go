package wal

import (
	"testing"
	"testing/synctest"
	"time"
)

// The percentile is that of the last fsyncs: a disk that has become slow, or quick again, is seen soon.
func TestRecentFsyncs(t *testing.T) {
	synctest.Test(t, recentFsyncsIn)
}

func recentFsyncsIn(t *testing.T) {
	r := &recentFsyncs{}
	add := func(n int, d time.Duration) {
		for range n {
			r.add(d)
		}
	}
	want := func(what string, d time.Duration) {
		t.Helper()
		if got := r.p99(); got != d {
			t.Errorf("%s: %v, want %v", what, got, d)
		}
	}
	want("none", 0)
	add(leastFsyncs-1, time.Second)
	want("too few", 0)
	add(1, time.Second)
	want("enough", time.Second)
	add(len(r.took), time.Millisecond)
	want("a full ring", time.Millisecond)
	add(2, time.Second)
	want("two outliers", time.Millisecond)
	add(10, time.Second)
	want("many", time.Second)
	add(len(r.took), 2*time.Millisecond)
	want("quick again", 2*time.Millisecond)
	time.Sleep(recently + 1)
	want("a minute later", 0)
}
