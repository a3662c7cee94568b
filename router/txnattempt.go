package router

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// txn is a transaction over several ranges under way. It makes attempts until one is decided. Each
// attempt has its own name, and all have the transaction's age.
type txn struct {
	r   *Router
	req *pb.TxnRequest
	id  rangeapi.TxnID
	// permit is the client's. The revoke of a lease has none of its own: whoever may revoke it was checked
	// before that was decided.
	permit keyspace.Permit
	// bytes are what it holds of the gateway's budget of transactions until refs is 0. The client's
	// call and the goroutines that go on without it each hold a reference.
	bytes budget.Share
	refs  atomic.Int32
	// answer is what the present attempt's answer holds so far of the budget of answers.
	answer reservation
	// seen are the outcomes of the compares at the last evaluation; nil assumes that all hold.
	// wrong says that this is known to be false.
	seen  outcomes
	wrong bool
	// misses counts wrong paths.
	misses int
	// unpinned says that the path reads a compacted revision. Only the locks show which operation
	// is refused first. So later attempts pin nothing and get that far.
	unpinned bool

	mu sync.Mutex
	// Guarded by mu. absent are leases that do not exist. yields counts how often the transaction
	// gave way to an older one. conflictKey is a key of the range of the last
	// conflict. The next attempt prepares that range first, and may wait there.
	yields      int
	conflictKey []byte
	absent      []keyspace.LeaseID
}

var (
	// errStartOver says that an attempt was given up and has no effect.
	errStartOver = errors.New("router: the transaction starts over")
	// errMissed is errStartOver for a wrong path.
	errMissed = errors.New("router: the compares lead to another path")
)

// newTxn returns a transaction, for which it has waited until its bytes have room. Its answer does not wait for memory: others may wait for its locks.
func (r *Router) newTxn(ctx context.Context, req *pb.TxnRequest, bytes int64) (*txn, error) {
	t := &txn{r: r, req: req, bytes: r.coordinator.bytes.Share(), answer: r.reservation()}
	t.answer.atOnce = true
	if err := r.coordinator.enter(ctx, &t.bytes, bytes); err != nil {
		t.bytes.Release()
		return nil, err
	}
	t.id = r.coordinator.newID()
	t.permit, _ = keyspace.PermitOf(ctx)
	t.retain()
	return t, nil
}

func (t *txn) retain() { t.refs.Add(1) }

func (t *txn) release() {
	if t.refs.Add(-1) == 0 {
		t.bytes.Release()
		t.forgetAnswer()
	}
}

// forgetAnswer releases what the attempt was told.
func (t *txn) forgetAnswer() { t.answer.Release() }

// pause returns the pause of a transaction that gave way.
func (t *txn) pause() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.yields == 0 {
		return 0
	}
	return min(firstYield<<min(t.yields-1, 10), lastYield)
}

// txnAttempt is one attempt of a transaction. Its locks have its name.
type txnAttempt struct {
	t    *txn
	name rangeapi.TxnName
	plan *plan
	ps   *participants
	// earlier are participants that were locked before the attempt chose its path.
	earlier []*participant
	// awaitResolve says that the decision is told only after all locks have ended.
	awaitResolve bool
	// term is that of the sequencer that allocated the attempt's revision, 0 before.
	term uint64
	// sequenced says that the sequencer has answered the question for the attempt's revision.
	sequenced atomic.Bool
}

// all returns all participants of the attempt.
func (a *txnAttempt) all() []*participant {
	if a.ps == nil {
		return a.earlier
	}
	return slices.Concat(a.earlier, a.ps.order)
}

// outcomes returns the outcomes of the plan's guards.
func (a *txnAttempt) outcomes() outcomes {
	facts := make([][]rangeapi.Fact, len(a.plan.guards))
	for _, p := range a.ps.order {
		for i, g := range p.guards {
			facts[g] = append(facts[g], p.answer.Facts[i])
		}
	}
	out := outcomes{}
	for i, g := range a.plan.guards {
		if _, ok := keyspace.FromEtcd(g.compare.GetKey(), g.compare.GetRangeEnd()); !ok {
			out[g.compare] = rangeapi.CompareAbsent(g.compare)
			continue
		}
		out[g.compare] = outcome(g.compare, facts[i])
	}
	return out
}

// The pauses of a transaction that gave way double from first to last.
const (
	firstYield = time.Millisecond
	lastYield  = 50 * time.Millisecond
)
