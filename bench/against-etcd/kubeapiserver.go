package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/skeindb/skein/bench/against-etcd/apiserver"
)

// apiserverOptions are the command line of the measure.
type apiserverOptions struct {
	pairs, total, workers int
	version, binary       string
}

func apiserverFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o apiserverOptions
	set.IntVar(&o.pairs, "pairs", 5, "runs of each side")
	set.IntVar(&o.total, "total", 5000, "operations of each kind in a run")
	set.IntVar(&o.workers, "workers", 64, "clients of kube-apiserver")
	set.StringVar(&o.version, "version", "v1.36.3", "version of Kubernetes whose kube-apiserver is built")
	set.StringVar(&o.binary, "binary", "", "a kube-apiserver that was built before, in place of a new one")
	return func(ctx context.Context, b *bench) error { return apiservers(ctx, b, o) }
}

// apiservers puts a kube-apiserver on each side, and loads one and the other by turns.
func apiservers(ctx context.Context, b *bench, o apiserverOptions) (err error) {
	if o.binary == "" {
		o.binary = filepath.Join(b.dir, "bench-apiserver")
		progress("building kube-apiserver %s", o.version)
		if err := apiserver.Build(ctx, o.version, filepath.Join(b.dir, "kubernetes"), o.binary); err != nil {
			return err
		}
	}
	sides := map[string]*cluster{etcdSide: b.etcd(), skeinSide: b.skein(keepRanges...)}
	return b.with(ctx, []*cluster{sides[etcdSide], sides[skeinSide]}, func() (err error) {
		servers := map[string]*apiserver.Server{}
		defer func() {
			for side, s := range servers {
				if err = errors.Join(err, s.Stop()); err == nil && !b.keep {
					err = os.RemoveAll(b.apiserverDir(side))
				}
			}
		}()
		for i, side := range []string{etcdSide, skeinSide} {
			c := sides[side]
			s, err := apiserver.Start(ctx, o.binary, b.apiserverDir(side), b.port+300+i, c.all(c.clientURL, ""))
			if err != nil {
				return fmt.Errorf("on %s: %w", side, err)
			}
			servers[side] = s
			if err := s.Grant(ctx, o.workers); err != nil {
				return fmt.Errorf("on %s: %w", side, err)
			}
		}
		for _, c := range sides {
			if _, err := c.settle(ctx); err != nil {
				return err
			}
		}
		runs, err := paired(o.pairs, []string{etcdSide, skeinSide}, func(side string, _ int) (figureSet, error) {
			return apiserverRun(ctx, sides[side], servers[side], o)
		})
		if len(runs[skeinSide]) > 0 {
			writePairs(os.Stdout, fmt.Sprintf("kube-apiserver %s, %d clients", o.version, o.workers), runs, slices.Sorted(maps.Keys(runs[skeinSide][0])))
			err = errors.Join(err, b.save("apiserver.json", runs))
		}
		return err
	})
}

func (b *bench) apiserverDir(side string) string { return filepath.Join(b.dir, "apiserver-"+side) }

// apiserverRun does as much of each kind on one side. The servers' processor time is that of the whole run, with what it leaves behind.
func apiserverRun(ctx context.Context, c *cluster, s *apiserver.Server, o apiserverOptions) (figureSet, error) {
	all := figureSet{}
	before, err := c.cpu()
	if err != nil {
		return nil, err
	}
	own, err := cpuTime(s.PID())
	if err != nil {
		return nil, err
	}
	for _, kind := range []string{apiserver.Create, apiserver.Renew, apiserver.Delete} {
		r, err := s.Load(ctx, kind, o.total, o.workers)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", kind, err)
		}
		all[kind+", 1/s"], all[kind+" p50, ms"], all[kind+" p99, ms"] = r.PerSecond, millis(r.P50), millis(r.P99)
	}
	if _, err := c.settle(ctx); err != nil {
		return nil, err
	}
	after, err := c.cpu()
	if err != nil {
		return nil, err
	}
	spent, err := cpuTime(s.PID())
	all["CPU of the servers for all, s"], all["CPU of kube-apiserver for all, s"] = (after - before).Seconds(), (spent - own).Seconds()
	return all, err
}
