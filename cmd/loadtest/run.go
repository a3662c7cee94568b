package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/loadtest"
)

// defaultDuration is how long a run takes for which neither duration nor total is
// given.
const defaultDuration = 10 * time.Second

// runFlags are the flags of `loadtest run` that are no field of a Config.
type runFlags struct {
	cacert, cert, key  string
	insecureSkipVerify bool
	json               string
}

func newRunCommand() *cobra.Command {
	cfg, flags := loadtest.DefaultConfig(), &runFlags{}
	cfg.Duration = 0
	c := &cobra.Command{
		Use:   "run",
		Short: "Runs a load and reports throughput, latencies, errors and CPU per operation",
		Example: "  loadtest run --endpoints 127.0.0.1:2379 --workload put --value-size 256 --conns 100 --clients 1000 --total 100000\n" +
			"  loadtest run --endpoints 127.0.0.1:2379 --workload mixed --read-percent 80 --rate 5000 --duration 1m --json report.json",
		Args: noArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if err := flags.complete(&cfg, c.Flags()); err != nil {
				return usageError{err}
			}
			cfg.Live = isTerminal(c.OutOrStdout())
			return run(c, cfg, flags.json)
		},
	}
	addFlags(c.Flags(), &cfg, flags)
	return c
}

func addFlags(f *pflag.FlagSet, cfg *loadtest.Config, flags *runFlags) {
	f.SortFlags = false
	f.StringSliceVar(&cfg.Endpoints, "endpoints", []string{"127.0.0.1:2379"}, "client ports; connection i goes to endpoint i modulo their number")
	f.IntVar(&cfg.Conns, "conns", cfg.Conns, "gRPC connections over all endpoints")
	f.IntVar(&cfg.Clients, "clients", cfg.Clients, "requests that can be under way at once")
	f.DurationVar(&cfg.Duration, "duration", 0, "measured time (default 10s unless --total is given)")
	f.Int64Var(&cfg.Total, "total", 0, "measured operations, in place of --duration")
	f.Float64Var(&cfg.Rate, "rate", 0, "operations per second over all clients, whatever the servers do; 0 sends as fast as they answer")
	f.StringVar((*string)(&cfg.Workload), "workload", string(cfg.Workload), "put, get, mixed, or txn: one compare and one put")
	f.IntVar(&cfg.ReadPercent, "read-percent", cfg.ReadPercent, "share of gets in workload mixed")
	f.BoolVar(&cfg.Serializable, "serializable", false, "make gets serializable")
	f.IntVar(&cfg.KeyBytes, "key-size", cfg.KeyBytes, "bytes of a key, with its prefix")
	f.IntVar(&cfg.ValueBytes, "value-size", cfg.ValueBytes, "bytes of a value")
	f.IntVar(&cfg.Keys, "keys", cfg.Keys, "number of different keys")
	f.StringVar(&cfg.KeyPrefix, "key-prefix", "", "stands before each key; without it the keys spread evenly over printable ASCII")
	f.StringVar((*string)(&cfg.Dist), "dist", string(cfg.Dist), "how keys are drawn: uniform, zipf or sequential")
	f.Float64Var(&cfg.ZipfSkew, "zipf-skew", cfg.ZipfSkew, "exponent of zipf, above 1")
	f.Uint64Var(&cfg.Seed, "seed", cfg.Seed, "determines the operations of each client")
	f.BoolVar(&cfg.Fill, "fill", false, "put each key once before the rest (default for all workloads but put)")
	f.DurationVar(&cfg.Warmup, "warmup", 0, "how long the workload runs before it is measured")
	f.DurationVar(&cfg.Timeout, "timeout", cfg.Timeout, "bound of each request")
	f.BoolVar(&cfg.Verify, "verify", false, "check at the end that everything acknowledged is there")
	f.StringSliceVar(&cfg.ServerMetrics, "server-metrics", nil, "URLs of the servers' /metrics pages, for their CPU per operation")
	f.StringVar(&cfg.DataPath, "data-dir", cfg.DataPath, "a path on the servers' disk, whose file system the report names")
	f.StringVar(&flags.json, "json", "", "write the report as JSON to this file (- for stdout; the text then goes to stderr)")
	f.StringVar(&flags.cacert, "cacert", "", "CA certificates that the servers' certificates are checked against")
	f.StringVar(&flags.cert, "cert", "", "client certificate")
	f.StringVar(&flags.key, "key", "", "key of the client certificate")
	f.BoolVar(&flags.insecureSkipVerify, "insecure-skip-tls-verify", false, "do not check the servers' certificates")
}

// complete fills in what depends on several flags and checks the whole.
func (f *runFlags) complete(cfg *loadtest.Config, set *pflag.FlagSet) error {
	if cfg.Total == 0 && !set.Changed("duration") {
		cfg.Duration = defaultDuration
	}
	if !set.Changed("fill") {
		cfg.Fill = cfg.Workload != loadtest.Put
	}
	if _, err := os.Stat(cfg.DataPath); err != nil {
		return fmt.Errorf("data-dir: %w", err)
	}
	var err error
	if cfg.TLS, err = f.tls(); err != nil {
		return err
	}
	return cfg.Validate()
}

// tls returns nil if no TLS flag is given.
func (f *runFlags) tls() (*tls.Config, error) {
	if (f.cert == "") != (f.key == "") {
		return nil, errors.New("--cert and --key go together")
	}
	if f.cacert == "" && f.cert == "" && !f.insecureSkipVerify {
		return nil, nil
	}
	return transport.TLSInfo{
		TrustedCAFile:      f.cacert,
		CertFile:           f.cert,
		KeyFile:            f.key,
		InsecureSkipVerify: f.insecureSkipVerify,
	}.ClientConfig()
}

// run does the run and writes the report to where it belongs.
func run(c *cobra.Command, cfg loadtest.Config, json string) error {
	text := c.OutOrStdout()
	switch json {
	case "":
	case "-":
		text = c.ErrOrStderr()
	default:
		// A long run is not lost to a wrong path. An older report stays until there is a
		// new one.
		f, err := os.OpenFile(json, os.O_WRONLY|os.O_CREATE, 0o644)
		if err != nil {
			return fmt.Errorf("json: %w", err)
		}
		f.Close()
	}
	report, err := loadtest.Run(c.Context(), cfg, text)
	if err != nil {
		return err
	}
	if json != "" {
		if err := report.WriteJSON(json, c.OutOrStdout()); err != nil {
			return err
		}
	}
	if report.Operations == 0 {
		return errors.New("no operation succeeded")
	}
	return report.Broken()
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
