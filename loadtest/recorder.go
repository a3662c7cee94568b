package loadtest

import (
	"fmt"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// class is the kind of a latency.
type class int

const (
	classPut class = iota
	classGet
	classFailed // failed operations of either kind
	// classLate is the generator's own lateness in an open loop: how long after it was
	// due a request left although a client was free. It is part of the latencies and
	// shows how far they can be trusted.
	classLate
	// The operations of workload kubernetes; a page is also one of workload range.
	classRenew
	classStatus
	classEvent
	classCreate
	classDelete
	classPage
	// The operations of workload lease.
	classGrant
	classAttach
	classRevoke
	classCount
)

// succeeded are the classes of operations that succeeded.
var succeeded = []class{classPut, classGet, classRenew, classStatus, classEvent, classCreate, classDelete, classPage, classGrant, classAttach, classRevoke}

// Latencies are kept in microseconds, to three digits, from 1 µs to an hour; a longer
// one counts as an hour.
const (
	longestMicros     = int64(time.Hour / time.Microsecond)
	significantDigits = 3
)

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(1, longestMicros, significantDigits)
}

// recorderShards is the number of locks of a recorder.
const recorderShards = 4

// recorder collects the latencies of one phase. Clients record into shards. Each
// second, and at the end, drain moves their content into the totals.
type recorder struct {
	shards [recorderShards]recorderShard
	// total and second belong to the goroutine that drains.
	total, second [classCount]*hdrhistogram.Histogram
}

type recorderShard struct {
	sync.Mutex
	hist     [classCount]*hdrhistogram.Histogram
	inWindow [classCount]int64 // succeeded within the measured time
	_        [64]byte
}

func newRecorder() *recorder {
	r := &recorder{}
	for i := range classCount {
		r.total[i], r.second[i] = newHistogram(), newHistogram()
		for s := range r.shards {
			r.shards[s].hist[i] = newHistogram()
		}
	}
	return r
}

// record notes one operation of a client.
func (r *recorder) record(client int, c class, latency time.Duration, inWindow bool) {
	s := &r.shards[client%recorderShards]
	micros := min(max(int64(latency/time.Microsecond), 1), longestMicros)
	s.Lock()
	// The value lies within the histogram's bounds, so there is no error.
	_ = s.hist[c].RecordValue(micros)
	if inWindow {
		s.inWindow[c]++
	}
	s.Unlock()
}

// drain moves the latencies since the last drain into second and total.
func (r *recorder) drain() {
	for c := range classCount {
		r.second[c].Reset()
		for i := range r.shards {
			s := &r.shards[i]
			s.Lock()
			if s.hist[c].TotalCount() > 0 {
				r.second[c].Merge(s.hist[c])
				s.hist[c].Reset()
			}
			s.Unlock()
		}
		if r.second[c].TotalCount() > 0 {
			r.total[c].Merge(r.second[c])
		}
	}
}

// answeredInWindow returns how many operations of these classes succeeded within the measured time.
func (r *recorder) answeredInWindow(of ...class) int64 {
	var n int64
	for i := range r.shards {
		s := &r.shards[i]
		s.Lock()
		for _, c := range of {
			n += s.inWindow[c]
		}
		s.Unlock()
	}
	return n
}

// countOf returns how many latencies of these classes there are.
func countOf(of [classCount]*hdrhistogram.Histogram, classes ...class) int64 {
	var n int64
	for _, c := range classes {
		n += of[c].TotalCount()
	}
	return n
}

// Latencies describes the latencies of one kind of operation, in microseconds.
type Latencies struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean_us"`
	Min   int64   `json:"min_us"`
	P50   int64   `json:"p50_us"`
	P75   int64   `json:"p75_us"`
	P90   int64   `json:"p90_us"`
	P95   int64   `json:"p95_us"`
	P99   int64   `json:"p99_us"`
	P999  int64   `json:"p99_9_us"`
	P9999 int64   `json:"p99_99_us"`
	Max   int64   `json:"max_us"`
}

// summary returns nil for an empty histogram.
func summary(h *hdrhistogram.Histogram) *Latencies {
	if h.TotalCount() == 0 {
		return nil
	}
	p := h.ValueAtPercentilesSlice([]float64{50, 75, 90, 95, 99, 99.9, 99.99})
	return &Latencies{
		Count: h.TotalCount(), Mean: h.Mean(), Min: h.Min(), Max: h.Max(),
		P50: p[0], P75: p[1], P90: p[2], P95: p[3], P99: p[4], P999: p[5], P9999: p[6],
	}
}

// micros prints a number of microseconds with three or four digits.
func micros(us int64) string {
	switch {
	case us < 1000:
		return fmt.Sprintf("%dµs", us)
	case us < 100_000:
		return fmt.Sprintf("%.2fms", float64(us)/1e3)
	case us < 10_000_000:
		return fmt.Sprintf("%.0fms", float64(us)/1e3)
	default:
		return fmt.Sprintf("%.1fs", float64(us)/1e6)
	}
}
