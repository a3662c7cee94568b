package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
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
	clients, done, err := c.connectSome(nodes)
	if err != nil {
		return err
	}
	defer done()
	value := strings.Repeat("v", f.value)
	return inParallel(ctx, (f.keys+fillTxnPuts-1)/fillTxnPuts, fillers, func(ctx context.Context, i int) error {
		var puts []clientv3.Op
		for n := i * fillTxnPuts; n < min((i+1)*fillTxnPuts, f.keys); n++ {
			puts = append(puts, clientv3.OpPut(f.key(n), value))
		}
		_, err := clients[i%nodes].Txn(ctx).Then(puts...).Commit()
		return err
	})
}

// processMemory is the resident memory of a process, in bytes.
type processMemory struct {
	now, peak int64 // the peak since resetPeak
	// anonymous is what of now belongs to no file. A server that maps its database has pages of that file too, which the
	// kernel can take back.
	anonymous int64
}

func resident(pid int) (processMemory, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return processMemory{}, err
	}
	return parseStatus(text)
}

// parseStatus reads VmRSS, VmHWM and RssAnon, which are in KiB.
func parseStatus(text []byte) (m processMemory, err error) {
	fields := map[string]*int64{"VmRSS:": &m.now, "VmHWM:": &m.peak, "RssAnon:": &m.anonymous}
	for line := range bytes.Lines(text) {
		words := strings.Fields(string(line))
		if len(words) < 2 || fields[words[0]] == nil {
			continue
		}
		kib, nan := strconv.ParseInt(words[1], 10, 64)
		*fields[words[0]], err = kib<<10, errors.Join(err, nan)
	}
	if err == nil && (m.now == 0 || m.peak == 0 || m.anonymous == 0) {
		err = errors.New("/proc/PID/status: no VmRSS, VmHWM or RssAnon")
	}
	return m, err
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
		m, err := resident(c.pid(i))
		if err != nil {
			return grown, err
		}
		before[i] = m.now
	}
	if err := work(); err != nil {
		return grown, err
	}
	for i := range nodes {
		m, err := resident(c.pid(i))
		if err != nil {
			return grown, err
		}
		grown[i] = float64(max(m.peak-before[i], 0)) / mebibyte
	}
	return grown, nil
}
