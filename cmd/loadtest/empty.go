package main

import (
	"github.com/spf13/cobra"

	"github.com/skeindb/skein/loadtest/emptykv"
)

// newEmptyCommand is loadtest empty.
func newEmptyCommand() *cobra.Command {
	var cfg emptykv.Config
	c := &cobra.Command{
		Use:   "empty",
		Short: "Serves puts and gets that are answered at once, to measure the measuring",
		Long: "Serves puts and gets that are answered at once, by calls and by the pipe, and keeps nothing: what `loadtest run` reaches against it\n" +
			"is the load generator and gRPC alone. /health and /metrics have a port of their own. Ctrl-C stops it.",
		Example: "  loadtest empty --listen 127.0.0.1:2379 & loadtest run --server-metrics http://127.0.0.1:2381/metrics",
		Args:    noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			return emptykv.Run(c.Context(), cfg)
		},
	}
	c.Flags().StringVar(&cfg.Listen, "listen", "127.0.0.1:2379", "client port")
	c.Flags().StringVar(&cfg.Web, "web", "127.0.0.1:2381", "port of /health and /metrics")
	c.Flags().IntVar(&cfg.ValueBytes, "value-size", 256, "bytes of the value that a get answers with")
	return c
}
