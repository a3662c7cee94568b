package engine

import (
	"errors"
	"syscall"

	"github.com/cockroachdb/errors/oserror"
	"go.uber.org/zap"
)

// Fatal is closed at the first error after which the store cannot be trusted. The node
// must stop: after a restart the wal replays what the store lacks.
func (e *Engine) Fatal() <-chan struct{} { return e.fatal.once }

// Err returns the error that closed Fatal, or nil.
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
		e.logger.Error("engine failed; the node must stop", zap.Error(err))
	}
}

// IsNoSpace reports whether the error means a full disk or an exhausted quota.
func IsNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// isNotExist reports whether the error means that the file does not exist.
func isNotExist(err error) bool { return oserror.IsNotExist(err) }

// ErrClosed is the error of calls that the engine's end interrupted.
var ErrClosed = errors.New("engine: closed")
