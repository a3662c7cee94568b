package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/ports"
)

// lines keeps what is logged, and calls seen with each line.
type lines struct {
	zapcore.LevelEnabler
	zapcore.Encoder
	seen func(line string)
	mu   *sync.Mutex
	all  *[]string
}

func newLines(seen func(line string)) lines {
	return lines{LevelEnabler: zap.InfoLevel, Encoder: zapcore.NewJSONEncoder(zap.NewDevelopmentEncoderConfig()), seen: seen, mu: &sync.Mutex{}, all: &[]string{}}
}

func (l lines) With(fields []zapcore.Field) zapcore.Core {
	l.Encoder = l.Clone()
	for _, f := range fields {
		f.AddTo(l.Encoder)
	}
	return l
}

func (l lines) Check(e zapcore.Entry, c *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if l.Enabled(e.Level) {
		return c.AddCore(e, l)
	}
	return c
}

func (l lines) Write(e zapcore.Entry, fields []zapcore.Field) error {
	b, err := l.EncodeEntry(e, fields)
	if err != nil {
		return err
	}
	l.mu.Lock()
	*l.all = append(*l.all, b.String())
	l.mu.Unlock()
	l.seen(b.String())
	return nil
}

func (l lines) Sync() error { return nil }

func (l lines) text() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), *l.all...)
}

// A start that a signal ends is no failure, and one plain line says so. One of several founders waits for the others then, and
// a single node listens.
func TestAStartThatASignalEnds(t *testing.T) {
	free, err := ports.Unused(4)
	if err != nil {
		t.Fatal(err)
	}
	at := func(i int) string { return fmt.Sprintf("http://127.0.0.1:%d", free[i]) }
	for what, members := range map[string]string{
		"one of three founders": fmt.Sprintf("n1=%s,n2=%s,n3=%s", at(1), at(2), at(3)),
		"a single node":         "n1=" + at(1),
	} {
		t.Run(what, func(t *testing.T) {
			cfg, _, err := config.Load([]string{
				"--data-dir", filepath.Join(t.TempDir(), "data"), "--name", "n1", "--listen-client-urls", at(0), "--advertise-client-urls", at(0),
				"--listen-peer-urls", at(1), "--initial-advertise-peer-urls", at(1), "--initial-cluster", members,
			}, nil)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			log := newLines(func(line string) {
				// The bus warns of http when it is made, right before the node takes part.
				if strings.Contains(line, "peer traffic is NOT AUTHENTICATED") {
					cancel()
				}
			})
			if err := runProcess(ctx, cfg, zap.New(log)); err != nil {
				t.Error(err)
			}
			all := log.text()
			if last := all[len(all)-1]; !strings.Contains(last, "stopped before the node served clients") {
				t.Errorf("the last line is %s", last)
			}
			for _, line := range all {
				if strings.Contains(line, "context canceled") {
					t.Errorf("logged: %s", line)
				}
			}
		})
	}
}

// Every line of a node's log, from its start to its stop, says which node it is.
func TestLinesNameTheNode(t *testing.T) {
	cfg, _, err := config.Load([]string{
		"--data-dir=" + filepath.Join(t.TempDir(), "data"), "--listen-client-urls=http://127.0.0.1:0", "--advertise-client-urls=http://127.0.0.1:1",
		"--listen-peer-urls=http://127.0.0.1:0",
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	log := newLines(func(line string) {
		if strings.Contains(line, "ready to serve client requests") {
			cancel()
		}
	})
	if err := runProcess(ctx, cfg, zap.New(log)); err != nil {
		t.Fatal(err)
	}
	all := strings.Join(log.text(), "")
	for _, want := range []string{"stopping", "the node has stopped"} {
		if strings.Count(all, `"M":"`+want+`"`) != 1 {
			t.Errorf("%q was not logged", want)
		}
	}
	for _, line := range log.text() {
		if !strings.Contains(line, `"node":`) {
			t.Errorf("it does not name the node: %s", line)
		}
	}
}
