package main

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
)

// newReadsCommand is loadtest reads.
func newReadsCommand() *cobra.Command {
	cfg := loadtest.ReadsConfig{Clock: clock.System()}
	c := &cobra.Command{
		Use:   "reads",
		Short: "Reads large answers with many clients, and watches meanwhile",
		Long: "Puts keys and has each client read all of them again and again, without a deadline. Reports answers, MB/s,\n" +
			"errors by kind, and how late a watcher gets its events meanwhile.",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := cfg.Validate(); err != nil {
				return usageError{err}
			}
			report, err := loadtest.Reads(c.Context(), cfg)
			if err != nil {
				return err
			}
			return report.Write(c.OutOrStdout())
		},
	}
	c.Flags().StringVar(&cfg.Endpoint, "endpoint", "http://127.0.0.1:2379", "client port")
	c.Flags().IntVar(&cfg.Clients, "clients", 10, "clients, each with a connection of its own")
	c.Flags().IntVar(&cfg.AnswerBytes, "answer-size", 5_000_000, "bytes of an answer")
	c.Flags().IntVar(&cfg.ValueBytes, "value-size", 50_000, "bytes of a value")
	c.Flags().DurationVar(&cfg.Duration, "duration", 5*time.Second, "how long reads are begun")
	return c
}
