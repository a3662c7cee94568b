package router

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// txn is a transaction over several ranges on its way. It is tried until an attempt is
// decided; each attempt has a name of its own, and all have the transaction's age.
type txn struct {
	r   *Router
	req *pb.TxnRequest
	id  rangeapi.TxnID
	// bytes are what the gateway's budget holds for the request until none of refs, its
	// client's call and what goes on without that, needs it any more.
	bytes int64
	refs  atomic.Int32
	// reserved is what the ranges have told the present attempt for the answer: it counts with
	// the answers that are put together.
	reserved reservation
	// seen are the outcomes of the compares as they were last seen; nil is that all are
	// thought to hold. wrong says that this is known not to be so.
	seen  outcomes
	wrong bool
	// misses counts the paths that were not the right one.
	misses int
	// unpinned says that a revision that the path reads is compacted. Which operation is
	// refused for that, and whether another one is before it, is found out under the locks:
	// later attempts pin nothing, so that they get there.
	unpinned bool

	mu sync.Mutex
	// Guarded by mu. absent are leases that were found not to be there. yields counts how often the transaction gave way to an older one;
	// met is a key of the range where it did so last, which is locked first the next time,
	// and patiently.
	yields      int
	conflictKey []byte
	absent      []keyspace.LeaseID
}

var (
	// errStartOver says that an attempt is given up and nothing of it will happen.
	errStartOver = errors.New("router: the transaction starts over")
	// errMissed is errStartOver where the path was not the right one.
	errMissed = errors.New("router: the compares lead elsewhere")
)

func (t *txn) retain() { t.refs.Add(1) }

func (t *txn) release() {
	if t.refs.Add(-1) == 0 {
		t.r.coordinator.leave(t.bytes)
		t.forgetAnswer()
	}
}

// forgetAnswer gives back what the attempt was told.
func (t *txn) forgetAnswer() { t.r.releaseAll(&t.reserved) }

// pause is how long a transaction that gave way leaves the others alone.
func (t *txn) pause() time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.yields == 0 {
		return 0
	}
	return min(firstYield<<min(t.yields-1, 10), lastYield)
}

// txnAttempt is one attempt of a transaction: what it holds is held under its name.
type txnAttempt struct {
	t    *txn
	name rangeapi.TxnName
	plan *plan
	ps   *participants
	// earlier are pieces that the attempt has locked before it chose its path.
	earlier []*participant
	// awaitResolve says that who waits for the decision waits for the end of all locks too.
	awaitResolve bool
}

// all are the pieces of the attempt.
func (a *txnAttempt) all() []*participant {
	if a.ps == nil {
		return a.earlier
	}
	return slices.Concat(a.earlier, a.ps.order)
}

// outcomes are what the guards of the plan have come to.
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

// The pauses of a transaction that gave way grow from first to last by doubling.
const (
	firstYield = time.Millisecond
	lastYield  = 50 * time.Millisecond
)
