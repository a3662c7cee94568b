package shard

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// end brings everything to its end: coordinators, the merge, locks of coordinators that are
// gone, and the follower.
func (e *elastic) end() {
	e.ending = true
	e.hurry()
	for i := 0; (len(e.txns) > 0 || e.merge != nil) && i < 6000; i++ {
		if m := e.merge; m != nil {
			if m.phase < elasticAbsorbs {
				m.phase = elasticReleases
			}
			e.takeMergeStep(m)
		}
		if len(e.txns) > 0 {
			e.advance(e.txns[e.rng.IntN(len(e.txns))])
		}
		if i%5 == 4 {
			e.pushForgotten()
		}
		e.pass(time.Millisecond)
		e.collect()
	}
	for i := 0; e.pushForgotten() && i < 6000; i++ {
		e.model.observe(e)
	}
	for _, t := range e.txns {
		e.fatal("%s does not end: %s", t.name, t.stage)
	}
	e.pass(elasticLongPatience)
	if e.collect(); len(e.waiting) > 0 || e.merge != nil {
		e.fatal("%d calls wait yet, the merge is %+v", len(e.waiting), e.merge)
	}
	e.agree()
	for _, w := range []*fakeWorld{e.leader, e.follower} {
		for _, r := range w.over(keyspace.Span{}) {
			if s := &r.applying.txns; len(s.Locks)+len(s.Records) > 0 {
				e.fatal("%s: range %s has %s", e.name(w), r.id, heldText(s))
			}
		}
		if n := w.store.locks.Bytes(); n != 0 {
			e.fatal("%s: no locks, which take %d bytes", e.name(w), n)
		}
	}
}

// pushForgotten ends a lock or a record whose coordinator is gone, if there is one.
func (e *elastic) pushForgotten() bool {
	gone := func(name rangeapi.TxnName) bool {
		return !slices.ContainsFunc(e.txns, func(t *elasticTxn) bool { return t.name == name })
	}
	for _, r := range e.over(keyspace.Span{}) {
		for _, l := range e.locks(r.id) {
			if gone(l.Name) {
				e.pushLock(r.id, l, true)
				return true
			}
		}
		for _, t := range e.records(r.id) {
			if gone(t.Name) {
				e.finish(t)
				return true
			}
		}
	}
	return false
}

// judge holds all that was told against what there is.
func (e *elastic) judge() {
	m := e.model
	m.observe(e)
	for _, r := range m.reads {
		want := m.state(r.span, r.at)
		if r.from != 0 {
			want = m.events(r.span, r.from, r.at)
		}
		if r.got != want {
			e.fatal("%s of %s at %d from %d: %s, there was %s", r.what, r.span, r.at, r.from, r.got, want)
		}
	}
	values := map[string]*mvcc.Version{}
	for _, key := range m.keys() {
		for i := range m.versions[key] {
			if v := &m.versions[key][i]; !v.Tombstone {
				values[string(v.Value)] = v
			}
		}
	}
	for n, w := range m.writes {
		e.judgeWrite(n+1, w, values)
	}
	for _, t := range m.txns {
		e.judgeTxn(t, values)
	}
}

// judgeWrite holds the n-th write against what there is of it.
func (e *elastic) judgeWrite(n int, w *elasticWrite, values map[string]*mvcc.Version) {
	o := w.put()
	if o == nil {
		s, _ := keyspace.FromEtcd(w.req.Op.(*pb.DeleteRangeRequest).Key, w.req.Op.(*pb.DeleteRangeRequest).RangeEnd)
		if found := e.model.tombstones(s, w.rev); w.ended && w.deleted > 0 && found != w.deleted {
			e.fatal("write %d deleted %d keys of %s at %d, and there are %d tombstones", n, w.deleted, s, w.rev, found)
		}
		return
	}
	v := values[string(o.Value)]
	switch {
	case w.failed && v != nil:
		e.fatal("write %d is said not to have happened, and there is %s", n, versionText(v))
	case w.ended && (v == nil || v.Mod != w.rev || v.Lease != keyspace.LeaseID(o.Lease)):
		e.fatal("write %d happened at %d, of %s there is %+v", n, w.rev, o.Value, v)
	}
	if !w.ended || !o.PrevKv {
		return
	}
	before := "nothing"
	if was := e.model.at(string(o.Key), w.rev-1); was != nil {
		before = fmt.Sprintf("%s@%d=%s", was.Key, was.Mod, was.Value)
	}
	if w.before != before {
		e.fatal("write %d at %d replaced %s, there was %s", n, w.rev, w.before, before)
	}
}

// judgeTxn holds a transaction against what there is of it.
func (e *elastic) judgeTxn(t *elasticTxn, values map[string]*mvcc.Version) {
	there := 0
	for _, value := range t.begun {
		v := values[value]
		if v == nil {
			continue
		}
		if there++; v.Mod != t.rev {
			e.fatal("%s at %d: there is %s", t.name, t.rev, versionText(v))
		}
	}
	// The coordinator knows if it was told of the abort, or never asked for a commit. Otherwise
	// others know.
	aborted := !t.committed && !t.unsure
	if there != 0 && there != len(t.begun) || t.committed && there != len(t.begun) || aborted && there != 0 {
		e.fatal("%s, committed %t, unsure %t: %d of %d values are there", t.name, t.committed, t.unsure, there, len(t.begun))
	}
	if !t.committed {
		return
	}
	for _, p := range t.participants {
		for i, g := range p.op.Guards {
			was := keyspace.Revision(0)
			if v := e.model.at(string(g.Compare.Key), t.rev-1); v != nil {
				was = v.Mod
			}
			if f := p.answer.Facts[i]; f.Holds != (int64(was) == g.Compare.GetModRevision()) || f.Found != (was != 0) {
				e.fatal("%s at %d compared %s with revision %d: %+v, it was %d", t.name, t.rev, g.Compare.Key, g.Compare.GetModRevision(), f, was)
			}
		}
		e.judgeResults(t, p)
	}
}

// judgeResults holds what the writes of a committed transaction found against what there is.
func (e *elastic) judgeResults(t *elasticTxn, p *elasticParticipant) {
	for i, w := range p.op.Writes {
		got := p.answer.Results[i]
		switch o := w.Op.(type) {
		case *pb.DeleteRangeRequest:
			s, _ := keyspace.FromEtcd(o.Key, o.RangeEnd)
			if n := e.model.tombstones(s, t.rev); !got.Uncounted && got.Deleted != n {
				e.fatal("%s at %d deleted %d keys of %s, and there are %d tombstones", t.name, t.rev, got.Deleted, s, n)
			}
		case *pb.PutRequest:
			v := e.model.at(string(o.Key), t.rev)
			create := cmp.Or(got.Create, t.rev)
			if v == nil || v.Mod != t.rev || v.Version != got.Version || v.Create != create || v.Lease != keyspace.LeaseID(o.Lease) {
				e.fatal("%s at %d: %s was to be %+v, and there is %+v", t.name, t.rev, o.Key, got, v)
			}
		}
	}
}
