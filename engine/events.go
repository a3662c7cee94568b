package engine

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
	"go.uber.org/zap"
)

// backgroundError classifies the errors of flushes and compactions. Pebble retries both,
// which is right for a full disk or without a free file and wrong for everything else. After a failed fsync the
// kernel treats the lost pages as clean, and the retry would report data as durable that
// are not.
func (e *Engine) backgroundError(err error) {
	switch {
	case errors.Is(err, pebble.ErrCancelledCompaction), errors.Is(err, pebble.ErrClosed), e.ctx.Err() != nil:
		return
	case errors.Is(err, errHeldBack):
		// Nothing was tried. Tables that are held back by turns would keep the state full for ever.
	case IsNoSpace(err):
		e.metrics.noSpace.Inc()
		e.space.noteFull(writeFoundNone)
	case isNoFiles(err):
		e.space.noteFull(noFreeFile)
	case reported(err):
	default:
		e.fail(fmt.Errorf("engine: flush or compaction: %w", err))
	}
}

// listener returns the callbacks. Pebble holds its own lock during most of them, so they
// only record.
func (e *Engine) listener() *pebble.EventListener {
	return &pebble.EventListener{
		BackgroundError: e.backgroundError,
		DataCorruption:  e.dataCorruption,
		FlushBegin:      func(i pebble.FlushInfo) { e.placing.Store(i.Ingest) },
		FlushEnd: func(i pebble.FlushInfo) {
			e.placing.Store(false) // one flush runs at a time
			e.metrics.flush(&i)
			e.durable.wake.Set()
		},
		CompactionEnd:   e.metrics.compaction,
		WriteStallBegin: func(pebble.WriteStallBeginInfo) { e.metrics.stallBegin(e) },
		WriteStallEnd:   func() { e.metrics.stallEnd(e) },
		PossibleAPIMisuse: func(i pebble.PossibleAPIMisuseInfo) {
			e.logger.Error("misuse of the engine", zap.String("kind", fmt.Sprint(i.Kind)), zap.String("key", FormatKey(i.UserKey)))
		},
	}
}

// pebbleLogger forwards Pebble's log to zap.
type pebbleLogger struct{ e *Engine }

// Infof drops Pebble's routine reports; Metrics counts them.
func (pebbleLogger) Infof(string, ...any) {}

// Errorf logs.
func (l pebbleLogger) Errorf(format string, args ...any) {
	l.e.logger.Error("pebble", zap.String("error", fmt.Sprintf(format, args...)))
}

// Fatalf must not return. Pebble calls it when it cannot continue, above all after a
// failed write or sync of the manifest. Ending the goroutine would release locks over a
// half-changed store. Blocking it would keep them, and every commit would wait for ever.
// So the process ends, as in a power failure, and the wal has what the store lacks. Only
// Open turns the call into an error.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("engine: pebble: "+format, args...)
	l.e.fail(err)
	if l.e.onLost != nil {
		l.e.onLost()
	}
	panic(err)
}
