package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

func newPlacement(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "placement", Short: "Look at what placement does, and stop it", RunE: needsCommand}
	f.add(c.PersistentFlags())
	c.AddCommand(&cobra.Command{
		Use: "operations", Short: "List the operations under way", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				l, err := client.OperationList(ctx)
				if err != nil {
					return err
				}
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, l)
			})
		}),
	}, newSwitch(f, "pause", "Have placement decide nothing by itself; what is under way goes on", "placement is paused: skein placement resume has it go on", (*adminapi.Client).PlacementPause, true),
		newSwitch(f, "resume", "Have placement decide by itself again", "placement decides by itself", (*adminapi.Client).PlacementPause, false))
	addPlacementGroup(c, f)
	return c
}

// addPlacementGroup adds the commands about the placement group's own members.
func addPlacementGroup(c *cobra.Command, f *adminFlags) {
	c.AddCommand(newPlacementShow(f), newPlacementMove(f), newPlacementAdd(f), newPlacementRemove(f), newPlacementTransfer(f), newSetReplication(f), newSetMergeAfter(f))
}

func newPlacementShow(f *adminFlags) *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show who holds and leads the placement group, and whether ranges have the voters they are to have", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				return showPlacement(ctx, c, client, format)
			})
		}),
	}
}

func showPlacement(ctx context.Context, c *cobra.Command, client *adminapi.Client, format adminapi.Format) error {
	p, err := client.PlacementShow(ctx)
	if err != nil {
		return err
	}
	return adminapi.WritePlacement(c.OutOrStdout(), c.ErrOrStderr(), format, p)
}

func newSetReplication(f *adminFlags) *cobra.Command {
	var dryRun bool
	var w waitFlags
	set := &cobra.Command{Use: "set-replication N", Short: "Set how many voters each range has: 1, 3, 5 or 7", Args: cobra.ExactArgs(1)}
	set.Flags().BoolVar(&dryRun, "dry-run", false, "change nothing: say what it would mean, or why it cannot be done")
	w.add(set.Flags(), "each range has so many")
	set.RunE = failing(func(c *cobra.Command, args []string) error {
		n, err := strconv.Atoi(args[0])
		if err != nil {
			return &config.UsageError{Err: fmt.Errorf("%q is no number of voters: give 1, 3, 5 or 7", args[0])}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			plan, err := client.SetReplication(ctx, n, dryRun)
			if err != nil {
				return err
			}
			if err := adminapi.WriteSetReplication(c.OutOrStdout(), c.ErrOrStderr(), format, plan); err != nil || dryRun || !w.wait {
				return err
			}
			waiting, cancel := context.WithTimeout(c.Context(), w.limit)
			defer cancel()
			_, err = client.AwaitReplication(waiting, adminapi.WaitReplication{
				Call: f.timeout, Pause: nodePause,
				Tell: func(r *adminpb.Replication) { fmt.Fprintln(c.ErrOrStderr(), adminapi.ReplicationProgress(r)) },
			}, n)
			return err
		})
	})
	return set
}

func newSetMergeAfter(f *adminFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "set-merge-after DURATION|off|default",
		Short: "Set after how long small and cold ranges become one by themselves; default is what the nodes were started with",
		Args:  cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			var after *time.Duration
			if args[0] != "default" {
				after = new(time.Duration)
				if args[0] != "off" {
					v, err := time.ParseDuration(args[0])
					if err != nil || v <= 0 {
						return &config.UsageError{Err: fmt.Errorf("%q is no time: give one, as 30m, or off, or default", args[0])}
					}
					*after = v
				}
			}
			done := map[string]string{
				"default": "small and cold neighbours merge as the nodes' --range-merge-after says", "off": "ranges merge by command alone",
			}[args[0]]
			return f.do(c, cmp.Or(done, "small and cold neighbours merge after "+args[0]), func(ctx context.Context, client *adminapi.Client) error {
				return client.PlacementSetMergeAfter(ctx, after)
			})
		}),
	}
}

func newPlacementMove(f *adminFlags) *cobra.Command {
	var from, to string
	move := &cobra.Command{Use: "move --from NODE --to NODE", Short: "Put the placement group's replica on one node in the place of that on another", Args: cobra.NoArgs}
	fromAndTo(f, move, &from, &to)
	change := changesPlacement(f, move, "the replica has moved")
	move.RunE = failing(func(c *cobra.Command, _ []string) error {
		if from == "" || to == "" {
			return &config.UsageError{Err: errors.New("give --from and --to")}
		}
		return change(c, from, to)
	})
	return move
}

func newPlacementAdd(f *adminFlags) *cobra.Command {
	add := &cobra.Command{
		Use: "add NODE", Short: "Add a voter of the placement group on a node", Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeNode),
	}
	change := changesPlacement(f, add, "it is a voter")
	add.RunE = failing(func(c *cobra.Command, args []string) error { return change(c, "", args[0]) })
	return add
}

func newPlacementRemove(f *adminFlags) *cobra.Command {
	remove := &cobra.Command{
		Use: "remove NODE", Short: "Remove the voter of the placement group on a node", Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeNode),
	}
	change := changesPlacement(f, remove, "it is gone")
	remove.RunE = failing(func(c *cobra.Command, args []string) error { return change(c, args[0], "") })
	return remove
}

// changesPlacement adds the flags of waiting to a command, and returns what changes the replicas of the
// placement group and waits for that.
func changesPlacement(f *adminFlags, c *cobra.Command, until string) (change func(c *cobra.Command, from, to string) error) {
	var w waitFlags
	w.add(c.Flags(), until)
	return func(c *cobra.Command, from, to string) error {
		return f.operate(c, &w, func(ctx context.Context, client *adminapi.Client) (*adminpb.Operation, error) {
			m, err := client.PlacementMove(ctx, from, to)
			return m.GetOperation(), err
		}, func(ctx context.Context, client *adminapi.Client, format adminapi.Format, op *adminpb.Operation) error {
			p, err := client.PlacementMoved(ctx, op)
			if err != nil {
				return err
			}
			return adminapi.WritePlacement(c.OutOrStdout(), c.ErrOrStderr(), format, p)
		})
	}
}

func newPlacementTransfer(f *adminFlags) *cobra.Command {
	var to string
	transfer := &cobra.Command{Use: "transfer-leader --to NODE", Short: "Have another replica of the placement group lead it", Args: cobra.NoArgs}
	transfer.Flags().StringVar(&to, "to", "", "name or id of the node that is to lead")
	f.completeFlag(transfer, "to", f.completeNode)
	transfer.RunE = failing(func(c *cobra.Command, _ []string) error {
		if to == "" {
			return &config.UsageError{Err: errors.New("give --to")}
		}
		return f.do(c, to+" leads the placement group", func(ctx context.Context, client *adminapi.Client) error {
			return client.PlacementTransferLeader(ctx, to)
		})
	})
	return transfer
}

// newSwitch is a command that turns something on or off. done says what holds then.
func newSwitch(f *adminFlags, name, short, done string, set func(*adminapi.Client, context.Context, bool) error, on bool) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.do(c, done, func(ctx context.Context, client *adminapi.Client) error { return set(client, ctx, on) })
		}),
	}
}
