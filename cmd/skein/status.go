package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node/machine"
)

// unwell ends a command whose output says already what is wrong.
type unwell struct{}

func (unwell) Error() string { return "not all is well" }

func newStatus(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{
		Use: "status", Short: "Show the cluster at a glance", Args: cobra.NoArgs,
		Long: `Show the cluster at a glance: quorum, dead nodes and since when, ranges without a quorum and the nodes they wait for,
operations under way, alarms, versions, disks, and what is wrong. It needs no quorum: give all nodes to --endpoints, and the first
that answers is asked. The exit code is 0 if all is well, and 1 if not; notes do not count.`,
		Example: "  skein status --endpoints 127.0.0.1:12379,127.0.0.1:22379,127.0.0.1:32379",
	}
	f.add(c.Flags())
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			s, silent, err := client.Survey(ctx)
			if err != nil {
				return err
			}
			client.Probe(ctx, s)
			found := adminapi.Diagnose(s, silent)
			if err := adminapi.WriteStatus(c.OutOrStdout(), format, s, silent, found); err != nil {
				return err
			}
			return ifUnwell(found)
		})
	})
	return c
}

func newDoctor(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var local bool
	var dir string
	var budget int64
	c := &cobra.Command{
		Use: "doctor", Short: "Say what is wrong with the cluster, or with this machine, and what to do", Args: cobra.NoArgs,
		Long: `Say what is wrong with the cluster and what to do about it, the worst first. It needs no quorum. With --local it measures this
machine instead, before a node starts on it: the disk's fsync, room, files, memory, UDP buffers and clock.
critical: clients are refused, or data are at risk. warning: one more failure, or some time, makes it so. note: nothing is wrong.
The exit code is 0 without findings but notes, and 1 otherwise.`,
		Example: "  skein doctor --endpoints 127.0.0.1:12379\n  skein doctor --local --data-dir /var/lib/skein",
	}
	f.add(c.Flags())
	c.Flags().BoolVar(&local, "local", false, "measure this machine, and ask no node")
	c.Flags().StringVar(&dir, "data-dir", ".", "with --local: where the node is to have its data")
	c.Flags().Int64Var(&budget, "memory-budget-bytes", 0, "with --local: the node's memory budget; 0 is what a node takes by itself")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		if !local {
			if c.Flags().Changed("data-dir") || c.Flags().Changed("memory-budget-bytes") {
				return &config.UsageError{Err: errors.New("--data-dir and --memory-budget-bytes are of --local")}
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, silent, err := client.Survey(ctx)
				if err != nil {
					return err
				}
				client.Probe(ctx, s)
				return writeFindings(c, format, adminapi.Diagnose(s, silent))
			})
		}
		if budget != 0 && budget < config.MinMemoryBytes {
			return &config.UsageError{Err: fmt.Errorf("--memory-budget-bytes must be 0 or at least %d (set to %d)", config.MinMemoryBytes, budget)}
		}
		format, err := f.format(c)
		if err != nil {
			return err
		}
		at, err := machine.Existing(dir)
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}
		facts, err := machine.Look(at)
		if err != nil {
			return err
		}
		if budget == 0 {
			budget = config.DefaultMemoryBytes(facts.Memory)
		}
		return writeFindings(c, format, machine.Diagnose(facts, budget))
	})
	return c
}

func writeFindings(c *cobra.Command, format adminapi.Format, found []adminapi.Finding) error {
	if err := adminapi.WriteFindings(c.OutOrStdout(), format, found); err != nil {
		return err
	}
	return ifUnwell(found)
}

func ifUnwell(found []adminapi.Finding) error {
	if adminapi.Healthy(found) {
		return nil
	}
	return unwell{}
}
