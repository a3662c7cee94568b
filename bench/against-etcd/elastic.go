package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/skeindb/skein/bench/against-etcd/rawwatch"
)

// keepRanges are flags of nodes that keep the ranges as the measure has made them,
// whatever their sizes and loads.
var keepRanges = []string{"--range-max-bytes", "0", "--range-split-load", "0"}

// numbered returns n keys in order, for a measure that must know which range a key is
// in.
func numbered(n int) [][]byte {
	keys := make([][]byte, n)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "%08d", i)
	}
	return keys
}

// borders returns the numbers of the keys at which ranges begin if so many keys are
// spread evenly over so many ranges; the first is 0.
func borders(keys, ranges int) []int {
	out := make([]int, ranges)
	for i := range out {
		out[i] = i * keys / ranges
	}
	return out
}

// elastic is a Skein cluster, not started, whose ranges begin at the keys with these
// numbers; the first is 0.
func (b *bench) elastic(keys [][]byte, borders []int, flags ...string) (*cluster, error) {
	flags = append(slices.Clone(keepRanges), flags...)
	if len(borders) > 1 {
		var at []string
		for _, i := range borders[1:] {
			at = append(at, string(keys[i]))
		}
		file, err := b.splitFile(at)
		if err != nil {
			return nil, err
		}
		flags = append(flags, "--initial-split-keys", file)
	}
	return b.skein(flags...), nil
}

// inParallel does n things, a limited number at a time, until one fails.
func inParallel(ctx context.Context, n, atOnce int, do func(context.Context, int) error) error {
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range min(n, atOnce) {
		g.Go(func() error {
			for {
				i := int(next.Add(1)) - 1
				if i >= n || ctx.Err() != nil {
					return ctx.Err()
				}
				if err := do(ctx, i); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// An admin sends requests about ranges to a node. It keeps its connection and starts no
// process as the commands do, so that the servers keep the processors.
type admin struct{ conn *grpc.ClientConn }

func (c *cluster) admin(i int) (*admin, error) {
	conn, err := rawwatch.Connect(c.clientURL(i))
	return &admin{conn}, err
}

func (a *admin) close() { _ = a.conn.Close() }

// call sends a request and returns the fields of the answer. It works on untyped
// messages, because this module does not depend on Skein's.
func (a *admin) call(ctx context.Context, method string, request proto.Message) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	var answer emptypb.Empty
	if err := a.conn.Invoke(ctx, "/skein.admin.v1.Admin/"+method, request, &answer); err != nil {
		return nil, fmt.Errorf("%s: %w", method, err)
	}
	return answer.ProtoReflect().GetUnknown(), nil
}

// split makes a range begin at a key.
func (a *admin) split(ctx context.Context, key []byte) error {
	_, err := a.call(ctx, "RangeSplit", wrapperspb.Bytes(key))
	return err
}

// mergeLimit bounds the wait for a merge; mergePoll lies between two polls.
const (
	mergeLimit = time.Minute
	mergePoll  = 20 * time.Millisecond
)

// merge lets a range absorb its right neighbour, and returns when the operation has
// ended, whatever its outcome.
func (a *admin) merge(ctx context.Context, left uint64) error {
	answer, err := a.call(ctx, "RangeMerge", wrapperspb.UInt64(left))
	if err != nil {
		return err
	}
	ids, err := operationIDs(answer)
	if err == nil && len(ids) != 1 {
		err = fmt.Errorf("RangeMerge: %d operations in the answer", len(ids))
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, mergeLimit)
	defer cancel()
	return waitUntil(ctx, mergePoll, func() error {
		under, err := a.operations(ctx)
		if err == nil && slices.Contains(under, ids[0]) {
			err = errUnderWay
		}
		return err
	})
}

var errUnderWay = errors.New("it is under way yet")

// operations returns the ids of the operations under way.
func (a *admin) operations(ctx context.Context) ([]uint64, error) {
	answer, err := a.call(ctx, "OperationList", &emptypb.Empty{})
	if err != nil {
		return nil, err
	}
	return operationIDs(answer)
}

// operationIDs reads the ids of the operations in an answer's first field.
func operationIDs(answer []byte) (ids []uint64, err error) {
	err = rawwatch.EachField(answer, func(n protowire.Number, _ uint64, operation []byte) error {
		if n != 1 {
			return nil
		}
		return rawwatch.EachField(operation, func(n protowire.Number, v uint64, _ []byte) error {
			if n == 1 {
				ids = append(ids, v)
			}
			return nil
		})
	})
	return ids, err
}

// totals sums a metric over the running nodes, by labels.
func (c *cluster) totals(ctx context.Context, name string) (map[string]float64, error) {
	sums := map[string]float64{}
	for i, p := range c.running {
		if p == nil {
			continue
		}
		page, err := c.metrics(ctx, i)
		if err != nil {
			return nil, err
		}
		for series, v := range page {
			if labels, ok := strings.CutPrefix(series, name); ok && (labels == "" || labels[0] == '{') {
				sums[labels] += v
			}
		}
	}
	return sums, nil
}

// total is the sum of a metric over the running nodes, and over labels.
func (c *cluster) total(ctx context.Context, name string) (float64, error) {
	by, err := c.totals(ctx, name)
	var sum float64
	for _, v := range by {
		sum += v
	}
	return sum, err
}

const operationsUnderWay = "skein_placement_operations_under_way"

// calm waits until placement has been idle for a while and the nodes are nearly idle.
func (c *cluster) calm(ctx context.Context, since, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	return waitUntil(ctx, time.Second, func() error {
		if err := c.alive(); err != nil {
			return err
		}
		n, err := c.total(ctx, operationsUnderWay)
		switch {
		case err != nil:
			return err
		case n > 0:
			began = time.Now()
			return fmt.Errorf("%.0f operations are under way", n)
		case time.Since(began) < since:
			return errNotYetCalm
		}
		return nil
	})
}

var errNotYetCalm = errors.New("nothing is under way, but not for long")
