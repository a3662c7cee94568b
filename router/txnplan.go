package router

import (
	"bytes"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// path is the branch that each transaction takes, in the order of execution: a nested one at its
// place among the operations.
type path []bool

// outcomes are presumed outcomes of compares. A missing one is presumed to hold.
type outcomes map[*pb.Compare]bool

func (o outcomes) holds(c *pb.Compare) bool {
	v, known := o[c]
	return v || !known
}

// choose returns the path that the outcomes lead to. All compares see the state before the
// transaction.
func choose(t *pb.TxnRequest, o outcomes, p path) path {
	succeeded := true
	for _, c := range t.GetCompare() {
		succeeded = succeeded && o.holds(c)
	}
	p = append(p, succeeded)
	for _, op := range branch(t, succeeded) {
		if n := op.GetRequestTxn(); n != nil {
			p = choose(n, o, p)
		}
	}
	return p
}

func branch(t *pb.TxnRequest, succeeded bool) []*pb.RequestOp {
	if succeeded {
		return t.GetSuccess()
	}
	return t.GetFailure()
}

// allCompares returns every compare of the transaction and of its nested ones.
func allCompares(t *pb.TxnRequest, into []*pb.Compare) []*pb.Compare {
	into = append(into, t.GetCompare()...)
	for _, ops := range [2][]*pb.RequestOp{t.GetSuccess(), t.GetFailure()} {
		for _, op := range ops {
			if n := op.GetRequestTxn(); n != nil {
				into = allCompares(n, into)
			}
		}
	}
	return into
}

// plan is one path with its guards and operations.
type plan struct {
	path path
	// guards are compares whose outcomes lead to this path and no other.
	guards []guard
	// ops are the path's operations in order; nested transactions are expanded.
	ops []proto.Message
}

// guard is a compare with the outcome that the path needs, or any.
type guard struct {
	compare *pb.Compare
	holds   bool
	any     bool
}

// newPlan plans the path that the outcomes lead to. For a transaction that fails, one compare that
// does not hold is enough of a guard.
func newPlan(t *pb.TxnRequest, o outcomes) *plan {
	p := &plan{path: choose(t, o, nil)}
	p.walk(t, o, p.path)
	return p
}

func (p *plan) walk(t *pb.TxnRequest, o outcomes, left path) path {
	succeeded, left := left[0], left[1:]
	for _, c := range t.GetCompare() {
		if succeeded || !o.holds(c) {
			p.guards = append(p.guards, guard{compare: c, holds: succeeded})
			if !succeeded {
				break
			}
		}
	}
	for _, op := range branch(t, succeeded) {
		switch o2 := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			p.ops = append(p.ops, o2.RequestRange)
		case *pb.RequestOp_RequestPut:
			p.ops = append(p.ops, o2.RequestPut)
		case *pb.RequestOp_RequestDeleteRange:
			p.ops = append(p.ops, o2.RequestDeleteRange)
		case *pb.RequestOp_RequestTxn:
			left = p.walk(o2.RequestTxn, o, left)
		}
	}
	return left
}

// writes says whether an operation of the path can change something.
func (p *plan) writes() bool { return p.anchor() != nil }

// explicit says whether an operation names a revision.
func (p *plan) explicit() bool {
	return slices.ContainsFunc(p.ops, func(op proto.Message) bool {
		q, ok := op.(*pb.RangeRequest)
		return ok && q.GetRevision() != 0
	})
}

// badRevision returns the first operation whose explicit revision cannot be read; etcd checks them
// before a path's first operation. Until the first compaction, etcd's first revision is -1.
func (p *plan) badRevision(now keyspace.SequenceAnswer) (number int, err error) {
	for i, op := range p.ops {
		q, ok := op.(*pb.RangeRequest)
		if !ok {
			continue
		}
		switch rev := q.GetRevision(); {
		case rev == 0:
		case rev > int64(now.Current):
			return i + 1, kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", rev, now.Current)
		case rev < int64(now.Compacted), rev < -1:
			return i + 1, &kverror.Error{Kind: kverror.Compacted, CompactRevision: max(now.Compacted, 0)}
		}
	}
	return 0, nil
}

// anchor returns the smallest key that the path writes.
func (p *plan) anchor() []byte {
	var least []byte
	for _, op := range p.ops {
		if s, ok := writtenSpan(op); ok {
			least = lower(least, s)
		}
	}
	return least
}

// lower returns the smaller of a key and the first key of a span; nil is no key.
func lower(least []byte, s keyspace.Span) []byte {
	key := s.Start
	if len(key) == 0 {
		key = []byte{0}
	}
	if least == nil || bytes.Compare(key, least) < 0 {
		return key
	}
	return least
}

// writtenSpan returns the keys that an operation may write.
func writtenSpan(op proto.Message) (s keyspace.Span, ok bool) {
	switch o := op.(type) {
	case *pb.PutRequest:
		return keyspace.Single(o.GetKey()), true
	case *pb.DeleteRangeRequest:
		return keyspace.FromEtcd(o.GetKey(), o.GetRangeEnd())
	}
	return s, false
}

// etcdPair returns etcd's pair (key, range_end) for the span.
func etcdPair(s keyspace.Span) (key, end []byte) {
	key, end = s.Start, s.End
	if len(key) == 0 {
		key = []byte{0}
	}
	if len(end) == 0 {
		return key, []byte{0}
	}
	if bytes.Equal(keyspace.Next(key), end) {
		return key, nil
	}
	return key, end
}

// participant is one range's part of a plan.
type participant struct {
	rt *route
	op *rangeapi.Prepare
	// guards are the plan's guards that op's guards are parts of, in order.
	guards []int
	// span covers everything that is locked.
	span   keyspace.Span
	locks  bool
	sent   bool
	answer *rangeapi.Prepared
}

func (p *participant) cover(s keyspace.Span) {
	if !p.locks {
		p.span, p.locks = s, true
		return
	}
	if bytes.Compare(s.Start, p.span.Start) < 0 {
		p.span.Start = s.Start
	}
	if len(p.span.End) != 0 && (len(s.End) == 0 || bytes.Compare(s.End, p.span.End) > 0) {
		p.span.End = s.End
	}
}

// participants divides a plan among ranges.
type participants struct {
	name   rangeapi.TxnName
	anchor []byte
	of     map[keyspace.RangeID]*participant
	order  []*participant
}

func (ps *participants) at(rt *route) *participant {
	p := ps.of[rt.desc.Range]
	if p == nil {
		p = &participant{rt: rt, op: &rangeapi.Prepare{Name: ps.name, Anchor: ps.anchor}}
		ps.of[rt.desc.Range] = p
		ps.order = append(ps.order, p)
	}
	return p
}

// guard gives each range its part of a compare.
func (ps *participants) guard(i int, g guard, s keyspace.Span, routes []*route) {
	single := len(g.compare.GetRangeEnd()) == 0
	for _, rt := range routes {
		part, ok := rt.desc.Span.Intersect(s)
		if !ok {
			continue
		}
		c := g.compare
		if !single {
			c = proto.CloneOf(c)
			c.Key, c.RangeEnd = spanPair(part)
		}
		want := rangeapi.WantAny
		switch {
		case g.any:
		case g.holds:
			want = rangeapi.WantHolds
		case single:
			want = rangeapi.WantFails
		}
		p := ps.at(rt)
		p.cover(part)
		p.guards = append(p.guards, i)
		p.op.Guards = append(p.op.Guards, rangeapi.Guard{Compare: c, Want: want})
	}
}

// spanPair is etcdPair for a span that stays one. A compare on a span and one on a key differ if
// the key is absent.
func spanPair(s keyspace.Span) (key, end []byte) {
	key, end = s.Start, s.End
	if len(key) == 0 {
		key = []byte{0}
	}
	if len(end) == 0 {
		end = []byte{0}
	}
	return key, end
}

// write gives each range its part of a write.
func (ps *participants) write(number int, op proto.Message, s keyspace.Span, routes []*route) {
	for _, rt := range routes {
		part, ok := rt.desc.Span.Intersect(s)
		if !ok {
			continue
		}
		mine := op
		if d, ok := op.(*pb.DeleteRangeRequest); ok {
			key, end := etcdPair(part)
			mine = &pb.DeleteRangeRequest{Key: key, RangeEnd: end, PrevKv: d.GetPrevKv()}
		}
		p := ps.at(rt)
		p.cover(part)
		// The keys that it deletes may have to be counted at the revision before.
		p.op.Pin = true
		p.op.Writes = append(p.op.Writes, rangeapi.Write{Number: uint32(number), Op: mine})
	}
}

// pin has each range keep a readable revision: an explicit one, or the one before the
// transaction's. A revision that will never exist is refused later.
func (ps *participants) pin(explicit int64, routes []*route) {
	at := keyspace.Revision(explicit)
	for _, rt := range routes {
		p := ps.at(rt)
		if at > 0 && at < keyspace.MaxRevision && (p.op.PinAt == 0 || at < p.op.PinAt) {
			p.op.PinAt = at
		}
		p.op.Pin = true
	}
}

// outcome returns the outcome of a compare from the facts of all participants.
func outcome(c *pb.Compare, facts []rangeapi.Fact) bool {
	if len(c.GetRangeEnd()) == 0 {
		return len(facts) == 1 && facts[0].Holds
	}
	found := false
	for _, f := range facts {
		if !f.Holds {
			return false
		}
		found = found || f.Found
	}
	return found || rangeapi.CompareAbsent(c)
}

// changes says whether the range writes something at the transaction's revision.
func (p *participant) changes() bool {
	return len(p.op.Writes) > 0 || p.op.Revoke != 0 && p.answer.Changes
}
