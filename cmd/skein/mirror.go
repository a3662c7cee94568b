package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/transfer"
)

// mirrorFlags are those of all commands about a mirror.
type mirrorFlags struct{ spool string }

// find has spool be the directory of the mirror that loads the cluster at --endpoints, if --spool was not given.
func (f *mirrorFlags) find(c *cobra.Command, cluster *adminFlags) error {
	if f.spool != "" {
		return nil
	}
	if err := cluster.fromEnvironment(c.Flags()); err != nil {
		return err
	}
	if !c.Flags().Changed("endpoints") {
		return &config.UsageError{Err: errors.New("--spool is missing: give the directory of the mirror, or client URLs of its new cluster to --endpoints")}
	}
	return cluster.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) (err error) {
		f.spool, err = transfer.MirrorOf(ctx, cluster)
		return err
	})
}

func newMirror(environ []string) *cobra.Command {
	f := &mirrorFlags{}
	c := &cobra.Command{
		Use: "mirror", Short: "Follow a running etcd into a new cluster, until the cluster takes its place", Args: cobra.NoArgs, RunE: needsCommand,
		Long: `Follow a running etcd into a new cluster, until the cluster takes its place. docs/MIGRATION.md has
it step by step.`,
	}
	c.PersistentFlags().StringVar(&f.spool, "spool", "", "directory of the mirror: what it has received and how far it is; with room for a copy of the source and for sorting it, twice its size, and for what is written meanwhile")
	c.AddCommand(newMirrorStart(environ, f), newMirrorStatus(environ, f), newMirrorCutover(environ, f), newMirrorAbandon(environ, f))
	return c
}

func newMirrorStart(environ []string, m *mirrorFlags) *cobra.Command {
	f, source := &adminFlags{environ: environ}, &sideFlags{name: "source"}
	var endpoints, listen string
	var o transfer.MirrorOptions
	c := &cobra.Command{
		Use: "start", Short: "Begin to follow, or go on with it", Args: cobra.NoArgs,
		Long: `Copy a running etcd into a new, empty cluster, and follow what is written there. It goes on until
the cut-over (skein mirror cutover). The same command goes on with a mirror that was broken off.`,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			if m.spool == "" {
				return &config.UsageError{Err: errors.New("--spool is missing: give a directory for the mirror")}
			}
			if endpoints == "" {
				return &config.UsageError{Err: errors.New("--source-endpoints is missing: give client URLs of the etcd to follow")}
			}
			var err error
			if o.Source, err = source.config(c, endpoints); err != nil {
				return err
			}
			o.Dir = m.spool
			if o.Number, err = loadNumber(); err != nil {
				return err
			}
			metrics := &mirror.Metrics{}
			o.Progress = metrics.Set
			stop, err := serveMetrics(listen, metrics)
			if err != nil {
				return err
			}
			defer stop()
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error {
				if err := transfer.Mirror(ctx, cluster, o); err != nil {
					return refused(err)
				}
				return printStatus(c, m.spool, adminapi.Table)
			})
		}),
	}
	f.addConnection(c.Flags())
	source.add(c.Flags())
	c.Flags().StringVar(&endpoints, "source-endpoints", "", "client URLs of the etcd to follow, separated by commas")
	c.Flags().StringVar(&listen, "metrics-listen", "", "HOST:PORT to serve the mirror's metrics at, as /metrics for Prometheus; without it, none")
	c.Flags().BoolVar(&o.WithoutAuth, "without-auth", false, "leave users and roles out")
	c.Flags().Int64Var(&o.MaxVersionBytes, "max-version-bytes", 3<<19, "largest key with its value: raise it with the nodes' --max-request-bytes")
	return c
}

// serveMetrics serves metrics for Prometheus at an address until stop is called. Without an address it does nothing.
func serveMetrics(address string, metrics prometheus.Collector) (stop func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	registry := prometheus.NewRegistry()
	if err := registry.Register(metrics); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, &config.UsageError{Err: fmt.Errorf("--metrics-listen %s: %w", address, err)}
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	s := &http.Server{Handler: mux, ReadHeaderTimeout: metricsTimeout}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // it ends with stop
	}()
	return func() {
		_ = s.Close()
		<-done
	}, nil
}

// metricsTimeout bounds how long a client may take for the head of its request.
const metricsTimeout = 10 * time.Second

// loadNumber returns a number for a new load.
func loadNumber() (uint64, error) {
	var b [8]byte
	if _, err := rand.Read(b[:]); err != nil {
		return 0, err
	}
	return max(1, binary.BigEndian.Uint64(b[:])), nil
}

// refused shows the next step of a mirror that stopped for good, or refuses a cut-over.
func refused(err error) error {
	if stop := (*mirror.Stop)(nil); errors.As(err, &stop) {
		return &adminapi.Refusal{Reason: stop.Reason, NextStep: stop.Next}
	}
	if refusal := (*mirror.Refusal)(nil); errors.As(err, &refusal) {
		return &adminapi.Refusal{Reason: refusal.Reason, NextStep: refusal.Next}
	}
	return err
}

// byCluster is what commands say that find the mirror by its cluster.
const byCluster = `The mirror is the one in --spool. Without that flag it is the one that loads the cluster at
--endpoints, if its directory is on this machine.`

func newMirrorStatus(environ []string, m *mirrorFlags) *cobra.Command {
	f := &adminFlags{environ: environ}
	var output string
	c := &cobra.Command{
		Use: "status", Short: "Show how far a mirror is", Args: cobra.NoArgs, Long: "Show how far a mirror is. " + byCluster,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			format := adminapi.Format(output)
			if format != adminapi.Table && format != adminapi.JSON {
				return &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", output)}
			}
			if err := m.find(c, f); err != nil {
				return err
			}
			return printStatus(c, m.spool, format)
		}),
	}
	f.addConnection(c.Flags())
	c.Flags().StringVarP(&output, "write-out", "w", "table", "table or json")
	return c
}

func printStatus(c *cobra.Command, dir string, format adminapi.Format) error {
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil {
		return err
	}
	if format == adminapi.JSON {
		return json.NewEncoder(c.OutOrStdout()).Encode(st)
	}
	line := st.String()
	if !st.Running && !ended(st.Step) {
		line += "; no `skein mirror start` runs"
	}
	fmt.Fprintln(c.OutOrStdout(), line)
	return nil
}

func ended(s mirror.Step) bool {
	return s == mirror.Done || s == mirror.Failed || s == mirror.Abandoned
}

func newMirrorCutover(environ []string, m *mirrorFlags) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{
		Use: "cutover", Short: "Let the cluster take the source's place", Args: cobra.NoArgs,
		Long: `Let the cluster take the source's place, as soon as the source stands still and the cluster has
all of it. Stop the source's clients first. The command waits until the cluster serves. If it is
broken off, the request stands. It is refused before the mirror has compared all keys once. If the
cluster cannot serve now, as a node does not answer that has to note the users, the request is
refused too. The mirror goes on in both cases.

` + byCluster,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			if err := m.find(c, f); err != nil {
				return err
			}
			if err := mirror.RequestCutover(vfs.Default, m.spool); err != nil {
				return refused(err)
			}
			return m.await(c, mirror.Done)
		}),
	}
	f.addConnection(c.Flags())
	return c
}

func newMirrorAbandon(environ []string, m *mirrorFlags) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{
		Use: "abandon", Short: "Give a mirror up: its cluster never serves", Args: cobra.NoArgs,
		Long: "Give a mirror up. Its cluster never serves, and the source stays as it is. " + byCluster,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			if err := m.find(c, f); err != nil {
				return err
			}
			if err := mirror.RequestAbandon(vfs.Default, m.spool); err != nil {
				return err
			}
			return m.await(c, mirror.Abandoned)
		}),
	}
	f.addConnection(c.Flags())
	return c
}

// Times of a command that waits for the mirror.
const (
	mirrorLook = 200 * time.Millisecond
	mirrorTell = 5 * time.Second
)

// await waits until the mirror has come to a step.
func (f *mirrorFlags) await(c *cobra.Command, step mirror.Step) error {
	clk := clock.System()
	var told clock.Time
	for {
		stands, err := mirror.CutoverRequested(vfs.Default, f.spool)
		if err != nil {
			return err
		}
		st, err := mirror.ReadStatus(vfs.Default, f.spool)
		if err == nil && !st.Running {
			st, err = mirror.ReadStatus(vfs.Default, f.spool) // its last step may have come between step and lock
		}
		switch {
		case err != nil:
			return err
		case st.Step == step:
			return printStatus(c, f.spool, adminapi.Table)
		case ended(st.Step) && step == mirror.Done:
			return fmt.Errorf("the mirror is %s: %s", st.Step, st.Stopped)
		case step == mirror.Done && !stands && st.Refused != nil:
			return refused(st.Refused)
		case step == mirror.Done && !stands:
			return fmt.Errorf("the request for a cut-over of the mirror in %s is gone", f.spool)
		case !st.Running:
			return &adminapi.Refusal{Reason: fmt.Sprintf("the mirror in %s is %s and does not run; the request stands", f.spool, st.Step), NextStep: "give its `skein mirror start` again"}
		}
		if now := clk.Now(); told == 0 || now.Sub(told) >= mirrorTell {
			told = now
			fmt.Fprintln(c.ErrOrStderr(), st)
		}
		if err := clock.Sleep(c.Context(), clk, mirrorLook); err != nil {
			return fmt.Errorf("wait for the mirror: %w; the request stands", err)
		}
	}
}
