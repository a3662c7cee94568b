package config

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/coreos/go-systemd/v22/journal"
	"go.etcd.io/etcd/client/pkg/v3/logutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Trap: log rotation under load. Each line is in one of the files, whole and once, and the files have their bound.
func TestLogRotationUnderLoad(t *testing.T) {
	dir := t.TempDir()
	l := Log{Logger: "zap", Level: "info", Format: "json", Outputs: []string{filepath.Join(dir, "log")}, Rotate: true, Rotation: `{"maxsize": 1}`}
	if err := l.validate(); err != nil {
		t.Fatal(err)
	}
	logger, err := l.Build()
	if err != nil {
		t.Fatal(err)
	}
	const writers, each = 4, 1500
	pad := strings.Repeat("x", 512)
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := range each {
				logger.Info(fmt.Sprintf("line %d of %d", i, w), zap.String("pad", pad)) // no two alike: none is left out
			}
		})
	}
	all.Wait()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 3 {
		t.Errorf("3 MB of log are in %d files", len(files))
	}
	seen := map[string]bool{}
	for _, f := range files {
		b, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if len(b) > 1<<20 {
			t.Errorf("%s has %d bytes", f.Name(), len(b))
		}
		for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
			var line struct {
				Msg string `json:"msg"`
			}
			if err := json.Unmarshal(lines.Bytes(), &line); err != nil || seen[line.Msg] {
				t.Fatalf("%s: %v, seen %t: %s", f.Name(), err, seen[line.Msg], lines.Bytes())
			}
			seen[line.Msg] = true
		}
	}
	if len(seen) != writers*each {
		t.Errorf("%d lines of %d", len(seen), writers*each)
	}
}

func TestLogSinksThatAreRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log")
	for _, c := range []struct {
		outputs  []string
		rotation string
		want     string
	}{
		{[]string{"stderr"}, defaultRotation, "exactly one file"},
		{[]string{file, file + "2"}, defaultRotation, "exactly one file"},
		{[]string{file}, `{"maxsize": "1"}`, "its fields are"},
		{[]string{file}, `{"max": 1}`, "its fields are"},
		{[]string{file}, `{"maxage": -1}`, "negative"},
		{[]string{file}, `{"filename": "x"}`, "filename"},
		{[]string{"systemd/journal", "stderr"}, defaultRotation, "must stand alone"},
		{[]string{file}, defaultRotation, ""},
		{[]string{file, "stdout"}, defaultRotation, ""},
	} {
		l := Log{Logger: "zap", Level: "info", Format: "json", Outputs: c.outputs, Rotate: true, Rotation: c.rotation}
		if err := l.validate(); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v %s: %v", c.outputs, c.rotation, err)
		}
	}
	l := Log{Logger: "zap", Level: "info", Format: "json", Outputs: []string{filepath.Join(file, "in", "a file")}, Rotate: true, Rotation: defaultRotation}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Build(); err == nil {
		t.Error("a log that cannot be written is taken")
	}
}

// A rotated file that is written as a URL is where the URL says, as without rotation. Its directory is made.
func TestRotatedURL(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir) // for what is taken for a relative path
	file := filepath.Join(dir, "new", "log")
	l := Log{Logger: "zap", Level: "info", Format: "json", Outputs: []string{"file://" + file}, Rotate: true, Rotation: defaultRotation}
	logger, err := l.Build()
	if err != nil {
		t.Fatal(err)
	}
	logger.Info("here")
	if b, err := os.ReadFile(file); err != nil || !strings.Contains(string(b), "here") {
		t.Errorf("%q, %v", b, err)
	}
	l.Outputs = []string{"udp://h:1"}
	if _, err := l.Build(); err == nil || !strings.Contains(err.Error(), "the path of a file") {
		t.Errorf("%v", err)
	}
}

// Entries come to the journal with the priority of their level; what it does not take goes to standard error.
func TestJournal(t *testing.T) {
	type sent struct {
		text     string
		priority journal.Priority
		vars     map[string]string
	}
	var got []sent
	var rest bytes.Buffer
	full := false
	core := &journalCore{
		LevelEnabler: zapcore.InfoLevel, encoder: zapcore.NewJSONEncoder(logutil.DefaultZapLoggerConfig.EncoderConfig), otherwise: &rest,
		send: func(text string, p journal.Priority, vars map[string]string) error {
			if full {
				return errors.New("full")
			}
			got = append(got, sent{text, p, vars})
			return nil
		},
	}
	logger := sampled(core, zapcore.AddSync(&rest)).With(zap.String("node", "n1"))
	logger.Debug("unseen")
	logger.Info("one")
	logger.Warn("two")
	logger.Error("three")
	full = true
	logger.Info("four")
	want := []journal.Priority{journal.PriInfo, journal.PriWarning, journal.PriErr}
	if len(got) != len(want) {
		t.Fatalf("%d entries: %+v", len(got), got)
	}
	for i, p := range want {
		if e := got[i]; e.priority != p || !json.Valid([]byte(e.text)) || !strings.Contains(e.text, `"node":"n1"`) || e.vars["PACKAGE"] != "config" || e.vars["SYSLOG_IDENTIFIER"] == "" {
			t.Errorf("%+v", e)
		}
	}
	if !strings.Contains(rest.String(), "four") {
		t.Errorf("%q", &rest)
	}
}
