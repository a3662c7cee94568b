package node

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/wal"
)

// flagged makes the rig's nodes of what the flags say, but for directories, bus, clock, and the
// segments of the wal, which are in memory.
func flagged(cfg *config.Config) func(*Options) {
	return func(o *Options) {
		rigs := *o
		*o = options(cfg, zap.NewNop(), nil)
		o.Cluster, o.Self, o.Founders, o.Name = rigs.Cluster, rigs.Self, rigs.Founders, ""
		o.WALSegmentBytes = 16 << 20
		o.FS, o.DataDir, o.WALDir, o.Clock, o.NewBus, o.Logger = rigs.FS, rigs.DataDir, rigs.WALDir, rigs.Clock, rigs.NewBus, rigs.Logger
	}
}

// Limits that flags set together, up to their extremes, are either refused before the node
// starts, or it starts and takes the largest request that they allow.
func TestLimitsWorkTogetherOrAreRefused(t *testing.T) {
	const most = rangeapi.MaxRequestBytes
	for i, c := range []struct{ flags, refused string }{
		{flags: ""},
		{flags: fmt.Sprint("--max-request-bytes=", most)},
		{flags: fmt.Sprint("--max-request-bytes=", most+1), refused: fmt.Sprint("--max-request-bytes must be between 1 and ", most)},
		{flags: "--max-request-bytes=0", refused: "--max-request-bytes must be between 1"},
		{flags: "--max-request-bytes=1"},
		{flags: fmt.Sprint("--memory-budget-bytes=67108864 --max-request-bytes=", most)},
		{flags: "--memory-budget-bytes=67108864"},
		{flags: "--memory-budget-bytes=67108863", refused: "--memory-budget-bytes must be between 67108864"},
		{flags: "--memory-budget-bytes=17592186044416"},
		{flags: "--memory-budget-bytes=17592186044417", refused: "--memory-budget-bytes must be between"},
		{flags: "--memory-budget-bytes=18446744073709551615", refused: "for --memory-budget-bytes: value out of range"},
		{flags: "--memory-budget-bytes=137438953472"},
		{flags: "--max-txn-ops=1048576 --max-request-bytes=1000"},
		{flags: "--max-txn-ops=1 --max-request-bytes=4194304"},
		{flags: "--max-txn-ops=0", refused: "--max-txn-ops must be between 1"},
		{flags: "--heartbeat-interval=1 --election-timeout=5"},
		{flags: "--heartbeat-interval=201 --election-timeout=1000", refused: "at least as 5 times"},
		{flags: "--heartbeat-interval=10000 --election-timeout=50000 --node-dead-after=100s"},
		{flags: "--election-timeout=50001", refused: "too long"},
		{flags: "--node-dead-after=1999ms", refused: "--node-dead-after must be at least two election timeouts, 2s"},
		{flags: "--node-dead-after=2s --range-merge-after=5m"},
		{flags: "--node-dead-after=2562047h --range-merge-after=2562047h"},
		{flags: "--range-max-bytes=1048576 --max-request-bytes=4194304"},
		{flags: "--range-max-bytes=1048575", refused: "--range-max-bytes must be 0 or at least 1048576"},
		{flags: "--range-max-bytes=9223372036854775807 --range-split-load=9223372036854775807"},
		{flags: "--range-max-bytes=0 --range-split-load=0 --range-merge-after=0"},
		{flags: "--copy-bytes-per-second=1048575", refused: "--copy-bytes-per-second must be at least 1048576"},
		{flags: "--copy-bytes-per-second=9223372036854775807"},
		{flags: "--compaction-batch-limit=9223372036854775807", refused: "for --compaction-batch-limit: value out of range"},
		{flags: "--compaction-batch-limit=1 --compaction-sleep-interval=2562047h"},
		{flags: "--watch-progress-notify-interval=1ns --warning-unary-request-duration=1ns"},
	} {
		t.Run(c.flags, func(t *testing.T) {
			args := strings.Fields(c.flags)
			cfg, _, err := config.Load(args, nil)
			if c.refused != "" {
				if err == nil || !strings.Contains(err.Error(), c.refused) {
					t.Fatalf("%v, want a refusal that says %q", err, c.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if i%fewer(1, 3) > 0 {
				t.Skip("-short starts a third of the nodes")
			}
			bubble(t, 1, nil, flagged(cfg), func(r *rig) { largestPut(r, cfg.MaxRequestBytes) })
		})
	}
}

// largestPut puts a request of as many bytes as it may have, if a put can be as small.
func largestPut(r *rig, most int) {
	const fields = 16 // at most: key, and the tags and lengths of key and value
	if most <= fields {
		return
	}
	value := strings.Repeat("v", most-fields)
	r.mustPut(r.nodes[0], "k", value)
	r.mustGet(r.nodes[0], "k", value)
}

// On a node that leads all ranges of a transaction its parts do not refuse one another, however
// large its values or keys and however small the node's memory. Its clean-up after the answer
// does not make the node refuse the next transaction either.
func TestTheLargestTransactionOverSeveralRanges(t *testing.T) {
	long(t, "moves hundreds of megabytes")
	for _, request := range []int{3 << 19, rangeapi.MaxRequestBytes} {
		t.Run(fmt.Sprint(request), func(t *testing.T) {
			bubble(t, 1, borders(3), func(o *Options) {
				o.MaxRequestBytes, o.MemoryBytes, o.WALSegmentBytes = request, config.MinMemoryBytes, 48<<20
			}, func(r *rig) {
				n := r.nodes[0]
				r.spread(n, 3, "v")
				most := request - 300 // for what is beside the large ones
				half, all := strings.Repeat("x", most/2), strings.Repeat("x", most)
				for i, puts := range [][2]*pb.PutRequest{
					{{Key: []byte("k0000a"), Value: []byte(half)}, {Key: []byte("k0002a"), Value: []byte(half)}},
					{{Key: []byte("k0000a"), Value: []byte(all)}, {Key: []byte("k0002a"), Value: []byte("y")}},
					{{Key: []byte("k0000" + half), Value: []byte("y")}, {Key: []byte("k0002" + half), Value: []byte("y")}},
					{{Key: []byte("k0000" + all), Value: []byte("y")}, {Key: []byte("k0002a"), Value: []byte("y")}},
				} {
					txn := &pb.TxnRequest{}
					for j := range puts {
						txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: puts[j]}})
					}
					if _, err := n.core.KV().Txn(r.t.Context(), txn); err != nil {
						t.Errorf("transaction %d: %.200v", i, err)
					}
					if i > 0 { // the second comes while the locks of the first, which end behind its answer, are there
						time.Sleep(time.Second)
					}
				}
			})
		})
	}
}

// A segment that cannot hold the entry of the largest request is refused before anything is
// opened, and the size that the refusal names will do.
func TestSegmentsHoldTheLargestRequest(t *testing.T) {
	for _, request := range []int{4 << 10, 256 << 10, 3 << 19, rangeapi.MaxRequestBytes} {
		t.Run(fmt.Sprint(request), func(t *testing.T) {
			o := Options{MaxRequestBytes: request, WALSegmentBytes: int64(request)}
			err := o.check()
			if err == nil || !strings.Contains(err.Error(), "WALSegmentBytes") {
				t.Fatalf("segments of %d bytes: %v", o.WALSegmentBytes, err)
			}
			words := strings.Fields(err.Error())
			if _, err := fmt.Sscan(words[len(words)-1], &o.WALSegmentBytes); err != nil {
				t.Fatal(err)
			}
			bubble(t, 1, nil, func(rigs *Options) { rigs.MaxRequestBytes, rigs.WALSegmentBytes = request, o.WALSegmentBytes }, func(r *rig) { largestPut(r, request) })
		})
	}
	// An entry takes in requests until it is full, so that it may have nearly twice as much.
	if holds := wal.MaxEntryBytes(0); holds < 2*rangeapi.MaxRequestBytes+1<<20 {
		t.Errorf("segments of the default size hold entries of %d bytes", holds)
	}
}

// An entry of the log takes in requests until it is full, and so has nearly twice as much as one may write. With the largest requests that
// any flag allows, writes that come together still fit into the log: none of their entries is refused by it and made again.
func TestBatchesOfTheLargestRequestsFitIntoTheLog(t *testing.T) {
	long(t, "writes hundreds of megabytes")
	var mu sync.Mutex
	reg := prometheus.NewRegistry()
	options := func(o *Options) {
		mu.Lock()
		defer mu.Unlock()
		o.MaxRequestBytes, o.MemoryBytes, o.WALSegmentBytes, o.Registry = rangeapi.MaxRequestBytes, 512<<20, 0, reg
	}
	bubble(t, 1, nil, options, func(r *rig) {
		n := r.nodes[0]
		key := func(of, i int) []byte {
			return append(fmt.Appendf(nil, "d%02d/%02d/", of, i), bytes.Repeat([]byte("x"), 128<<10)...)
		}
		const deletes, keys, puts = 6, 31, 6 // 31 tombstones are what one request may write
		for of := range deletes {
			for i := range keys {
				r.mustPut(n, string(key(of, i)), "")
			}
		}
		value := bytes.Repeat([]byte("v"), rangeapi.MaxRequestBytes-32)
		errs := make([]error, puts+deletes)
		var all sync.WaitGroup
		for i := range errs {
			all.Go(func() {
				if i < puts {
					_, errs[i] = n.core.KV().Put(r.t.Context(), &pb.PutRequest{Key: fmt.Appendf(nil, "p%02d", i), Value: value})
					return
				}
				from := fmt.Appendf(nil, "d%02d/", i-puts)
				_, errs[i] = n.core.KV().DeleteRange(r.t.Context(), &pb.DeleteRangeRequest{Key: from, RangeEnd: append(from[:len(from)-1:len(from)-1], '0')})
			})
		}
		all.Wait()
		for i, err := range errs {
			if err != nil {
				t.Errorf("request %d: %.200v", i, err)
			}
		}
		if cuts := counted(t, reg, "skein_shard_pipeline_cuts_total"); cuts > 0 {
			t.Errorf("%v batches did not fit into the log", cuts)
		}
	})
}
