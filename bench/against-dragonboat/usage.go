package main

import (
	"fmt"
	"syscall"
)

// usage is what this process has used so far, beside CPU time.
type usage struct {
	switches, peakBytes float64
}

func usageNow() usage {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		panic(fmt.Sprintf("getrusage: %v", err)) // of the process itself it cannot fail
	}
	return usage{switches: float64(r.Nvcsw), peakBytes: float64(r.Maxrss) * 1024}
}
