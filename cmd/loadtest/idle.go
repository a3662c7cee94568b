package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
)

// newIdleCommand is loadtest idle.
func newIdleCommand() *cobra.Command {
	cfg, access := loadtest.IdleConfig{Clock: clock.System()}, &accessFlags{}
	json := new(jsonFlag)
	c := &cobra.Command{
		Use:   "idle",
		Short: "Holds connections and watchers without work, and reads the server's memory",
		Long: "Opens connections and watchers, waits, and reports how many the server took, what it said to the others, and what\n" +
			"its memory grew by for each. Give the server --enable-pprof: then it collects its garbage before.",
		Example: "  loadtest idle --endpoint http://127.0.0.1:2379 --watchers 10000 --streams 100",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var err error
			if cfg.Access, err = access.access(c.Flags(), c.ErrOrStderr()); err == nil {
				err = cfg.Validate()
			}
			if err != nil {
				return usageError{err}
			}
			text, err := json.text(c)
			if err != nil {
				return err
			}
			report, err := loadtest.Idle(c.Context(), cfg)
			if err != nil {
				return err
			}
			return errors.Join(report.Write(text), json.write(c, report))
		},
	}
	c.Flags().StringVar(&cfg.Endpoint, "endpoint", "http://127.0.0.1:2379", "client port")
	c.Flags().StringVar(&cfg.MetricsURL, "metrics-url", "", "where the server's /metrics tells its memory, if not at the client port, which may be full")
	c.Flags().IntVar(&cfg.Connections, "connections", 0, "connections, each of which reads one key first")
	c.Flags().IntVar(&cfg.Watchers, "watchers", 0, "watchers, each of a key of its own, on one connection more")
	c.Flags().IntVar(&cfg.Streams, "streams", 100, "streams over which the watchers are spread")
	c.Flags().DurationVar(&cfg.Pause, "pause", 5*time.Second, "how long all is held before the memory is read")
	json.add(c.Flags())
	access.add(c.Flags())
	return c
}
