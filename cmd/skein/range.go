package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/keyspace"
)

func newRange(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "range", Short: "List, split, move and show ranges, and their load", RunE: needsCommand}
	f.add(c.PersistentFlags())
	f.addKeyFormat(c.PersistentFlags())
	// What is wrong is found before anything is changed.
	c.PersistentPreRunE = failing(func(*cobra.Command, []string) error {
		_, err := f.keys()
		return err
	})
	c.AddCommand(newRangeList(f), newRangeShow(f), newSplit(f), newMove(f), newMerge(f), newTransfer(f), newHeat(f))
	return c
}

// rangeID reads the id of a range.
func rangeID(text string) (uint64, error) {
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil || id == 0 {
		return 0, &config.UsageError{Err: fmt.Errorf("%q is no id of a range: skein range list shows them", text)}
	}
	return id, nil
}

func newRangeShow(f *adminFlags) *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show a range and its replicas", Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeRange),
		RunE: failing(func(c *cobra.Command, args []string) error {
			id, err := rangeID(args[0])
			if err != nil {
				return err
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.RangeShow(ctx, id)
				if err != nil {
					return err
				}
				return adminapi.WriteShow(c.OutOrStdout(), format, adminapi.KeyFormat(f.keyFormat), s)
			})
		}),
	}
}

func newRangeList(f *adminFlags) *cobra.Command {
	var node, holding, order string
	ranges := &cobra.Command{Use: "list", Short: "List all ranges, or those of a node or a key", Args: cobra.NoArgs}
	ranges.Flags().StringVar(&node, "node", "", "name or id of a node: only what is there")
	ranges.Flags().StringVar(&holding, "holding", "", "only the range that holds this key")
	ranges.Flags().StringVar(&order, "sort", "key", "key, size (the largest first) or load (the busiest first)")
	f.completeFlag(ranges, "node", f.completeNode)
	f.completeFlag(ranges, "sort", words("key", "size", "load"))
	ranges.RunE = failing(func(c *cobra.Command, _ []string) error {
		q := &adminpb.RangeListRequest{Node: node}
		key, err := f.parseKey(holding)
		if err != nil {
			return err
		}
		if c.Flags().Changed("holding") {
			q.Key = append([]byte{}, key...) // the empty key is one too
		}
		if err := adminapi.SortRanges(nil, order); err != nil {
			return &config.UsageError{Err: err}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			l, err := client.RangeListOf(ctx, q)
			if err != nil {
				return err
			}
			if err := adminapi.SortRanges(l.GetRanges(), order); err != nil {
				return err
			}
			return writeRanges(c, f, format, l)
		})
	})
	return ranges
}

func writeRanges(c *cobra.Command, f *adminFlags, format adminapi.Format, l *adminpb.RangeListResponse) error {
	return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, adminapi.KeyFormat(f.keyFormat), l)
}

func newHeat(f *adminFlags) *cobra.Command {
	var last time.Duration
	var top int
	hot := &cobra.Command{
		Use: "heat [PREFIX]", Short: "Show which keys have the most requests, of all or of those that begin with PREFIX", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	hot.Flags().DurationVar(&last, "last", time.Hour, "over so long a time until now, at most 28 days")
	hot.Flags().IntVar(&top, "top", 20, "at most so many rows")
	hot.RunE = failing(func(c *cobra.Command, args []string) error {
		start, err := f.parseKey(strings.Join(args, ""))
		if err == nil && (last < time.Second || top < 1) {
			err = &config.UsageError{Err: errors.New("--last is at least 1s, and --top 1")}
		}
		if err != nil {
			return err
		}
		q := &adminpb.HeatRequest{LastSeconds: int64(last / time.Second)} // the node knows when that began: this machine's clock may be wrong
		if len(start) > 0 {
			keys, _ := keyspace.FromEtcd(start, []byte(clientv3.GetPrefixRangeEnd(string(start))))
			q.Start, q.End = keys.Start, keys.End
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			r, err := client.Heat(ctx, q)
			if err != nil {
				return err
			}
			return adminapi.WriteHeat(c.OutOrStdout(), c.ErrOrStderr(), format, adminapi.KeyFormat(f.keyFormat), top, r)
		})
	})
	return hot
}

func newSplit(f *adminFlags) *cobra.Command {
	return &cobra.Command{
		Use: "split KEY", Short: "Make a new range begin at a key", Args: cobra.ExactArgs(1), ValidArgsFunction: cobra.NoFileCompletions,
		RunE: failing(func(c *cobra.Command, args []string) error {
			key, err := f.parseKey(args[0])
			if err != nil {
				return err
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.RangeSplit(ctx, key)
				if err != nil {
					return err
				}
				return adminapi.WriteSplit(c.OutOrStdout(), format, adminapi.KeyFormat(f.keyFormat), s)
			})
		}),
	}
}

func newMove(f *adminFlags) *cobra.Command {
	var from, to string
	var w waitFlags
	move := &cobra.Command{
		Use: "move ID --from NODE --to NODE", Short: "Put a range's replica on one node in the place of that on another",
		Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeRange),
	}
	fromAndTo(f, move, &from, &to)
	w.add(move.Flags(), "the replica has moved")
	move.RunE = failing(func(c *cobra.Command, args []string) error {
		id, err := rangeID(args[0])
		if err == nil && (from == "" || to == "") {
			err = &config.UsageError{Err: errors.New("give --from and --to")}
		}
		if err != nil {
			return err
		}
		return f.operate(c, &w, func(ctx context.Context, client *adminapi.Client) (*adminpb.Operation, error) {
			m, err := client.RangeMove(ctx, id, from, to)
			return m.GetOperation(), err
		}, func(ctx context.Context, client *adminapi.Client, format adminapi.Format, op *adminpb.Operation) error {
			r, err := client.RangeMoved(ctx, op)
			if err != nil {
				return err
			}
			return writeRanges(c, f, format, &adminpb.RangeListResponse{Ranges: []*adminpb.Range{r}})
		})
	})
	return move
}

// fromAndTo adds the flags of a move.
func fromAndTo(f *adminFlags, c *cobra.Command, from, to *string) {
	c.Flags().StringVar(from, "from", "", "name or id of the node that gives its replica up")
	c.Flags().StringVar(to, "to", "", "name or id of the node that gets one")
	f.completeFlag(c, "from", f.completeNode)
	f.completeFlag(c, "to", f.completeNode)
}

func newMerge(f *adminFlags) *cobra.Command {
	var w waitFlags
	merge := &cobra.Command{
		Use: "merge ID", Short: "Let a range absorb its right neighbour", Args: cobra.ExactArgs(1), ValidArgsFunction: f.firstArgument(f.completeRange),
	}
	w.add(merge.Flags(), "they are one")
	merge.RunE = failing(func(c *cobra.Command, args []string) error {
		left, err := rangeID(args[0])
		if err != nil {
			return err
		}
		return f.operate(c, &w, func(ctx context.Context, client *adminapi.Client) (*adminpb.Operation, error) {
			m, err := client.RangeMerge(ctx, left)
			return m.GetOperation(), err
		}, func(ctx context.Context, client *adminapi.Client, format adminapi.Format, op *adminpb.Operation) error {
			l, err := client.RangesMerged(ctx, op)
			if err != nil {
				return err
			}
			return writeMerged(c, f, format, l.GetRanges(), op)
		})
	})
	return merge
}

// writeMerged writes the range that a merge has left, or says that it was given up.
func writeMerged(c *cobra.Command, f *adminFlags, format adminapi.Format, all []*adminpb.Range, op *adminpb.Operation) error {
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
	return writeRanges(c, f, format, &adminpb.RangeListResponse{Ranges: merged})
}

func newTransfer(f *adminFlags) *cobra.Command {
	var to string
	transfer := &cobra.Command{
		Use: "transfer-leader ID --to NODE", Short: "Have another replica of a range lead it", Args: cobra.ExactArgs(1),
		ValidArgsFunction: f.firstArgument(f.completeRange),
	}
	transfer.Flags().StringVar(&to, "to", "", "name or id of the node that is to lead")
	f.completeFlag(transfer, "to", f.completeNode)
	transfer.RunE = failing(func(c *cobra.Command, args []string) error {
		id, err := rangeID(args[0])
		if err == nil && to == "" {
			err = &config.UsageError{Err: errors.New("give --to")}
		}
		if err != nil {
			return err
		}
		return f.do(c, fmt.Sprintf("%s leads range %d", to, id), func(ctx context.Context, client *adminapi.Client) error {
			return client.RangeTransferLeader(ctx, id, to)
		})
	})
	return transfer
}
