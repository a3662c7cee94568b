package bundle

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"runtime/trace"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/redact"
)

// The bounds of a node's part. All files together have 62 MiB at most.
const (
	// nodeTime is how long a node makes its part at most. What is not there by then is said to be missing.
	nodeTime = 28 * time.Second
	// takeTime is how long the part may take altogether: who asked may be slow to read, or not read at all.
	takeTime = 30 * time.Second
	// mostProfile bounds the profile and the trace.
	mostProfile = 20 * time.Second
	traceBytes  = 16 << 20
	// manyGoroutines is from where on goroutines are shown by the places where they are, and not one by one.
	manyGoroutines = 10_000
	pieceBytes     = 1 << 20
)

// Source makes a node's part of a debug bundle. It holds nothing that could be refused to it: memory, and files of
// the process alone.
type Source struct {
	// Node is the node's name.
	Node   string
	Config *config.Config
	Log    *Ring
	// SlowCalls returns the node's last slow requests, in any order.
	SlowCalls func() []*adminpb.SlowCall
	Metrics   prometheus.Gatherer
	Clock     clock.Clock

	busy atomic.Bool // a part is being made
}

// file is a file of the part.
type file struct {
	name, about string
	most        int // bytes
	make        func(ctx context.Context, w io.Writer) error
}

// made is a file that is made.
type made struct {
	*file
	data []byte
	err  error
}

func (s *Source) files(q *adminpb.BundleRequest) []file {
	keys := redact.New(q.GetSalt())
	files := []file{
		{"build.txt", "what the program was made from", 1 << 20, func(_ context.Context, w io.Writer) error { return writeBuild(w) }},
		{"config.txt", "the node's settings, without secrets", 1 << 20, func(_ context.Context, w io.Writer) error { return writeConfig(w, s.Config, keys) }},
		{"process.txt", "limits, memory and pressure of the process and its machine, as the kernel tells", 1 << 20, func(_ context.Context, w io.Writer) error { return writeProcess(w) }},
		{"log.jsonl", "the end of the node's log, one JSON object a line", 8 << 20, func(_ context.Context, w io.Writer) error { return keys.JSON(w, s.Log.Lines()) }},
		{"slow.json", "the node's last slow requests, as skein debug slow -w json", 1 << 20, func(_ context.Context, w io.Writer) error { return s.writeSlow(w, keys) }},
		{"metrics.txt", "metrics, as Prometheus reads them", 8 << 20, func(_ context.Context, w io.Writer) error { return s.writeMetrics(w) }},
		{"goroutines.txt", "the stacks of all goroutines", 12 << 20, func(_ context.Context, w io.Writer) error {
			return pprof.Lookup("goroutine").WriteTo(w, goroutineDetail(runtime.NumGoroutine()))
		}},
		{"heap.pb.gz", "where memory was allocated; for go tool pprof", 4 << 20, func(_ context.Context, w io.Writer) error {
			return pprof.Lookup("heap").WriteTo(w, 0)
		}},
	}
	d := min(time.Duration(q.GetProfileMs())*time.Millisecond, mostProfile)
	if d <= 0 {
		return files
	}
	return append(files,
		file{"cpu.pb.gz", fmt.Sprintf("where the processor was used for %v; for go tool pprof", d), 4 << 20, func(ctx context.Context, w io.Writer) error { return s.profile(ctx, w, d) }},
		file{"trace.out", fmt.Sprintf("the end of what goroutines did in the same %v, from Go's flight recorder; for go tool trace", d), traceBytes * 3 / 2, func(ctx context.Context, w io.Writer) error { return s.record(ctx, w, d) }},
	)
}

// goroutineDetail is the debug argument of pprof's goroutine profile.
func goroutineDetail(n int) int {
	if n > manyGoroutines {
		return 1
	}
	return 2
}

// Bundle implements adminapi.BundleBackend. One part is made at a time: each takes memory, and the process has one
// profile. After 30 seconds it returns, also while send still waits for who does not read; send must return soon after that.
func (s *Source) Bundle(ctx context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
	if !s.busy.CompareAndSwap(false, true) {
		return &adminapi.Refusal{Reason: "node " + s.Node + " is making a part for another debug bundle", NextStep: "try again in half a minute"}
	}
	ctx, cancel := clock.WithTimeout(ctx, s.Clock, takeTime)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		err := s.part(ctx, q, send)
		s.busy.Store(false)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("the part was not read within %v: %w", takeTime, context.Cause(ctx))
	}
}

// part makes the files and sends them. They are made beside each other, so that one that cannot be made costs itself alone.
func (s *Source) part(ctx context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
	ctx, cancel := clock.WithTimeout(ctx, s.Clock, nodeTime)
	defer cancel()
	files := s.files(q)
	done := make(chan made, len(files)) // a file that hangs ends alone
	missing := map[string]bool{}
	for i := range files {
		f := &files[i]
		missing[f.name] = true
		go func() {
			w := &bounded{most: f.most}
			err := f.make(ctx, w)
			if err == nil && w.cut > 0 {
				err = fmt.Errorf("cut: %d bytes more than %d", w.cut, f.most)
			}
			done <- made{f, w.Bytes(), err}
		}()
	}
	for range files {
		select {
		case m := <-done:
			delete(missing, m.name)
			if err := s.send(m, send); err != nil {
				return err
			}
		case <-ctx.Done():
			for i := range files {
				if f := &files[i]; missing[f.name] {
					if err := s.send(made{f, nil, fmt.Errorf("not made within %v", nodeTime)}, send); err != nil {
						return err
					}
				}
			}
			return nil
		}
	}
	return nil
}

// send sends a file in pieces.
func (s *Source) send(m made, send func(*adminpb.BundleResponse) error) error {
	p := &adminpb.BundleResponse{Node: s.Node, File: m.name, About: m.about}
	if m.err != nil {
		p.Error = redact.Secrets(m.err.Error())
	}
	for {
		n := min(len(m.data), pieceBytes)
		p.Data, m.data = m.data[:n], m.data[n:]
		p.Last = len(m.data) == 0
		if err := send(p); err != nil {
			return err
		}
		if p.Last {
			return nil
		}
		p = &adminpb.BundleResponse{Node: s.Node, File: m.name}
	}
}

// bounded takes so many bytes, and counts what is beyond.
type bounded struct {
	bytes.Buffer
	most, cut int
}

// Write implements io.Writer.
func (b *bounded) Write(p []byte) (int, error) {
	n := min(len(p), b.most-b.Len())
	b.cut += len(p) - n
	b.Buffer.Write(p[:n])
	return len(p), nil
}

// profile writes where the processor is used for a while.
func (s *Source) profile(ctx context.Context, w io.Writer, d time.Duration) error {
	if err := pprof.StartCPUProfile(w); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	_ = clock.Sleep(ctx, s.Clock, d) // what there is by then is of use
	return nil
}

// record writes the end of what goroutines do in a while. The recorder does not run otherwise: it would cost each request
// for the sake of the few seconds before a bundle.
func (s *Source) record(ctx context.Context, w io.Writer, d time.Duration) error {
	r := trace.NewFlightRecorder(trace.FlightRecorderConfig{MinAge: d, MaxBytes: traceBytes})
	if err := r.Start(); err != nil {
		return err
	}
	defer r.Stop()
	_ = clock.Sleep(ctx, s.Clock, d) // as above
	_, err := r.WriteTo(w)
	return err
}

func (s *Source) writeSlow(w io.Writer, keys *redact.Redactor) error {
	var all bytes.Buffer
	if err := adminapi.WriteSlowOf(&all, s.SlowCalls()); err != nil {
		return err
	}
	return keys.JSON(w, all.Bytes())
}

func (s *Source) writeMetrics(w io.Writer) error {
	all, err := s.Metrics.Gather()
	for _, m := range all {
		if _, werr := expfmt.MetricFamilyToText(w, m); werr != nil {
			return errors.Join(err, werr)
		}
	}
	return err
}

func writeBuild(w io.Writer) error {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return errors.New("the program was built without a note of what it was made from")
	}
	_, err := fmt.Fprintf(w, "%s/%s\n%s", runtime.GOOS, runtime.GOARCH, redact.Secrets(info.String()))
	return err
}

// processFiles are what the kernel tells. None has arguments or environment, which may have secrets.
var processFiles = []string{
	"/proc/version", "/proc/self/status", "/proc/self/limits", "/proc/self/io", "/proc/loadavg", "/proc/meminfo",
	"/proc/pressure/cpu", "/proc/pressure/io", "/proc/pressure/memory", "/proc/net/snmp",
	"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu.stat",
}

// processFileBytes is how much of each is taken.
const processFileBytes = 64 << 10

func writeProcess(w io.Writer) error {
	fmt.Fprintf(w, "GOMAXPROCS %d of %d processors, GOGC %q, GOMEMLIMIT %q, %d goroutines\n", runtime.GOMAXPROCS(0), runtime.NumCPU(),
		os.Getenv("GOGC"), os.Getenv("GOMEMLIMIT"), runtime.NumGoroutine())
	for _, name := range processFiles {
		b, err := readSome(name)
		if errors.Is(err, os.ErrNotExist) {
			continue // another kernel, or no cgroup
		}
		fmt.Fprintf(w, "\n--- %s\n%s", name, b)
		if err != nil {
			fmt.Fprintln(w, err)
		}
	}
	return nil
}

func readSome(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, processFileBytes))
	return b, cmp.Or(err, f.Close())
}
