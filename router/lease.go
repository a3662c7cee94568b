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

// revokeBytes is roughly what a revoke takes of the budget of transactions.
const revokeBytes = 4 << 10

// maxRevokeRanges bounds the ranges that a revoke locks at a time. maxRevokeBorders bounds the
// bytes of their spans beyond keyspace.MaxRevisionRanges of them, because the commit record lists
// all.
const (
	maxRevokeRanges  = 4 * keyspace.MaxRevisionRanges
	maxRevokeBorders = 1 << 20
)

// RevokeLease deletes all keys that are attached to the lease, at one revision, and removes the
// lease's attachments. The spans are those that the lease's record lists. It returns the revision
// of the deletion or a later one; without keys it uses none. From before the call until after its
// success, the record must register no range. The call lasts until ctx ends. It may be repeated
// after any error, even much later, because it spares later incarnations; with a check, by the leader of its term.
//
// The deletion has several revisions if more than keyspace.MaxRevisionRanges ranges have keys, or
// if the spans have become more than maxRevokeRanges ranges.
//
// Checked, if its At is not 0, says as of when the lease's keys were checked. If one of them was written later, the
// error is KeysChanged. Then nothing is deleted, but for what has several revisions: there all deleted keys were
// checked.
func (r *Router) RevokeLease(
	ctx context.Context, lease keyspace.LeaseID, incarnation keyspace.LeaseIncarnation, spans []keyspace.Span, checked keyspace.KeyCheck,
) (keyspace.Revision, error) {
	var last keyspace.Revision
	v := &revoke{r: r, lease: lease, incarnation: incarnation, checked: checked, most: maxRevokeRanges}
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

// revoke is the revocation of a lease under way. Over several ranges it is a transaction as old as
// its first attempt.
type revoke struct {
	r           *Router
	lease       keyspace.LeaseID
	incarnation keyspace.LeaseIncarnation
	checked     keyspace.KeyCheck
	txn         *txn
	starts      int
	// most bounds the ranges that are locked at a time.
	most int
}

// begin takes the revoke into the budget of transactions.
func (v *revoke) begin(ctx context.Context) (*txn, error) {
	if v.txn == nil {
		t, err := v.r.newTxn(ctx, nil, revokeBytes)
		if err != nil {
			return nil, err
		}
		v.txn = t
		v.r.cfg.Metrics.Txns.Inc()
	}
	return v.txn, nil
}

func (v *revoke) end() {
	if v.txn != nil {
		v.txn.release()
	}
}

// pause returns the pause of a revoke that gave way.
func (v *revoke) pause() time.Duration {
	v.starts++
	return min(firstYield<<min(v.starts-1, 10), lastYield)
}

// some revokes the lease in the first ranges of the spans, and returns the other spans.
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
		got, err := v.r.commandAt(ctx, routes[0], &rangeapi.Revoke{Lease: v.lease, Incarnation: v.incarnation, Checked: v.checked})
		if err != nil {
			return 0, v.again(ctx, err)
		}
		if one := got.(*rangeapi.Revoked); !one.TooMany {
			v.r.coordinator.observe(one.Revision)
			return one.Revision, nil
		}
	}
	t, err := v.begin(ctx)
	if err != nil {
		return 0, err
	}
	// The last attachment goes with the last lock. Otherwise a merge might carry an attachment to
	// keys that the record does not list, and a split might carry it on to a range where nobody
	// ends it. A later lease with this id would then attach keys there without asking its record.
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

// again returns errStartOver if a revoke that failed may be repeated at once.
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

// participants has every range delete the lease's keys. The smallest key of the first range is the
// anchor, because every range locks the lease, with keys or without.
func (v *revoke) participants(name rangeapi.TxnName, routes []*route) *participants {
	anchor := lower(nil, routes[0].desc.Span)
	ps := &participants{name: name, anchor: anchor, of: map[keyspace.RangeID]*participant{}}
	for _, rt := range routes {
		p := ps.at(rt)
		p.op.Revoke, p.op.Incarnation, p.op.Checked = v.lease, v.incarnation, v.checked
		p.cover(rt.desc.Span)
	}
	return ps
}

// changes returns the number of ranges that the attempt's revision concerns.
func (a *txnAttempt) changes() (n int) {
	for _, p := range a.ps.order {
		if p.changes() {
			n++
		}
	}
	return n
}

// detach ends the revoke of a lease without keys. While all ranges hold the lease locked, each of
// them may remove its attachment. There is no commit record. A range whose lock was ended by others
// refuses, and the revoke starts over.
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

// LeaseKeys returns the keys in the spans that are attached to the lease, in order, and a revision
// that was current after the call. The result has every change of attachments up to that revision,
// and may have later ones.
func (r *Router) LeaseKeys(ctx context.Context, lease keyspace.LeaseID, spans []keyspace.Span) ([][]byte, keyspace.Revision, error) {
	limit := r.limited(ctx)
	defer limit.End()
	now, err := r.currentOrWait(limit.LazyDeadline)
	if err != nil {
		return nil, 0, limit.outcome(err)
	}
	reserved := r.reservation()
	defer reserved.Release()
	var keys [][]byte
	for _, s := range disjoint(spans) {
		if keys, err = r.leaseKeys(limit.LazyDeadline, lease, s, now.Current, &reserved, keys); err != nil {
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
		if err := r.reserve(ctx, reserved, size); err != nil {
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
