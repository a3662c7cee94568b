package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/bench/against-etcd/table"
)

// stored is the data that measures of data in and out begin with.
type stored struct {
	keys, value int
	// file is an etcd's snapshot with these keys, of an earlier run; empty is none.
	file string
}

// flags registers the flags of the data.
func (d *stored) flags(set *flag.FlagSet, keys int) {
	set.IntVar(&d.keys, "keys", keys, "keys")
	set.IntVar(&d.value, "value-size", 242, "bytes of a value; a key has 14 more")
	set.StringVar(&d.file, "file", "", "etcd's snapshot of an earlier run with the same sizes, which it leaves with --keep")
}

// check refuses sizes that cannot be.
func (d *stored) check() error {
	// Every other revision would be of the same key.
	if d.keys < 1 || d.keys%shuffle == 0 || d.value < 1 || d.value > mebibyte {
		return fmt.Errorf("%d keys with values of %d bytes: at least one of each, no multiple of %d keys, at most %d bytes", d.keys, d.value, shuffle, mebibyte)
	}
	return nil
}

// shuffle is a prime. Keys are written in another order than they are sorted in.
const shuffle = 611_953

// key is the n-th key that is written, of keyBytes.
func (d *stored) key(n int) string { return fmt.Sprintf("data/%0*d", keyBytes-5, n*shuffle%d.keys) }

const keyBytes = 14

// bytes is the size of all keys and values.
func (d *stored) bytes() float64 { return float64(d.keys) * float64(keyBytes+d.value) }

// String describes the data.
func (d *stored) String() string {
	return fmt.Sprintf("%d keys, %d bytes with each value", d.keys, keyBytes+d.value)
}

// fill puts all keys. Values do not compress.
func (d *stored) fill(ctx context.Context, c *cluster) error {
	clients, done, err := c.connectSome(c.founders())
	if err != nil {
		return err
	}
	defer done()
	// A transaction stays below etcd's bounds of 128 operations and 1.5 MiB.
	each := max(1, min(fillTxnPuts, mebibyte/(keyBytes+d.value)))
	began := time.Now()
	err = inParallel(ctx, (d.keys+each-1)/each, fillers, func(ctx context.Context, i int) error {
		random := rand.New(rand.NewPCG(3, uint64(i)))
		var puts []clientv3.Op
		for n := i * each; n < min((i+1)*each, d.keys); n++ {
			puts = append(puts, clientv3.OpPut(d.key(n), string(cut(random, d.value))))
		}
		_, err := clients[i%len(clients)].Txn(ctx).Then(puts...).Commit()
		return err
	})
	if err != nil {
		return fmt.Errorf("fill %s: %w", c.name, err)
	}
	progress("%s: %d keys after %s", c.name, d.keys, time.Since(began).Round(time.Millisecond))
	return nil
}

// quota are etcd's flags for a store of this size.
func (d *stored) quota() []string {
	return []string{"--quota-backend-bytes", strconv.FormatInt(int64(2*d.bytes())+2<<30, 10)}
}

// source is an etcd of one node, not started.
func (b *bench) source(d *stored) *cluster {
	c := b.cluster(etcdSide, etcdBinary, 0, etcdArgs(d.quota()...))
	c.size = 1
	return c
}

// snapshotFile returns an etcd's snapshot of the data, and makes it unless one was given.
func (b *bench) snapshotFile(ctx context.Context, d *stored) (path string, err error) {
	if d.file != "" {
		return d.file, nil
	}
	path = filepath.Join(b.dir, "source.db")
	c := b.source(d)
	err = b.with(ctx, []*cluster{c}, func() error {
		if err := d.fill(ctx, c); err != nil {
			return err
		}
		client, err := c.connect(0)
		if err != nil {
			return err
		}
		defer client.Close()
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		_, err = snapshotTo(ctx, client, f)
		return errors.Join(err, f.Close())
	})
	return path, err
}

// dropFile removes the file of snapshotFile unless it is to be kept.
func (b *bench) dropFile(d *stored, path string) error {
	if b.keep || d.file != "" {
		progress("--file %s is the data of the next run", path)
		return nil
	}
	return os.Remove(path)
}

// snapshotRun is one answer of Maintenance.Snapshot.
type snapshotRun struct {
	first, took time.Duration // to the first piece, and to the end
	bytes       int64
}

// snapshotTo writes a node's Maintenance.Snapshot, and checks the hash at its end.
func snapshotTo(ctx context.Context, client *clientv3.Client, to io.Writer) (run snapshotRun, err error) {
	began := time.Now()
	stream, err := pb.NewMaintenanceClient(client.ActiveConnection()).Snapshot(ctx, &pb.SnapshotRequest{})
	if err != nil {
		return run, fmt.Errorf("snapshot: %w", err)
	}
	sum := sha256.New()
	var tail []byte // the last bytes that came: the hash, once all have come
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return run, fmt.Errorf("snapshot, after %d bytes: %w", run.bytes, err)
		}
		if run.bytes == 0 {
			run.first = time.Since(began)
		}
		run.bytes += int64(len(piece.Blob))
		if _, err := to.Write(piece.Blob); err != nil {
			return run, err
		}
		tail = append(tail, piece.Blob...)
		passed := max(0, len(tail)-sha256.Size)
		sum.Write(tail[:passed])
		tail = append(tail[:0], tail[passed:]...)
	}
	run.took = time.Since(began)
	if !bytes.Equal(sum.Sum(nil), tail) {
		return run, fmt.Errorf("snapshot: the hash at the end of its %d bytes is not theirs", run.bytes)
	}
	return run, nil
}

// ran is what a command took.
type ran struct {
	output       string
	seconds, cpu float64
	// memory is the most that it had resident, temporary the most that its files in the temporary directory held,
	// removed ones too, in bytes.
	memory, temporary int64
}

// sampleEvery is the pause between two looks at a running command.
const sampleEvery = 50 * time.Millisecond

// run runs a command of Skein's against the cluster, with a temporary directory of its own.
func (c *cluster) run(ctx context.Context, args ...string) (r ran, err error) {
	temp, err := os.MkdirTemp(filepath.Dir(c.dir), "temp-")
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	cmd := exec.CommandContext(ctx, c.binary, append(args, "--endpoints", strings.Join(c.endpoints(), ","))...)
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out, lines bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &lines
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return r, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for err = errUnderWay; errors.Is(err, errUnderWay); {
		select {
		case err = <-ended:
		case <-tick.C:
			// A process that has just ended has neither memory nor files.
			if m, err := resident(cmd.Process.Pid); err == nil {
				r.memory = max(r.memory, m.peak)
			}
			r.temporary = max(r.temporary, heldIn(cmd.Process.Pid, temp))
		}
	}
	r.seconds, r.output = time.Since(began).Seconds(), out.String()
	if err != nil {
		return r, fmt.Errorf("skein %s: %w\n%s", strings.Join(args, " "), err, &lines)
	}
	r.cpu = (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	return r, nil
}

// heldIn is the size of the files below a directory that a process has open. They may have no name any more.
func heldIn(pid int, dir string) (size int64) {
	fds := fmt.Sprintf("/proc/%d/fd", pid)
	open, err := os.ReadDir(fds)
	if err != nil {
		return 0 // it has just ended
	}
	for _, fd := range open {
		link := filepath.Join(fds, fd.Name())
		if to, err := os.Readlink(link); err != nil || !strings.HasPrefix(to, dir+"/") {
			continue
		}
		if info, err := os.Stat(link); err == nil {
			size += info.Size()
		}
	}
	return size
}

// imported imports an etcd's snapshot into the cluster, and checks that all its keys are there.
func (c *cluster) imported(ctx context.Context, d *stored, file string) (r ran, err error) {
	if r, err = c.run(ctx, "import", "etcd", file); err != nil {
		return r, err
	}
	return r, c.counts(ctx, d.keys)
}

// counts checks how many keys each node counts.
func (c *cluster) counts(ctx context.Context, keys int) error {
	for i := range c.founders() {
		client, err := c.connect(i)
		if err != nil {
			return err
		}
		got, err := client.Get(ctx, "data/", clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err = errors.Join(err, client.Close()); err != nil {
			return fmt.Errorf("count at %s of %s: %w", nodeName(i), c.name, err)
		}
		if got.Count != int64(keys) {
			return fmt.Errorf("%s of %s counts %d keys, in place of %d", nodeName(i), c.name, got.Count, keys)
		}
	}
	return nil
}

// A barred is a figure with the bar that it is to keep.
type barred struct{ name, bar string }

// writeBarred prints the figures of all runs, their medians and bars. Figures that no run has are left out.
func writeBarred(out io.Writer, caption, of string, runs []figureSet, rows []barred) {
	t := table.New(of, "every run", "median", "bar")
	for _, row := range rows {
		var all []float64
		for _, f := range runs {
			if v, there := f[row.name]; there {
				all = append(all, v)
			}
		}
		if len(all) > 0 {
			t.Add(row.name, strings.Join(table.Numbers(all), " "), table.Number(table.Median(all)), row.bar)
		}
	}
	t.Write(out, caption)
}

// numberIn reads the number before a word of a text, as in "3 records".
func numberIn(text, word string) (int64, error) {
	fields := strings.Fields(strings.NewReplacer(",", " ", ";", " ").Replace(text))
	for i := 1; i < len(fields); i++ {
		if fields[i] == word {
			return strconv.ParseInt(fields[i-1], 10, 64)
		}
	}
	return 0, fmt.Errorf("%q does not say how many %s", text, word)
}
