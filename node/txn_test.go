package node

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// bank is accounts in many ranges between which clients move money: whatever happens
// to nodes and network, every revision has all the money.
type bank struct {
	r        *rig
	accounts int
	moved    atomic.Int64
	unknown  atomic.Int64
	summed   atomic.Int64
	failed   atomic.Int64
}

const startMoney = 100

func (b *bank) key(i int) string { return keyOf(i%6) + fmt.Sprintf("%02d", i) }

func putOp(key, value string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}}}
}

func getOp(key string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(key)}}}
}

func valueIs(key, value string) *pb.Compare {
	return &pb.Compare{Key: []byte(key), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte(value)}}
}

// gateway returns a node that runs.
func (b *bank) gateway(rng *rand.Rand) *Core {
	for range 10 {
		if c := b.r.nodes[rng.IntN(len(b.r.nodes))].running(); c != nil {
			return c
		}
	}
	return nil
}

// open puts the money there, in one transaction over all ranges.
func (b *bank) open(ctx context.Context) error {
	t := &pb.TxnRequest{}
	for i := range b.accounts {
		t.Success = append(t.Success, putOp(b.key(i), strconv.Itoa(startMoney)))
	}
	resp, err := b.r.nodes[0].core.KV().Txn(ctx, t)
	if err == nil && resp.Header.Revision != 2 {
		err = fmt.Errorf("revision %d", resp.Header.Revision)
	}
	return err
}

// move takes money from one account to another, if they are as they were read.
func (b *bank) move(ctx context.Context, rng *rand.Rand) {
	from, to := rng.IntN(b.accounts), rng.IntN(b.accounts)
	c := b.gateway(rng)
	if from == to || c == nil {
		return
	}
	x, y := b.key(from), b.key(to)
	read := &pb.TxnRequest{Success: []*pb.RequestOp{getOp(x), getOp(y)}}
	resp, err := c.KV().Txn(ctx, read)
	if err != nil {
		b.failed.Add(1)
		return
	}
	value := func(i int) string { return string(resp.Responses[i].GetResponseRange().Kvs[0].Value) }
	have, _ := strconv.Atoi(value(0))
	has, _ := strconv.Atoi(value(1))
	part := 1 + rng.IntN(10)
	t := &pb.TxnRequest{
		Compare: []*pb.Compare{valueIs(x, value(0)), valueIs(y, value(1))},
		Success: []*pb.RequestOp{putOp(x, strconv.Itoa(have-part)), getOp(x), putOp(y, strconv.Itoa(has+part))},
		Failure: []*pb.RequestOp{getOp(x), getOp(y)},
	}
	done, err := c.KV().Txn(ctx, t)
	switch {
	case err != nil && kverror.Of(err).Fate() == kverror.Unknown:
		b.unknown.Add(1)
	case err != nil:
		b.failed.Add(1)
	case done.Succeeded:
		b.moved.Add(1)
		if kv := done.Responses[1].GetResponseRange().Kvs[0]; string(kv.Value) != strconv.Itoa(have-part) || kv.ModRevision != done.Header.Revision {
			b.r.t.Errorf("a transaction does not see its own write: %v at %d", kv, done.Header.Revision)
		}
	}
}

// sum counts the money at one revision, in one of six ways.
func (b *bank) sum(ctx context.Context, rng *rand.Rand) {
	c := b.gateway(rng)
	if c == nil {
		return
	}
	all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
	var resp *pb.RangeResponse
	var err error
	switch rng.IntN(6) {
	case 0:
		resp, err = c.KV().Range(ctx, all)
	case 3:
		all.Serializable = true
		resp, err = c.KV().Range(ctx, all)
	case 4, 5:
		all.Serializable = rng.IntN(2) == 0
		resp, err = streamed(ctx, c, all)
	case 1:
		var now *pb.RangeResponse
		if now, err = c.KV().Range(ctx, &pb.RangeRequest{Key: []byte("z")}); err == nil {
			all.Revision = 2 + rng.Int64N(now.Header.Revision-1)
			resp, err = c.KV().Range(ctx, all)
		}
	default:
		var t *pb.TxnResponse
		t, err = c.KV().Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{
			{Request: &pb.RequestOp_RequestRange{RequestRange: all}}, putOp("z", "summed"),
		}})
		if err == nil {
			resp = t.Responses[0].GetResponseRange()
		}
	}
	if err != nil {
		b.failed.Add(1)
		return
	}
	if all.Serializable && resp.Header.Revision < 2 {
		return // of a node that has not heard of the money yet
	}
	total := 0
	for _, kv := range resp.Kvs {
		n, _ := strconv.Atoi(string(kv.Value))
		total += n
	}
	b.summed.Add(1)
	if total != b.accounts*startMoney || len(resp.Kvs) != b.accounts || resp.Count != int64(b.accounts) {
		b.r.t.Errorf("%d in %d accounts (count %d) at revision %d of %d", total, len(resp.Kvs), resp.Count, all.Revision, resp.Header.Revision)
	}
}

// streamed reads by RangeStream.
func streamed(ctx context.Context, c *Core, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	all := &pb.RangeResponse{}
	return all, c.KV().RangeStream(ctx, req, func(keys []byte, last *pb.RangeResponse) error {
		part := &pb.RangeResponse{}
		if err := proto.Unmarshal(keys, part); err != nil {
			return err
		}
		proto.Merge(all, part)
		if last != nil {
			proto.Merge(all, last)
		}
		return nil
	})
}

// A node that is left alone answers serializable reads from what it has, and no others.
func TestSerializableReadsWithoutAQuorum(t *testing.T) {
	t.Parallel()
	bubble(t, 3, borders(6), shortLog, func(r *rig) {
		b := &bank{r: r, accounts: 12}
		if err := b.open(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		b.work(fewer(3, 2), func() { time.Sleep(fewer(2*time.Second, time.Second)) })
		b.unlocked()
		time.Sleep(5 * time.Second) // all replicas have all of it
		r.net.Partition(r.nodes[0].id)
		time.Sleep(5 * time.Second)
		c := r.nodes[0].core
		ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
		defer cancel()
		if _, err := c.KV().Range(ctx, &pb.RangeRequest{Key: []byte(b.key(0))}); err == nil {
			r.t.Error("a linearizable read without a quorum")
		}
		// Nobody waits for a leader that cannot be there.
		begin := time.Now()
		one, err := c.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(b.key(0)), Serializable: true})
		if err != nil || len(one.Kvs) != 1 {
			r.t.Errorf("one key: %v, %v", one, err)
		}
		all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), Serializable: true}
		for name, read := range map[string]func() (*pb.RangeResponse, error){
			"read":   func() (*pb.RangeResponse, error) { return c.KV().Range(r.t.Context(), all) },
			"stream": func() (*pb.RangeResponse, error) { return streamed(r.t.Context(), c, all) },
		} {
			resp, err := read()
			if err != nil {
				r.t.Errorf("%s: %v", name, err)
				continue
			}
			total := 0
			for _, kv := range resp.Kvs {
				n, _ := strconv.Atoi(string(kv.Value))
				total += n
			}
			if total != b.accounts*startMoney || resp.Header.Revision < 2 {
				r.t.Errorf("%s: %d at revision %d", name, total, resp.Header.Revision)
			}
		}
		if took := time.Since(begin); took > 100*time.Millisecond {
			r.t.Errorf("the reads took %v", took)
		}
		r.net.HealAll()
		time.Sleep(3 * time.Second)
	})
}

// work lets clients work while the nemesis does.
func (b *bank) work(clients int, nemesis func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range clients {
		rng := rand.New(rand.NewPCG(uint64(i), 77))
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
				if rng.IntN(4) == 0 {
					b.sum(ctx, rng)
				} else {
					b.move(ctx, rng)
				}
				cancel()
				time.Sleep(time.Duration(rng.Int64N(int64(fewer(20*time.Millisecond, 60*time.Millisecond)))))
			}
		})
	}
	nemesis()
	close(stop)
	wg.Wait()
}

// unlocked waits until no range holds a lock or a record.
func (b *bank) unlocked() {
	b.r.t.Helper()
	var left string
	for range 100 {
		left = ""
		for _, n := range b.r.nodes {
			for _, p := range n.core.shards.Replicas() {
				if st := p.Show(); st.Locks+st.TxnRecords > 0 {
					left += fmt.Sprintf("node %s range %s: %d locks, %d records; ", n.id, p.Range(), st.Locks, st.TxnRecords)
				}
			}
		}
		if left == "" {
			return
		}
		time.Sleep(200 * time.Millisecond)
	}
	b.r.t.Errorf("locks are left behind: %s", left)
}

// check ends a test of the bank.
func (b *bank) check(least int64) {
	b.r.t.Helper()
	b.unlocked()
	rng := rand.New(rand.NewPCG(9, 9))
	for range 6 {
		b.sum(b.r.t.Context(), rng)
	}
	b.r.t.Logf("%d moved, %d sums, %d failed, %d of unknown fate", b.moved.Load(), b.summed.Load(), b.failed.Load(), b.unknown.Load())
	if b.moved.Load() < least || b.summed.Load() < least/4 {
		b.r.t.Errorf("only %d transfers and %d sums", b.moved.Load(), b.summed.Load())
	}
}

// Money moves between ranges while these are split.
func TestTransfersOverSplitRanges(t *testing.T) {
	t.Parallel()
	bubble(t, 3, borders(6), shortLog, func(r *rig) {
		b := &bank{r: r, accounts: 18}
		if err := b.open(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		b.work(fewer(8, 3), func() {
			for i := range fewer(12, 8) {
				time.Sleep(fewer(300*time.Millisecond, 150*time.Millisecond))
				b.split([]byte(b.key(i)))
			}
		})
		b.check(int64(fewer(100, 30)))
	})
}

// split splits the range of a key there.
func (b *bank) split(key []byte) {
	for range 20 {
		for _, n := range b.r.nodes {
			c := n.running()
			if c == nil {
				continue
			}
			for _, p := range c.shards.Replicas() {
				if d := p.Descriptor(); d.Span.Contains(key) && p.Leader().IsLeader {
					ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
					_, err := p.Split(ctx, 0, key)
					cancel()
					if err == nil || kverror.Of(err).Kind == kverror.BadRequest {
						return
					}
				}
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// running returns the node's Core, nil while it is down.
func (n *rigNode) running() *Core {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.core
}

// Nodes die with the transactions that they coordinate and the ranges that they lead.
// They come back without their unsynced writes.
func TestTransfersThroughCrashes(t *testing.T) {
	t.Parallel()
	bubble(t, 3, borders(6), shortLog, func(r *rig) {
		b := &bank{r: r, accounts: 12}
		if err := b.open(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(1, 1))
		b.work(fewer(6, 3), func() {
			for range fewer(3, 2) {
				time.Sleep(time.Duration(300+rng.IntN(500)) * time.Millisecond)
				n := r.nodes[rng.IntN(3)]
				r.crash(n)
				if rng.IntN(2) == 0 {
					b.split([]byte(b.key(rng.IntN(12))))
				}
				time.Sleep(time.Duration(1000+rng.IntN(1000)) * time.Millisecond)
				r.start(n)
			}
			time.Sleep(time.Second)
		})
		b.check(int64(fewer(50, 20)))
	})
}

// A coordinator is cut off with its locks prepared, and comes back when others have
// decided against it: it loses, and nothing of it is seen (trap 78). Nobody waits for it
// longer than seconds.
func TestTransfersThroughPartitions(t *testing.T) {
	t.Parallel()
	bubble(t, 3, borders(6), shortLog, func(r *rig) {
		b := &bank{r: r, accounts: 12}
		if err := b.open(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(4, 1))
		b.work(fewer(6, 3), func() {
			for range fewer(3, 2) {
				time.Sleep(time.Duration(300+rng.IntN(700)) * time.Millisecond)
				r.net.Partition(r.nodes[rng.IntN(3)].id)
				time.Sleep(time.Duration(500+rng.IntN(3000)) * time.Millisecond)
				r.net.HealAll()
			}
			time.Sleep(fewer(3*time.Second, time.Second))
		})
		b.check(int64(fewer(50, 20)))
	})
}

// The record of a transaction lists the spans of its locks. If it is larger than an entry, its range
// refuses the commit for good. The client learns that nothing has happened, and the keys are free
// again without a restart.
func TestARecordThatNoEntryHolds(t *testing.T) {
	long(t, "moves a hundred megabytes")
	long := strings.Repeat("x", 900<<10)
	var splits [][]byte
	for i := range 5 {
		splits = append(splits, fmt.Appendf(nil, "k%d%s", i, long))
	}
	bubble(t, 3, splits, func(o *Options) { o.MaxRequestBytes, o.WALSegmentBytes = 3<<19, 24<<20 }, func(r *rig) {
		n := r.nodes[0]
		keys := []string{"k0", "k1", "k2", "k3", "k4", "k5"}
		for _, k := range keys {
			r.mustPut(n, k, "old")
		}
		begin := time.Now()
		_, err := n.core.KV().DeleteRange(r.t.Context(), &pb.DeleteRangeRequest{Key: []byte("k"), RangeEnd: []byte("l")})
		r.wantKind("a delete over long borders", err, kverror.RequestTooLarge)
		for _, k := range keys {
			r.mustGet(n, k, "old")
			r.mustPut(n, k, "new")
		}
		if took := time.Since(begin); took > time.Second {
			r.t.Errorf("the keys were locked for %v", took)
		}
		(&bank{r: r}).unlocked()
	})
}
