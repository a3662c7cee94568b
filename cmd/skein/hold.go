package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
)

func newHold(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{
		Use: "hold", Short: "List and end what keeps old versions", Args: cobra.NoArgs, RunE: needsCommand,
		Long: `List and end holds. A hold keeps old versions on all nodes while a backup, an export or a snapshot
reads them, though clients have compacted them. It expires an hour after its owner has died.`,
	}
	f.add(c.PersistentFlags())
	c.AddCommand(&cobra.Command{
		Use: "list", Short: "List the holds, the oldest first", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				l, err := client.HoldList(ctx)
				if err != nil {
					return err
				}
				return adminapi.WriteHolds(c.OutOrStdout(), c.ErrOrStderr(), format, l)
			})
		}),
	}, &cobra.Command{
		Use: "release ID", Short: "End a hold", Args: cobra.ExactArgs(1),
		Long: `End a hold, so that what clients have compacted is removed. A backup that reads by it fails, and has to
be made anew; skein backup follow says so and makes a full one.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				h, err := client.HoldRelease(ctx, args[0])
				if err != nil {
					return err
				}
				return adminapi.WriteReleased(c.OutOrStdout(), format, h)
			})
		}),
	})
	return c
}
