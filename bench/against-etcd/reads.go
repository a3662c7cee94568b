package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

// filling is the content of both sides before the reads: the same keys, spread evenly
// over Skein's ranges.
type filling struct {
	keys, value, ranges int
	// prefixes are the first keys of the ranges.
	prefixes [][]byte
}

// fillTxnPuts is how many keys one transaction puts when a side is filled. fillers is
// how many transactions run at the same time.
const (
	fillTxnPuts = 100
	fillers     = 8
)

// everything is a read of all keys.
func everything() *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
}

// filled starts both sides, fills them and does work.
func (b *bench) filled(ctx context.Context, f *filling, work func(sides []*cluster) error) error {
	if f.keys < 1 || f.ranges < 1 {
		return fmt.Errorf("%d keys over %d ranges: at least one of each", f.keys, f.ranges)
	}
	skein := b.skein("--initial-ranges", strconv.Itoa(f.ranges))
	sides := []*cluster{b.etcd(), skein}
	return b.with(ctx, sides, func() error {
		if err := skein.created(ctx, f.ranges); err != nil {
			return err
		}
		list, err := skein.ranges(ctx)
		if err != nil {
			return err
		}
		f.prefixes = firstKeys(list)
		for _, c := range sides {
			began := time.Now()
			if err := f.fill(ctx, c); err != nil {
				return fmt.Errorf("fill %s: %w", c.name, err)
			}
			progress("%s: %d keys after %s", c.name, f.keys, time.Since(began))
		}
		return work(sides)
	})
}

// key is the n-th key. The keys of one transaction lie in one range.
func (f *filling) key(n int) string {
	return fmt.Sprintf("%s/%09d", f.prefixes[n/fillTxnPuts%len(f.prefixes)], n)
}

func (f *filling) fill(ctx context.Context, c *cluster) error {
	clients, err := c.connectAll()
	if err != nil {
		return err
	}
	defer closeAll(clients)
	value := strings.Repeat("v", f.value)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for i := range fillers {
		g.Go(func() error {
			for {
				from := int(next.Add(fillTxnPuts)) - fillTxnPuts
				if from >= f.keys {
					return nil
				}
				var puts []clientv3.Op
				for n := from; n < min(from+fillTxnPuts, f.keys); n++ {
					puts = append(puts, clientv3.OpPut(f.key(n), value))
				}
				if _, err := clients[i%nodes].Txn(ctx).Then(puts...).Commit(); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// resident is a process's memory now, and its peak since resetPeak, in bytes.
func resident(pid int) (now, peak int64, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	return parseStatus(text)
}

// parseStatus reads VmRSS and VmHWM, which are in KiB.
func parseStatus(text []byte) (now, peak int64, err error) {
	for line := range bytes.Lines(text) {
		fields := strings.Fields(string(line))
		if len(fields) < 2 {
			continue
		}
		kib, nan := strconv.ParseInt(fields[1], 10, 64)
		switch fields[0] {
		case "VmRSS:":
			now, err = kib<<10, errors.Join(err, nan)
		case "VmHWM:":
			peak, err = kib<<10, errors.Join(err, nan)
		}
	}
	if err == nil && (now == 0 || peak == 0) {
		err = errors.New("/proc/PID/status: no VmRSS or VmHWM")
	}
	return now, peak, err
}

// resetPeak sets the peak of a process to its present memory.
func resetPeak(pid int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
}

// growth is the largest growth of each node's memory during work, in MiB.
func (c *cluster) growth(work func() error) (grown [nodes]float64, err error) {
	var before [nodes]int64
	for i := range nodes {
		if err := resetPeak(c.pid(i)); err != nil {
			return grown, err
		}
		if before[i], _, err = resident(c.pid(i)); err != nil {
			return grown, err
		}
	}
	if err := work(); err != nil {
		return grown, err
	}
	for i := range nodes {
		_, peak, err := resident(c.pid(i))
		if err != nil {
			return grown, err
		}
		grown[i] = float64(max(peak-before[i], 0)) / mebibyte
	}
	return grown, nil
}
