package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

// addPlacementGroup adds the commands about the placement group's own members.
func addPlacementGroup(c *cobra.Command, f *adminFlags) {
	c.AddCommand(newPlacementShow(f), newPlacementMove(f), newPlacementTransfer(f))
}

func newPlacementShow(f *adminFlags) *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show which nodes hold the placement group, and which one leads", Args: cobra.NoArgs,
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
	return adminapi.WritePlacement(c.OutOrStdout(), format, p)
}

func newPlacementMove(f *adminFlags) *cobra.Command {
	var from, to string
	var noWait bool
	move := &cobra.Command{Use: "move --from NODE --to NODE", Short: "Put the placement group's replica on one node in the place of that on another", Args: cobra.NoArgs}
	move.Flags().StringVar(&from, "from", "", "name or id of the node that gives its replica up")
	move.Flags().StringVar(&to, "to", "", "name or id of the node that gets one")
	move.Flags().BoolVar(&noWait, "no-wait", false, "return when the move has begun")
	move.RunE = failing(func(c *cobra.Command, _ []string) error {
		if from == "" || to == "" {
			return &config.UsageError{Err: errors.New("give --from and --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			m, err := client.PlacementMove(ctx, from, to)
			if err != nil {
				return err
			}
			if noWait {
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
			}
			if err := client.AwaitOperation(ctx, m.GetOperation().GetId()); err != nil {
				return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", m.GetOperation().GetId(), err)
			}
			return showPlacement(ctx, c, client, format)
		})
	})
	return move
}

func newPlacementTransfer(f *adminFlags) *cobra.Command {
	var to string
	transfer := &cobra.Command{Use: "transfer-leader --to NODE", Short: "Have another replica of the placement group lead it", Args: cobra.NoArgs}
	transfer.Flags().StringVar(&to, "to", "", "name or id of the node that is to lead")
	transfer.RunE = failing(func(c *cobra.Command, _ []string) error {
		if to == "" {
			return &config.UsageError{Err: errors.New("give --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
			return client.PlacementTransferLeader(ctx, to)
		})
	})
	return transfer
}
