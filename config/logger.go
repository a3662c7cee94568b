package config

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Log says what is logged, how and where.
type Log struct {
	// Logger is "zap", the only one there is.
	Logger string
	// Level is the lowest level that is logged: debug, info, warn, error, panic or
	// fatal. Default info. Debug logs requests and slows the node down.
	Level string
	// Format is json or console. Default json.
	Format string
	// Outputs are "default" and "stderr" (both mean standard error), "stdout",
	// "systemd/journal", or paths of files, which are appended to. Never empty. Default
	// "default", which must stand alone, as the journal must.
	Outputs []string
	// Rotate has the one file among Outputs rotated. Default false.
	Rotate bool
	// Rotation says when, as JSON: maxsize in MiB, maxage in days, maxbackups, localtime, compress; 0 is
	// no bound, and for maxsize 100. Not read without Rotate.
	Rotation string
}

func (l *Log) validate() error {
	if l.Logger != "zap" {
		return fmt.Errorf("unknown logger option %q", l.Logger)
	}
	if _, err := zapcore.ParseLevel(l.Level); err != nil {
		return fmt.Errorf("--log-level: %w", err)
	}
	if l.Format != "json" && l.Format != "console" {
		return fmt.Errorf("unknown log format: %s, supported values json, console", l.Format)
	}
	switch {
	case len(l.Outputs) == 0:
		return errors.New("--log-outputs must not be empty")
	case slices.Contains(l.Outputs, ""):
		return errors.New("--log-outputs has an empty output")
	case len(l.Outputs) > 1 && slices.Contains(l.Outputs, "default"):
		return fmt.Errorf("multi logoutput for %q is not supported yet", "default")
	}
	return l.validateSinks()
}

// Build makes the logger. Its fields are etcd's, so that etcd's log tools read it.
func (l *Log) Build() (*zap.Logger, error) {
	level, err := zapcore.ParseLevel(l.Level)
	if err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	if l.special() {
		return l.buildSpecial(level)
	}
	z := logutil.DefaultZapLoggerConfig
	z.Level = zap.NewAtomicLevelAt(level)
	z.Encoding = l.Format
	z.DisableStacktrace = true // an error says which operation failed on what
	z.OutputPaths = nil
	for _, o := range l.Outputs {
		if o == "default" {
			o = "stderr"
		}
		z.OutputPaths = append(z.OutputPaths, o)
	}
	z.ErrorOutputPaths = z.OutputPaths
	logger, err := logutil.MergeOutputPaths(z).Build()
	if err != nil {
		return nil, fmt.Errorf("log outputs %v: %w", l.Outputs, err)
	}
	return logger, nil
}
