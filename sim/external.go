package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/judge"
)

// Requests makes the requests of one client for a rig that runs its own nodes and sends
// by itself. It belongs to one goroutine.
type Requests struct{ c *client }

// Workload is what the clients of such a rig share.
type Workload struct{ c *cluster }

// NewWorkload makes a Workload. It uses Seed, Txns, Leases and Users of cfg.
func NewWorkload(cfg Config) *Workload { return &Workload{&cluster{cfg: cfg}} }

// Requests returns the request source of a client. Its values have up to padding more
// bytes than they need to be unique.
func (o *Workload) Requests(id, padding int) *Requests {
	c := newClient(o.c, nil, id)
	c.padding = padding
	return &Requests{c}
}

// NextLease returns an id for a lease that was never used.
func (o *Workload) NextLease() int64 { return o.c.leases.next() }

// Granted lets clients attach keys to a lease.
func (o *Workload) Granted(id int64) { o.c.leases.add(id) }

// Next draws a request: one of etcd's Range-, Put-, DeleteRange- and TxnRequests.
func (r *Requests) Next() proto.Message {
	for {
		if req := r.c.request(); taken(req) {
			return req
		}
	}
}

// Attachment draws a request that attaches a key, or a few at once, to a lease.
func (r *Requests) Attachment(lease int64) proto.Message {
	for {
		if req := r.c.attachment(lease); taken(req) {
			return req
		}
	}
}

// taken says whether etcd's services accept a request. The layers behind them also
// accept transactions that write a key more than once.
func taken(req proto.Message) bool {
	t, ok := req.(*pb.TxnRequest)
	if !ok {
		return true
	}
	var puts []string
	for _, op := range t.GetSuccess() {
		if p := op.GetRequestPut(); p != nil {
			puts = append(puts, string(p.GetKey()))
		}
	}
	for i, key := range puts {
		if slices.Contains(puts[:i], key) || slices.ContainsFunc(t.GetSuccess(), func(op *pb.RequestOp) bool {
			d := op.GetRequestDeleteRange()
			return d != nil && judge.Covers(d.GetKey(), d.GetRangeEnd(), key)
		}) {
			return false
		}
	}
	return true
}

// Users are the users of such a rig at work: their clients, and the admin who changes their rights. RootPassword is
// the admin's, whose name is root.
type Users struct {
	access *judge.Access
	stop   func()
	work   sync.WaitGroup
}

// RootPassword is the password of root, who is made with the other users.
var RootPassword = word(rootPassword)

// StartUsers makes the users of the workload and begins their work. What they do and are told goes into h, and what is
// asked of the admin to logf. ready is closed when the users are there, and checked. pausedClocks says that the nodes' clocks may stand still.
func (o *Workload) StartUsers(v Venue, h *judge.History, pausedClocks bool, logf func(format string, args ...any)) (u *Users, ready <-chan struct{}) {
	stop, there := make(chan struct{}), make(chan struct{})
	u = &Users{access: &judge.Access{Remote: true, PausedClocks: pausedClocks}, stop: sync.OnceFunc(func() { close(stop) })}
	all := &users{venue: v, prepare: func(<-chan struct{}) {}, logf: logf, c: o.c, h: h, a: u.access}
	all.load(stop, &u.work, there)
	return u, there
}

// End ends their work, waits for the last calls, and returns what happened, for a Report.
func (u *Users) End() *judge.Access {
	u.stop()
	u.work.Wait()
	return u.access
}

// Probes are requests for the ranges of all written keys, none of which another range
// can answer. The last one reads everything.
func (r *Requests) Probes() []proto.Message { return r.c.probes() }

// Value returns a value that nobody else ever writes.
func (r *Requests) Value() []byte { return r.c.value() }

// Learn keeps the values of an answer for later requests.
func (r *Requests) Learn(o *judge.Op) {
	if o.Outcome == judge.Answered {
		r.c.learn(o)
	}
}

// Rand is the client's random source.
func (r *Requests) Rand() *rand.Rand { return r.c.rng }

// WatchedSpans are the spans of a run's watchers.
func WatchedSpans() []keyspace.Span { return slices.Clone(watchedSpans) }

// SeenByAll are keys that lie in each of the watched spans.
func SeenByAll() []string { return []string{"i0", "u0"} }

// SomeKey draws one of the keys that clients write, or one between their groups.
func SomeKey(rng *rand.Rand) string {
	key := judge.Groups[rng.IntN(len(judge.Groups)):][:1]
	if rng.IntN(3) == 0 {
		key += fmt.Sprint(1 + rng.IntN(judge.KeysPerGroup-1))
	}
	return key
}
