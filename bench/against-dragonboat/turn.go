package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/pprof"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/internal/measure"
)

// The sides that are measured.
const (
	skeinSide      = "skein"
	dragonboatSide = "dragonboat"
)

// errNothing says that a window has shown nothing.
var errNothing = errors.New("nothing was applied")

// settings say what one turn does.
type settings struct {
	Side   string
	Groups int
	// Depth is how many proposals of each group are under way.
	Depth, Bytes int
	Warm, Window time.Duration
	Dir          string
	// Profile is a file for a CPU profile of the window, or empty.
	Profile string
	// Carrier is Skein's.
	Carrier string
	// LogDB and Shards are Dragonboat's.
	LogDB  string
	Shards uint64
}

// figures are what one turn has measured.
type figures struct {
	Proposals int64
	PerSecond float64
	// CPUMicros is the CPU time of the whole process for a proposal.
	CPUMicros            float64
	P50Millis, P99Millis float64
	// Switches are the voluntary context switches for a proposal.
	Switches float64
	// PeakMiB is the most memory that the process has had so far.
	PeakMiB float64
}

// A side is one of the two, with a leader for each group.
type side interface {
	// drive keeps proposals under way until stop is set and the last one is applied, or
	// as good as that.
	drive(stop *atomic.Bool) error
	// applied returns how many proposals are applied so far.
	applied() int64
	// check returns an error if leaders were lost.
	check() error
	close() error
}

// takeTurn measures one side and prints its figures as JSON.
func takeTurn(ctx context.Context, text string, out io.Writer) error {
	var s settings
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return fmt.Errorf("settings of a turn: %w", err)
	}
	f, err := measured(ctx, s)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(f)
}

// measured starts a side, drives it, and removes its data.
func measured(ctx context.Context, s settings) (f figures, err error) {
	dir, err := os.MkdirTemp(s.Dir, s.Side+"-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	s.Dir = dir
	start := startSkein
	if s.Side == dragonboatSide {
		start = startDragonboat
	}
	l := newLatencies(s.Groups, s.Depth)
	it, err := start(ctx, s, l)
	if err != nil {
		return f, err
	}
	var stop atomic.Bool
	driven := make(chan error, 1)
	go func() { driven <- it.drive(&stop) }()
	f, err = window(ctx, s, it, l, driven)
	stop.Store(true)
	if err == nil {
		err = errors.Join(<-driven, it.check())
	}
	err = errors.Join(err, it.close())
	f.P50Millis, f.P99Millis = l.quantile(500).Seconds()*1e3, l.quantile(990).Seconds()*1e3
	return f, err
}

// window measures a time in the middle of a drive, all but the latencies. It returns early
// with an error if the drive ends.
func window(ctx context.Context, s settings, it side, l *latencies, driven <-chan error) (f figures, err error) {
	wait := func(d time.Duration) error {
		select {
		case <-time.After(d):
			return nil
		case err := <-driven:
			return errors.Join(errors.New("the load has ended"), err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := wait(s.Warm); err != nil {
		return f, err
	}
	if s.Profile != "" {
		file, err := os.Create(s.Profile)
		if err != nil {
			return f, err
		}
		defer file.Close()
		if err := pprof.StartCPUProfile(file); err != nil {
			return f, err
		}
		defer pprof.StopCPUProfile()
	}
	l.record(true)
	applied, cpu, used, begin := it.applied(), measure.CPU(), usageNow(), time.Now()
	if err := wait(s.Window); err != nil {
		return f, err
	}
	n, spent, took, after := it.applied()-applied, measure.CPU()-cpu, time.Since(begin), usageNow()
	l.record(false)
	if n == 0 {
		return f, errNothing
	}
	per := func(v float64) float64 { return v / float64(n) }
	return figures{
		Proposals: n,
		PerSecond: float64(n) / took.Seconds(),
		CPUMicros: per(float64(spent.Nanoseconds()) / 1e3),
		Switches:  per(after.switches - used.switches),
		PeakMiB:   after.peakBytes / (1 << 20),
	}, nil
}
