package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node/process"
)

// What BenchmarkRestart's node has in its log, and in how many ranges.
const (
	restartRanges     = 1000
	restartWALBytes   = 1 << 30
	restartValueBytes = 64 << 10
)

// BenchmarkRestart kills a node with 1,000 ranges and 1 GiB of live wal, and starts it
// again. The store has none of that in tables, so all of it is read, checked and applied
// again. open-s is the time until the node takes part in the cluster, serving-s the time
// until a put to each range was answered. It is alone in its cluster, so that nobody else
// serves meanwhile.
func BenchmarkRestart(b *testing.B) {
	stop := process.UseMemoryBudget(restartMemory)
	defer stop()
	dir, addrs := b.TempDir(), unusedAddrs(b, 2)
	keys := filepath.Join(dir, "keys")
	if err := os.WriteFile(keys, restartBorders(), 0o600); err != nil {
		b.Fatal(err)
	}
	start := func() *Node {
		client, peer := "http://"+addrs[0], "http://"+addrs[1]
		cfg, _, err := config.Load([]string{
			"--data-dir", filepath.Join(dir, "data"), "--initial-split-keys", keys, "--memory-budget-bytes", fmt.Sprint(int64(restartMemory)),
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
		}, nil)
		if err != nil {
			b.Fatal(err)
		}
		n, err := Start(b.Context(), cfg, zap.NewNop())
		if err != nil {
			b.Fatal(err)
		}
		return n
	}
	n := start()
	if err := putEverywhere(b, n, restartWALBytes/restartRanges/restartValueBytes+1); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	var opened, served time.Duration
	live := int64(0)
	for range b.N {
		b.StopTimer()
		live = n.core.wal.LiveBytes()
		n.crash()
		b.StartTimer()
		begin := time.Now()
		n = start()
		opened += time.Since(begin)
		if err := putEverywhere(b, n, 0); err != nil {
			b.Fatal(err)
		}
		served += time.Since(begin)
	}
	b.StopTimer()
	b.ReportMetric(float64(live)/(1<<30), "wal-GiB")
	b.ReportMetric(opened.Seconds()/float64(b.N), "open-s")
	b.ReportMetric(served.Seconds()/float64(b.N), "serving-s")
	if err := n.Stop(context.Background()); err != nil {
		b.Error(err)
	}
}

// restartMemory is a budget whose memtables hold all of the wal each: nothing is flushed before
// the node is killed.
const restartMemory = 22 << 30

// restartBorders is the file of the keys at which the ranges begin.
func restartBorders() (file []byte) {
	for i := 1; i < restartRanges; i++ {
		file = fmt.Appendf(file, "k%04d\n", i)
	}
	return file
}

// putEverywhere puts so many values, at least a small one, to each range, and returns when
// all are answered.
func putEverywhere(b *testing.B, n *Node, values int) error {
	b.Helper()
	const writers = 50
	errs := make([]error, writers)
	deadline := time.Now().Add(5 * time.Minute)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			value := make([]byte, restartValueBytes)
			for i := range value {
				value[i] = byte(rng.Uint32())
			}
			put := func(key string, value []byte) {
				for errs[w] == nil {
					_, err := n.core.KV().Put(b.Context(), &pb.PutRequest{Key: []byte(key), Value: value})
					if err == nil {
						return
					}
					if time.Now().After(deadline) {
						errs[w] = err
					}
				}
			}
			for r := w; r < restartRanges; r += writers {
				put(fmt.Sprintf("k%04d/", r), nil)
				for i := range values {
					put(fmt.Sprintf("k%04d/%04d", r, i), value)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// crash ends the node without a flush.
func (n *Node) crash() {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	n.api.Stop(ctx)
	n.cancel()
	<-n.done
	n.core.Crash()
}
