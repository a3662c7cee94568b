package main

import (
	"os"
	"runtime"
	"testing"
	"time"
)

func TestParseWaits(t *testing.T) {
	const text = "Name:\tskein\nvoluntary_ctxt_switches:\t1234\nnonvoluntary_ctxt_switches:\t99\n"
	if n, err := parseWaits(text); n != 1234 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	for _, wrong := range []string{"", "nonvoluntary_ctxt_switches:\t99\n", "voluntary_ctxt_switches:\tmany\n"} {
		if n, err := parseWaits(wrong); err == nil {
			t.Errorf("%q: %d", wrong, n)
		}
	}
}

func TestProcessWaits(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("/proc is Linux's")
	}
	before, err := processWaits(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	// On a busy machine a nap may end before the thread has given up its processor.
	for after, end := before, time.Now().Add(time.Minute); after == before; {
		time.Sleep(2 * time.Millisecond)
		if after, err = processWaits(os.Getpid()); err != nil || time.Now().After(end) {
			t.Fatalf("%d waits before the naps, %d after: %v", before, after, err)
		}
	}
	if _, err := processWaits(1 << 30); err == nil {
		t.Error("a process that is none has waited")
	}
}
