package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
)

// failure marks the errors of commands that were understood. All others, which cobra
// finds itself, are wrong usage.
type failure struct{ error }

func (f failure) Unwrap() error { return f.error }

// failing marks a command's own errors as such.
func failing(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		if err := run(c, args); err != nil {
			return failure{err}
		}
		return nil
	}
}

// outputFormat reads -w.
func outputFormat(text string) (adminapi.Format, error) {
	f := adminapi.Format(text)
	if f != adminapi.Table && f != adminapi.JSON {
		return "", &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", text)}
	}
	return f, nil
}

// needsCommand refuses a command that only groups others.
func needsCommand(c *cobra.Command, _ []string) error {
	return fmt.Errorf("%s needs a command", c.CommandPath())
}

// onlyCommands refuses the arguments of a command that only groups others, and says which command was meant.
func onlyCommands(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	meant := ""
	if n := config.Nearest(args[0], names); n != "" {
		meant = fmt.Sprintf("; did you mean %s %s?", c.CommandPath(), n)
	}
	return fmt.Errorf("unknown command %q for %q%s", args[0], c.CommandPath(), meant)
}

// flagError says which flag was meant by an unknown one.
func flagError(c *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return err
	}
	var names []string
	c.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if n := config.Nearest(unknown.GetSpecifiedName(), names); n != "" {
		return fmt.Errorf("%w; did you mean --%s?", err, n)
	}
	return err
}

// progressLine shows on a terminal in one line how far a command is, and lines of reports above it.
type progressLine struct {
	out io.Writer

	mu    sync.Mutex
	shown bool // guarded by mu: the line is there
}

// width returns that of the terminal, or 0 where there is none.
func (p *progressLine) width() int {
	f, ok := p.out.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil || width == 0 {
		return 80
	}
	return width
}

// show replaces the line.
func (p *progressLine) show(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprint(p.out, "\r"+cutTo(text, p.width()-1)+restOfLine)
	p.shown = true
}

// report prints a line that stays.
func (p *progressLine) report(format string, args ...any) {
	p.clear()
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, format+"\n", args...)
}

// clear removes the line.
func (p *progressLine) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shown {
		fmt.Fprint(p.out, "\r"+restOfLine)
		p.shown = false
	}
}

// cutTo cuts a line to a width. Keys may have characters of any width, and so little is promised for them.
func cutTo(line string, width int) string {
	if utf8.RuneCountInString(line) <= width {
		return line
	}
	runes := []rune(line)
	return string(runes[:max(0, width)])
}

// waitFlags are those of commands that wait for what they have begun.
type waitFlags struct {
	wait  bool
	limit time.Duration
}

// add adds them. until says what the command waits for.
func (w *waitFlags) add(fs *pflag.FlagSet, until string) {
	fs.BoolVar(&w.wait, "wait", true, "return when "+until+"; with --wait=false, when that has begun")
	fs.DurationVar(&w.limit, "wait-timeout", time.Hour, "time to wait; what has begun goes on without the command")
}
