package shard

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// elasticWrite is a put, or a delete, of one range alone.
type elasticWrite struct {
	req *rangeapi.Request
	// ended says that there is an answer. failed says that by this answer nothing was done.
	ended, failed bool
	// rev is the answer's revision, 0 without one. The rest is of the answer too: the version
	// before a put, and how many keys a delete found.
	rev     keyspace.Revision
	before  string
	deleted int64
}

func (w *elasticWrite) put() *pb.PutRequest {
	o, _ := w.req.Op.(*pb.PutRequest)
	return o
}

// put puts a key; half of the puts attach it to a lease.
func (e *elastic) put() {
	o := &pb.PutRequest{Key: e.key(), Value: []byte(e.value()), PrevKv: e.one(2)}
	if e.one(2) {
		o.Lease = int64(e.lease())
	}
	e.write(&elasticWrite{req: e.request(o.Key, o)})
}

// del deletes a key, or all of a range's from there on.
func (e *elastic) del() {
	o := &pb.DeleteRangeRequest{Key: e.key()}
	w := &elasticWrite{req: e.request(o.Key, o)}
	if end := e.at(o.Key).Descriptor().Span.End; e.one(3) {
		o.RangeEnd = end
		if len(end) == 0 {
			o.RangeEnd = []byte{0}
		}
	}
	e.write(w)
}

// request is one to the range of a key.
func (e *elastic) request(key []byte, op proto.Message) *rangeapi.Request {
	d := e.at(key).Descriptor()
	return &rangeapi.Request{Range: d.Range, Generation: d.Generation, Op: op}
}

func (e *elastic) write(w *elasticWrite) {
	e.model.writes = append(e.model.writes, w)
	n := len(e.model.writes)
	e.say("write %d at range %s: %s", n, w.req.Range, w.req.Op)
	var a *rangeapi.Response
	var err error
	e.call(e.one(4), func(ctx context.Context) { a, err = e.leader.store.Do(ctx, w.req) }, func() {
		e.say("write %d: %s", n, formatAnswer(a, err))
		e.sane(err)
		w.ended, w.failed = err == nil, err != nil && kverror.Of(err).Fate() == kverror.NotApplied
		if err != nil {
			return
		}
		switch o := a.Op.(type) {
		case *pb.PutResponse:
			w.rev = keyspace.Revision(o.Header.Revision)
			w.before = "nothing"
			if kv := o.PrevKv; kv != nil {
				w.before = fmt.Sprintf("%s@%d=%s", kv.Key, kv.ModRevision, kv.Value)
			}
		case *pb.DeleteRangeResponse:
			w.rev, w.deleted = keyspace.Revision(o.Header.Revision), o.Deleted
		}
	})
}

// elasticRead is what was read at a revision: the state of a span, or the events in it from
// another one on.
type elasticRead struct {
	what string
	span keyspace.Span
	from keyspace.Revision
	at   keyspace.Revision
	got  string
}

// read reads some keys at the leader, or what a node's replica has.
func (e *elastic) read() {
	key := e.key()
	o := &pb.RangeRequest{Key: key}
	if end := e.at(key).Descriptor().Span.End; e.one(2) {
		o.RangeEnd = end
		if len(end) == 0 {
			o.RangeEnd = []byte{0}
		}
	}
	span, _ := keyspace.FromEtcd(o.Key, o.RangeEnd)
	req := e.request(key, o)
	if e.one(2) {
		e.readHere(req, span)
		return
	}
	var a *rangeapi.Response
	var err error
	e.call(e.one(4), func(ctx context.Context) { a, err = e.leader.store.Do(ctx, req) }, func() {
		e.say("read of %s at range %s: %s", span, req.Range, formatAnswer(a, err))
		e.sane(err)
		if err == nil {
			e.model.read(elasticRead{what: "read at the leader", span: span}, a)
		}
	})
}

// readHere reads a node's replica up to its resolved revision.
func (e *elastic) readHere(req *rangeapi.Request, span keyspace.Span) {
	w := e.leader
	if e.one(2) {
		w = e.follower
	}
	from, to, ok := w.store.ResolvedHere(req.Range, req.Generation)
	if !ok {
		return
	}
	req.ReadRevision = to
	if from < to && e.one(2) {
		req.ReadRevision = from + keyspace.Revision(e.rng.IntN(int(to-from)))
	}
	a, err := w.store.ReadHere(e.t.Context(), req)
	e.say("read of %s at range %s at %d at the %s: %s", span, req.Range, req.ReadRevision, e.name(w), formatAnswer(a, err))
	if err == nil {
		e.model.read(elasticRead{what: "read at the " + e.name(w), span: span}, a)
	}
}

// page reads the history of a range.
func (e *elastic) page() {
	w := e.leader
	if e.one(2) {
		w = e.follower
	}
	if rs := w.over(keyspace.Span{}); len(rs) > 0 {
		e.pageAt(w, rs[e.rng.IntN(len(rs))])
	}
}

// pageAt reads the events of a replica up to its resolved revision, to which none can be added.
func (e *elastic) pageAt(w *fakeWorld, r *Replica) {
	r.mu.Lock()
	g, span, to := r.rec.Generation, r.rec.Span, r.resolved
	r.mu.Unlock()
	if g == 0 || to < 1 {
		return
	}
	q := &rangeapi.HistoryRequest{Range: r.id, Generation: g, Span: span, From: 1 + keyspace.Revision(e.rng.IntN(int(to))), To: to, MaxBytes: 1 << 20}
	p, err := r.feeds.History(q)
	if err != nil {
		e.say("history of range %s from %d to %d at the %s: %s", r.id, q.From, q.To, e.name(w), errorText(err))
		return
	}
	got := ""
	for i := range p.Events {
		got += versionText(&p.Events[i].Version) + " "
	}
	e.say("history of range %s from %d to %d at the %s: %s", r.id, q.From, q.To, e.name(w), got)
	e.model.reads = append(e.model.reads, elasticRead{what: "history at the " + e.name(w), span: span, from: q.From, at: to, got: got})
}

// compact lets old versions go.
func (e *elastic) compact() {
	if !e.traits.compacts {
		return
	}
	e.seq.mu.Lock()
	e.seq.compacted += keyspace.Revision(e.rng.IntN(int(max(1, e.seq.last-e.seq.compacted))))
	c := e.seq.compacted
	e.seq.mu.Unlock()
	e.tellCompacted(e.leader)
	e.tellCompacted(e.follower)
	e.say("compacted %d", c)
	e.pass(elasticTick * 50)
}

// tellCompacted tells a node what is compacted, as the sequencer would, and has it look after
// its replicas in their order: a run is to be one for ever.
func (e *elastic) tellCompacted(w *fakeWorld) {
	if raise(&w.store.compacted, int64(e.seq.compacted)) {
		rs := w.store.Replicas()
		slices.SortFunc(rs, func(a, b *Replica) int { return cmp.Compare(a.id, b.id) })
		w.store.maintenance.note(rs...)
	}
}
