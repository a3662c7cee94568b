package chaos

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/sim"
	"github.com/skeindb/skein/sim/judge"
)

const (
	// stormPinned is how many clients use only one machine, for each machine.
	// stormRoaming is how many have all machines as endpoints, and stormHolders how many
	// hold leases.
	stormPinned, stormRoaming, stormHolders = 2, 8, 4
	// stormPause bounds the pause of a client between two operations: the checkers keep
	// the whole keyspace for each revision, and replay it.
	stormPause = 150 * time.Millisecond
	// stormSetback is how long a client waits after an operation of unknown fate.
	stormSetback = 250 * time.Millisecond
	// stormTxns is how many of a hundred operations are transactions over some keys,
	// beside the other transactions.
	stormTxns = 15
	// TTLs of leases, in seconds.
	leastTTL, mostTTL = 3, 8
	stormPadding      = 800
)

// The clients' numbers: those with leases, those that probe, and one for each machine.
const (
	holderIDs = 500
	probeIDs  = 900
)

// load is the clients of a storm, the source of their requests, and what they were
// told.
type load struct {
	c        *cluster
	h        *judge.History
	workload *sim.Workload
	seed     uint64
	began    time.Time
	// all is a client of all machines, and each one of one machine; those of users have rights of their own.
	all      *clientv3.Client
	each     []*clientv3.Client
	who      *login     // in whose name all and each call, nil if nothing is checked
	users    *sim.Users // nil if nothing is checked
	writers  sync.WaitGroup
	stop     context.CancelFunc
	watching sync.WaitGroup
	unwatch  context.CancelFunc
	watchers []*judge.Watcher
}

// newLoad makes the part that clients share.
func newLoad(c *cluster, seed uint64, began time.Time) *load {
	var who *login
	if c.root != nil {
		who = &login{name: everything, password: everythingPassword}
	}
	l := &load{c: c, h: &judge.History{}, began: began, who: who, all: c.connectAs(who, c.urls()...), seed: seed}
	for _, n := range c.nodes {
		l.each = append(l.each, c.connectAs(who, n.url))
	}
	l.workload = sim.NewWorkload(sim.Config{Seed: seed, Txns: stormTxns, Leases: stormHolders, Users: stormUsers})
	l.stop, l.unwatch = func() {}, func() {}
	return l
}

// start starts clients, holders of leases, and watchers.
func (l *load) start(ctx context.Context) {
	c, seed := l.c, l.seed
	wctx, unwatch := context.WithCancel(ctx)
	ctx, l.stop = context.WithCancel(ctx)
	l.unwatch = unwatch
	for id := range len(c.nodes)*stormPinned + stormRoaming {
		machine := min(id/stormPinned, len(c.nodes))
		l.writers.Go(func() { l.runClient(ctx, id, machine) })
	}
	for i := range stormHolders {
		l.writers.Go(func() { l.runHolder(ctx, i) })
	}
	var crowd []*judge.Watcher
	for i, span := range sim.WatchedSpans() {
		crowd = append(crowd, judge.NewWatcher(fmt.Sprintf("watcher %d of the crowd", i), span))
		// One goes from machine to machine, and one stays where clientv3 takes it.
		for _, roams := range []bool{true, false} {
			w := judge.NewWatcher(fmt.Sprintf("watcher %d, by itself %t", i, roams), span)
			l.watchers = append(l.watchers, w)
			rng := rand.New(rand.NewPCG(seed, uint64(2000+10*i+len(l.watchers))))
			l.watching.Go(func() { l.watch(wctx, []*judge.Watcher{w}, rng, roams) })
		}
	}
	// Several that go from machine to machine on one stream.
	l.watchers = append(l.watchers, crowd...)
	l.watching.Go(func() { l.watch(wctx, crowd, rand.New(rand.NewPCG(seed, 3000)), true) })
}

// client is the client of a machine that has a node; for any other number it is the
// client of all.
func (l *load) client(machine int) *clientv3.Client {
	if machine < len(l.c.nodes) && !l.c.nodes[machine].away.Load() {
		return l.each[machine]
	}
	return l.all
}

// runClient does one operation after the other.
func (l *load) runClient(ctx context.Context, id, machine int) {
	r := l.workload.Requests(id, stormPadding)
	for ctx.Err() == nil {
		timeout := patience
		if r.Rand().IntN(40) == 0 {
			timeout = time.Duration(2+r.Rand().IntN(50)) * time.Millisecond
		}
		o := l.do(machine, id, r.Next(), timeout)
		r.Learn(o)
		pause := time.Duration(r.Rand().Int64N(int64(stormPause)))
		if !o.Definite() {
			pause += stormSetback
		}
		wait(ctx, pause)
	}
}

// do sends a request and records the outcome. The end of a run does not cut it short.
func (l *load) do(machine, id int, req proto.Message, timeout time.Duration) *judge.Op {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	o := l.h.Begin(id, keyspace.NodeID(machine+1), req, time.Since(l.began))
	resp, err := send(ctx, l.client(machine).ActiveConnection(), req)
	l.h.End(o, resp, asKind(err), false, time.Since(l.began))
	return o
}

// send sends one of etcd's requests.
func send(ctx context.Context, conn *grpc.ClientConn, req proto.Message) (proto.Message, error) {
	kv, leases := etcdserverpb.NewKVClient(conn), etcdserverpb.NewLeaseClient(conn)
	switch q := req.(type) {
	case *etcdserverpb.RangeRequest:
		return kv.Range(ctx, q)
	case *etcdserverpb.PutRequest:
		return kv.Put(ctx, q)
	case *etcdserverpb.DeleteRangeRequest:
		return kv.DeleteRange(ctx, q)
	case *etcdserverpb.TxnRequest:
		return kv.Txn(ctx, q)
	case *etcdserverpb.LeaseGrantRequest:
		return leases.LeaseGrant(ctx, q)
	case *etcdserverpb.LeaseRevokeRequest:
		return leases.LeaseRevoke(ctx, q)
	case *etcdserverpb.LeaseTimeToLiveRequest:
		return leases.LeaseTimeToLive(ctx, q)
	case *etcdserverpb.LeaseLeasesRequest:
		return leases.LeaseLeases(ctx, q)
	case *etcdserverpb.LeaseKeepAliveRequest:
		stream, err := leases.LeaseKeepAlive(ctx)
		if err != nil {
			return nil, err
		}
		if err := stream.Send(q); err != nil {
			return nil, err
		}
		return stream.Recv()
	}
	panic(fmt.Sprintf("chaos: no operation: %T", req))
}

// asKind gives an error the kind that its text implies, so that the checkers know
// whether something may have been done.
func asKind(err error) error {
	if err == nil || !refuses(err) {
		return err
	}
	for _, row := range kverror.Table() {
		if text := message(err); message(row.GRPC) == text {
			return fmt.Errorf("%s: %w", text, row.Kind)
		}
	}
	return err
}

// runHolder holds one lease after the other, renews it for a while, and revokes it or
// lets it expire.
func (l *load) runHolder(ctx context.Context, i int) {
	id := holderIDs + i
	r := l.workload.Requests(id, stormPadding)
	rng := r.Rand()
	for ctx.Err() == nil {
		machine := rng.IntN(len(l.c.nodes) + 1)
		seconds := leastTTL + rng.Int64N(mostTTL-leastTTL+1)
		lease := l.workload.NextLease()
		o := l.do(machine, id, &etcdserverpb.LeaseGrantRequest{ID: lease, TTL: seconds}, patience)
		if o.Outcome == judge.Answered {
			l.workload.Granted(lease)
			h := holder{load: l, id: id, lease: lease, ttl: time.Duration(seconds) * time.Second, requests: r, rng: rng}
			h.keep(ctx)
			h.end(ctx)
		}
		wait(ctx, time.Duration(rng.Int64N(int64(time.Second))))
	}
}

// holder is a client that has a lease.
type holder struct {
	*load
	id       int
	lease    int64
	ttl      time.Duration
	requests *sim.Requests
	rng      *rand.Rand
}

func (h *holder) ask(req proto.Message) *judge.Op {
	return h.do(h.rng.IntN(len(h.c.nodes)+1), h.id, req, h.ttl)
}

// keep renews the lease for a while, attaches keys, and asks about it.
func (h *holder) keep(ctx context.Context) {
	for range 1 + h.rng.IntN(12) {
		for range h.rng.IntN(3) {
			h.ask(h.requests.Attachment(h.lease))
		}
		if h.rng.IntN(4) == 0 {
			h.ask(&etcdserverpb.LeaseTimeToLiveRequest{ID: h.lease, Keys: h.rng.IntN(2) == 0})
		}
		wait(ctx, h.ttl/12+time.Duration(h.rng.Int64N(int64(h.ttl/3))))
		if ctx.Err() != nil {
			return
		}
		o := h.ask(&etcdserverpb.LeaseKeepAliveRequest{ID: h.lease})
		if a, ok := o.Response.(*etcdserverpb.LeaseKeepAliveResponse); ok && a.GetTTL() <= 0 {
			return
		}
	}
}

// end revokes the lease or waits for its end, and attaches keys meanwhile.
func (h *holder) end(ctx context.Context) {
	if h.rng.IntN(2) == 0 {
		h.ask(&etcdserverpb.LeaseRevokeRequest{ID: h.lease})
	} else {
		wait(ctx, h.ttl-200*time.Millisecond)
	}
	for try := 0; try < 10 && ctx.Err() == nil; try++ {
		if o := h.ask(h.requests.Attachment(h.lease)); o.Outcome == judge.Refused {
			break
		}
		wait(ctx, time.Duration(h.rng.Int64N(int64(200*time.Millisecond))))
	}
	h.ask(&etcdserverpb.LeaseTimeToLiveRequest{ID: h.lease, Keys: true})
}

// watch runs watchers until ctx ends, on one stream: a client has no more than one. A
// roaming watcher changes machines by itself now and then; the others leave it to
// clientv3 to find another machine.
func (l *load) watch(ctx context.Context, ws []*judge.Watcher, rng *rand.Rand, roams bool) {
	for ctx.Err() == nil {
		machine, sctx, cancel := len(l.c.nodes), ctx, context.CancelFunc(func() {})
		if roams {
			machine = rng.IntN(len(l.c.nodes))
			sctx, cancel = context.WithTimeout(ctx, time.Second+time.Duration(rng.Int64N(int64(10*time.Second))))
		}
		var wg sync.WaitGroup
		for _, w := range ws {
			wg.Go(func() { l.watchOnce(sctx, l.client(machine), w) })
		}
		wg.Wait()
		cancel()
		wait(ctx, time.Duration(rng.Int64N(int64(50*time.Millisecond))))
	}
}

// watchOnce watches through one client until that ends.
func (l *load) watchOnce(ctx context.Context, cl *clientv3.Client, w *judge.Watcher) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if l.who != nil {
		// A stream of watchers keeps its token. clientv3 has one stream for each metadata. Without the token in there a watcher
		// that is refused since the token is old would ask on the same stream again, for as long as another watcher keeps that.
		ctx = l.who.named(ctx)
	}
	from := w.Begin()
	// etcd's names of the first key and of the end of the keyspace.
	key, end := cmp.Or(string(w.Span.Start), "\x00"), cmp.Or(string(w.Span.End), "\x00")
	n, told := 0, l.c.told
	told.note("%s begins at %d, through %q", w.Name, from, cl.Endpoints())
	defer func() { told.note("%s ends, %d is next", w.Name, w.Next()) }()
	for resp := range cl.Watch(ctx, key, clientv3.WithRange(end), clientv3.WithRev(from), clientv3.WithProgressNotify()) {
		switch {
		case resp.Err() != nil:
			return
		case resp.IsProgressNotify():
			w.ToldProgress(told.teller(resp.Header), told.at(), resp.Header.Revision)
		case len(resp.Events) > 0:
			w.Told(told.teller(resp.Header), told.at(), resp.Events)
		}
		if n++; n%8 == 4 {
			_ = cl.RequestProgress(ctx) // without it it receives none
		}
	}
}

// behind returns a watcher that has not yet received a revision that all of them see,
// nil if there is none.
func behind(ws []*judge.Watcher, rev int64) *judge.Watcher {
	for _, w := range ws {
		if w.Next() <= rev {
			return w
		}
	}
	return nil
}

// endWrites ends clients and lease holders, and waits for their last operations.
func (l *load) endWrites() {
	l.stop()
	l.writers.Wait()
	if l.users != nil {
		l.users.End()
	}
}

// close ends everything.
func (l *load) close() {
	l.endWrites()
	l.unwatch()
	l.watching.Wait()
	for _, cl := range append(l.each, l.all) {
		cl.Close()
	}
}

// wait returns after d, or when ctx ends.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
