package shard

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
	dto "github.com/prometheus/client_model/go"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/sim/simbus"
)

// callInput is one operation of a history, callOutput its answer. A key's value is
// unique to the operation that wrote it.
type callInput struct {
	op          string // put, get, cas, del
	key         string
	value, want string
}

type callOutput struct {
	unknown bool
	done    bool
	value   string
	rev     int64 // the header's
	mod     int64 // the key's, for a get
}

// keyState is what the model knows of a key: mod is 0 while unknown, at is the
// highest revision of an answer so far.
type keyState struct {
	value string
	mod   int64
	at    int64
}

// model is etcd for one key.
var model = porcupine.Model{
	Partition: func(h []porcupine.Operation) [][]porcupine.Operation {
		by := map[string][]porcupine.Operation{}
		for _, o := range h {
			k := o.Input.(callInput).key
			by[k] = append(by[k], o)
		}
		var all [][]porcupine.Operation
		for _, l := range by {
			all = append(all, l)
		}
		return all
	},
	Init: func() any { return keyState{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, out := state.(keyState), input.(callInput), output.(callOutput)
		if !out.unknown && out.rev < s.at {
			return false, s
		}
		next := s
		next.at = max(s.at, out.rev)
		switch in.op {
		case "get":
			ok := out.unknown || out.value == s.value && (s.mod == 0 || s.value == "" || s.mod == out.mod)
			if ok && !out.unknown {
				next.mod = out.mod
			}
			return ok, next
		case "put":
			next.value, next.mod = in.value, out.rev
			return out.unknown || out.rev > s.mod, next
		case "del":
			if !out.unknown && out.done != (s.value != "") {
				return false, s
			}
			if s.value != "" {
				next.value, next.mod = "", out.rev
			}
			return true, next
		default: // cas
			holds := s.value == in.want
			if !out.unknown && out.done != holds {
				return false, s
			}
			if holds {
				next.value, next.mod = in.value, out.rev
			}
			return true, next
		}
	},
}

// history records operations with virtual times.
type history struct {
	mu  sync.Mutex
	ops []porcupine.Operation
	// definite counts those with an answer.
	definite int
	start    time.Time
}

func (h *history) add(client int, in callInput, from time.Time, out callOutput) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ret := time.Since(h.start).Nanoseconds()
	if out.unknown {
		if in.op == "get" {
			return
		}
		ret = math.MaxInt64
	} else {
		h.definite++
	}
	h.ops = append(h.ops, porcupine.Operation{
		ClientId: client, Input: in, Call: from.Sub(h.start).Nanoseconds(), Output: out, Return: ret,
	})
}

// check judges the history.
func (h *history) check(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.definite*10 < len(h.ops)*8 || h.definite < 100 {
		t.Fatalf("%d of %d operations have a definite answer", h.definite, len(h.ops))
	}
	switch porcupine.CheckOperationsTimeout(model, h.ops, 0) {
	case porcupine.Ok:
	case porcupine.Illegal:
		for _, o := range h.ops {
			t.Logf("%+v", o)
		}
		t.Fatal("the history is not linearizable")
	case porcupine.Unknown:
		t.Fatal("porcupine does not know")
	}
	t.Logf("%d operations, %d definite", len(h.ops), h.definite)
}

// client runs operations until stop.
func (r *rig) client(id int, seed uint64, h *history, keys int, stop <-chan struct{}) {
	rng := rand.New(rand.NewPCG(seed, uint64(id)))
	seen := map[string]string{}
	for i := 0; ; i++ {
		select {
		case <-stop:
			return
		default:
		}
		in := callInput{key: fmt.Sprintf("k%d", rng.IntN(keys)), value: fmt.Sprintf("%d.%d", id, i)}
		in.op = []string{"put", "get", "cas", "del", "get", "cas"}[rng.IntN(6)]
		in.want = seen[in.key]
		from := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 700*time.Millisecond)
		out := r.perform(ctx, in)
		cancel()
		if !out.unknown {
			seen[in.key] = out.value
			if in.op == "put" || in.op == "cas" && out.done {
				seen[in.key] = in.value
			}
		}
		h.add(id, in, from, out)
		time.Sleep(time.Duration(rng.Int64N(int64(15 * time.Millisecond))))
	}
}

// perform sends one operation. An operation that was certainly not applied also counts as
// unknown: porcupine may leave it out.
func (r *rig) perform(ctx context.Context, in callInput) callOutput {
	req := &rangeapi.Request{}
	key := []byte(in.key)
	get := &pb.RangeRequest{Key: key}
	switch in.op {
	case "put":
		req.Op = &pb.PutRequest{Key: key, Value: []byte(in.value)}
	case "get":
		req.Op = get
	case "del":
		req.Op = &pb.DeleteRangeRequest{Key: key}
	case "cas":
		t := &pb.TxnRequest{
			Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key, Value: []byte(in.value)}}}},
			Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: get}}},
			Compare: []*pb.Compare{{Key: key, Target: pb.Compare_VALUE, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_Value{Value: []byte(in.want)}}},
		}
		if in.want == "" {
			t.Compare[0].Target, t.Compare[0].TargetUnion = pb.Compare_VERSION, &pb.Compare_Version{}
		}
		req.Op = t
	}
	p, err := r.do(ctx, in.key, req)
	if err != nil {
		return callOutput{unknown: true}
	}
	switch o := p.Op.(type) {
	case *pb.PutResponse:
		return callOutput{done: true, rev: o.Header.Revision, value: in.value}
	case *pb.DeleteRangeResponse:
		return callOutput{done: o.Deleted > 0, rev: o.Header.Revision}
	case *pb.RangeResponse:
		return rangeOutput(o, o.Header.Revision)
	case *pb.TxnResponse:
		if o.Succeeded {
			return callOutput{done: true, rev: o.Header.Revision, value: in.value}
		}
		out := rangeOutput(o.Responses[0].GetResponseRange(), o.Header.Revision)
		return out
	}
	panic(fmt.Sprintf("%T", p.Op))
}

func rangeOutput(o *pb.RangeResponse, rev int64) callOutput {
	out := callOutput{rev: rev}
	if len(o.Kvs) > 0 {
		out.value, out.mod = string(o.Kvs[0].Value), o.Kvs[0].ModRevision
	}
	return out
}

// run lets clients work while the nemesis does, and judges.
func (r *rig) run(seed uint64, clients, keys int, nemesis func()) {
	r.runWith(seed, clients, keys, r.agree, nemesis)
}

// runWith is run with a judge of the replicas of its own.
func (r *rig) runWith(seed uint64, clients, keys int, agree, nemesis func()) {
	h := &history{start: time.Now()}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() { r.client(c, seed, h, keys, stop) })
	}
	nemesis()
	close(stop)
	wg.Wait()
	agree()
	r.stopAll()
	h.check(r.t)
}

// seeds are those of a test run: one, or so many as SKEIN_SIM_SEEDS says.
func seeds() []uint64 {
	n := 1
	if v := os.Getenv("SKEIN_SIM_SEEDS"); v != "" {
		if _, err := fmt.Sscan(v, &n); err != nil {
			panic(err)
		}
	}
	s := make([]uint64, n)
	for i := range s {
		s[i] = uint64(i)
	}
	return s
}

var lan = simbus.Faults{Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: time.Millisecond}}

// The leader is killed with the loss of what it had not synced, again and again.
func TestLinearizableThroughCrashes(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, seed, lan)
				r.startAll()
				r.leader(1)
				r.run(seed, 6, 3, func() {
					for range 2 {
						time.Sleep(700 * time.Millisecond)
						n := r.leader(1)
						n.crash()
						time.Sleep(1500 * time.Millisecond)
						n.start()
					}
					r.leader(1)
					time.Sleep(time.Second)
				})
			})
		})
	}
}

// The leader is cut off, hands over, is cut off again; messages are lost and
// reordered. Without leases reads go by ReadIndex.
func TestLinearizableThroughPartitions(t *testing.T) {
	faults := lan
	faults.Loss, faults.Duplicate, faults.Reorder, faults.ReorderBy = 0.01, 0.01, 0.01, 5*time.Millisecond
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, seed, faults)
				r.noLease = seed%3 == 2
				r.startAll()
				r.leader(1)
				r.run(seed, 6, 3, func() {
					for range 1 + len(seeds())/10 {
						time.Sleep(600 * time.Millisecond)
						r.net.Partition(r.leader(1).id)
						time.Sleep(2 * time.Second)
						r.net.HealAll()
						time.Sleep(500 * time.Millisecond)
						// A process that is stopped and does not know it: it hears nothing, its timers
						// hold still, and it goes on answering who reaches it (trap 35).
						n := r.leader(1)
						r.net.Pause(n.id)
						n.clock.Pause()
						time.Sleep(3 * time.Second)
						n.clock.Resume()
						r.net.Resume(n.id)
						time.Sleep(500 * time.Millisecond)
						ctx, cancel := context.WithTimeout(context.Background(), time.Second)
						if err := r.leader(1).node.Load().Replica(1).group.Transfer(ctx, 0); err != nil {
							t.Logf("transfer: %v", err)
						}
						cancel()
					}
					r.leader(1)
					time.Sleep(time.Second)
				})
			})
		})
	}
}

// The sequencer fails and stalls, and the group has room for two small entries
// only: pipelines are cut, proposals are refused and offered again.
func TestLinearizableThroughRefusals(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, seed, lan)
				r.maxInflight = 300
				r.seq.failures, r.seq.slow = 0.02, 0.005
				r.startAll()
				r.leader(1)
				r.run(seed, 8, 2, func() {
					time.Sleep(2 * time.Second)
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					defer cancel()
					if err := r.leader(1).node.Load().Replica(1).group.Transfer(ctx, 0); err != nil {
						t.Logf("transfer: %v", err)
					}
					time.Sleep(2 * time.Second)
				})
			})
		})
	}
}

// Ranges are split under load while nodes crash; afterwards all replicas of all
// ranges agree and the ranges cover the keyspace once.
func TestSplitsUnderLoad(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, seed, lan)
				r.startAll()
				r.leader(1)
				r.run(seed, 6, 4, func() {
					var children []keyspace.RangeID
					for i, key := range []string{"k2", "k1", "k3"} {
						time.Sleep(300 * time.Millisecond)
						children = append(children, r.split(key))
						if i == 1 {
							n := r.nodes[r.rng.IntN(3)]
							n.crash()
							time.Sleep(2 * time.Second)
							n.start()
						}
					}
					r.leader(1)
					for _, id := range children {
						r.leader(id)
					}
					time.Sleep(time.Second)
				})
			})
		})
	}
}

// split cuts the range that holds the key at it and returns the child.
func (r *rig) split(key string) keyspace.RangeID {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		d, leaders := r.route([]byte(key))
		if string(d.Span.Start) == key {
			return d.Range
		}
		for _, n := range leaders {
			ds, err := n.node.Load().Admin().Split(ctx, n.id, d.Range, d.Generation, []byte(key))
			if err == nil {
				if len(ds) != 2 || string(ds[1].Span.Start) != key || ds[0].Generation != d.Generation+1 {
					r.t.Fatalf("split of %v at %q: %v", d, key, ds)
				}
				return ds[1].Range
			}
			if e := kverror.Of(err); e.Retry() != kverror.RetryRouter && e.Kind != kverror.LeaderChanged {
				r.t.Fatalf("split at %q: %v", key, err)
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	r.t.Fatalf("no split at %q", key)
	return 0
}

// put writes one value, again where its fate is unknown.
func (r *rig) put(key, value string) int64 {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for {
		p, err := r.do(ctx, key, &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}})
		if err == nil {
			return p.Op.(*pb.PutResponse).Header.Revision
		}
		if ctx.Err() != nil {
			r.t.Fatalf("put %s: %v", key, err)
		}
	}
}

// get reads one value.
func (r *rig) get(key string) string {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	p, err := r.do(ctx, key, &rangeapi.Request{Op: &pb.RangeRequest{Key: []byte(key)}})
	if err != nil {
		r.t.Fatalf("get %s: %v", key, err)
	}
	return rangeOutput(p.Op.(*pb.RangeResponse), 0).value
}

// After a split the child has a leader as soon as a follower has heard of the split,
// by a heartbeat at the latest: votes that come before are parked there. Nobody waits
// for an election timeout.
func TestChildIsLedAtOnce(t *testing.T) {
	virtually(t, func(t *testing.T) {
		faults := lan
		faults.Delay.Max = 20 * time.Millisecond
		r := newShardRig(t, 5, faults)
		r.startAll()
		r.leader(1)
		r.put("a", "1")
		for i := range 12 {
			if i%3 == 2 {
				time.Sleep(30 * time.Second) // the range may fall asleep
			}
			child := r.split(string([]byte{byte('z' - i)}))
			begin := time.Now()
			r.leader(child)
			if d := time.Since(begin); d > 600*time.Millisecond { // an election timeout is 1 s at least
				t.Errorf("split %d: the child was without a leader for %v", i, d)
			} else {
				t.Logf("split %d: %v", i, d)
			}
		}
		r.stopAll()
	})
}

// A range is made while its nodes do not reach each other. It has a leader soon after they do:
// its first replica repeats the campaign, and nobody waits for an election timeout.
func TestNewRangeIsLedThoughACampaignIsLost(t *testing.T) {
	virtually(t, func(t *testing.T) {
		for seed := range uint64(8) {
			r := newShardRig(t, seed, lan)
			for _, from := range r.nodes {
				for _, to := range r.nodes {
					r.net.Cut(from.id, to.id)
				}
			}
			r.startAll()
			time.Sleep(time.Duration(10+seed*100) * time.Millisecond)
			r.net.HealAll()
			begin := time.Now()
			r.leader(1)
			if d := time.Since(begin); d > 500*time.Millisecond { // an election timeout is 1 s at least
				t.Errorf("seed %d: the range was without a leader for %v", seed, d)
			} else {
				t.Logf("seed %d: %v", seed, d)
			}
			r.stopAll()
		}
	})
}

// Trap 7: a follower is cut off while the range is split and its log goes on. It
// gets the parent past the split as a snapshot, so that no split makes the child
// there: the child's leader speaks to it, and it opens an empty replica.
func TestFollowerSkipsTheSplit(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 1, lan)
		r.maxLag = 64 << 10
		r.startAll()
		leader := r.leader(1)
		r.put("a", "1")
		r.put("x", "1")
		away := r.nodes[int(leader.id)%3]
		r.net.Partition(away.id)
		child := r.split("m")
		r.leader(child)
		for i := range 40 {
			r.put(fmt.Sprintf("a%d", i), string(make([]byte, 8<<10)))
			r.put(fmt.Sprintf("x%d", i), string(make([]byte, 8<<10)))
		}
		for _, n := range r.nodes {
			if n != away {
				if err := n.engine.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(5 * time.Second)
		r.net.HealAll()
		time.Sleep(20 * time.Second)
		p := away.node.Load().Replica(child)
		if p == nil {
			t.Fatalf("no child on node %s; the parent there: %+v", away.id, away.node.Load().Replica(1).Show())
		}
		var m dto.Metric
		if err := away.node.Load().metrics.splits.Write(&m); err != nil || m.Counter.GetValue() != 0 {
			t.Fatalf("node %s has applied %v splits (%v): no snapshot carried it past", away.id, m.Counter.GetValue(), err)
		}
		r.agree()
		if v := r.get("x"); v != "1" {
			t.Fatalf("x = %q", v)
		}
		r.stopAll()
	})
}

// Traps 2 and 28: all nodes lose power right behind a split, when nothing of it is
// flushed. The parents' logs are replayed and make the children again, whose own
// logs and votes are there already.
func TestPowerLossBehindASplit(t *testing.T) {
	for _, pause := range []time.Duration{0, 2 * time.Millisecond, 300 * time.Millisecond} {
		t.Run(pause.String(), func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newShardRig(t, 2, lan)
				r.startAll()
				r.leader(1)
				r.put("a", "1")
				r.put("x", "1")
				child := r.split("m")
				time.Sleep(pause)
				if pause > 100*time.Millisecond {
					r.put("x", "2")
				}
				for _, n := range r.nodes {
					n.crash()
				}
				r.startAll()
				r.leader(1)
				r.leader(child)
				want := "1"
				if pause > 100*time.Millisecond {
					want = "2"
				}
				if a, x := r.get("a"), r.get("x"); a != "1" || x != want {
					t.Fatalf("a = %q, x = %q, want 1 and %s", a, x, want)
				}
				r.put("x", "3")
				r.put("a", "3")
				r.agree()
				r.stopAll()
			})
		})
	}
}

// A node that stops in order loses no write and hands its leaderships over; new
// writes go elsewhere meanwhile.
func TestDrain(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newShardRig(t, 3, lan)
		r.startAll()
		n := r.leader(1)
		h := &history{start: time.Now()}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for c := range 4 {
			wg.Go(func() { r.client(c, 9, h, 3, stop) })
		}
		time.Sleep(500 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		start := time.Now()
		if err := n.node.Load().Drain(ctx); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("draining took %s", d)
		}
		synctest.Wait() // raft has let go; the replica hears of it
		if r.leader(1) == n {
			t.Error("the drained node leads")
		}
		n.stop()
		time.Sleep(500 * time.Millisecond)
		close(stop)
		wg.Wait()
		n.start()
		r.agree()
		r.stopAll()
		h.check(t)
		for _, o := range h.ops {
			if o.Output.(callOutput).unknown {
				t.Errorf("an orderly stop left the fate of %+v open", o.Input)
			}
		}
	})
}

// Trap 34: a replica that has counted other versions than its leader stops.
func TestReplicasDisagree(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.serve(1, 5)
		g := w.groups.group(1)
		entry := func(number uint64, prev command.Link, hash uint64, rev keyspace.Revision) raftgroup.Entry {
			b := command.AppendHeader(nil, command.Header{Kind: command.KindBatch, Term: 5, Generation: 1})
			b = command.AppendBatchHeader(b, &command.Batch{Prev: prev, Number: number, Hash: hash, First: rev, Txns: 1})
			b = command.AppendVersion(append(b, 1), &mvcc.Version{Key: []byte("k"), Mod: rev, Create: rev, Version: 1}, command.Prior{})
			return raftgroup.Entry{Term: 5, Data: b}
		}
		if err := g.apply(entry(1, command.Link{}, 0, 2)); err != nil {
			t.Fatal(err)
		}
		err := g.apply(entry(2, command.Link{Term: 5, Number: 1}, 0xbad, 3))
		if !errors.Is(err, kverror.Corrupt) || !strings.Contains(err.Error(), "0xbad") {
			t.Fatalf("a wrong hash: %v", err)
		}
	})
}

// Trap 6: a child's snapshot that arrives before the parent here has applied the
// split would put two replicas over one span. It is refused, and taken afterwards.
func TestSnapshotOverTheParent(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		child := w.store.newReplica(2)
		rec := command.Record{RangeID: 2, Generation: 2, Span: keyspace.Span{Start: []byte("m")}, LastRevision: 9}
		snap := engine.Applied{Index: 40, Term: 6, Replicas: testDescriptor.Replicas, Payload: command.AppendRecord(nil, &rec)}
		if err := child.AcceptSnapshot(snap); err == nil || !strings.Contains(err.Error(), "overlaps") {
			t.Fatalf("accepted over the parent: %v", err)
		}
		g := w.groups.group(1)
		split := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: 5, Generation: 1})
		split = command.AppendSplit(split, &command.Split{Key: []byte("m"), Child: 3, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas[1:]})
		if err := g.apply(raftgroup.Entry{Term: 5, Data: split}); err != nil {
			t.Fatal(err)
		}
		if err := child.AcceptSnapshot(snap); err != nil {
			t.Fatalf("refused beside the parent: %v", err)
		}
		other := w.store.newReplica(4)
		rec4 := command.Record{RangeID: 4, Generation: 3, Span: keyspace.Span{Start: []byte("x")}}
		snap4 := engine.Applied{Index: 40, Term: 6, Payload: command.AppendRecord(nil, &rec4)}
		if err := other.AcceptSnapshot(snap4); err == nil {
			t.Fatal("two snapshots over one span at a time")
		}
		child.SnapshotDone(snap, errors.New("the sender died"))
		if err := other.AcceptSnapshot(snap4); err != nil {
			t.Fatal(err)
		}
		other.SnapshotDone(snap4, nil)
		if d := other.Descriptor(); d.Generation != 3 || string(d.Span.Start) != "x" {
			t.Fatalf("after the snapshot: %+v", d)
		}
		if err := child.AcceptSnapshot(engine.Applied{Payload: command.AppendRecord(nil, &rec4)}); err == nil {
			t.Fatal("the snapshot of another range")
		}
	})
}
