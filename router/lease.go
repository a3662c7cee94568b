package router

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// revokeBytes is about what a revoke takes of the budget of transactions.
const revokeBytes = 4 << 10

// maxRevokeRanges bounds the ranges that a revoke locks at a time, and maxRevokeBorders the
// bytes of their spans beyond keyspace.MaxRevisionRanges of them: its record lists all.
const (
	maxRevokeRanges  = 4 * keyspace.MaxRevisionRanges
	maxRevokeBorders = 1 << 20
)

// RevokeLease deletes all keys that are attached to the lease in the spans, which are those
// that its record lists, in one revision, and lets the ranges forget the lease. It returns
// the revision of the deletion or a later one; where there was no key none is used. The
// record must register nobody from before the call until after its success. It takes as
// long as ctx lasts. After any error it may be called again, for ever: it deletes nothing of
// a later incarnation.
//
// The deletion has several revisions where keys lie in more than keyspace.MaxRevisionRanges
// ranges, or the spans have become more than maxRevokeRanges ranges.
func (r *Router) RevokeLease(
	ctx context.Context, lease keyspace.LeaseID, incarnation keyspace.LeaseIncarnation, spans []keyspace.Span,
) (keyspace.Revision, error) {
	var last keyspace.Revision
	v := &revoke{r: r, lease: lease, incarnation: incarnation, most: maxRevokeRanges}
	defer v.end()
	spans = disjoint(spans)
	for len(spans) > 0 {
		rev, rest, err := v.some(ctx, spans)
		if errors.Is(err, errStartOver) {
			r.cfg.Metrics.Restarts.Inc()
			err = clock.Sleep(ctx, r.cfg.Clock, v.pause())
			rest = spans
		}
		if err != nil {
			return 0, kverror.Of(err)
		}
		spans, last = rest, max(last, rev)
	}
	if last != 0 {
		return last, nil
	}
	now, err := r.currentOrWait(ctx)
	if err != nil {
		return 0, kverror.Of(err)
	}
	return now.Current, nil
}

// disjoint returns the spans in order, without overlaps.
func disjoint(spans []keyspace.Span) (out []keyspace.Span) {
	spans = slices.Clone(spans)
	slices.SortFunc(spans, func(a, b keyspace.Span) int { return bytes.Compare(a.Start, b.Start) })
	for _, s := range spans {
		if n := len(out) - 1; n >= 0 && (len(out[n].End) == 0 || bytes.Compare(s.Start, out[n].End) <= 0) {
			if len(out[n].End) > 0 && (len(s.End) == 0 || bytes.Compare(s.End, out[n].End) > 0) {
				out[n].End = s.End
			}
			continue
		}
		out = append(out, s)
	}
	return out
}

// revoke is the revocation of a lease on its way. Over several ranges it is a transaction
// like others, and as old as its first attempt.
type revoke struct {
	r           *Router
	lease       keyspace.LeaseID
	incarnation keyspace.LeaseIncarnation
	txn         *txn
	starts      int
	// most is how many ranges are locked at a time.
	most int
}

// begin takes the revoke into the budget of transactions.
func (v *revoke) begin() (*txn, error) {
	if v.txn == nil {
		if err := v.r.coordinator.enter(revokeBytes); err != nil {
			return nil, err
		}
		v.txn = &txn{r: v.r, id: v.r.coordinator.newID(), bytes: revokeBytes}
		v.txn.retain()
		v.r.cfg.Metrics.Txns.Inc()
	}
	return v.txn, nil
}

func (v *revoke) end() {
	if v.txn != nil {
		v.txn.release()
	}
}

// pause is how long a revoke that gave way leaves the others alone.
func (v *revoke) pause() time.Duration {
	v.starts++
	return min(firstYield<<min(v.starts-1, 10), lastYield)
}

// some revokes the lease in the first ranges of the spans, and returns what is left of
// these.
func (v *revoke) some(ctx context.Context, spans []keyspace.Span) (keyspace.Revision, []keyspace.Span, error) {
	var routes []*route
	borders := 0
	for i, s := range spans {
		over, err := v.r.resolve(ctx, s)
		if err != nil {
			return 0, nil, err
		}
		for _, rt := range over {
			if n := len(routes); n > 0 && routes[n-1].desc.Range == rt.desc.Range {
				continue
			}
			if n := len(routes); n == v.most || n >= keyspace.MaxRevisionRanges && borders > maxRevokeBorders {
				rest := slices.Clone(spans[i:])
				if bytes.Compare(rest[0].Start, rt.desc.Span.Start) < 0 {
					rest[0].Start = rt.desc.Span.Start
				}
				rev, err := v.at(ctx, routes)
				return rev, rest, err
			}
			routes = append(routes, rt)
			borders += len(rt.desc.Span.Start) + len(rt.desc.Span.End)
		}
	}
	rev, err := v.at(ctx, routes)
	return rev, nil, err
}

// at revokes the lease in the ranges, at one revision.
func (v *revoke) at(ctx context.Context, routes []*route) (keyspace.Revision, error) {
	if len(routes) == 1 {
		got, err := v.r.commandAt(ctx, routes[0], &rangeapi.Revoke{Lease: v.lease, Incarnation: v.incarnation})
		if err != nil {
			return 0, v.again(ctx, err)
		}
		if one := got.(*rangeapi.Revoked); !one.TooMany {
			v.r.coordinator.observe(one.Revision)
			return one.Revision, nil
		}
	}
	t, err := v.begin()
	if err != nil {
		return 0, err
	}
	// With the last lock goes the last mark. While there is one a merge may carry it to keys
	// that the record did not list, and a split from there to a range where nobody comes to end
	// it: who attaches a key there would not ask the record of a later lease with this id.
	a := &txnAttempt{t: t, name: v.r.coordinator.begin(t.id), plan: &plan{}, awaitResolve: true}
	a.ps = v.participants(a.name, routes)
	if err := a.prepareAll(ctx); err != nil {
		a.abort()
		return 0, err
	}
	switch n := a.changes(); {
	case n == 0:
		return 0, a.detach(ctx)
	case n > keyspace.MaxRevisionRanges:
		a.abort()
		v.most = keyspace.MaxRevisionRanges
		return 0, errStartOver
	}
	d := a.awaitDecision(ctx)
	if d.err != nil {
		return 0, v.again(ctx, d.err)
	}
	return d.revision, nil
}

// again says what becomes of a revoke that failed so: whatever it did, it may be repeated.
func (v *revoke) again(ctx context.Context, err error) error {
	if errors.Is(err, errStartOver) {
		return err
	}
	e := kverror.Of(err)
	if ctx.Err() == nil && e.Fate() == kverror.Unknown && e.Kind != kverror.Corrupt && e.Kind != kverror.Internal {
		return errStartOver
	}
	return err
}

// pieces has every range delete the lease's keys. The smallest key of the first one is the
// anchor: a lease is locked in each, whether there is a key or not.
func (v *revoke) participants(name rangeapi.TxnName, routes []*route) *participants {
	anchor := lower(nil, routes[0].desc.Span)
	ps := &participants{name: name, anchor: anchor, of: map[keyspace.RangeID]*participant{}}
	for _, rt := range routes {
		p := ps.at(rt)
		p.op.Revoke, p.op.Incarnation = v.lease, v.incarnation
		p.cover(rt.desc.Span)
	}
	return ps
}

// changes returns how many ranges the attempt's revision concerns.
func (a *txnAttempt) changes() (n int) {
	for _, p := range a.ps.order {
		if p.changes() {
			n++
		}
	}
	return n
}

// unmark ends the revoke of a lease that has no key: while all ranges hold it locked, each
// of them may forget it. No record says so, and who takes this node for dead may end a lock
// before: that range refuses, and the revoke starts over.
func (a *txnAttempt) detach(ctx context.Context) error {
	err := each(ctx, a.ps.order, func(ctx context.Context, p *participant) error {
		return a.t.r.commandForSpan(ctx, p.span, &rangeapi.Resolve{
			Name: a.name, Lock: p.answer.Lock, Detach: p.op.Revoke, Incarnation: p.op.Incarnation,
		})
	})
	if err != nil {
		a.abort()
		return a.failed(ctx, err)
	}
	a.t.r.coordinator.end(a.name)
	return nil
}

// LeaseKeys returns the keys in the spans that are attached to the lease, in their order,
// and a revision that was current after the call: whatever was attached or detached up to
// there is so here. What ranges answer later may show more.
func (r *Router) LeaseKeys(ctx context.Context, lease keyspace.LeaseID, spans []keyspace.Span) ([][]byte, keyspace.Revision, error) {
	limit := r.limited(ctx)
	defer limit.End()
	now, err := r.currentOrWait(limit.Patience)
	if err != nil {
		return nil, 0, limit.outcome(err)
	}
	var reserved reservation
	defer r.releaseAll(&reserved)
	var keys [][]byte
	for _, s := range disjoint(spans) {
		if keys, err = r.leaseKeys(limit.Patience, lease, s, now.Current, &reserved, keys); err != nil {
			return nil, 0, limit.outcome(err)
		}
	}
	return keys, now.Current, nil
}

// leaseKeys appends the keys of one span, range by range and page by page.
func (r *Router) leaseKeys(
	ctx context.Context, lease keyspace.LeaseID, s keyspace.Span, at keyspace.Revision, reserved *reservation, keys [][]byte,
) ([][]byte, error) {
	for {
		routes, err := r.resolve(ctx, s)
		if err != nil {
			return nil, err
		}
		rt := routes[0]
		part, ok := rt.desc.Span.Intersect(s)
		if !ok {
			return keys, nil
		}
		got, err := r.commandAt(ctx, rt, &rangeapi.LeaseKeys{Lease: lease, Span: part, At: at})
		if err != nil {
			e := kverror.Of(err)
			if !errors.Is(err, errStartOver) && (e.Fate() == kverror.NotApplied || e.Kind == kverror.Corrupt || e.Kind == kverror.Internal) {
				return nil, err
			}
			if sleep := clock.Sleep(ctx, r.cfg.Clock, firstPause); sleep != nil {
				return nil, err
			}
			continue
		}
		page := got.(*rangeapi.Attached)
		size := int64(0)
		for _, k := range page.Keys {
			size += int64(len(k))
		}
		if err := r.reserve(reserved, size); err != nil {
			return nil, err
		}
		keys = append(keys, page.Keys...)
		switch {
		case page.More:
			s.Start = keyspace.Next(page.Keys[len(page.Keys)-1])
		case len(part.End) == 0 || bytes.Equal(part.End, s.End):
			return keys, nil
		default:
			s.Start = part.End
		}
	}
}
