// Command loadtest drives any etcd endpoint with puts and gets and measures it.
// See package loadtest.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// Exit codes.
const (
	exitFailed = 1 // the run could not be done or was interrupted, operations failed, or a promise was broken
	exitUsage  = 2
	exitSLO    = 3 // all went well, but a clause of --slo is not met
)

// gcPercent trades memory for processor time, which the load generator often takes
// from the servers beside it. Its heap is small; collecting it at Go's default
// costs a sixth of its time.
const gcPercent = 400

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	// The second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(execute(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// execute runs the command line and returns the exit code.
func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(stderr, "loadtest:", err)
	switch {
	case errors.As(err, new(usageError)):
		return exitUsage
	case errors.As(err, new(sloError)):
		return exitSLO
	default:
		return exitFailed
	}
}

// newRoot makes the command line.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "loadtest",
		Short: "Drives any etcd endpoint, measures it and checks what it promised",
		Example: "  loadtest run --endpoints 127.0.0.1:2379 --clients 50 --duration 30s --cleanup\n" +
			"  loadtest kubernetes --endpoints 127.0.0.1:2379 --rate 1000 --duration 1m --cleanup\n" +
			"  loadtest sweep --endpoints 127.0.0.1:2379 --duration 5s --cleanup\n" +
			"  loadtest compare before.json after.json",
		Args:          noArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newRunCommand(), newKubernetesCommand(), newReadsCommand(), newIdleCommand(), newEmptyCommand(), newCompareCommand(),
		newSweepCommand(), newReportCommand(), newMergeCommand())
	return root
}

// noArgs refuses what is neither a flag nor a command.
func noArgs(c *cobra.Command, args []string) error {
	if err := cobra.NoArgs(c, args); err != nil {
		return usageError{err}
	}
	return nil
}

// sloError says which objectives were not met.
type sloError struct{ error }

func (e sloError) Unwrap() error { return e.error }

// usageError is an error in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }
