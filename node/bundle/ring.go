package bundle

import (
	"bytes"
	"sync"

	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// RingBytes is how much of the log a node keeps in memory for a bundle.
const RingBytes = 4 << 20

// Ring keeps the last lines of a log in memory. The zero Ring is empty.
type Ring struct {
	mu sync.Mutex
	// Guarded by mu. buf grows up to RingBytes, and then next is where the oldest byte is.
	buf  []byte
	next int
}

// Attach returns a logger that also writes to the ring, as JSON, what it logs.
func (r *Ring) Attach(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		e := zapcore.NewJSONEncoder(logutil.DefaultZapLoggerConfig.EncoderConfig)
		return zapcore.NewTee(c, zapcore.NewCore(e, r, c))
	}))
}

// Write implements zapcore.WriteSyncer. It takes whole lines.
func (r *Ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rest := p[max(0, len(p)-RingBytes):]
	if grow := min(len(rest), RingBytes-len(r.buf)); grow > 0 {
		r.buf = append(r.buf, rest[:grow]...)
		rest = rest[grow:]
	}
	for len(rest) > 0 {
		n := copy(r.buf[r.next:], rest)
		rest = rest[n:]
		r.next = (r.next + n) % RingBytes
	}
	return len(p), nil
}

// Sync implements zapcore.WriteSyncer.
func (r *Ring) Sync() error { return nil }

// Lines returns the lines that are left, whole ones alone.
func (r *Ring) Lines() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := append(bytes.Clone(r.buf[r.next:]), r.buf[:r.next]...)
	if len(r.buf) == RingBytes { // its first line has lost its beginning, unless by chance
		_, all, _ = bytes.Cut(all, []byte{'\n'})
	}
	return all
}
