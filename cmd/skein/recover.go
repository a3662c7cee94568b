package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/recovery"
)

// newRecover has the commands for a lost majority (docs/RECOVERY.md).
func newRecover(environ []string) *cobra.Command {
	c := &cobra.Command{
		Use: "recover", Short: "Bring a cluster back that has lost its majority for good", Args: cobra.NoArgs, RunE: needsCommand,
		Long: "Bring a cluster back that has lost the majority of its nodes for good (docs/RECOVERY.md).\n\n" +
			"Stop all survivors. Collect from each, make one plan, read it, apply it on each, start them, verify.",
	}
	c.AddCommand(newCollect(), newPlan(), newApply(), newVerify(environ))
	return c
}

// dirFlags are those of commands that read a stopped node's directories.
func dirFlags(c *cobra.Command, d *recovery.Dir) {
	c.Flags().StringVar(&d.Data, "data-dir", "", "the stopped node's data directory")
	c.Flags().StringVar(&d.WAL, "wal-dir", "", "its wal directory, if it has one of its own")
	_ = c.MarkFlagRequired("data-dir")
}

func newCollect() *cobra.Command {
	var d recovery.Dir
	var out string
	c := &cobra.Command{Use: "collect --data-dir DIR -o FILE", Short: "Write down what a stopped node has", Args: cobra.NoArgs}
	dirFlags(c, &d)
	c.Flags().StringVarP(&out, "output", "o", "", "the file to write")
	_ = c.MarkFlagRequired("output")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		got, err := recovery.Collect(d)
		if err != nil {
			return err
		}
		b, err := got.Encode()
		if err != nil {
			return err
		}
		if err := writeNew(out, b); err != nil {
			return err
		}
		_, err = fmt.Fprintf(c.OutOrStdout(), "%s: node %s has %d replicas\n", out, got.NodeName(), len(got.Copies))
		return err
	})
	return c
}

func newPlan() *cobra.Command {
	var o recovery.PlanOptions
	var out string
	c := &cobra.Command{Use: "plan FILE... --dead NODE,... -o PLAN", Short: "Say what is safe, doubtful and lost, and write down what to do", Args: cobra.MinimumNArgs(1)}
	c.Flags().StringSliceVar(&o.Dead, "dead", nil, "the nodes that never come back, by name or id")
	c.Flags().BoolVar(&o.AcceptLost, "accept-lost-spans", false, "make empty ranges where no copy survives")
	c.Flags().Int64Var((*int64)(&o.Bump), "bump-revision", int64(recovery.DefaultBump), "how far the revision rises above the highest that is known")
	c.Flags().StringVarP(&out, "output", "o", "", "the file to write")
	_ = c.MarkFlagRequired("output")
	c.RunE = failing(func(c *cobra.Command, files []string) error {
		var in []*recovery.Collected
		for _, path := range files {
			b, err := readFile(path)
			if err != nil {
				return err
			}
			got, err := recovery.DecodeCollected(b)
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			in = append(in, got)
		}
		p, err := recovery.MakePlan(in, o)
		if p != nil {
			err = errors.Join(p.Write(c.OutOrStdout()), err)
		}
		if err != nil {
			return err
		}
		b, err := p.Encode()
		if err != nil {
			return err
		}
		if err := writeNew(out, b); err != nil {
			return err
		}
		_, err = fmt.Fprintf(c.OutOrStdout(), "%s: plan %s; nothing is changed yet: run skein recover apply on each survivor\n", out, p.ID)
		return err
	})
	return c
}

func newApply() *cobra.Command {
	var d recovery.Dir
	var plan string
	c := &cobra.Command{Use: "apply --data-dir DIR --plan PLAN", Short: "Do on a stopped node what the plan says", Args: cobra.NoArgs}
	dirFlags(c, &d)
	c.Flags().StringVar(&plan, "plan", "", "the file of skein recover plan")
	_ = c.MarkFlagRequired("plan")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		p, err := readPlan(plan)
		if err != nil {
			return err
		}
		a, err := recovery.Apply(c.Context(), d, p, clock.System().Wall())
		if err != nil {
			return err
		}
		if a.Already {
			_, err = fmt.Fprintf(c.OutOrStdout(), "plan %s was applied here before: nothing is done\n", p.ID)
		} else {
			_, err = fmt.Fprintf(c.OutOrStdout(), "plan %s is applied: %d ranges go on from here, %d replicas go\n", p.ID, a.Sole, a.Dropped)
		}
		if err == nil && len(a.Awaits) > 0 {
			_, err = fmt.Fprintf(c.OutOrStdout(), "next: apply it on %s, if it is not applied there yet, and start all survivors: each waits at its first start until it has heard that all have the plan\n", namesOf(a.Awaits))
		}
		return err
	})
	return c
}

func newVerify(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var plan string
	c := &cobra.Command{
		Use: "verify --plan PLAN", Short: "Check the running cluster against the plan", Args: cobra.NoArgs,
		Long: "Check the running cluster against the plan. Its exit code is 0 if all is as the plan says, 1 if something is wrong or nobody\nanswers, and 4 if nothing is wrong and a range still waits for its leader: then run it again.",
	}
	f.add(c.Flags())
	c.Flags().StringVar(&plan, "plan", "", "the file of skein recover plan")
	_ = c.MarkFlagRequired("plan")
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		p, err := readPlan(plan)
		if err != nil {
			return err
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
			t, err := f.tls()
			if err != nil {
				return err
			}
			kv, err := clientv3.New(clientv3.Config{Endpoints: f.endpoints, TLS: t, Logger: zap.NewNop(), Username: f.user, Password: f.password})
			if err != nil {
				return err
			}
			defer kv.Close()
			found, err := recovery.Verify(ctx, recovered{client, kv}, p)
			if err != nil {
				return unanswered(err)
			}
			for _, w := range found.Wrong {
				fmt.Fprintln(c.OutOrStdout(), "WRONG  ", w)
			}
			for _, w := range found.Waits {
				fmt.Fprintln(c.OutOrStdout(), "NOT YET", w)
			}
			switch {
			case len(found.Wrong) > 0:
				return fmt.Errorf("the cluster is not as plan %s says, in %d points, which will not pass by themselves; %d more wait", p.ID, len(found.Wrong), len(found.Waits))
			case len(found.Waits) > 0:
				return notYet{fmt.Errorf("nothing is wrong, and %d points cannot be checked yet: run verify again in some seconds. What stays after a minute needs a node that is not up", len(found.Waits))}
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "all ranges have leaders and cover all keys, replicas agree, revisions are above %d\n", p.Ceiling)
			return err
		})
	})
	return c
}

// unanswered says why a cluster may not answer behind a recovery.
func unanswered(err error) error {
	const why = "a survivor serves once all survivors have applied the plan: its log says for whom it waits"
	if r := (*adminapi.Refusal)(nil); errors.As(err, &r) {
		return &adminapi.Refusal{Reason: r.Reason, NextStep: r.NextStep + "; " + why}
	}
	return fmt.Errorf("%w; %s", err, why)
}

// notYet says that a check has to be repeated.
type notYet struct{ error }

// namesOf lists names.
func namesOf[T fmt.Stringer](all []T) string {
	names := make([]string, len(all))
	for i, x := range all {
		names[i] = x.String()
	}
	return strings.Join(names, ", ")
}

// recovered is a running cluster as recovery.Verify asks it.
type recovered struct {
	*adminapi.Client
	kv *clientv3.Client
}

// Revision is that of a linearizable read.
func (r recovered) Revision(ctx context.Context) (keyspace.Revision, error) {
	resp, err := r.kv.Get(ctx, "\x00", clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return keyspace.Revision(resp.Header.Revision), nil
}

// forceNewCluster is --force-new-cluster.
func forceNewCluster(ctx context.Context, cfg *config.Config, logger *zap.Logger) error {
	p, err := recovery.Force(ctx, recovery.Dir{Data: cfg.DataDir, WAL: cfg.WALDir, Logger: logger}, clock.System().Wall())
	switch {
	case errors.Is(err, recovery.ErrLostSpans):
		return fmt.Errorf("--force-new-cluster: %w; to give them up use skein recover plan instead of this flag", err)
	case err != nil:
		return fmt.Errorf("--force-new-cluster: %w", err)
	case p == nil:
		logger.Info("--force-new-cluster: this node is the only one already; leave the flag out from now on")
		return nil
	}
	var lossy, kept int
	for _, v := range p.Groups {
		switch v.Verdict {
		case recovery.Doubtful:
			lossy++
		case recovery.Safe, recovery.Kept:
			kept++
		}
	}
	logger.Warn("made a new cluster of this node alone; leave --force-new-cluster out from now on, and do not start the others again",
		zap.String("plan", p.ID), zap.Int("groups-safe", kept), zap.Int("groups-that-may-have-lost-writes", lossy), zap.Int64("revisions-above", int64(p.Ceiling)))
	return nil
}

func readPlan(path string) (*recovery.Plan, error) {
	b, err := readFile(path)
	if err != nil {
		return nil, err
	}
	p, err := recovery.DecodePlan(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// readFile reads a file of skein recover, which has a bound.
func readFile(path string) (b []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	b, err = io.ReadAll(io.LimitReader(f, recovery.MaxFileBytes+1))
	return b, errors.Join(err, f.Close())
}

// writeNew writes a file completely or not at all.
func writeNew(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
