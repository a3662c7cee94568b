package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/audit"
)

// nodePause lies between two looks at a node that is waited for. Each asks all nodes.
const nodePause = 2 * time.Second

func newNode(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "node", Short: "List and show nodes, and take them out of service", RunE: needsCommand}
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
	}, newNodeShow(f),
		newNodeChange(f, adminapi.Drain, "Have a node give up its leaders, so that it can be stopped for a while", "leads nothing"),
		newNodeChange(f, adminapi.Undrain, "Take a drained node back", ""),
		newNodeChange(f, adminapi.Decommission, "Have a node give up all that it holds, so that it can be removed for good", "holds nothing and is removed"),
		newNodeChange(f, adminapi.Recommission, "Take a decommissioned node back, as long as it is not removed", ""))
	return c
}

func newNodeShow(f *adminFlags) *cobra.Command {
	show := &cobra.Command{
		Use: "show NODE", Short: "Say what a node holds, and whether it can be drained or decommissioned", Args: cobra.ExactArgs(1),
		ValidArgsFunction: f.firstArgument(f.completeNode),
		RunE: failing(func(c *cobra.Command, args []string) error {
			k, err := f.keys()
			if err != nil {
				return err
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.NodeShow(ctx, args[0])
				if err != nil {
					return err
				}
				return adminapi.WriteNodeShow(c.OutOrStdout(), c.ErrOrStderr(), format, k, s)
			})
		}),
	}
	f.addKeyFormat(show.Flags())
	return show
}

// newNodeChange returns the command for a change. until says what it waits for, if it
// takes a while.
func newNodeChange(f *adminFlags, change adminapi.NodeChange, short, until string) *cobra.Command {
	var w waitFlags
	cmd := &cobra.Command{Use: string(change) + " NODE", Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeNode)}
	if until != "" {
		w.add(cmd.Flags(), "the node "+until)
	}
	cmd.RunE = failing(func(c *cobra.Command, args []string) error {
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			n, err := client.ChangeNode(ctx, change, args[0])
			if err == nil && w.wait {
				waiting, cancel := context.WithTimeout(c.Context(), w.limit)
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
	c := &cobra.Command{Use: "cluster", Short: "Look at the cluster version, and raise it after an upgrade", RunE: needsCommand}
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
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				v, err := client.ClusterUpgrade(ctx)
				if err != nil {
					return err
				}
				return adminapi.WriteDone(c.OutOrStdout(), format, fmt.Sprintf("cluster version %d", v))
			})
		}),
	}, newSwitch(f, "hold", "Have the cluster version be raised by command alone", "the cluster version is raised by command alone", (*adminapi.Client).ClusterHold, true),
		newSwitch(f, "unhold", "Have the cluster version be raised by itself, after --upgrade-after", "the cluster version is raised by itself", (*adminapi.Client).ClusterHold, false))
	return c
}

// newAudit is skein audit.
func newAudit() *cobra.Command {
	c := &cobra.Command{Use: "audit", Short: "Check the audit log of a node", RunE: needsCommand}
	c.AddCommand(&cobra.Command{
		Use:   "check FILE...",
		Short: "Find lines of an audit log that were removed or changed",
		Long: "Find lines of an audit log that were removed or changed. Give the files of a rotated log from the oldest on.\n" +
			"The end of the last file can be cut off, and a file written anew, without a trace in it: compare the last hash with one that was kept elsewhere.",
		Args: cobra.MinimumNArgs(1),
		RunE: failing(func(c *cobra.Command, files []string) error { return checkAudit(c, files) }),
	})
	return c
}

func checkAudit(c *cobra.Command, files []string) error {
	hash := ""
	for i, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		r, err := audit.Check(f)
		_ = f.Close()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		case r.Lines == 0:
			continue
		case i > 0 && r.Begins != hash:
			return fmt.Errorf("%s does not follow %s, whose last line has the hash %s: its first line names %q. Lines or a file between them are missing, or the order is another", path, files[i-1], hash, r.Begins)
		case i == 0 && r.Begins != "":
			fmt.Fprintf(c.OutOrStdout(), "%s goes on with an earlier file, whose last line has the hash %s\n", path, r.Begins)
		}
		for _, n := range r.Torn {
			fmt.Fprintf(c.OutOrStdout(), "%s: line %d was cut short by a crash\n", path, n)
		}
		fmt.Fprintf(c.OutOrStdout(), "%s: %d lines from %s to %s, last hash %s\n", path, r.Lines, r.First.Format(time.RFC3339), r.Last.Format(time.RFC3339), r.Hash)
		hash = r.Hash
	}
	return nil
}
