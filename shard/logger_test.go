package shard

import (
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/skeindb/skein/shard/eval"
)

// fieldCounter counts the fields that loggers were asked to encode for good.
type fieldCounter struct {
	zapcore.Core
	fields *atomic.Int64
}

func (c fieldCounter) With(fields []zapcore.Field) zapcore.Core {
	c.fields.Add(int64(len(fields)))
	return c
}

// TestQuietReplicaHasNoLogBuffer: the fields of a replica's logger take a buffer of a KiB once
// they are encoded. A replica that logs nothing does not have it.
func TestQuietReplicaHasNoLogBuffer(t *testing.T) {
	var fields atomic.Int64
	s := &Store{cache: &eval.VersionCache{}, log: zap.New(fieldCounter{zapcore.NewNopCore(), &fields})}
	s.newReplica(7)
	if got := fields.Load(); got != 0 {
		t.Errorf("%d fields were encoded for a replica that logs nothing", got)
	}
}
