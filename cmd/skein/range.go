package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

func newRange(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "range", Short: "List, split, move and show ranges", Args: cobra.NoArgs, RunE: needsCommand}
	f.add(c.PersistentFlags())
	c.AddCommand(newRangeList(f), newSplit(f), newMove(f), newMerge(f), newTransfer(f), &cobra.Command{
		Use: "show ID", Short: "Dump the state of one range's replicas", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil {
				return &config.UsageError{Err: fmt.Errorf("%q is no id of a range", args[0])}
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.RangeShow(ctx, id)
				if err != nil {
					return err
				}
				return adminapi.WriteShow(c.OutOrStdout(), format, s)
			})
		}),
	})
	return c
}

func newRangeList(f *adminFlags) *cobra.Command {
	var node string
	var key keyFlags
	ranges := &cobra.Command{Use: "list", Short: "List all ranges, or those of a node or a key", Args: cobra.NoArgs}
	ranges.Flags().StringVar(&node, "node", "", "name or id of a node: only ranges with a replica there")
	key.add(ranges.Flags(), "only the range that holds the key")
	ranges.RunE = failing(func(c *cobra.Command, _ []string) error {
		q := &adminpb.RangeListRequest{Node: node}
		k, given, err := key.key(c.Flags())
		if err != nil {
			return err
		}
		if given {
			q.Key = append([]byte{}, k...) // the empty key is one too
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			l, err := client.RangeListOf(ctx, q)
			if err != nil {
				return err
			}
			return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, l)
		})
	})
	return ranges
}

func newSplit(f *adminFlags) *cobra.Command {
	var key keyFlags
	split := &cobra.Command{Use: "split --key KEY", Short: "Make a new range begin at a key", Args: cobra.NoArgs}
	key.add(split.Flags(), "first key of the new range")
	split.RunE = failing(func(c *cobra.Command, _ []string) error {
		k, given, err := key.key(c.Flags())
		if err != nil {
			return err
		}
		if !given {
			return &config.UsageError{Err: errors.New("give either --key or --key-base64")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			s, err := client.RangeSplit(ctx, k)
			if err != nil {
				return err
			}
			return adminapi.WriteSplit(c.OutOrStdout(), format, s)
		})
	})
	return split
}

func newMove(f *adminFlags) *cobra.Command {
	var id uint64
	var from, to string
	var noWait bool
	move := &cobra.Command{Use: "move --range ID --from NODE --to NODE", Short: "Put a range's replica on one node in the place of that on another", Args: cobra.NoArgs}
	move.Flags().Uint64Var(&id, "range", 0, "id of the range")
	move.Flags().StringVar(&from, "from", "", "name or id of the node that gives its replica up")
	move.Flags().StringVar(&to, "to", "", "name or id of the node that gets one")
	move.Flags().BoolVar(&noWait, "no-wait", false, "return when the move has begun")
	move.RunE = failing(func(c *cobra.Command, _ []string) error {
		if id == 0 || from == "" || to == "" {
			return &config.UsageError{Err: errors.New("give --range, --from and --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			m, err := client.RangeMove(ctx, id, from, to)
			if err != nil {
				return err
			}
			if noWait {
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
			}
			if err := client.AwaitOperation(ctx, m.GetOperation().GetId()); err != nil {
				return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", m.GetOperation().GetId(), err)
			}
			r, err := client.RangeMoved(ctx, m.GetOperation())
			if err != nil {
				return err
			}
			return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.RangeListResponse{Ranges: []*adminpb.Range{r}})
		})
	})
	return move
}

func newMerge(f *adminFlags) *cobra.Command {
	var left uint64
	var noWait bool
	merge := &cobra.Command{Use: "merge --left ID", Short: "Let a range absorb its right neighbour", Args: cobra.NoArgs}
	merge.Flags().Uint64Var(&left, "left", 0, "id of the range that stays")
	merge.Flags().BoolVar(&noWait, "no-wait", false, "return when the merge has begun")
	merge.RunE = failing(func(c *cobra.Command, _ []string) error {
		if left == 0 {
			return &config.UsageError{Err: errors.New("give --left")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			m, err := client.RangeMerge(ctx, left)
			if err != nil {
				return err
			}
			op := m.GetOperation()
			if noWait {
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{op}})
			}
			if err := client.AwaitOperation(ctx, op.GetId()); err != nil {
				return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", op.GetId(), err)
			}
			l, err := client.RangesMerged(ctx, op)
			if err != nil {
				return err
			}
			return writeMerged(c, format, l.GetRanges(), op)
		})
	})
	return merge
}

// writeMerged writes the range that a merge has left, or says that it was given up.
func writeMerged(c *cobra.Command, format adminapi.Format, all []*adminpb.Range, op *adminpb.Operation) error {
	var merged []*adminpb.Range
	for _, r := range all {
		switch r.GetId() {
		case op.GetRight():
			return fmt.Errorf(
				"operation %d has ended, and range %d is there yet: a replica of one of the two ranges did not follow, one of them changed, or who leads placement did (skein node list, skein range list); try again",
				op.GetId(), op.GetRight())
		case op.GetRange():
			merged = append(merged, r)
		}
	}
	return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.RangeListResponse{Ranges: merged})
}

func newTransfer(f *adminFlags) *cobra.Command {
	var id uint64
	var to string
	transfer := &cobra.Command{Use: "transfer-leader --range ID --to NODE", Short: "Have another replica of a range lead it", Args: cobra.NoArgs}
	transfer.Flags().Uint64Var(&id, "range", 0, "id of the range")
	transfer.Flags().StringVar(&to, "to", "", "name or id of the node that is to lead")
	transfer.RunE = failing(func(c *cobra.Command, _ []string) error {
		if id == 0 || to == "" {
			return &config.UsageError{Err: errors.New("give --range and --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
			return client.RangeTransferLeader(ctx, id, to)
		})
	})
	return transfer
}
