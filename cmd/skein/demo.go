package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/demo"
)

// newDemo is skein demo.
func newDemo() *cobra.Command {
	var o demo.Options
	var verbose bool
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run a whole cluster on this machine, to see it work",
		Long: "Run a whole cluster on this machine, on loopback with real QUIC and real disks. Ctrl-C stops it.\n" +
			"With --load it runs the load test against itself, checks every acknowledged key, and exits: 0 only without any error.\n" +
			"With --kill it kills a node under load, says how long writes stood still, starts it again, and checks every write and every event.",
		Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return &config.UsageError{Err: err}
			}
			logger, err := demoLogger(verbose)
			if err != nil {
				return err
			}
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("this program, which the nodes run: %w", err)
			}
			o.Command = []string{program, "start"}
			return demo.Run(c.Context(), o, c.OutOrStdout(), logger)
		}),
	}
	f := c.Flags()
	f.IntVar(&o.Nodes, "nodes", 3, "how many nodes, 1 to 9")
	f.IntVar(&o.Ranges, "ranges", 4, "how many ranges the keyspace begins with")
	f.StringVar(&o.DataDir, "data-dir", "", "where the nodes' directories are kept; without it, a temporary directory that is removed at the end")
	f.IntVar(&o.Port, "port", 2379, "the first client port; each node has its own, and peer ports follow")
	f.DurationVar(&o.Load, "load", 0, "run the load test for this long, check what was acknowledged, and exit")
	f.BoolVar(&o.Kill, "kill", false, "run each node as a process, kill one under load, and show what clients see of it")
	f.BoolVar(&verbose, "verbose", false, "show what the nodes log, not only their errors")
	return c
}

// demoLogger writes for people.
func demoLogger(verbose bool) (*zap.Logger, error) {
	c := zap.NewDevelopmentConfig()
	c.DisableStacktrace = true
	c.Level = zap.NewAtomicLevelAt(zap.ErrorLevel)
	if verbose {
		c.Level = zap.NewAtomicLevelAt(zap.InfoLevel)
	}
	return c.Build()
}
