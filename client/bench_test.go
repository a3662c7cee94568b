package client_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/skeindb/skein/embedtest"
)

// BenchmarkPut compares puts of 256 bytes by the pipe with etcd's calls: cpu-µs/op is what the node and the client, in one process,
// take for one together. Elapsed times have the disk in them.
func BenchmarkPut(b *testing.B) {
	c := open(b, at(embedtest.New(b).Endpoints()...))
	value := string(make([]byte, 256))
	compare(b, func(ctx context.Context, key string) error {
		_, err := c.Put(ctx, key, value)
		return err
	}, func(ctx context.Context, key string) error {
		_, err := c.Etcd().Put(ctx, key, value)
		return err
	})
}

// BenchmarkGet is BenchmarkPut for linearizable reads of a key.
func BenchmarkGet(b *testing.B) {
	c := open(b, at(embedtest.New(b).Endpoints()...))
	compare(b, func(ctx context.Context, key string) error {
		_, err := c.Get(ctx, key)
		return err
	}, func(ctx context.Context, key string) error {
		_, err := c.Etcd().Get(ctx, key)
		return err
	})
}

func compare(b *testing.B, byPipe, byCall func(ctx context.Context, key string) error) {
	b.Helper()
	for _, way := range []struct {
		name string
		do   func(ctx context.Context, key string) error
	}{{"pipe", byPipe}, {"call", byCall}} {
		b.Run(way.name, func(b *testing.B) {
			var n atomic.Int64
			b.ReportAllocs()
			b.SetParallelism(256 / 2)
			before := cpuMicros(b)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					if err := way.do(b.Context(), fmt.Sprintf("k/%d", n.Add(1)%10000)); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(cpuMicros(b)-before)/float64(b.N), "cpu-µs/op")
		})
	}
}

// cpuMicros returns the processor time of this process.
func cpuMicros(b *testing.B) int64 {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return (u.Utime.Sec+u.Stime.Sec)*1e6 + u.Utime.Usec + u.Stime.Usec
}
