package shard

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// elasticRecord is the record of a lease, as placement keeps it.
type elasticRecord struct {
	incarnation keyspace.LeaseIncarnation
	// spans are those that keys may lie in. They are widened where ranges merge, and merges is
	// how often that was.
	spans  []keyspace.Span
	merges int
	// ending says that the lease is being revoked: it registers nobody any more.
	ending bool
}

// elasticLeases has the records of leases. Who asks one is answered by answer.
type elasticLeases struct {
	mu sync.Mutex
	// Guarded by mu. asks has what the records were not asked yet, and answers what they have
	// said and nobody has heard yet.
	asks, answers []leaseAsk
	said          []leaseAnswer

	// For the test's goroutine alone: records are the leases that exist. For slow more steps
	// nobody hears their answers, or with deaf they hear no question.
	records      map[keyspace.LeaseID]*elasticRecord
	incarnations keyspace.LeaseIncarnation
	slow         int
	deaf         bool
}

type leaseAnswer struct {
	got keyspace.LeaseRegistration
	err error
}

func newElasticLeases() *elasticLeases {
	return &elasticLeases{records: map[keyspace.LeaseID]*elasticRecord{}}
}

// Register implements Leases.
func (l *elasticLeases) Register(lease keyspace.LeaseID, span keyspace.Span, done func(keyspace.LeaseRegistration, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asks = append(l.asks, leaseAsk{lease, span, done})
}

// answer has the records say what they are asked, but for leases that are being revoked, and
// unless they are slow it is heard. It says whether anything was heard.
func (l *elasticLeases) answer() bool {
	l.mu.Lock()
	asks := l.asks
	l.asks = nil
	for _, a := range asks {
		r := l.records[a.lease]
		if r != nil && r.ending || l.slow > 0 && l.deaf {
			l.asks = append(l.asks, a)
			continue
		}
		say := leaseAnswer{err: kverror.LeaseNotFound}
		if r != nil {
			r.spans = append(r.spans, a.span)
			say = leaseAnswer{got: keyspace.LeaseRegistration{Incarnation: r.incarnation}}
		}
		l.answers, l.said = append(l.answers, a), append(l.said, say)
	}
	if l.slow > 0 || len(l.answers) == 0 {
		l.mu.Unlock()
		return false
	}
	answers, said := l.answers, l.said
	l.answers, l.said = nil, nil
	l.mu.Unlock()
	for i, a := range answers {
		a.done(said[i].got, said[i].err)
	}
	return true
}

// merged widens the records of leases that list a part of what is one range now.
func (l *elasticLeases) merged(hull keyspace.Span) {
	for _, r := range l.records {
		if slices.ContainsFunc(r.spans, func(s keyspace.Span) bool { return s.Overlaps(hull) }) {
			r.spans = append(r.spans, hull)
			r.merges++
		}
	}
}

// lists says whether the record of a lease lists the span.
func (l *elasticLeases) lists(m rangeapi.Attachment, s keyspace.Span) bool {
	r := l.records[m.Lease]
	return r != nil && r.incarnation == m.Incarnation && slices.ContainsFunc(r.spans, func(o keyspace.Span) bool { return o.Covers(s) })
}

// beginRevoke grants a lease, or has somebody revoke one that there is.
func (e *elastic) beginRevoke() {
	lease := e.lease()
	if slices.ContainsFunc(e.txns, func(t *elasticTxn) bool { return t.lease == lease }) {
		return
	}
	r := e.leases.records[lease]
	if r == nil {
		e.leases.incarnations++
		e.leases.records[lease] = &elasticRecord{incarnation: e.leases.incarnations}
		e.say("lease %d/%d is granted", lease, e.leases.incarnations)
		return
	}
	r.ending = true
	t := &elasticTxn{name: e.newName(), lease: lease, incarnation: r.incarnation}
	e.txns = append(e.txns, t)
	e.planRevoke(t)
}

// planRevoke begins an attempt to revoke a lease in all ranges that its record lists.
func (e *elastic) planRevoke(t *elasticTxn) {
	r := e.leases.records[t.lease]
	t.stage, t.participants, t.rev, t.unsure, t.detaches, t.merges = elasticPrepares, nil, 0, false, false, r.merges
	for _, m := range e.over(keyspace.Span{}) {
		d := m.Descriptor()
		if !slices.ContainsFunc(r.spans, d.Span.Overlaps) {
			continue
		}
		if len(t.participants) == 0 {
			t.anchor = eval.SpanFromFirst(d.Span).Start
		}
		t.participants = append(t.participants, &elasticParticipant{at: d.Range, generation: d.Generation, span: d.Span, op: &rangeapi.Prepare{
			Name: t.name, Anchor: t.anchor, Revoke: t.lease, Incarnation: t.incarnation,
		}})
	}
	e.say("%s revokes lease %d/%d in %d ranges: %s", t.name, t.lease, t.incarnation, len(t.participants), r.spans)
	if len(t.participants) == 0 {
		t.stage = elasticForgets
		return
	}
	if e.anyOrder(t); len(t.participants) == 1 {
		t.stage = elasticRevokes
	}
}

// revokeAgain begins the next attempt.
func (e *elastic) revokeAgain(t *elasticTxn) {
	e.attempts++
	t.name.Attempt = e.attempts
	e.planRevoke(t)
}

// revokeAtOnce revokes a lease that has keys in one range alone.
func (e *elastic) revokeAtOnce(t *elasticTxn) {
	p := t.participants[0]
	a, err := do(e, func(ctx context.Context) (rangeapi.TxnAnswer, error) {
		return e.leader.store.Txn(ctx, p.at, p.generation, &rangeapi.Revoke{Lease: t.lease, Incarnation: t.incarnation})
	})
	e.say("revoke lease %d/%d in range %s: %+v %s", t.lease, t.incarnation, p.at, a, errorText(err))
	switch {
	case err != nil:
		e.revokeAgain(t)
	case a.(*rangeapi.Revoked).TooMany:
		t.stage = elasticPrepares
	case e.revoked(t):
		t.stage = elasticOver
	}
}

// revoked removes the record of a lease whose revoke has ended everywhere, and fails if anything
// of the lease is left. If ranges were merged meanwhile, the lease is revoked once more: an
// attachment may have come back with a merge.
func (e *elastic) revoked(t *elasticTxn) bool {
	if e.leases.records[t.lease].merges != t.merges {
		e.say("ranges of lease %d/%d were merged meanwhile", t.lease, t.incarnation)
		e.revokeAgain(t)
		return false
	}
	e.say("lease %d/%d is revoked", t.lease, t.incarnation)
	delete(e.leases.records, t.lease)
	for _, r := range e.over(keyspace.Span{}) {
		r.mu.Lock()
		_, attached := r.leases.attached[t.lease]
		held := r.locks.OfLease(t.lease)
		r.mu.Unlock()
		if attached || len(held) > 0 {
			e.fatal("lease %d is revoked, range %s has its attachment: %t, and %d locks", t.lease, r.id, attached, len(held))
		}
	}
	if _, err := mvcc.Scan(e.leader.engine, mvcc.ScanOptions{At: eval.Newest, KeysOnly: true}, func(v *mvcc.Version) error {
		if v.Lease == t.lease {
			return fmt.Errorf("lease %d is revoked and has key %s", t.lease, v.Key)
		}
		return nil
	}); err != nil {
		e.fatal("%v", err)
	}
	e.settle()
	return true
}
