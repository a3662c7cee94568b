package sim

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Trace is the log of a run without the clients' operations: faults and the nodes'
// logs. It may be used from many goroutines.
type Trace struct {
	mu sync.Mutex
	// w, guarded by mu.
	w io.Writer
}

// NewTrace returns a trace that is written at once, because a node that panics ends the
// process.
func NewTrace(w io.Writer) *Trace { return &Trace{w: w} }

// Add adds a line with the virtual time since the start of the run.
func (t *Trace) Add(at time.Duration, text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	fmt.Fprintf(t.w, "%12v %s\n", at, text)
}

// logger returns a node's logger that writes into the trace.
func (t *Trace) logger(elapsed func() time.Duration, level zapcore.Level) *zap.Logger {
	cfg := zapcore.EncoderConfig{MessageKey: "m", LevelKey: "l", EncodeLevel: zapcore.CapitalLevelEncoder, EncodeDuration: zapcore.StringDurationEncoder}
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(cfg), &traceWriter{t, elapsed}, level))
}

type traceWriter struct {
	t       *Trace
	elapsed func() time.Duration
}

// Write implements zapcore.WriteSyncer.
func (w *traceWriter) Write(p []byte) (int, error) {
	w.t.Add(w.elapsed(), strings.TrimRight(string(p), "\n"))
	return len(p), nil
}

// Sync implements zapcore.WriteSyncer.
func (w *traceWriter) Sync() error { return nil }
