package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"gopkg.in/natefinch/lumberjack.v2"
)

// journalOutput is the journal of systemd among the outputs.
const journalOutput = "systemd/journal"

// defaultRotation is etcd's default of log-rotation-config-json.
const defaultRotation = `{"maxsize": 100, "maxage": 0, "maxbackups": 0, "localtime": false, "compress": false}`

// isFile says whether an output is the path of a file.
func isFile(output string) bool {
	return !slices.Contains([]string{"default", "stderr", "stdout", journalOutput}, output)
}

// outputPath returns the path of an output that is a file. It may be written as a URL, and is read as zap reads it.
func outputPath(output string) (string, error) {
	if filepath.IsAbs(output) {
		return output, nil
	}
	u, err := url.Parse(output)
	if err != nil || u.Scheme != "" && u.Scheme != "file" || u.Host != "" && u.Host != "localhost" || u.User != nil ||
		u.RawQuery != "" || u.Fragment != "" || u.Path == "" {
		return "", fmt.Errorf("--log-outputs %s: give default, stderr, stdout, %s or the path of a file", output, journalOutput)
	}
	return u.Path, nil
}

// journalMissing says that there is no journal, if so.
func journalMissing() error {
	if !journal.Enabled() {
		return fmt.Errorf("--log-outputs %s: there is no journal on this machine: give stderr or a file", journalOutput)
	}
	return nil
}

// rotation reads the settings of a file that is rotated.
func (l *Log) rotation() (*lumberjack.Logger, error) {
	r := &lumberjack.Logger{}
	d := json.NewDecoder(strings.NewReader(l.Rotation))
	d.DisallowUnknownFields()
	if err := d.Decode(r); err != nil {
		return nil, fmt.Errorf("--log-rotation-config-json: %w: its fields are maxsize (MiB), maxage (days), maxbackups, localtime and compress, as in %s", err, defaultRotation)
	}
	switch {
	case r.Filename != "":
		return nil, errors.New("--log-rotation-config-json has a filename: the file is that of --log-outputs")
	case r.MaxSize < 0 || r.MaxAge < 0 || r.MaxBackups < 0:
		return nil, errors.New("--log-rotation-config-json has a negative number")
	}
	return r, nil
}

// validateSinks checks the outputs that are neither standard output nor a file that grows.
func (l *Log) validateSinks() error {
	if slices.Contains(l.Outputs, journalOutput) && len(l.Outputs) > 1 {
		return fmt.Errorf("--log-outputs %s must stand alone: the journal has all of it", journalOutput)
	}
	if !l.Rotate {
		return nil
	}
	files := 0
	for _, o := range l.Outputs {
		if isFile(o) {
			files++
		}
	}
	if files != 1 {
		return fmt.Errorf("--enable-log-rotation needs exactly one file among --log-outputs (set to %s)", strings.Join(l.Outputs, ","))
	}
	_, err := l.rotation()
	return err
}

// special says whether zap's own configuration does not know an output.
func (l *Log) special() bool { return l.Rotate || slices.Contains(l.Outputs, journalOutput) }

// buildSpecial makes the logger of a rotated file, or of the journal.
func (l *Log) buildSpecial(level zapcore.Level) (*zap.Logger, error) {
	encoder := zapcore.NewJSONEncoder(logutil.DefaultZapLoggerConfig.EncoderConfig)
	if l.Format == "console" {
		encoder = zapcore.NewConsoleEncoder(logutil.DefaultZapLoggerConfig.EncoderConfig)
	}
	if slices.Contains(l.Outputs, journalOutput) {
		if err := journalMissing(); err != nil {
			return nil, err
		}
		return sampled(&journalCore{LevelEnabler: level, encoder: encoder, send: journal.Send, otherwise: zapcore.Lock(os.Stderr)}, zapcore.Lock(os.Stderr)), nil
	}
	var sinks []zapcore.WriteSyncer
	for _, o := range l.Outputs {
		switch {
		case o == "stdout":
			sinks = append(sinks, zapcore.Lock(os.Stdout))
		case !isFile(o):
			sinks = append(sinks, zapcore.Lock(os.Stderr))
		default:
			r, err := l.rotation()
			if err != nil {
				return nil, err
			}
			if r.Filename, err = outputPath(o); err != nil {
				return nil, err
			}
			if _, err := r.Write(nil); err != nil { // a file that cannot be written is found now
				return nil, fmt.Errorf("log outputs %v: %w", l.Outputs, err)
			}
			sinks = append(sinks, zapcore.AddSync(r))
		}
	}
	sink := zapcore.NewMultiWriteSyncer(sinks...)
	return sampled(zapcore.NewCore(encoder, sink, level), sink), nil
}

// sampled makes a logger that repeats itself no more often than those of zap's own configuration.
func sampled(c zapcore.Core, failures zapcore.WriteSyncer) *zap.Logger {
	s := logutil.DefaultZapLoggerConfig.Sampling
	return zap.New(zapcore.NewSamplerWithOptions(c, time.Second, s.Initial, s.Thereafter), zap.AddCaller(), zap.ErrorOutput(failures))
}

// journalCore writes to systemd's journal, with the fields that etcd's entries have there.
type journalCore struct {
	zapcore.LevelEnabler
	encoder   zapcore.Encoder
	send      func(message string, priority journal.Priority, vars map[string]string) error
	otherwise io.Writer // what the journal does not take
}

// With implements zapcore.Core.
func (j *journalCore) With(fields []zapcore.Field) zapcore.Core {
	with := *j
	with.encoder = j.encoder.Clone()
	for i := range fields {
		fields[i].AddTo(with.encoder)
	}
	return &with
}

// Check implements zapcore.Core.
func (j *journalCore) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if j.Enabled(e.Level) {
		return c.AddCore(e, j)
	}
	return c
}

// Write implements zapcore.Core.
func (j *journalCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	line, err := j.encoder.EncodeEntry(e, fields)
	if err != nil {
		return err
	}
	defer line.Free()
	text := bytes.TrimRight(line.Bytes(), "\n")
	err = j.send(string(text), priorityOf(e.Level), map[string]string{"PACKAGE": filepath.Dir(e.Caller.TrimmedPath()), "SYSLOG_IDENTIFIER": filepath.Base(os.Args[0])})
	if err != nil {
		_, err = j.otherwise.Write(line.Bytes())
	}
	return err
}

// Sync implements zapcore.Core.
func (*journalCore) Sync() error { return nil }

func priorityOf(l zapcore.Level) journal.Priority {
	switch {
	case l <= zapcore.DebugLevel:
		return journal.PriDebug
	case l == zapcore.InfoLevel:
		return journal.PriInfo
	case l == zapcore.WarnLevel:
		return journal.PriWarning
	case l == zapcore.ErrorLevel:
		return journal.PriErr
	}
	return journal.PriCrit
}
