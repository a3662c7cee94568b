package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// backupOptions are the command line of the measure.
type backupOptions struct {
	stored
	runs, pairs, clients, conns int
	limit                       string
	rate                        float64
	turn                        time.Duration
}

func backupFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o backupOptions
	o.flags(set, 2_000_000)
	set.IntVar(&o.runs, "runs", 3, "backups without a bound, each with a restore")
	set.IntVar(&o.pairs, "pairs", 5, "turns of puts with backups beside them, and as many without")
	set.StringVar(&o.limit, "backup-rate", "", "--rate of the backups beside puts (default: that of the command)")
	set.Float64Var(&o.rate, "rate", 1000, "puts a second")
	set.DurationVar(&o.turn, "turn", 20*time.Second, "length of a turn of puts")
	set.IntVar(&o.clients, "clients", 64, "clients at a time")
	set.IntVar(&o.conns, "conns", 12, "connections")
	return func(ctx context.Context, b *bench) error {
		if o.runs < 0 || o.pairs < 0 || o.rate <= 0 || o.turn < 2*turnWarmup {
			return fmt.Errorf("backup: %d runs, %d pairs, %v puts a second, turns of %v: no less than 0, puts, and %v", o.runs, o.pairs, o.rate, o.turn, 2*turnWarmup)
		}
		if err := o.check(); err != nil {
			return err
		}
		return backingUp(ctx, b, &o)
	}
}

// The names of the figures.
const (
	backupSeconds  = "backup, s"
	backupBytes    = "backup, MB/s"
	backupMemory   = "backup: the command's memory, MiB"
	backupCPU      = "backup: CPU of the command, s"
	backupNodesCPU = "backup: CPU of the nodes, s"
	backupFiles    = "backup: its files / live data"

	restoreSeconds  = "restore, s"
	restoreVersions = "restore, versions/s"
	restoreBytes    = "restore, MB/s"
	restoreMemory   = "restore: the command's memory, MiB"
	restoreCPU      = "restore: CPU of the command, s"
	restoreNodesCPU = "restore: CPU of the nodes, s"

	besideP50   = "put p50, ms"
	besideP99   = "put p99, ms"
	besideRate  = "puts/s"
	besideBytes = "backups beside them, MB/s"
)

// The sides of the puts: the same cluster by turns.
const (
	aloneSide  = "alone"
	besideSide = "beside backups"
)

// turnWarmup is the begin of a turn, which is not counted.
const turnWarmup = 2 * time.Second

// backingUp measures backups of a filled cluster and restores of them, and what backups cost puts.
func backingUp(ctx context.Context, b *bench, o *backupOptions) error {
	file, err := b.snapshotFile(ctx, &o.stored)
	if err != nil {
		return err
	}
	var out struct {
		Full   []figureSet            `json:"full"`
		Beside map[string][]figureSet `json:"beside"`
	}
	skein := b.skein()
	err = b.with(ctx, []*cluster{skein}, func() (err error) {
		if _, err = skein.imported(ctx, &o.stored, file); err != nil {
			return err
		}
		for range o.runs {
			f, err := o.full(ctx, b, skein)
			if err != nil {
				return err
			}
			progress("%v", f)
			out.Full = append(out.Full, f)
		}
		out.Beside, err = o.beside(ctx, skein)
		return err
	})
	if err != nil {
		return err
	}
	writeBarred(os.Stdout, "A backup to a folder without a bound, and its restore into three new nodes", o.String(), out.Full, []barred{
		{backupSeconds, ""},
		{backupBytes, "≥ 80"},
		{backupMemory, commandMemory},
		{backupCPU, ""},
		{backupNodesCPU, ""},
		{backupFiles, ""},
		{restoreSeconds, ""},
		{restoreVersions, "≥ 60,000"},
		{restoreBytes, "≥ 25"},
		{restoreMemory, commandMemory},
		{restoreCPU, ""},
		{restoreNodesCPU, ""},
	})
	o.writeBeside(out.Beside)
	return errors.Join(b.save("backup.json", out), b.dropFile(&o.stored, file))
}

// full makes a backup as fast as can be, once the cluster has come to rest, and restores it.
func (o *backupOptions) full(ctx context.Context, b *bench, c *cluster) (f figureSet, err error) {
	folder := filepath.Join(b.dir, "backup")
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	if _, err := c.settle(ctx); err != nil {
		return nil, err
	}
	r, nodesCPU, err := c.costsOf(ctx, "backup", "create", "file://"+folder, "--rate", "0")
	if err != nil {
		return nil, err
	}
	size, _, err := sizeOf(folder)
	if err != nil {
		return nil, err
	}
	f = figureSet{
		backupSeconds: r.seconds, backupBytes: o.bytes() / megabyte / r.seconds, backupMemory: float64(r.memory) / mebibyte,
		backupCPU: r.cpu, backupNodesCPU: nodesCPU, backupFiles: float64(size) / o.bytes(),
	}
	restored := b.cluster("restored", skeinBinary, 200, c.args)
	return f, b.with(ctx, []*cluster{restored}, func() error {
		r, nodesCPU, err := restored.costsOf(ctx, "restore", "file://"+folder, "--exact")
		if err != nil {
			return err
		}
		f[restoreSeconds], f[restoreVersions], f[restoreBytes] = r.seconds, float64(o.keys)/r.seconds, o.bytes()/megabyte/r.seconds
		f[restoreMemory], f[restoreCPU], f[restoreNodesCPU] = float64(r.memory)/mebibyte, r.cpu, nodesCPU
		return restored.counts(ctx, o.keys)
	})
}

// costsOf runs a command of Skein's. nodesCPU is the processor time of all nodes meanwhile, in seconds.
func (c *cluster) costsOf(ctx context.Context, args ...string) (r ran, nodesCPU float64, err error) {
	before, err := c.cpu()
	if err != nil {
		return r, 0, err
	}
	if r, err = c.run(ctx, args...); err != nil {
		return r, 0, err
	}
	after, err := c.cpu()
	return r, (after - before).Seconds(), err
}

// sizeOf is the size of all files below a directory, and what they take on the disk: some room is taken before it is used.
func sizeOf(dir string) (size, taken int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		switch {
		case err == nil:
			size += info.Size()
			if s, ok := info.Sys().(*syscall.Stat_t); ok {
				taken += s.Blocks * 512
			}
		case errors.Is(err, fs.ErrNotExist): // a server has just removed it
			err = nil
		}
		return err
	})
	return size, taken, err
}

// beside puts at a steady rate by turns: alone, and while one backup after the other is made.
func (o *backupOptions) beside(ctx context.Context, c *cluster) (map[string][]figureSet, error) {
	p := pace{endpoints: c.endpoints(), conns: o.conns, clients: o.clients, value: o.value, rate: o.rate}
	for n := range o.keys {
		p.keys = append(p.keys, []byte(o.key(n)))
	}
	p.pick = evenlyOf(o.keys)
	return paired(o.pairs, []string{aloneSide, besideSide}, func(side string, _ int) (figureSet, error) {
		if _, err := c.settle(ctx); err != nil {
			return nil, err
		}
		l, err := p.start(ctx)
		if err != nil {
			return nil, err
		}
		defer l.stop()
		if err := sleep(ctx, turnWarmup); err != nil {
			return nil, err
		}
		f, from := figureSet{}, l.now()
		if side == aloneSide {
			err = sleep(ctx, o.turn-turnWarmup)
		} else {
			f[besideBytes], err = o.backups(ctx, c)
		}
		to := l.now()
		if err != nil {
			return nil, err
		}
		l.stop()
		if n, err := l.failures(0, to); n > 0 {
			return nil, fmt.Errorf("%d puts failed: %w", n, err)
		}
		took := l.took(from, to)
		f[besideP50], f[besideP99], f[besideRate] = millis(quantile(took, 500)), millis(quantile(took, 990)), l.madeRate(from, to)
		return f, nil
	})
}

// backups makes one backup after the other for a turn, and returns the MB/s that they have read.
func (o *backupOptions) backups(ctx context.Context, c *cluster) (float64, error) {
	folder := filepath.Join(filepath.Dir(c.dir), "beside")
	args := []string{"backup", "create", "file://" + folder}
	if o.limit != "" {
		args = append(args, "--rate", o.limit)
	}
	began, made := time.Now(), 0
	for time.Since(began) < o.turn-turnWarmup {
		if _, err := c.run(ctx, args...); err != nil {
			return 0, err
		}
		made++
		if err := os.RemoveAll(folder); err != nil {
			return 0, err
		}
	}
	return float64(made) * o.bytes() / megabyte / time.Since(began).Seconds(), nil
}

func (o *backupOptions) writeBeside(runs map[string][]figureSet) {
	if len(runs[besideSide]) == 0 {
		return
	}
	limit := o.limit
	if limit == "" {
		limit = "its default"
	}
	t := table.New(fmt.Sprintf("%.0f puts/s", o.rate), "alone: all", "beside backups: all", "beside / alone: median (lowest to highest)", "bar")
	for _, row := range []barred{{besideP50, ""}, {besideP99, "≤ 1.2"}, {besideRate, ""}} {
		alone, beside := column(runs[aloneSide], row.name), column(runs[besideSide], row.name)
		t.Add(row.name, table.Figures(alone, "%.2f"), table.Figures(beside, "%.2f"), table.Spread(beside, alone), row.bar)
	}
	t.Add(besideBytes, "", table.Figures(column(runs[besideSide], besideBytes), "%.1f"))
	t.Write(os.Stdout, "Puts with backups beside them, at --rate "+limit)
}
