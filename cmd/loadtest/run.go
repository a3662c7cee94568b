package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/loadtest"
)

const (
	// defaultDuration is how long a run takes for which neither duration nor total is
	// given.
	defaultDuration = 10 * time.Second
	// defaultPrefix keeps a run's keys apart from those of others.
	defaultPrefix = "loadtest/"
	// kubeWorkers is the default number of clients of loadtest kubernetes.
	kubeWorkers = 64
)

// runFlags are the flags of runs that are no field of a Config.
type runFlags struct {
	access      accessFlags
	json        jsonFlag
	maxFailures int64
}

func newRunCommand() *cobra.Command {
	cfg, flags := loadtest.DefaultConfig(), &runFlags{}
	cfg.Duration, cfg.KeyPrefix = 0, defaultPrefix
	c := &cobra.Command{
		Use:   "run",
		Short: "Runs a load and reports throughput, latencies, errors and CPU per operation",
		Long: "Runs a load and reports throughput, latencies, errors and CPU per operation.\n\n" +
			"Without --rate each client sends its next request after the last answer. With --rate requests are due at fixed times\n" +
			"whatever the servers do, and latencies count from there. The run ends in time: what could not be sent is counted as\n" +
			"failed, and said.\n\n" +
			"Status: 0 for a clean run; 1 if more operations failed than --max-failures accepts, none succeeded, a promise was\n" +
			"broken (--verify), or the run was interrupted or could not be done; 2 for a wrong command line; 3 if all that is well\n" +
			"and a clause of --slo is not met.",
		Example: "  # the most puts that the servers can do, and their processor time for each\n" +
			"  loadtest run --endpoints 127.0.0.1:2379 --clients 1000 --total 100000 --server-metrics http://127.0.0.1:2379/metrics\n" +
			"  # latencies at a steady load, with YCSB's distribution of keys, kept as JSON\n" +
			"  loadtest run --workload mixed --read-percent 80 --dist zipf --zipf-skew 0.99 --rate 5000 --duration 1m --json report.json\n" +
			"  # fails a build whose latencies are too long\n" +
			"  loadtest run --rate 2000 --duration 1m --warmup 5s --slo 'p99<10ms,errors<0.1%'\n" +
			"  # transactions over eight ranges; pages of a list; leases that come and go\n" +
			"  loadtest run --workload txn --txn-keys 8 --key-prefix '' --cleanup\n" +
			"  loadtest run --workload range --page-keys 500 --keys 10000 --clients 20\n" +
			"  loadtest run --workload lease --clients 100 --cleanup\n" +
			"  # how long does an event take to each of 1,000 watchers?\n" +
			"  loadtest run --watchers 1000 --rate 100 --duration 30s --slo 'delay.p99<50ms'\n" +
			"  # one hot key; a hot prefix that moves every ten seconds; a log to whose end all append\n" +
			"  loadtest run --dist hot --hot-percent 99\n" +
			"  loadtest run --dist hot --hot-keys 1000 --hot-move 10s --duration 1m\n" +
			"  loadtest run --workload mixed --read-percent 50 --dist tail --keys 10000000\n" +
			"  # is everything there that was acknowledged? Then nothing is left behind\n" +
			"  loadtest run --workload txn --total 50000 --verify --cleanup\n" +
			"  # a cluster that checks users and certificates\n" +
			"  loadtest run --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key --user load:secret\n" +
			"  # by Skein's pipe: the operations of all clients share a stream to each endpoint\n" +
			"  loadtest run --api pipe --clients 256 --endpoints 127.0.0.1:12379,127.0.0.1:22379,127.0.0.1:32379 --cleanup\n" +
			"  # keys in all ranges of an empty cluster, not below one prefix\n" +
			"  loadtest run --key-prefix '' --cleanup",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if !c.Flags().Changed("fill") {
				cfg.Fill = fillByDefault(&cfg)
			}
			return flags.run(c, &cfg)
		},
	}
	f := c.Flags()
	f.SortFlags = false
	flags.addLoad(f, &cfg)
	addWorkload(f, &cfg)
	flags.addRest(f, &cfg, "delete the run's keys at the end, whoever put them last")
	flags.addFailures(f)
	return c
}

func newKubernetesCommand() *cobra.Command {
	cfg, flags := loadtest.DefaultConfig(), &runFlags{}
	cfg.Duration, cfg.Workload, cfg.Clients, cfg.Fill = 0, loadtest.Kubernetes, kubeWorkers, true
	c := &cobra.Command{
		Use:   "kubernetes",
		Short: "Does what the API servers of a large Kubernetes cluster do, and checks what its watchers get",
		Long: "Does what the API servers of a large Kubernetes cluster do, and checks what its watchers get.\n\n" +
			"It puts lease objects of nodes and pods, and then does by weight (--mix): renew a node's lease object, update the status\n" +
			"of a pod, create an event with a lease of etcd's, create a pod, delete one, read a page of 500 of a list of all pods at\n" +
			"the revision of its first page. Each write is a transaction that compares the key's mod_revision. Each of --watchers API\n" +
			"servers watches pods, leases and events, and asks for progress. Every acknowledged change must come to each watcher once,\n" +
			"in order: lost and duplicate events are counted, and make the status 1, as all broken promises do. The status is 3 if a\n" +
			"clause of --slo is not met and all else is well.\n\n" +
			"All keys lie below /registry/loadtest/, which no API server reads; what an earlier run has left there is deleted first.\n" +
			"So only one such run at a time can use a cluster.",
		Example: "  # 64 workers, as fast as the servers answer\n" +
			"  loadtest kubernetes --endpoints 127.0.0.1:2379 --total 100000\n" +
			"  # 5,000 nodes that renew their leases every 10 s, and the rest in proportion, as a steady load\n" +
			"  loadtest kubernetes --nodes 5000 --pods 150000 --rate 1000 --duration 10m --cleanup\n" +
			"  # are events at the watchers in time?\n" +
			"  loadtest kubernetes --rate 500 --duration 1m --slo 'delay.p99<100ms,renew.p99<20ms,errors<0.1%'\n" +
			"  # creates alone\n" +
			"  loadtest kubernetes --mix create=1 --total 20000",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error { return flags.run(c, &cfg) },
	}
	f := c.Flags()
	f.SortFlags = false
	flags.addLoad(f, &cfg)
	f.IntVar(&cfg.Kubernetes.Nodes, "nodes", cfg.Kubernetes.Nodes, "nodes, each with a lease object")
	f.IntVar(&cfg.Kubernetes.Pods, "pods", cfg.Kubernetes.Pods, "pods at the begin")
	f.IntVar(&cfg.Kubernetes.Watchers, "watchers", cfg.Kubernetes.Watchers, "API servers that watch all three resources; 0 watches nothing")
	f.StringVar(&cfg.Kubernetes.Mix, "mix", cfg.Kubernetes.Mix, "kinds of operations and their weights")
	flags.addRest(f, &cfg, "delete all below /registry/loadtest/ at the end")
	flags.addFailures(f)
	return c
}

// fillByDefault says whether a workload finds too little in an empty store.
func fillByDefault(cfg *loadtest.Config) bool {
	return cfg.Workload != loadtest.Put && cfg.Workload != loadtest.Lease && cfg.Dist != loadtest.Tail
}

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

// addWorkload adds the flags of what is sent.
func addWorkload(f *pflag.FlagSet, cfg *loadtest.Config) {
	f.StringVar((*string)(&cfg.Workload), "workload", string(cfg.Workload), "put, get, mixed, txn (a compare and --txn-keys puts), range (pages), or lease (grant, put with it, revoke)")
	f.IntVar(&cfg.ReadPercent, "read-percent", cfg.ReadPercent, "share of gets in workload mixed")
	f.BoolVar(&cfg.Serializable, "serializable", false, "make gets serializable")
	f.IntVar(&cfg.KeyBytes, "key-size", cfg.KeyBytes, "bytes of a key, with its prefix")
	f.IntVar(&cfg.ValueBytes, "value-size", cfg.ValueBytes, "bytes of a value")
	f.IntVar(&cfg.Keys, "keys", cfg.Keys, "number of different keys")
	f.StringVar(&cfg.KeyPrefix, "key-prefix", cfg.KeyPrefix, "stands before each key; with an empty one the keys spread evenly over printable ASCII, and so over all ranges")
	f.StringVar((*string)(&cfg.Dist), "dist", string(cfg.Dist), "how keys are drawn: uniform, zipf, sequential, hot (few neighbours get most operations), or tail (each put makes a key behind the last, and gets read near the end)")
	f.Float64Var(&cfg.ZipfSkew, "zipf-skew", cfg.ZipfSkew, "exponent of zipf, above 0; YCSB's is 0.99")
	f.IntVar(&cfg.HotKeys, "hot-keys", cfg.HotKeys, "with dist hot: the neighbouring keys that are hot")
	f.IntVar(&cfg.HotPercent, "hot-percent", cfg.HotPercent, "with dist hot: the share of operations that they get")
	f.DurationVar(&cfg.HotMove, "hot-move", cfg.HotMove, "with dist hot: how long they stay hot until others are, far from them; 0 is for ever")
	f.IntVar(&cfg.TxnKeys, "txn-keys", cfg.TxnKeys, "keys that a txn puts, at even distances over all keys, and so in different ranges")
	f.IntVar(&cfg.PageKeys, "page-keys", cfg.PageKeys, "with workload range: the most keys of a page")
	f.IntVar(&cfg.Watchers, "watchers", cfg.Watchers, "watchers of all keys of the run, to measure from before each put is sent until each has its event")
	f.BoolVar(&cfg.Fill, "fill", false, "put each key once before the rest (default for all workloads but put and lease, and not for dist tail)")
}

// addLoad adds the flags of where and how much is sent.
func (f *runFlags) addLoad(set *pflag.FlagSet, cfg *loadtest.Config) {
	set.StringSliceVar(&cfg.Endpoints, "endpoints", []string{"127.0.0.1:2379"}, "client ports; connection i goes to endpoint i modulo their number")
	set.StringVar((*string)(&cfg.API), "api", string(cfg.API), "by which API the requests go: etcd, a call for each, or pipe, Skein's streams of many (leases and watchers are etcd's calls all the same)")
	set.IntVar(&cfg.Conns, "conns", cfg.Conns, "gRPC connections over all endpoints (without this flag at most one for each client; by the pipe one for each endpoint)")
	set.IntVar(&cfg.Clients, "clients", cfg.Clients, "requests that can be under way at once")
	set.DurationVar(&cfg.Duration, "duration", 0, "measured time (default 10s unless --total is given)")
	set.Int64Var(&cfg.Total, "total", 0, "measured operations, in place of --duration")
	set.Float64Var(&cfg.Rate, "rate", 0, "operations per second over all clients, whatever the servers do; 0 sends as fast as they answer")
}

// addRest adds the other flags that all workloads have.
func (f *runFlags) addRest(set *pflag.FlagSet, cfg *loadtest.Config, cleanup string) {
	set.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "determines the operations of each client")
	set.DurationVar(&cfg.Warmup, "warmup", 0, "how long the workload runs before it is measured")
	set.DurationVar(&cfg.Timeout, "timeout", cfg.Timeout, "bound of each request")
	set.BoolVar(&cfg.Verify, "verify", false, "check at the end that everything acknowledged is there")
	set.BoolVar(&cfg.Cleanup, "cleanup", false, cleanup)
	set.StringVar(&cfg.SLO, "slo", "", "what the run must reach, and otherwise the status is 3: p99<10ms,put.p99.9<50ms,errors<0.1%,throughput>1000; a clause of errors takes the place of --max-failures 0")
	set.StringSliceVar(&cfg.ServerMetrics, "server-metrics", nil, "URLs of the servers' /metrics pages, for their CPU per operation")
	set.StringVar(&cfg.DataPath, "data-dir", cfg.DataPath, "a path on the servers' disk, whose file system the report names")
	f.json.add(set)
	f.access.add(set)
}

func (f *runFlags) addFailures(set *pflag.FlagSet) {
	set.Int64Var(&f.maxFailures, "max-failures", 0, "measured operations that may fail or stay unsent before the status is 1")
}

// complete fills in what depends on several flags and checks the whole.
func (f *runFlags) complete(cfg *loadtest.Config, set *pflag.FlagSet, prompts io.Writer) (err error) {
	if cfg.Total == 0 && !set.Changed("duration") {
		cfg.Duration = defaultDuration
	}
	if !set.Changed("conns") {
		if cfg.API == loadtest.APIPipe {
			cfg.Conns = len(cfg.Endpoints)
		}
		cfg.Conns = max(1, min(cfg.Conns, cfg.Clients))
	}
	if objectives, err := loadtest.ParseObjectives(cfg.SLO); err == nil && objectives.BoundErrors() && !set.Changed("max-failures") {
		f.maxFailures = math.MaxInt64
	}
	if f.maxFailures < 0 {
		return fmt.Errorf("max-failures: %d is below 0", f.maxFailures)
	}
	if _, err := os.Stat(cfg.DataPath); err != nil {
		return fmt.Errorf("data-dir: %w", err)
	}
	if cfg.Access, err = f.access.access(set, prompts); err != nil {
		return err
	}
	return cfg.Validate()
}

// run does the run and writes the report to where it belongs.
func (f *runFlags) run(c *cobra.Command, cfg *loadtest.Config) error {
	if err := f.complete(cfg, c.Flags(), c.ErrOrStderr()); err != nil {
		return usageError{err}
	}
	cfg.Live = isTerminal(c.OutOrStdout())
	text, err := f.json.text(c)
	if err != nil {
		return err
	}
	report, err := loadtest.Run(c.Context(), *cfg, text)
	if err != nil {
		return err
	}
	if err := f.json.write(c, &report); err != nil {
		return err
	}
	if err := f.fault(&report); err != nil {
		return errors.Join(err, report.Missed())
	}
	if err := report.Missed(); err != nil {
		return sloError{err}
	}
	return nil
}

// jsonFlag is where a report is written as JSON: a file, - for stdout, or nowhere.
type jsonFlag string

func (j *jsonFlag) add(set *pflag.FlagSet) {
	set.StringVar((*string)(j), "json", "", "write the report as JSON to this file (- for stdout; the text then goes to stderr)")
}

// text returns where the report for people goes.
func (j *jsonFlag) text(c *cobra.Command) (io.Writer, error) {
	switch *j {
	case "":
	case "-":
		return c.ErrOrStderr(), nil
	default:
		// A long run is not lost to a wrong path. An older report stays until there is a
		// new one.
		file, err := os.OpenFile(string(*j), os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			return nil, fmt.Errorf("json: %w", err)
		}
		file.Close()
	}
	return c.OutOrStdout(), nil
}

// write writes a report to where the flag says.
func (j *jsonFlag) write(c *cobra.Command, report interface {
	WriteJSON(name string, stdout io.Writer) error
},
) error {
	if *j == "" {
		return nil
	}
	return report.WriteJSON(string(*j), c.OutOrStdout())
}

// fault returns what makes the status of a run 1.
func (f *runFlags) fault(r *loadtest.Report) error {
	var all []error
	switch {
	case r.Interrupted:
		all = append(all, errors.New("the run was interrupted"))
	case r.Operations == 0:
		all = append(all, errors.New("no operation succeeded"))
	}
	if r.Failed > f.maxFailures {
		all = append(all, fmt.Errorf("%d of %d operations failed; --max-failures accepts %d", r.Failed, r.Failed+r.Operations, f.maxFailures))
	}
	return errors.Join(append(all, r.Broken())...)
}

// isTerminal says whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
