package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
)

const topLong = `Show live what the nodes do, anew every two seconds: processor, requests, disks, the busiest ranges, and what is wrong. q ends it.
Where the output is no terminal, each look is printed below the one before; --once prints one, and -w json prints each in a line.`

func newTop(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var once bool
	var every time.Duration
	c := &cobra.Command{Use: "top", Short: "Show live what the nodes do", Long: topLong, Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions}
	f.add(c.Flags())
	f.addKeyFormat(c.Flags())
	c.Flags().BoolVar(&once, "once", false, "print one look, and end")
	c.Flags().DurationVar(&every, "interval", 2*time.Second, "time between two looks, at least 500ms")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		keys, err := f.keys()
		if err != nil {
			return err
		}
		if every < 500*time.Millisecond {
			return &config.UsageError{Err: fmt.Errorf("--interval %v: at least 500ms", every)}
		}
		return f.ask(c, func(_ context.Context, client *adminapi.Client, format adminapi.Format) error {
			top := adminapi.NewTop(client)
			defer top.Close()
			s := &topScreen{out: c.OutOrStdout(), format: format, keys: keys, every: every, look: func(ctx context.Context) (*adminapi.TopFrame, error) {
				ctx, cancel := context.WithTimeout(ctx, f.timeout)
				defer cancel()
				return top.Look(ctx)
			}}
			out, isFile := s.out.(*os.File)
			if isFile && format == adminapi.Table && !once && term.IsTerminal(int(out.Fd())) && term.IsTerminal(int(os.Stdin.Fd())) {
				return s.live(c.Context(), os.Stdin, out)
			}
			return s.plain(c.Context(), once)
		})
	})
	return c
}

// topScreen shows looks at a cluster.
type topScreen struct {
	out    io.Writer
	format adminapi.Format
	keys   adminapi.KeyFormat
	every  time.Duration
	look   func(context.Context) (*adminapi.TopFrame, error)
}

// plain prints a look after the other until ctx ends. The first one has no rates, and so is not printed.
func (s *topScreen) plain(ctx context.Context, once bool) error {
	if _, err := s.look(ctx); err != nil {
		return err
	}
	for clock.Sleep(ctx, clock.System(), s.every) == nil {
		frame, err := s.look(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		if err := adminapi.WriteTop(s.out, s.format, s.keys, frame); err != nil || once {
			return err
		}
	}
	return nil
}

// What a terminal is told: to show another screen without a cursor, and the one before again; to begin at its top, to
// forget the rest of a line, and all below.
const (
	enterScreen, leaveScreen         = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
	screenTop, restOfLine, restBelow = "\x1b[H", "\x1b[K", "\x1b[J"
)

// live shows looks on a terminal until somebody presses q or Ctrl-C. A cluster that does not answer for a while does not
// end it.
func (s *topScreen) live(ctx context.Context, in, out *os.File) (err error) {
	before, err := term.MakeRaw(int(in.Fd()))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() {
		_, werr := io.WriteString(out, leaveScreen)
		err = errors.Join(err, werr, term.Restore(int(in.Fd()), before))
	}()
	if _, err := io.WriteString(out, enterScreen); err != nil {
		return err
	}
	go func() { // it ends with the process, or with what is typed
		defer cancel()
		key := make([]byte, 1)
		for {
			if n, err := in.Read(key); err != nil || n == 1 && strings.ContainsRune("qQ\x03\x1b", rune(key[0])) {
				return
			}
		}
	}()
	for {
		width, height, serr := term.GetSize(int(out.Fd()))
		if serr != nil || width == 0 || height == 0 { // some terminals do not know theirs
			width, height = 80, 24
		}
		frame, lerr := s.look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if _, err := io.WriteString(out, s.screen(frame, lerr, width, height)); err != nil {
			return err
		}
		if clock.Sleep(ctx, clock.System(), s.every) != nil {
			return nil
		}
	}
}

// screen draws a look on a terminal of that size.
func (s *topScreen) screen(frame *adminapi.TopFrame, lookErr error, width, height int) string {
	var text bytes.Buffer
	if lookErr != nil {
		fmt.Fprintf(&text, "no answer: %v\n", lookErr)
	} else if err := adminapi.WriteTop(&text, s.format, s.keys, frame); err != nil {
		fmt.Fprintln(&text, err)
	}
	lines := strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
	if rest := len(lines) - (height - 1); rest > 0 {
		lines = lines[:max(0, height-1)]
	}
	lines = append(lines, "q ends skein top")
	for i, line := range lines {
		lines[i] = cutTo(line, width) + restOfLine
	}
	return screenTop + strings.Join(lines, "\r\n") + restBelow
}
