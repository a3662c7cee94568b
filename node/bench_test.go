package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/node/process"
	"github.com/skeindb/skein/router"
)

// benchRanges and benchValueBytes are those of the comparison with etcd.
const (
	benchRanges     = 8
	benchKeys       = 10000
	benchValueBytes = 256
)

// unusedAddrs returns addresses of loopback that nobody uses, for TCP and UDP.
func unusedAddrs(b *testing.B, n int) (addrs []string) {
	b.Helper()
	free, err := ports.Unused(n)
	if err != nil {
		b.Fatal(err)
	}
	for _, port := range free {
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", port))
	}
	return addrs
}

// benchNodes starts three whole nodes in this process, on QUIC over loopback, with
// real disks and the defaults of their settings, and writes every key once.
func benchNodes(b *testing.B) []*Node {
	b.Helper()
	before := debug.SetGCPercent(-1)
	stop := process.UseMemoryBudget(1 << 30) // as a process does
	b.Cleanup(func() {
		stop()
		debug.SetGCPercent(before)
	})
	addrs := unusedAddrs(b, 6)
	var members string
	for i := range 3 {
		members += fmt.Sprintf("n%d=http://%s,", i+1, addrs[3+i])
	}
	dir := b.TempDir()
	nodes, errs := make([]*Node, 3), make([]error, 3)
	var wg sync.WaitGroup
	for i := range nodes {
		name, client, peer := fmt.Sprintf("n%d", i+1), "http://"+addrs[i], "http://"+addrs[3+i]
		cfg, _, err := config.Load([]string{
			"--name", name, "--data-dir", filepath.Join(dir, name),
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", members[:len(members)-1], "--initial-ranges", fmt.Sprint(benchRanges),
		}, nil)
		if err != nil {
			b.Fatal(err)
		}
		wg.Go(func() { nodes[i], errs[i] = Start(b.Context(), cfg, zap.NewNop()) })
	}
	wg.Wait()
	b.Cleanup(func() {
		for _, n := range nodes {
			if n != nil {
				wg.Go(func() {
					if err := n.Stop(context.Background()); err != nil {
						b.Error(err)
					}
				})
			}
		}
		wg.Wait()
	})
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	fillKeys(b, nodes)
	return nodes
}

// fillKeys writes every key once, through every node by turns.
func fillKeys(b *testing.B, nodes []*Node) {
	b.Helper()
	value := make([]byte, benchValueBytes)
	deadline := time.Now().Add(60 * time.Second)
	const writers = 300
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := w; i < benchKeys; {
				_, err := nodes[i%len(nodes)].core.KV().Put(b.Context(), &pb.PutRequest{Key: benchKey(i), Value: value})
				if err == nil {
					i += writers
				} else if time.Now().After(deadline) {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
}

// benchKey spreads keys over all of the ranges, whose borders divide what can be
// printed evenly.
func benchKey(i int) []byte { return fmt.Appendf(nil, "%c/key/%08d", '!'+byte(i%93), i) }

// gateway is how a benchmark talks to a node.
type gateway struct {
	put func(context.Context, *pb.PutRequest) error
	get func(context.Context, *pb.RangeRequest) error
}

func directly(kv router.Own) gateway {
	return gateway{
		put: func(ctx context.Context, q *pb.PutRequest) error { _, err := kv.Put(ctx, q); return err },
		get: func(ctx context.Context, q *pb.RangeRequest) error { _, err := kv.Range(ctx, q); return err },
	}
}

// overGRPC has 8 connections to the node, by turns: one is soon the narrowest place.
func overGRPC(b *testing.B, n *Node) gateway {
	b.Helper()
	var kvs [8]pb.KVClient
	for i := range kvs {
		c, err := grpc.NewClient(n.ClientAddrs()[0].String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		kvs[i] = pb.NewKVClient(c)
	}
	var next atomic.Uint32
	kv := func() pb.KVClient { return kvs[next.Add(1)%uint32(len(kvs))] }
	return gateway{
		put: func(ctx context.Context, q *pb.PutRequest) error { _, err := kv().Put(ctx, q); return err },
		get: func(ctx context.Context, q *pb.RangeRequest) error { _, err := kv().Range(ctx, q); return err },
	}
}

// BenchmarkPath is the whole path of a put and of a linearizable get. Three nodes run
// in this process with 8 ranges, values of 256 bytes, a real bus and real disks;
// clients are spread over the nodes. "router" calls the gateway as a function. "grpc"
// goes through the client port, and its CPU includes the client's. One client at a time
// tells the latency, many tell the cost.
func BenchmarkPath(b *testing.B) {
	nodes := benchNodes(b)
	var direct, grpcs []gateway
	for _, n := range nodes {
		direct, grpcs = append(direct, directly(n.core.KV())), append(grpcs, overGRPC(b, n))
	}
	value := make([]byte, benchValueBytes)
	for _, op := range []struct {
		name string
		do   func(ctx context.Context, g *gateway, i int) error
	}{
		{"put", func(ctx context.Context, g *gateway, i int) error {
			return g.put(ctx, &pb.PutRequest{Key: benchKey(i), Value: value})
		}},
		{"get", func(ctx context.Context, g *gateway, i int) error {
			return g.get(ctx, &pb.RangeRequest{Key: benchKey(i)})
		}},
	} {
		for _, by := range []struct {
			name     string
			gateways []gateway
		}{{"router", direct}, {"grpc", grpcs}} {
			for _, clients := range []int{1, 512} {
				b.Run(fmt.Sprintf("%s/%s/clients=%d", op.name, by.name, clients), func(b *testing.B) {
					benchPath(b, clients, func(n int) error {
						return op.do(b.Context(), &by.gateways[n%len(by.gateways)], n*7919%benchKeys)
					})
				})
			}
		}
	}
}

// benchPath has so many clients do one operation after the other.
func benchPath(b *testing.B, clients int, do func(n int) error) {
	b.Helper()
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	cpu := measure.CPU()
	for range clients {
		wg.Go(func() {
			for {
				n := int(next.Add(1)) - 1
				if n >= b.N {
					return
				}
				if err := do(n); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "op/s")
	b.ReportMetric(float64((measure.CPU()-cpu).Nanoseconds())/1e3/float64(b.N), "cpu-µs/op")
}
