package router

import (
	"context"
	"errors"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// prepareAll has all participants prepare. The range of the last conflict goes first: while the
// attempt holds nothing, it may wait there for any lock.
func (a *txnAttempt) prepareAll(ctx context.Context) error {
	rest := a.ps.order
	if i := slices.IndexFunc(rest, a.t.conflictsIn); i >= 0 {
		rest[i].op.WaitForOlder = len(a.earlier) == 0
		if err := a.prepare(ctx, rest[i]); err != nil {
			return a.failed(ctx, err)
		}
		rest = slices.Concat(rest[:i], rest[i+1:])
	}
	if len(rest) == 1 {
		return a.failed(ctx, a.prepare(ctx, rest[0]))
	}
	return a.failed(ctx, each(ctx, rest, a.prepare))
}

// conflictsIn says whether the participant's range had the last conflict.
func (t *txn) conflictsIn(p *participant) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.conflictKey != nil && p.locks && p.rt.desc.Span.Contains(t.conflictKey)
}

// prepare has one participant prepare.
func (a *txnAttempt) prepare(ctx context.Context, p *participant) error {
	p.sent = true
	got, err := a.t.r.commandAt(ctx, p.rt, p.op)
	if err != nil {
		if errors.Is(err, kverror.Conflict) {
			a.t.noteConflict(p.span.Start)
		}
		return err
	}
	p.answer = got.(*rangeapi.Prepared)
	if err := a.t.r.reserve(ctx, &a.t.answer, answerBytes(p.answer)); err != nil {
		return err
	}
	a.t.noteAbsent(p)
	switch {
	case p.answer.Fence != 0:
		a.t.r.coordinator.skipTo(p.answer.Fence)
		return errStartOver
	case p.locks && !p.answer.Held:
		return errMissed
	}
	return nil
}

// noteAbsent remembers a lease that does not exist, so that later attempts do not look again.
func (t *txn) noteAbsent(p *participant) {
	if p.answer.Refused == nil || p.answer.Refused.Kind != kverror.LeaseNotFound {
		return
	}
	for i := range p.op.Writes {
		put, ok := p.op.Writes[i].Op.(*pb.PutRequest)
		if lease := keyspace.LeaseID(put.GetLease()); ok && p.op.Writes[i].Number == p.answer.RefusedAt {
			t.mu.Lock()
			if !slices.Contains(t.absent, lease) {
				t.absent = append(t.absent, lease)
			}
			t.mu.Unlock()
		}
	}
}

// answerBytes returns the bytes of the previous keys in an answer.
func answerBytes(p *rangeapi.Prepared) (bytes int64) {
	for i := range p.Results {
		bytes += int64(len(p.Results[i].Value))
		for _, kv := range p.Results[i].Prevs {
			bytes += int64(proto.Size(kv))
		}
	}
	return bytes
}

// noteConflict notes the key of a conflict with an older transaction.
func (t *txn) noteConflict(at []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(at) == 0 {
		at = []byte{0}
	}
	t.conflictKey = at
	t.yields++
}

// failed classifies the error of a prepare. Nothing is decided yet, and all locks are aborted,
// because the name is never used again.
func (a *txnAttempt) failed(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, errStartOver) || errors.Is(err, errMissed) {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	switch e := kverror.Of(err); {
	case e.Kind == kverror.Conflict:
		return errStartOver
	case e.Kind == kverror.Compacted:
		a.t.unpinned = true
		return errStartOver
	case e.Kind == kverror.Corrupt || e.Kind == kverror.Internal:
		return err
	case e.Retry() == kverror.RetryRouter || e.Fate() == kverror.Unknown:
		if clock.Sleep(ctx, a.t.r.cfg.Clock, firstPause) != nil {
			return ctx.Err()
		}
		return errStartOver
	}
	return err
}
