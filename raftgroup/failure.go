package raftgroup

import "go.uber.org/zap"

// fail ends the host's progress: the engine rejects a commit, a state machine cannot
// apply an entry, or the log cannot be read. The node must stop. After a restart the wal
// applies the entries again, or refuses to open where it is damaged.
func (h *Host) fail(err error) {
	h.failMu.Lock()
	defer h.failMu.Unlock()
	if h.failed.Swap(true) {
		return
	}
	h.failErr = err
	close(h.failCh)
	h.log.Error("raft groups failed; the node must stop", zap.Error(err))
}

// Fatal is closed when the host cannot go on. Wal and engine have such channels of their
// own.
func (h *Host) Fatal() <-chan struct{} { return h.failCh }

// Err returns what closed Fatal, or nil.
func (h *Host) Err() error {
	h.failMu.Lock()
	defer h.failMu.Unlock()
	return h.failErr
}
