package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
)

// nodePause lies between two looks at a node that is waited for. Each asks all nodes.
const nodePause = 2 * time.Second

func newNode(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "node", Short: "List and show nodes, and take them out of service", Args: cobra.NoArgs, RunE: needsCommand}
	f.add(c.PersistentFlags())
	c.AddCommand(&cobra.Command{
		Use: "list", Short: "List all nodes", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				nodes, err := client.NodeList(ctx)
				if err != nil {
					return err
				}
				return adminapi.WriteNodes(c.OutOrStdout(), c.ErrOrStderr(), format, nodes)
			})
		}),
	}, &cobra.Command{
		Use: "show NODE", Short: "Say what a node holds, and whether it can be drained or decommissioned", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.NodeShow(ctx, args[0])
				if err != nil {
					return err
				}
				return adminapi.WriteNodeShow(c.OutOrStdout(), c.ErrOrStderr(), format, s)
			})
		}),
	},
		newNodeChange(f, adminapi.Drain, "Have a node give up its leaders, so that it can be stopped for a while", "leads nothing"),
		newNodeChange(f, adminapi.Undrain, "Take a drained node back", ""),
		newNodeChange(f, adminapi.Decommission, "Have a node give up all that it holds, so that it can be removed for good", "holds nothing and is removed"),
		newNodeChange(f, adminapi.Recommission, "Take a decommissioned node back, as long as it is not removed", ""))
	return c
}

// newNodeChange returns the command for a change. until says what it waits for, if it
// takes a while.
func newNodeChange(f *adminFlags, change adminapi.NodeChange, short, until string) *cobra.Command {
	wait, limit := until != "", time.Duration(0)
	cmd := &cobra.Command{Use: string(change) + " NODE", Short: short, Args: cobra.ExactArgs(1)}
	if wait {
		cmd.Flags().BoolVar(&wait, "wait", true, "return when the node "+until+"; with --wait=false, when that has begun")
		cmd.Flags().DurationVar(&limit, "wait-timeout", time.Hour, "time to wait; the command can be repeated")
	}
	cmd.RunE = failing(func(c *cobra.Command, args []string) error {
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			n, err := client.ChangeNode(ctx, change, args[0])
			if err == nil && wait {
				waiting, cancel := context.WithTimeout(c.Context(), limit)
				defer cancel()
				n, err = client.AwaitNode(waiting, adminapi.Wait{
					Call: f.timeout, Pause: nodePause,
					Tell: func(text string) { fmt.Fprintln(c.ErrOrStderr(), text) },
				}, change, n)
			}
			if err != nil {
				return err
			}
			return adminapi.WriteNode(c.OutOrStdout(), format, n)
		})
	})
	return cmd
}

func newCluster(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "cluster", Short: "Look at the cluster version, and raise it after an upgrade", Args: cobra.NoArgs, RunE: needsCommand}
	f.add(c.PersistentFlags())
	c.AddCommand(&cobra.Command{
		Use: "show", Short: "Show the cluster version, and which versions the nodes read", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				r, err := client.ClusterShow(ctx)
				if err != nil {
					return err
				}
				return adminapi.WriteCluster(c.OutOrStdout(), c.ErrOrStderr(), format, r)
			})
		}),
	}, &cobra.Command{
		Use: "upgrade", Short: "Raise the cluster version by one, once all nodes run a build that reads it; there is no way back", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
				v, err := client.ClusterUpgrade(ctx)
				if err == nil {
					fmt.Fprintf(c.ErrOrStderr(), "cluster version %d\n", v)
				}
				return err
			})
		}),
	}, newSwitch(f, "hold", "Have the cluster version be raised by command alone", (*adminapi.Client).ClusterHold, true),
		newSwitch(f, "unhold", "Have the cluster version be raised by itself, after --upgrade-after", (*adminapi.Client).ClusterHold, false))
	return c
}
