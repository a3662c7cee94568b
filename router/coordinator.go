package router

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// maxTxns bounds the unfinished attempts of a gateway.
const maxTxns = 1 << 13

// maxAborts bounds the attempts that a gateway aborts at a time.
const maxAborts = 1 << 9

// abortTimeout bounds how long a coordinator ends the locks of an aborted attempt. The ranges push
// the others.
const abortTimeout = 3 * time.Second

// Bus carries the question whether a coordinator still claims an attempt.
type Bus interface {
	Call(ctx context.Context, to keyspace.NodeID, m transport.Method, payload []byte) ([]byte, error)
}

// Registrar is what RegisterHandlers needs of the bus.
type Registrar interface {
	HandleCall(m transport.Method, class transport.Class, h transport.CallHandler)
}

// coordinator has the transactions over several ranges that a gateway coordinates.
type coordinator struct {
	node keyspace.NodeID
	boot keyspace.BootID
	// bytes bounds the transactions under way.
	bytes *budget.Bytes

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// start is the highest revision that this node has heard of.
	start atomic.Int64

	mu sync.Mutex
	// Guarded by mu. active are the attempts that may still be committed, or whose locks this node
	// ends.
	active map[rangeapi.TxnName]struct{}
	// reading are the transactions whose clients wait for an answer, with the lowest revision that
	// each may read.
	reading map[*txn]keyspace.Revision
	// aborts counts the attempts whose locks are being ended.
	aborts int
	// counter numbers transactions. attempt numbers their attempts, above every fence that this
	// node has heard of.
	counter, attempt uint64
	// draining says that no transaction begins any more, and stopped that none goes on. idle is
	// closed when the last attempt ends while it drains.
	draining, stopped bool
	idle              chan struct{}
}

func newCoordinator(cfg *Config) *coordinator {
	t := &coordinator{node: cfg.Self, boot: cfg.Boot, bytes: budget.New(cfg.TxnBytes/2, cfg.TxnBytes/2), active: map[rangeapi.TxnName]struct{}{}, reading: map[*txn]keyspace.Revision{}}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

// enter takes the bytes of a transaction from the gateway's budget, and waits for them. A
// transaction takes all of them at once and does not grow, so the next one may lead.
func (t *coordinator) enter(ctx context.Context, share *budget.Share, bytes int64) error {
	switch err := share.Take(ctx, bytes); {
	case errors.Is(err, budget.ErrTooLarge):
		return kverror.New(kverror.RequestTooLarge, "a transaction over several ranges of %d bytes, at most %d", bytes, t.bytes.Reserve())
	case err != nil:
		return kverror.Of(err)
	}
	share.Complete()
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.draining || t.stopped:
		return kverror.New(kverror.Stopped, "node %s stops", t.node)
	case len(t.active) >= maxTxns:
		return kverror.New(kverror.TooManyRequests, "%d transactions over several ranges are under way", len(t.active))
	}
	return nil
}

// newID returns the id of a new transaction, which is younger than all before it.
func (t *coordinator) newID() rangeapi.TxnID {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counter++
	return rangeapi.TxnID{Start: keyspace.Revision(t.start.Load()), Node: t.node, Boot: t.boot, Counter: t.counter}
}

// observe notes a revision.
func (t *coordinator) observe(rev keyspace.Revision) {
	for {
		old := t.start.Load()
		if int64(rev) <= old || t.start.CompareAndSwap(old, int64(rev)) {
			return
		}
	}
}

// begin returns the name of a new attempt, which this node claims until end.
func (t *coordinator) begin(id rangeapi.TxnID) rangeapi.TxnName {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.attempt++
	n := rangeapi.TxnName{TxnID: id, Attempt: t.attempt}
	t.active[n] = struct{}{}
	return n
}

// skipTo numbers the next attempts above a fence.
func (t *coordinator) skipTo(fence uint64) {
	t.mu.Lock()
	t.attempt = max(t.attempt, fence)
	t.mu.Unlock()
}

func (t *coordinator) end(n rangeapi.TxnName) {
	t.mu.Lock()
	delete(t.active, n)
	t.idleLocked()
	t.mu.Unlock()
}

func (t *coordinator) idleLocked() {
	if t.draining && len(t.active) == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

// drains says whether the node's stop waits for the remaining attempts.
func (t *coordinator) drains() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.draining
}

func (t *coordinator) owns(n rangeapi.TxnName) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, ok := t.active[n]
	return ok
}

// run calls f in a new goroutine, and returns false if the gateway has stopped.
func (t *coordinator) run(f func(ctx context.Context)) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stopped {
		return false
	}
	t.wg.Go(func() { f(t.ctx) })
	return true
}

// runAbort is run for the abort of an attempt; it also returns false at maxAborts.
func (t *coordinator) runAbort(f func(ctx context.Context)) bool {
	t.mu.Lock()
	full := t.aborts >= maxAborts
	if !full {
		t.aborts++
	}
	t.mu.Unlock()
	if full {
		return false
	}
	ended := func() {
		t.mu.Lock()
		t.aborts--
		t.mu.Unlock()
	}
	started := t.run(func(ctx context.Context) {
		defer ended()
		f(ctx)
	})
	if !started {
		ended()
	}
	return started
}

func (t *coordinator) stop() {
	t.mu.Lock()
	t.stopped = true
	t.mu.Unlock()
	t.cancel()
	t.wg.Wait()
}

// drainTimeout bounds how long a stopping node waits for its transactions.
const drainTimeout = 3 * time.Second

// txnWireVersion is the first byte of method 20's messages.
const txnWireVersion = 1

// errNoAnswer says that a node did not tell whether it claims an attempt.
var errNoAnswer = errors.New("router: no answer about a transaction")

// ask asks the coordinator's node whether it claims the attempt.
func (r *Router) ask(ctx context.Context, name rangeapi.TxnName) (bool, error) {
	b, err := r.cfg.Bus.Call(ctx, name.Node, transport.MethodRouterTxn, rangeapi.AppendName([]byte{txnWireVersion}, name))
	if err != nil {
		return false, fmt.Errorf("%w %s from node %s: %w", errNoAnswer, name, name.Node, err)
	}
	if len(b) != 2 || b[0] != txnWireVersion || b[1] > 1 {
		return false, fmt.Errorf("router: answer %x of node %s about transaction %s", b, name.Node, name)
	}
	return b[1] == 1, nil
}

func (r *Router) handleTxn(_ context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	if len(payload) == 0 || payload[0] != txnWireVersion {
		return nil, fmt.Errorf("router: question of %d bytes about a transaction", len(payload))
	}
	name, err := rangeapi.DecodeTxnName(payload[1:])
	if err != nil {
		return nil, err
	}
	if r.coordinator.owns(name) {
		return []byte{txnWireVersion, 1}, nil
	}
	return []byte{txnWireVersion, 0}, nil
}
