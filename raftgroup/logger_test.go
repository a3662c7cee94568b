package raftgroup

import (
	"sync/atomic"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// fieldCounter counts the fields that loggers had to encode permanently.
type fieldCounter struct {
	zapcore.Core
	fields *atomic.Int64
}

func (c fieldCounter) With(fields []zapcore.Field) zapcore.Core {
	c.fields.Add(int64(len(fields)))
	return c
}

// TestQuietGroupHasNoLogBuffer: encoding the fields of a group's logger takes a buffer of
// 1 KiB. A group that logs nothing must not have one: with many thousands of groups the
// buffers took a fifth of a node's memory.
func TestQuietGroupHasNoLogBuffer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		var fields atomic.Int64
		r.zap = zap.New(fieldCounter{zapcore.NewNopCore(), &fields})
		r.startAll()
		defer r.close()
		before := fields.Load()
		r.bootstrap(1, 1, voters(1))
		r.write(1, "x")
		if n := fields.Load() - before; n != 0 {
			t.Errorf("%d fields were encoded for a group that logs nothing", n)
		}
	})
}
