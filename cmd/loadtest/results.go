package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/loadtest/results"
)

// newCompareCommand is loadtest compare.
func newCompareCommand() *cobra.Command {
	var options results.Options
	json := new(jsonFlag)
	c := &cobra.Command{
		Use:   "compare A B",
		Short: "Compares the reports of two sides, with confidence intervals",
		Long: "Compares the reports of two sides: B's figures as ratios to A's. A side is a file that --json has written, or several:\n" +
			"separated by commas, or a pattern in quotes. With two runs or more of each side each ratio has its 95 % confidence\n" +
			"interval: Student's, on the logarithms, of pairs (--paired) or by Welch for groups. If that has 1 in it, the runs show\n" +
			"no difference. Run the sides by turns: what else the machine does then meets both.\n\n" +
			"Runs of different settings, or from different machines, are refused, and the settings are named. A run whose load\n" +
			"generator was saturated is named too: it says little about the servers.\n\n" +
			"Status: 0, whichever side is better; 1 if the sides cannot be compared; 2 for a wrong command line.",
		Example: "  loadtest compare before.json after.json\n" +
			"  # five runs of each, by turns: run 1 of etcd, run 1 of skein, run 2 of etcd, …\n" +
			"  loadtest compare --paired 'etcd-*.json' 'skein-*.json'\n" +
			"  loadtest compare --different 256-clients.json 512-clients.json --json ratios.json",
		Args: exactly(2),
		RunE: func(c *cobra.Command, sides []string) error {
			a, errA := results.ReadSide(sides[0])
			b, errB := results.ReadSide(sides[1])
			if err := errors.Join(errA, errB); err != nil {
				return err
			}
			comparison, err := results.Compare(a, b, options)
			if err != nil {
				return err
			}
			text, err := json.text(c)
			if err != nil {
				return err
			}
			return errors.Join(comparison.Write(text), json.write(c, comparison))
		},
	}
	c.Flags().BoolVar(&options.Paired, "paired", false, "run i of B is the partner of run i of A")
	c.Flags().BoolVar(&options.Different, "different", false, "compare runs of different settings too")
	json.add(c.Flags())
	return c
}

// exactly refuses any other number of arguments.
func exactly(n int) cobra.PositionalArgs {
	return usage(cobra.ExactArgs(n))
}

// usage makes what arguments are refused for an error in the command line.
func usage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if err := check(c, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// newReportCommand is loadtest report.
func newReportCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "report OUT.html REPORT.json ...",
		Short: "Shows up to eight reports on one HTML page",
		Long: "Writes one HTML page about up to eight reports: latency and throughput over time, percentiles, processor time, each kind of\n" +
			"operations, settings, versions and machine. The page needs no other file and no network, and runs no script.",
		Example: "  loadtest report report.html report.json\n" +
			"  loadtest report both.html etcd.json skein.json",
		Args: usage(cobra.MinimumNArgs(2)),
		RunE: func(_ *cobra.Command, args []string) error {
			if filepath.Ext(args[0]) == ".json" {
				return usageError{fmt.Errorf("report: the first name is that of the page, which is written: %s looks like a report", args[0])}
			}
			runs, err := results.ReadAll(args[1:])
			if err != nil {
				return err
			}
			return results.WritePageFile(args[0], runs)
		},
	}
}

// newMergeCommand is loadtest merge.
func newMergeCommand() *cobra.Command {
	json := new(jsonFlag)
	c := &cobra.Command{
		Use:   "merge REPORT.json REPORT.json ...",
		Short: "Makes one report of several load generators that ran at a time",
		Long: "Makes one report of several load generators that ran at a time against the same servers, where one alone is the\n" +
			"bottleneck. Throughputs, clients and rates add up, percentiles are those of all operations, and --slo is judged anew.\n" +
			"Give each generator a --key-prefix or a --seed of its own. Generators that did different things, or of whose time all\n" +
			"had less than nine tenths in common, are refused.\n\n" +
			"Status: 0; 1 if the reports cannot be merged, or a promise was broken in one; 2 for a wrong command line; 3 if a clause\n" +
			"of --slo is not met.",
		Example: "  # on each of two machines, at the same moment\n" +
			"  loadtest run --rate 5000 --duration 1m --key-prefix one/ --json one.json\n" +
			"  loadtest run --rate 5000 --duration 1m --key-prefix two/ --json two.json\n" +
			"  # then\n" +
			"  loadtest merge one.json two.json --json both.json",
		Args: usage(cobra.MinimumNArgs(2)),
		RunE: func(c *cobra.Command, args []string) error {
			runs, err := results.ReadAll(args)
			if err != nil {
				return err
			}
			report, err := results.Merge(runs)
			if err != nil {
				return err
			}
			text, err := json.text(c)
			if err != nil {
				return err
			}
			report.WriteText(text)
			if err := errors.Join(json.write(c, report), report.Broken()); err != nil {
				return err
			}
			if err := report.Missed(); err != nil {
				return sloError{err}
			}
			return nil
		},
	}
	json.add(c.Flags())
	return c
}
