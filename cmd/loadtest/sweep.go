package main

import (
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/loadtest"
)

// newSweepCommand is loadtest sweep.
func newSweepCommand() *cobra.Command {
	cfg, flags, over := loadtest.DefaultConfig(), &runFlags{}, loadtest.SweepClients
	cfg.Duration, cfg.KeyPrefix = 0, defaultPrefix
	var steps []float64
	var p99 time.Duration
	c := &cobra.Command{
		Use:   "sweep",
		Short: "Runs a load that grows step by step, up to the knee",
		Long: "Runs a load that grows step by step, and says where the knee is: the last step whose p99 is at most --p99, that brings at\n" +
			"least 1.05 times the throughput of the best step before, of whose operations at most 0.1 % fail, and that meets --slo.\n" +
			"Two steps in a row that do not end the sweep. --duration, --total and --warmup are each step's. The JSON has the whole\n" +
			"report of each step.\n\n" +
			"Over clients it is a closed loop: the most that the servers can do. Over rates it is an open loop, in which latencies\n" +
			"count from when an operation was due: what users see at each load. --clients is then how many requests can be under way.\n\n" +
			"Status: 0 if there is a knee, also at the last step; 1 if no step is good, a promise was broken or a step could not be\n" +
			"done; 2 for a wrong command line.",
		Example: "  loadtest sweep --endpoints 127.0.0.1:2379 --duration 5s --cleanup\n" +
			"  # at which rate is the p99 of a mixed load still 10 ms?\n" +
			"  loadtest sweep --over rate --steps 1000,2000,4000,8000,16000 --workload mixed --p99 10ms --json sweep.json",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if !c.Flags().Changed("fill") {
				cfg.Fill = fillByDefault(&cfg)
			}
			if err := flags.complete(&cfg, c.Flags(), c.ErrOrStderr()); err != nil {
				return usageError{err}
			}
			if steps == nil {
				steps = loadtest.DefaultSteps(over)
			}
			sweep := loadtest.SweepConfig{Run: cfg, Over: over, Steps: steps, P99: p99}
			if err := sweep.Validate(); err != nil {
				return usageError{err}
			}
			text, err := flags.json.text(c)
			if err != nil {
				return err
			}
			report, err := loadtest.Sweep(c.Context(), sweep, text)
			if report != nil && len(report.Steps) > 0 {
				err = errors.Join(err, flags.json.write(c, report))
			}
			if err != nil {
				return err
			}
			if report.Knee < 0 {
				return errors.Join(errors.New("no step was good"), report.Broken())
			}
			return report.Broken()
		},
	}
	f := c.Flags()
	f.SortFlags = false
	f.StringVar((*string)(&over), "over", string(over), "what grows: clients or rate")
	f.Float64SliceVar(&steps, "steps", nil, "the numbers of clients or the rates, in growing order (default: 1, 2, 4 and so on to 4096 clients, or 1000 times as many per second)")
	f.DurationVar(&p99, "p99", 50*time.Millisecond, "bound of the operations' p99")
	flags.addLoad(f, &cfg)
	addWorkload(f, &cfg)
	flags.addRest(f, &cfg, "delete the keys after the last step, whoever put them last")
	return c
}
