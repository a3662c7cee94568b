package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
)

func newSlow(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var atLeast time.Duration
	c := &cobra.Command{
		Use: "slow", Short: "List the last slow requests of all nodes, and what each waited for", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Long: `List the last slow requests of all nodes, the newest first, and what each waited for longest. Each node keeps its last 256 that
took longer than 50 ms. -w json has all their stages. Keys, values and users are not in it. It needs no quorum.`,
	}
	f.add(c.Flags())
	c.Flags().DurationVar(&atLeast, "min", 0, "only requests that took at least so long")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		if atLeast < 0 {
			return &config.UsageError{Err: fmt.Errorf("--min %v is below 0", atLeast)}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			r, err := client.Slow(ctx, atLeast)
			if err != nil {
				return err
			}
			return adminapi.WriteSlow(c.OutOrStdout(), format, r)
		})
	})
	return c
}
