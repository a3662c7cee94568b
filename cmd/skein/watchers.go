package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

func newWatchers(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var node string
	var limit, skip int
	c := &cobra.Command{
		Use: "watchers", Short: "List watchers of clients, those furthest behind first", Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		Long: `List the watchers of clients at all nodes or at one, those furthest behind first. Each node has its watchers in memory, so it needs no
quorum. A list is read page by page with --skip; what has moved meanwhile may be on two pages, or on none.`,
	}
	f.add(c.Flags())
	f.addKeyFormat(c.Flags())
	c.Flags().StringVar(&node, "node", "", "name or id of a node: only what is there")
	c.Flags().IntVar(&limit, "limit", 50, "how many, at most 1000")
	c.Flags().IntVar(&skip, "skip", 0, "how many of the list are left out before them")
	f.completeFlag(c, "node", f.completeNode)
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		keys, err := f.keys()
		if err != nil {
			return err
		}
		if limit < 1 || limit > 1000 || skip < 0 || skip > 9000 {
			return &config.UsageError{Err: fmt.Errorf("--limit %d --skip %d: a limit from 1 to 1000, and 0 to 9000 to skip", limit, skip)}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			r, err := client.Watchers(ctx, &adminpb.WatcherListRequest{Node: node, Limit: uint32(limit), Skip: uint32(skip)})
			if err != nil {
				return err
			}
			return adminapi.WriteWatchers(c.OutOrStdout(), c.ErrOrStderr(), format, keys, r, skip)
		})
	})
	return c
}
