//go:build linux

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/internal/ptytest"
)

// A bundle overwrites nothing, and where there is none no file is left.
func TestBundleFiles(t *testing.T) {
	dir := t.TempDir()
	there, file := filepath.Join(dir, "there"), filepath.Join(dir, "b.tar.gz")
	if err := os.WriteFile(there, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"-o", there, "--endpoints", "127.0.0.1:1"}, exitRefused, "is there already"},
		{[]string{"-o", file, "--endpoints", "127.0.0.1:1"}, exitRefused, "no endpoint can be reached"},
		{[]string{"-o", filepath.Join(dir, "no", "b"), "--endpoints", "127.0.0.1:1"}, exitRefused, "no such file"},
		{[]string{"--redact", "all"}, exitUsage, "there are keys and none"},
		{[]string{"--cpu", "1m"}, exitUsage, "from 0 to 20s"},
	} {
		var out, errs bytes.Buffer
		if code := execute(t.Context(), append([]string{"debug", "bundle"}, c.args...), nil, &out, &errs); code != c.code || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%v: exit %d\n%s%s", c.args, code, &out, &errs)
		}
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("a file of no bundle is left")
	}
	if b, _ := os.ReadFile(there); string(b) != "precious" {
		t.Errorf("%q", b)
	}
}

// frame is a look at a cluster of two nodes.
func frame(i int) *adminapi.TopFrame {
	cpu, puts := 12.5, float64(100*i)
	return &adminapi.TopFrame{
		At: time.Date(2026, 11, 28, 20, 0, i, 0, time.UTC), Total: 4,
		Nodes:  []adminapi.TopNode{{Node: "n1", State: "serving", CPU: &cpu, Puts: &puts, DiskUsed: 1, DiskSize: 4, FsyncP99Us: 2500}, {Node: "n2", State: "dead"}},
		Ranges: []adminapi.TopRange{{ID: 3, Start: []byte("k\x1b[2J"), Leader: "n1", Writes: 90.25}},
	}
}

// On a terminal the screen is drawn anew until somebody presses q, and the terminal is as it was then.
func TestTopOnATerminal(t *testing.T) {
	user, program := ptytest.New(t)
	looks := 0
	s := &topScreen{out: program, format: adminapi.Table, keys: adminapi.QuotedKeys, every: time.Millisecond, look: func(context.Context) (*adminapi.TopFrame, error) {
		if looks++; looks == 3 {
			return nil, context.DeadlineExceeded // which does not end it
		}
		return frame(looks), nil
	}}
	shows := make(chan string)
	go func() {
		var all []byte
		for pressed := false; !bytes.Contains(all, []byte(leaveScreen)); {
			b := make([]byte, 4096)
			n, err := user.Read(b)
			if err != nil {
				break
			}
			all = append(all, b[:n]...)
			if !pressed && bytes.Contains(all, []byte("no answer")) {
				_, _ = user.WriteString("q")
				pressed = true
			}
		}
		shows <- string(all)
	}()
	if err := s.live(t.Context(), program, program); err != nil {
		t.Error(err)
	}
	screen := <-shows
	for _, want := range []string{enterScreen, "100 puts/s", "200 puts/s", "no answer", "90.2", "25 %", "2.5 ms", leaveScreen} {
		if !strings.Contains(screen, want) {
			t.Errorf("%q is missing in %q", want, screen)
		}
	}
	if strings.Contains(screen, "k\x1b[2J") {
		t.Error("a key has commanded the terminal")
	}
	if !ptytest.Echoes(program) {
		t.Error("the terminal shows nothing any more")
	}
}

// No line is wider than the terminal, and no more than it has are drawn.
func TestTopFitsTheTerminal(t *testing.T) {
	s := &topScreen{format: adminapi.Table, keys: adminapi.QuotedKeys}
	for _, size := range [][2]int{{20, 5}, {80, 24}, {3, 1}} {
		screen := strings.TrimSuffix(strings.TrimPrefix(s.screen(frame(1), nil, size[0], size[1]), screenTop), restBelow)
		lines := strings.Split(strings.ReplaceAll(screen, restOfLine, ""), "\r\n")
		if len(lines) > size[1] {
			t.Errorf("%v: %d lines", size, len(lines))
		}
		for _, line := range lines {
			if len([]rune(line)) > size[0] {
				t.Errorf("%v: %q", size, line)
			}
		}
	}
}

// Without a terminal looks are printed one below the other, or one alone; the first one has no rates.
func TestTopWithoutATerminal(t *testing.T) {
	looks := 0
	var out bytes.Buffer
	ctx, cancel := context.WithCancel(t.Context())
	s := &topScreen{out: &out, format: adminapi.JSON, keys: adminapi.QuotedKeys, every: time.Millisecond, look: func(context.Context) (*adminapi.TopFrame, error) {
		if looks++; looks == 4 {
			cancel()
		}
		return frame(looks), nil
	}}
	if err := s.plain(ctx, true); err != nil || looks != 2 || strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), `"puts_per_second":200`) {
		t.Errorf("%v, %d looks: %s", err, looks, &out)
	}
	looks = 0
	out.Reset()
	if err := s.plain(ctx, false); err != nil || strings.Count(out.String(), "\n") != 2 {
		t.Errorf("%v: %s", err, &out)
	}
}

// A terminal shows in one line how far a command is, and reports stay above it.
func TestProgressLine(t *testing.T) {
	user, program := ptytest.New(t)
	p := &progressLine{out: program}
	if (&progressLine{out: &bytes.Buffer{}}).width() != 0 || p.width() == 0 {
		t.Error("what is no terminal has a width, or a terminal none")
	}
	p.show("one of two")
	p.report("a report of %d", 1)
	p.show(strings.Repeat("x", 1000))
	p.clear()
	p.clear()
	if _, err := program.WriteString("end"); err != nil {
		t.Fatal(err)
	}
	var all []byte
	for b := make([]byte, 4096); !bytes.HasSuffix(all, []byte("end")); {
		n, err := user.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b[:n]...)
	}
	line := "\r" + strings.Repeat("x", p.width()-1) + restOfLine
	if want := "\rone of two" + restOfLine + "\r" + restOfLine + "a report of 1\r\n" + line + "\r" + restOfLine + "end"; string(all) != want {
		t.Errorf("%q, not %q", all, want)
	}
}
