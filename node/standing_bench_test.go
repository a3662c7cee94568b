package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node/process"
)

// standingMemory is the budget of BenchmarkIdleReplicas.
const standingMemory = 2 << 30

// BenchmarkIdleReplicas starts a lone node with so many ranges. It reports the live heap and the stacks of
// each, at rest. rss-MiB is the most memory that the process had resident. Run one size at a time, with
// -benchtime 1x.
func BenchmarkIdleReplicas(b *testing.B) {
	for _, ranges := range []int{1000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("ranges=%d", ranges), func(b *testing.B) {
			for b.Loop() {
				idleReplicas(b, ranges)
			}
		})
	}
}

func idleReplicas(b *testing.B, ranges int) {
	b.Helper()
	stop := process.UseMemoryBudget(standingMemory)
	defer stop()
	before := liveBytes()
	addrs, dir := unusedAddrs(b, 2), b.TempDir()
	client, peer := "http://"+addrs[0], "http://"+addrs[1]
	cfg, _, err := config.Load([]string{
		"--data-dir", filepath.Join(dir, "data"), "--memory-budget-bytes", fmt.Sprint(int64(standingMemory)),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
	}, nil)
	if err != nil {
		b.Fatal(err)
	}
	o := options(cfg, zap.NewNop(), nil)
	m, err := joiner(cfg, &o, nil).Find(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	o.SetMembership(m)
	o.SplitKeys = nil // more than --initial-split-keys takes
	for i := 1; i < ranges; i++ {
		o.SplitKeys = append(o.SplitKeys, fmt.Appendf(nil, "k%08d", i))
	}
	if err := o.FS.MkdirAll(cfg.DataDir, 0o700); err != nil {
		b.Fatal(err)
	}
	c, err := Open(b.Context(), o)
	if err != nil {
		b.Fatal(err)
	}
	asleep := func() (n int) {
		for _, g := range c.host.Groups() {
			if !g.ID().IsSystem() && g.Status().Asleep {
				n++
			}
		}
		return n
	}
	began := time.Now()
	for asleep() < ranges {
		if time.Since(began) > 4*time.Minute {
			b.Fatalf("%d of %d replicas sleep", asleep(), ranges)
		}
		time.Sleep(100 * time.Millisecond)
	}
	b.ReportMetric(float64(liveBytes()-before)/float64(ranges), "B/replica")
	b.ReportMetric(float64(peakResident(b))/(1<<20), "rss-MiB")
	if err := c.Stop(context.Background()); err != nil {
		b.Error(err)
	}
}

// liveBytes returns the live heap and the stacks.
func liveBytes() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}

// peakResident returns the most memory that the process had resident.
func peakResident(b *testing.B) int64 {
	b.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		b.Fatal(err)
	}
	found := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)
	if found == nil {
		b.Fatal("no VmHWM in /proc/self/status")
	}
	kib, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return kib << 10
}
