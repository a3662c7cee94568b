package engine

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"syscall"

	"github.com/cockroachdb/errors/oserror"
	"github.com/cockroachdb/pebble/v2"
	"go.uber.org/zap"
)

// Fatal is closed at the first error behind which the store cannot be trusted.
// The node must stop: after a restart the wal replays what the store lacks.
func (e *Engine) Fatal() <-chan struct{} { return e.fatal.once }

// Err returns the error that closed Fatal, and nil before.
func (e *Engine) Err() error {
	e.fatal.Lock()
	defer e.fatal.Unlock()
	return e.fatal.err
}

// fail records the first fatal error.
func (e *Engine) fail(err error, lost bool) {
	e.fatal.Lock()
	defer e.fatal.Unlock()
	e.fatal.lost = e.fatal.lost || lost
	if e.fatal.err == nil {
		e.fatal.err = err
		close(e.fatal.once)
		e.logger.Error("the store failed; the node must stop", zap.Error(err))
	}
}

// isNoSpace says whether the error means a full disk or an exhausted quota.
func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// backgroundError sorts the errors of flushes and compactions. Pebble tries both
// again, which is right for a full disk and wrong for everything else: after a
// failed fsync the kernel holds the lost pages for clean, and the second try
// would report as durable what is not.
func (e *Engine) backgroundError(err error) {
	switch {
	case errors.Is(err, pebble.ErrCancelledCompaction), errors.Is(err, pebble.ErrClosed), e.ctx.Err() != nil:
		return
	case isNoSpace(err):
		e.metrics.noSpace.Inc()
		e.space.sawFull()
	default:
		e.fail(fmt.Errorf("engine: flush or compaction: %w", err), false)
	}
}

// listener returns the callbacks. Pebble holds its own lock in most of them: they
// only take notes.
func (e *Engine) listener() *pebble.EventListener {
	return &pebble.EventListener{
		BackgroundError: e.backgroundError,
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			e.fail(fmt.Errorf("engine: corruption in %s, keys %s: %w; restore the node from its peers",
				i.Path, i.Bounds.String(), i.Details), false)
		},
		FlushEnd: func(i pebble.FlushInfo) {
			e.metrics.flush(&i)
			e.durable.signal()
		},
		CompactionEnd:   e.metrics.compaction,
		WriteStallBegin: func(pebble.WriteStallBeginInfo) { e.metrics.stallBegin(e) },
		WriteStallEnd:   func() { e.metrics.stallEnd(e) },
		PossibleAPIMisuse: func(i pebble.PossibleAPIMisuseInfo) {
			e.logger.Error("misuse of the store", zap.String("kind", fmt.Sprint(i.Kind)), zap.String("key", FormatKey(i.UserKey)))
		},
	}
}

// pebbleLogger hands Pebble's log to zap.
type pebbleLogger struct{ e *Engine }

// Infof drops Pebble's reports of its daily work; Metrics counts it.
func (pebbleLogger) Infof(string, ...any) {}

// Errorf logs.
func (l pebbleLogger) Errorf(format string, args ...any) {
	l.e.logger.Error("pebble", zap.String("error", fmt.Sprintf(format, args...)))
}

// Fatalf must not return, and must not end the process, of which the node may be
// one of several: it records the error and ends its goroutine, which is Pebble's
// or one of guarded. A failed commit is the exception: it comes on a caller's
// goroutine, which must not vanish, and cannot happen but by a bug, since without
// a WAL a commit touches memory only.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("engine: pebble: "+format, args...)
	l.e.fail(err, true)
	if strings.HasPrefix(format, "pebble: fatal commit error") {
		panic(err)
	}
	runtime.Goexit()
}

// isNotExist says whether the error means that there is no such file.
func isNotExist(err error) bool { return oserror.IsNotExist(err) }
