package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
)

// newIdleCommand is loadtest idle.
func newIdleCommand() *cobra.Command {
	cfg := loadtest.IdleConfig{Clock: clock.System()}
	c := &cobra.Command{
		Use:   "idle",
		Short: "Holds connections and watchers without work, and reads the server's memory",
		Long: "Opens connections and watchers, waits, and reports how many the server took, what it said to the others, and what\n" +
			"its memory grew by for each. Give the server --enable-pprof: then it collects its garbage before.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			report, err := loadtest.Idle(c.Context(), cfg)
			if err != nil {
				return err
			}
			return report.Write(c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&cfg.Endpoint, "endpoint", "http://127.0.0.1:2379", "client port")
	c.Flags().StringVar(&cfg.MetricsURL, "metrics-url", "", "where the server's /metrics tells its memory, if not at the client port, which may be full")
	c.Flags().IntVar(&cfg.Connections, "connections", 0, "connections, each of which reads one key first")
	c.Flags().IntVar(&cfg.Watchers, "watchers", 0, "watchers, each of a key of its own, on one connection more")
	c.Flags().IntVar(&cfg.Streams, "streams", 100, "streams over which the watchers are spread")
	c.Flags().DurationVar(&cfg.Pause, "pause", 5*time.Second, "how long all is held before the memory is read")
	return c
}
