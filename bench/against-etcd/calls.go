package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// connectSome makes so many clients with a connection each, of the nodes by turns. done closes them.
func (c *cluster) connectSome(n int) (clients []*clientv3.Client, done func(), err error) {
	done = func() {
		for _, client := range clients {
			_ = client.Close() // nothing is under way any more
		}
	}
	for i := range n {
		client, err := c.connect(i % c.founders())
		if err != nil {
			done()
			return nil, nil, err
		}
		clients = append(clients, client)
	}
	return clients, done, nil
}

// A callRun is what calls of one kind took.
type callRun struct {
	// took is how long each call took, acked when it was answered, since the run began.
	took, acked []time.Duration
	// over is how long all took, cpu the servers' processor time meanwhile.
	over, cpu time.Duration
}

// calls makes n calls, so many at once, as fast as they are answered. One that fails ends it.
func (c *cluster) calls(ctx context.Context, n, atOnce int, do func(ctx context.Context, i int) error) (r callRun, err error) {
	before, err := c.cpu()
	if err != nil {
		return r, err
	}
	r.took, r.acked = make([]time.Duration, n), make([]time.Duration, n)
	began := time.Now()
	err = inParallel(ctx, n, atOnce, func(ctx context.Context, i int) error {
		ctx, cancel := context.WithTimeout(ctx, fillDeadline)
		defer cancel()
		sent := time.Since(began)
		err := do(ctx, i)
		r.acked[i] = time.Since(began)
		r.took[i] = r.acked[i] - sent
		return err
	})
	r.over = time.Since(began)
	if err != nil {
		return r, err
	}
	after, err := c.cpu()
	r.cpu = after - before
	return r, err
}

// The figures of calls. Their names follow that of the kind.
const (
	callRate    = "%s: a second"
	callP50     = "%s: p50, ms"
	callP99     = "%s: p99, ms"
	callLongest = "%s: longest, ms"
	callCPU     = "%s: servers' CPU each, µs"
)

// callNames are the names of all figures of a kind.
func callNames(kind string) (names []string) {
	for _, name := range []string{callRate, callP50, callP99, callLongest, callCPU} {
		names = append(names, fmt.Sprintf(name, kind))
	}
	return names
}

// into adds the figures of a kind.
func (r *callRun) into(f figureSet, kind string) {
	n := float64(len(r.took))
	for i, v := range []float64{n / r.over.Seconds(), milli(r.took, 500), milli(r.took, 990), millis(slices.Max(r.took)), micros(r.cpu) / n} {
		f[callNames(kind)[i]] = v
	}
}

// without is the longest time in which no call was answered.
func (r *callRun) without() time.Duration {
	slices.Sort(r.acked)
	return longestGap(append([]time.Duration{0}, r.acked...), 0, r.over).Length
}
