package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// importOptions are the command line of the measure.
type importOptions struct {
	stored
	runs   int
	export bool
}

func importFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o importOptions
	o.flags(set, 2_000_000)
	set.IntVar(&o.runs, "runs", 3, "imports, each into a new cluster")
	set.BoolVar(&o.export, "export", true, "export what was imported, too")
	return func(ctx context.Context, b *bench) error {
		if o.runs < 1 {
			return fmt.Errorf("import: %d runs: at least one", o.runs)
		}
		if err := o.check(); err != nil {
			return err
		}
		return importing(ctx, b, &o)
	}
}

// The names of the figures.
const (
	importSeconds  = "import, s"
	importVersions = "import, versions/s"
	importBytes    = "import, MB/s"
	importMemory   = "import: the command's memory, MiB"
	importTemp     = "import: temporary files / live data"
	importCPU      = "import: CPU of the command, s"
	importNodesCPU = "import: CPU of the nodes, s"
	importNode     = "import: a node's memory at most, MiB"
	exportSeconds  = "export, s"
	exportBytes    = "export, MB/s"
	exportMemory   = "export: the command's memory, MiB"
	exportTemp     = "export: temporary files / live data"
	exportCPU      = "export: CPU of the command, s"
	exportNodesCPU = "export: CPU of the nodes, s"
)

const (
	megabyte = 1e6
	// commandMemory is the bar for the memory of a command, in MiB.
	commandMemory = "≤ 512"
)

// importing imports an etcd's snapshot into three new nodes and exports it again.
func importing(ctx context.Context, b *bench, o *importOptions) error {
	file, err := b.snapshotFile(ctx, &o.stored)
	if err != nil {
		return err
	}
	var runs []figureSet
	for range o.runs {
		skein := b.skein()
		err := b.with(ctx, []*cluster{skein}, func() error {
			f, err := o.once(ctx, skein, file)
			if err == nil {
				runs = append(runs, f)
				progress("%v", f)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	writeBarred(os.Stdout, "An etcd's snapshot into three new nodes, and back into a file", o.String(), runs, []barred{
		{importSeconds, "≤ 60 with 2,000,000 keys of 256 bytes, ≤ 600 with 8 GiB"},
		{importVersions, "≥ 60,000"},
		{importBytes, "≥ 25"},
		{importMemory, commandMemory},
		{importTemp, "≤ 1.2"},
		{importCPU, ""},
		{importNodesCPU, ""},
		{importNode, ""},
		{exportSeconds, "≤ 60 with 2,000,000 keys of 256 bytes"},
		{exportBytes, ""},
		{exportMemory, commandMemory},
		{exportTemp, ""},
		{exportCPU, ""},
		{exportNodesCPU, ""},
	})
	return errors.Join(b.save("import.json", runs), b.dropFile(&o.stored, file))
}

func (o *importOptions) once(ctx context.Context, c *cluster, file string) (figureSet, error) {
	f := figureSet{}
	began, err := c.cpu()
	if err != nil {
		return nil, err
	}
	r, err := c.imported(ctx, &o.stored, file)
	if err != nil {
		return nil, err
	}
	loaded, err := c.cpu()
	if err != nil {
		return nil, err
	}
	f[importSeconds], f[importVersions], f[importBytes] = r.seconds, float64(o.keys)/r.seconds, o.bytes()/megabyte/r.seconds
	f[importMemory], f[importTemp] = float64(r.memory)/mebibyte, float64(r.temporary)/o.bytes()
	f[importCPU], f[importNodesCPU] = r.cpu, (loaded - began).Seconds()
	var most []int64
	for i := range nodes {
		m, err := resident(c.pid(i))
		if err != nil {
			return nil, err
		}
		most = append(most, m.peak)
	}
	f[importNode] = float64(slices.Max(most)) / mebibyte
	if !o.export {
		return f, nil
	}
	return f, o.exported(ctx, c, f)
}

// exported exports everything, once the cluster has come to rest.
func (o *importOptions) exported(ctx context.Context, c *cluster, f figureSet) error {
	if _, err := c.settle(ctx); err != nil {
		return err
	}
	began, err := c.cpu()
	if err != nil {
		return err
	}
	file := filepath.Join(filepath.Dir(c.dir), "exported.db")
	r, err := c.run(ctx, "export", "etcd", file)
	if err != nil {
		return err
	}
	ended, err := c.cpu()
	if err != nil {
		return err
	}
	records, err := numberIn(r.output, "records")
	if err == nil && records != int64(o.keys) {
		err = fmt.Errorf("export: %d records of %d keys", records, o.keys)
	}
	f[exportSeconds], f[exportBytes] = r.seconds, o.bytes()/megabyte/r.seconds
	f[exportMemory], f[exportTemp] = float64(r.memory)/mebibyte, float64(r.temporary)/o.bytes()
	f[exportCPU], f[exportNodesCPU] = r.cpu, (ended - began).Seconds()
	return errors.Join(err, os.Remove(file))
}
