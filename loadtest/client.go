package loadtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/clock"
)

// kv is the part of etcd's API that a client uses. A conn satisfies it.
type kv interface {
	Put(ctx context.Context, in *etcdserverpb.PutRequest, opts ...grpc.CallOption) (*etcdserverpb.PutResponse, error)
	Range(ctx context.Context, in *etcdserverpb.RangeRequest, opts ...grpc.CallOption) (*etcdserverpb.RangeResponse, error)
	Txn(ctx context.Context, in *etcdserverpb.TxnRequest, opts ...grpc.CallOption) (*etcdserverpb.TxnResponse, error)
	LeaseGrant(ctx context.Context, in *etcdserverpb.LeaseGrantRequest, opts ...grpc.CallOption) (*etcdserverpb.LeaseGrantResponse, error)
	LeaseRevoke(ctx context.Context, in *etcdserverpb.LeaseRevokeRequest, opts ...grpc.CallOption) (*etcdserverpb.LeaseRevokeResponse, error)
}

// errorPause is how long a client of a closed loop rests after an error. Otherwise it
// would ask a server that refuses at once in a busy loop.
const errorPause = 10 * time.Millisecond

// client sends one request after the other. It belongs to one goroutine at a time and
// lives through all phases of a run.
type client struct {
	id     int
	cfg    *Config
	kv     kv
	space  *keySpace
	values *values
	ledger *ledger // nil if nothing is verified

	rng    *rand.Rand
	picker picker
	ops    uint64 // puts made so far
	put    etcdserverpb.PutRequest
	get    etcdserverpb.RangeRequest
	watch  *keyWatch   // nil without watchers
	lease  churned     // in workload lease
	kube   *kubeWorker // in workload kubernetes, which uses none of the rest
}

func newClient(id int, cfg *Config, kv kv, space *keySpace, v *values, l *ledger, turn *atomic.Uint64) *client {
	c := &client{id: id, cfg: cfg, kv: kv, space: space, values: v, ledger: l}
	c.rng = rand.New(rand.NewPCG(cfg.Seed, uint64(id)))
	c.picker = newPicker(cfg, c.rng, turn)
	c.put.Value = make([]byte, cfg.ValueBytes)
	c.get.Serializable = cfg.Serializable
	return c
}

// phase is one part of a run: the state that its clients share.
type phase struct {
	name     string
	schedule *schedule
	recorder *recorder
	errors   *errorTally
	// fill makes operation n a put of key n.
	fill bool
}

// run sends the operations of the phase's schedule until there are no more or ctx is
// done.
func (c *client) run(ctx context.Context, p *phase) {
	var pace pacer
	defer pace.stop()
	now := c.cfg.Clock.Now()
	for ctx.Err() == nil {
		n, due, ok := p.schedule.draw(now)
		if !ok {
			return
		}
		if due > now {
			if pace.wait(ctx, c.cfg.Clock, due.Sub(now)) != nil {
				return
			}
			now = c.cfg.Clock.Now()
			p.recorder.record(c.id, classLate, now.Sub(due), false)
		}
		kind, err := c.operate(ctx, p, n)
		now = c.cfg.Clock.Now()
		switch {
		case err == nil:
			p.recorder.record(c.id, kind, now.Sub(due), p.schedule.end == 0 || now <= p.schedule.end)
		case ctx.Err() != nil:
			return // the end of the run, not an error of the operation
		default:
			p.recorder.record(c.id, classFailed, now.Sub(due), false)
			p.errors.add(errorKind(err), 1)
			if c.cfg.Rate == 0 && pace.wait(ctx, c.cfg.Clock, errorPause) != nil {
				return
			}
			now = c.cfg.Clock.Now()
		}
	}
}

// operate sends operation n of a phase.
func (c *client) operate(ctx context.Context, p *phase, n int64) (class, error) {
	if c.cfg.Cleanup {
		// An interrupted run waits for its last answers. Otherwise a put could arrive behind its deletion.
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	if c.kube != nil {
		return c.kube.operate(ctx, p.fill, n)
	}
	if p.fill {
		return classPut, c.doPut(ctx, uint64(n))
	}
	switch c.cfg.Workload {
	case Lease:
		return c.churn(ctx)
	case Range:
		return classPage, c.doPage(ctx, c.picker.next())
	case Get:
		return classGet, c.doGet(ctx, c.readKey())
	case Mixed:
		if c.rng.IntN(100) < c.cfg.ReadPercent {
			return classGet, c.doGet(ctx, c.readKey())
		}
	default:
	}
	return classPut, c.doPut(ctx, c.picker.next())
}

// readKey draws a key for a get.
func (c *client) readKey() uint64 {
	if tail, ok := c.picker.(*tailPicker); ok {
		return tail.read()
	}
	return c.picker.next()
}

// doPut puts a unique value. It reuses request and buffers: gRPC has encoded them
// before it returns.
func (c *client) doPut(ctx context.Context, key uint64) error {
	c.ops++
	op := makeOpID(c.id, c.ops)
	if c.watch != nil {
		// The moment stands for the operation, so that watchers can tell how late they are.
		op = opID(c.cfg.Clock.Now())
	}
	c.put.Key = c.space.appendKey(c.put.Key[:0], key)
	c.values.put(c.put.Value, op)
	if c.ledger == nil {
		_, err := c.write(ctx, key)
		if err == nil && c.watch != nil {
			c.watch.acknowledged.Add(int64(c.cfg.keysEach()))
		}
		return err
	}
	f := c.ledger.begin(key)
	revision, err := c.write(ctx, key)
	switch {
	case err == nil:
		c.ledger.acknowledged(key, op, f, revision)
	case !refused(err):
		c.ledger.unknownFate(key, op)
	}
	return err
}

// write sends the prepared put, in workload Txn in a transaction whose compare holds for
// any key: its version is above -1. With several keys the others lie at even distances.
func (c *client) write(ctx context.Context, key uint64) (revision int64, err error) {
	if c.cfg.Workload != Txn {
		answer, err := c.kv.Put(ctx, &c.put)
		return answer.GetHeader().GetRevision(), err
	}
	txn := &etcdserverpb.TxnRequest{
		Compare: []*etcdserverpb.Compare{{
			Target: etcdserverpb.Compare_VERSION, Result: etcdserverpb.Compare_GREATER, Key: c.put.Key,
			TargetUnion: &etcdserverpb.Compare_Version{Version: -1},
		}},
		Success: []*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestPut{RequestPut: &c.put}}},
	}
	keys := uint64(c.cfg.TxnKeys)
	for i := uint64(1); i < keys; i++ {
		other := (key + i*c.space.count/keys) % c.space.count
		txn.Success = append(txn.Success, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{
			RequestPut: &etcdserverpb.PutRequest{Key: c.space.appendKey(nil, other), Value: c.put.Value},
		}})
	}
	answer, err := c.kv.Txn(ctx, txn)
	if err == nil && !answer.GetSucceeded() {
		err = errors.New("txn: a version above -1 was not found")
	}
	return answer.GetHeader().GetRevision(), err
}

// doPage reads the page that begins with a key.
func (c *client) doPage(ctx context.Context, key uint64) error {
	answer, err := c.kv.Range(ctx, &etcdserverpb.RangeRequest{
		Key: c.space.appendKey(nil, key), RangeEnd: c.space.end(), Limit: int64(c.cfg.PageKeys), Serializable: c.cfg.Serializable,
	})
	if n := len(answer.GetKvs()); n > c.cfg.PageKeys {
		return fmt.Errorf("page: %d keys came, and the limit is %d", n, c.cfg.PageKeys)
	}
	return err
}

// doGet gets one key.
func (c *client) doGet(ctx context.Context, key uint64) error {
	c.get.Key = c.space.appendKey(c.get.Key[:0], key)
	if c.ledger == nil || c.cfg.Serializable {
		_, err := c.kv.Range(ctx, &c.get)
		return err
	}
	f := c.ledger.begin(key)
	answer, err := c.kv.Range(ctx, &c.get)
	if err != nil {
		return err
	}
	switch kvs := answer.GetKvs(); len(kvs) {
	case 0:
		c.ledger.read(key, f, answer.GetHeader().GetRevision(), nil)
	case 1:
		c.ledger.read(key, f, answer.GetHeader().GetRevision(), kvs[0])
	default:
		return fmt.Errorf("get of one key: %d keys came back", len(kvs))
	}
	return nil
}

// runClients runs all clients through a phase and waits for them.
func runClients(ctx context.Context, clients []*client, p *phase) {
	var wg sync.WaitGroup
	for _, c := range clients {
		wg.Go(func() { c.run(ctx, p) })
	}
	wg.Wait()
}

// pacer waits with one timer that it reuses. The zero pacer is ready.
type pacer struct{ timer clock.Timer }

// wait returns after d, or earlier with the error of ctx.
func (p *pacer) wait(ctx context.Context, c clock.Clock, d time.Duration) error {
	if p.timer == nil {
		p.timer = c.NewTimer(d)
	} else {
		p.timer.Reset(d)
	}
	select {
	case <-p.timer.C():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *pacer) stop() {
	if p.timer != nil {
		p.timer.Stop()
	}
}
