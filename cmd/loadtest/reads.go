package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
)

// newReadsCommand is loadtest reads.
func newReadsCommand() *cobra.Command {
	cfg, access := loadtest.ReadsConfig{Clock: clock.System()}, &accessFlags{}
	json := new(jsonFlag)
	c := &cobra.Command{
		Use:   "reads",
		Short: "Reads large answers with many clients, and watches meanwhile",
		Long: "Puts keys and has each client read all of them again and again, without a deadline. Reports answers, MB/s,\n" +
			"errors by kind, and how late a watcher gets its events meanwhile.",
		Example: "  loadtest reads --endpoint http://127.0.0.1:2379 --clients 4 --answer-size 200000000 --value-size 500000 --cleanup",
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
			report, err := loadtest.Reads(c.Context(), cfg)
			if err != nil {
				return err
			}
			return errors.Join(report.Write(text), json.write(c, report))
		},
	}
	c.Flags().StringVar(&cfg.Endpoint, "endpoint", "http://127.0.0.1:2379", "client port")
	c.Flags().IntVar(&cfg.Clients, "clients", 10, "clients, each with a connection of its own")
	c.Flags().IntVar(&cfg.AnswerBytes, "answer-size", 5_000_000, "bytes of an answer")
	c.Flags().IntVar(&cfg.ValueBytes, "value-size", 50_000, "bytes of a value")
	c.Flags().DurationVar(&cfg.Duration, "duration", 5*time.Second, "how long reads are begun")
	c.Flags().BoolVar(&cfg.Cleanup, "cleanup", false, "delete the keys at the end")
	json.add(c.Flags())
	access.add(c.Flags())
	return c
}
