package sim

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// Requests draws the requests of one client for a rig that runs nodes of its own and
// sends them by itself. It belongs to one goroutine.
type Requests struct{ c *client }

// Outside is what the clients of such a rig share.
type Outside struct{ c *cluster }

// NewOutside makes what the clients share. Of cfg, Seed, Txns and Leases count.
func NewOutside(cfg Config) *Outside { return &Outside{&cluster{cfg: cfg}} }

// Requests returns the source of the requests of a client; its values have up to so
// many bytes more than they need to differ from others.
func (o *Outside) Requests(id, padding int) *Requests {
	c := newClient(o.c, nil, id)
	c.padding = padding
	return &Requests{c}
}

// NextLease returns an id for a lease that was never used.
func (o *Outside) NextLease() int64 { return o.c.leases.next() }

// Granted lets clients attach keys to a lease.
func (o *Outside) Granted(id int64) { o.c.leases.add(id) }

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

// taken says whether etcd's services take a request. What is behind them takes
// transactions too that write a key more than once.
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
			return d != nil && covers1(d.GetKey(), d.GetRangeEnd(), key)
		}) {
			return false
		}
	}
	return true
}

// Probes are requests that no range can answer for another one, for the ranges of all
// keys that are written; the last one reads everything.
func (r *Requests) Probes() []proto.Message { return r.c.probes() }

// Value returns one that nobody else ever writes.
func (r *Requests) Value() []byte { return r.c.value() }

// Learn keeps what an answer says of keys, for the requests to come.
func (r *Requests) Learn(o *Op) {
	if o.Outcome == Answered {
		r.c.learn(o)
	}
}

// Rand is the client's source of chance.
func (r *Requests) Rand() *rand.Rand { return r.c.rng }

// WatchedSpans are what the watchers of a run watch.
func WatchedSpans() []keyspace.Span { return slices.Clone(watchedSpans) }

// SeenByAll are keys of which each of the watched spans has one.
func SeenByAll() []string { return []string{"i0", "u0"} }

// SomeKey draws one of the keys that clients write, or one between their groups.
func SomeKey(rng *rand.Rand) string {
	key := groups[rng.IntN(len(groups)):][:1]
	if rng.IntN(3) == 0 {
		key += fmt.Sprint(1 + rng.IntN(keysPerGroup-1))
	}
	return key
}

// CheckAnswers is what of Check can be done without the versions of a run that did not
// come to its end.
func CheckAnswers(r *Report) []string {
	bad, _ := checkAnswers(r)
	return bad
}

// NewWatcher makes a watcher that is to be told everything of a span from the first
// revision on, by whoever calls Told and ToldProgress.
func NewWatcher(name string, span keyspace.Span) *Watcher {
	return &Watcher{Name: name, Span: span, from: 2}
}

// Begin notes that the watcher is served, and returns the revision from which it wants
// to go on.
func (w *Watcher) Begin() int64 {
	w.mu.Lock()
	w.sessions++
	w.mu.Unlock()
	return w.next()
}

// Next is the revision from which the watcher wants to go on.
func (w *Watcher) Next() int64 { return w.next() }

// Told notes the events of one response, who told them and when.
func (w *Watcher) Told(by string, at time.Duration, events []*mvccpb.Event) {
	w.take(telling{by: by, at: at}, &watch.Delivery{Watcher: &watch.Watcher{}, Events: events})
}

// ToldProgress notes a revision up to which the watcher is to have everything, who told it and
// when.
func (w *Watcher) ToldProgress(by string, at time.Duration, rev int64) {
	w.take(telling{by: by, at: at}, &watch.Delivery{Revision: keyspace.Revision(rev)})
}

// Versions returns the versions that the watcher was told, for a Report: of one that
// watched everything these are all. Whether they are the right ones the checkers find
// out, who compare them with every answer and with what other watchers were told.
func (w *Watcher) Versions() []Version {
	w.mu.Lock()
	defer w.mu.Unlock()
	vs := make([]Version, len(w.told))
	for i, e := range w.told {
		vs[i] = versionOf(e.GetKv())
		if vs[i].Deleted = e.GetType() == mvccpb.Event_DELETE; vs[i].Deleted {
			vs[i] = Version{Key: vs[i].Key, Mod: vs[i].Mod, Deleted: true}
		}
		if i > 0 && vs[i-1].Mod == vs[i].Mod {
			vs[i].Sub = vs[i-1].Sub + 1
		}
	}
	return vs
}
