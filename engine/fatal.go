package engine

import (
	"errors"
	"fmt"
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
func (e *Engine) fail(err error) {
	e.fatal.Lock()
	defer e.fatal.Unlock()
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
		e.fail(fmt.Errorf("engine: flush or compaction: %w", err))
	}
}

// listener returns the callbacks. Pebble holds its own lock in most of them: they
// only take notes.
func (e *Engine) listener() *pebble.EventListener {
	return &pebble.EventListener{
		BackgroundError: e.backgroundError,
		DataCorruption: func(i pebble.DataCorruptionInfo) {
			e.fail(fmt.Errorf("engine: corruption in %s, keys %s: %w; restore the node from its peers",
				i.Path, i.Bounds.String(), i.Details))
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

// Fatalf must not return. Pebble calls it where it cannot go on: in the first
// place after a failed write or sync of the manifest. Neither ending its goroutine
// nor stopping it would do: the one gives locks back behind which the store is half
// changed, the other keeps them, and every commit waits for ever. So the process
// ends, as after a power cut, and the wal has what the store lacks. Only Open turns
// it into an error.
func (l pebbleLogger) Fatalf(format string, args ...any) {
	err := fmt.Errorf("engine: pebble: "+format, args...)
	l.e.fail(err)
	if l.e.onLost != nil {
		l.e.onLost()
	}
	panic(err)
}

// isNotExist says whether the error means that there is no such file.
func isNotExist(err error) bool { return oserror.IsNotExist(err) }
