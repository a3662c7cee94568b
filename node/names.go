package node

import (
	"fmt"
	"slices"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/skeindb/skein/keyspace"
)

// namingCore is a log that writes the names of nodes beside their ids. The parts of a node know ids alone.
type namingCore struct {
	zapcore.Core
	names *nodeNames
}

// withNames has a logger name the nodes.
func withNames(log *zap.Logger, names *nodeNames) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core { return namingCore{c, names} }))
}

// With implements zapcore.Core.
func (c namingCore) With(fields []zapcore.Field) zapcore.Core {
	return namingCore{c.Core.With(c.named(fields)), c.names}
}

// Check implements zapcore.Core. The core below may have several that write, or write not each line, and says so by its own
// entry.
func (c namingCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	below := c.Core.Check(e, nil)
	if below == nil {
		return ce
	}
	return ce.AddCore(e, namedEntry{c, below})
}

// namedEntry is one line that the core below has agreed to write.
type namedEntry struct {
	namingCore
	below *zapcore.CheckedEntry
}

// Write implements zapcore.Core.
func (n namedEntry) Write(e zapcore.Entry, fields []zapcore.Field) error {
	n.below.Entry = e // with what was added since, as the caller
	n.below.Write(n.named(fields)...)
	return nil
}

// Write implements zapcore.Core.
func (c namingCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	return c.Core.Write(e, c.named(fields))
}

// named returns the fields with names of nodes. Errors have ids in their texts.
func (c namingCore) named(fields []zapcore.Field) []zapcore.Field {
	copied := false
	for i := range fields {
		text, was := "", ""
		switch v := fields[i].Interface.(type) {
		case keyspace.NodeID:
			was = v.String()
			text = c.names.of(v)
		case error:
			was = fmt.Sprint(v) // which outlives an error that is a nil pointer
			text = c.names.inText(was)
		default:
			continue
		}
		if text == was {
			continue
		}
		if !copied { // the caller's own
			fields, copied = slices.Clone(fields), true
		}
		fields[i] = zap.String(fields[i].Key, text)
	}
	return fields
}
