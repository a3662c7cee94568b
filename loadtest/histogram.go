package loadtest

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Histogram is the latencies of one kind of operation. All have the same buckets, so that those of several runs can be
// merged without a loss. Its text has for each bucket the largest latency in microseconds and how often it came:
// "1023:5 4807:12". The zero Histogram is empty.
type Histogram struct{ h *hdrhistogram.Histogram }

// Count returns the number of latencies.
func (h *Histogram) Count() int64 {
	if h == nil || h.h == nil {
		return 0
	}
	return h.h.TotalCount()
}

// Percentile returns the latency in microseconds that p percent of all do not exceed, and 0 if there is none.
func (h *Histogram) Percentile(p float64) int64 {
	if h.Count() == 0 {
		return 0
	}
	return h.h.ValueAtPercentile(p)
}

// Summary describes the latencies, and is nil if there is none.
func (h *Histogram) Summary() *Latencies {
	if h.Count() == 0 {
		return nil
	}
	return summary(h.h)
}

// Merge adds the latencies of another histogram.
func (h *Histogram) Merge(from *Histogram) {
	if from.Count() == 0 {
		return
	}
	if h.h == nil {
		h.h = newHistogram()
	}
	h.h.Merge(from.h)
}

// MarshalText implements encoding.TextMarshaler.
func (h Histogram) MarshalText() ([]byte, error) {
	var text []byte
	if h.Count() == 0 {
		return text, nil
	}
	for _, bar := range h.h.Distribution() {
		if bar.Count == 0 {
			continue
		}
		if len(text) > 0 {
			text = append(text, ' ')
		}
		text = strconv.AppendInt(text, min(bar.To, longestMicros), 10)
		text = append(text, ':')
		text = strconv.AppendInt(text, bar.Count, 10)
	}
	return text, nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Histogram) UnmarshalText(text []byte) error {
	read, left := newHistogram(), int64(math.MaxInt64)
	for pair := range strings.FieldsSeq(string(text)) {
		value, count, _ := strings.Cut(pair, ":")
		micros, err := strconv.ParseInt(value, 10, 64)
		n, wrong := strconv.ParseInt(count, 10, 64)
		if err != nil || wrong != nil || micros < 1 || micros > longestMicros || n < 1 || n > left {
			return fmt.Errorf("histogram: %.40q is not MICROSECONDS:COUNT, with up to %d µs and a count above 0", pair, longestMicros)
		}
		left -= n
		// The value lies within the histogram's bounds, so there is no error.
		_ = read.RecordValues(micros, n)
	}
	h.h = read
	return nil
}

// histogramOf returns nil for an empty histogram.
func histogramOf(h *hdrhistogram.Histogram) *Histogram {
	if h.TotalCount() == 0 {
		return nil
	}
	return &Histogram{h}
}
