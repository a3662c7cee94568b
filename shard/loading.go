package shard

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/rangefeed"
)

// A new cluster can be given finished versions at given revisions: "Life of a load" in doc.go has the whole.
// An entry stands on the cursor that the range's record has. So a repeated entry, or one of a lost leader,
// does nothing, and a loader that has crashed goes on where the ranges are.

// loads says whether the range takes versions of a load. A range that has had a transaction does not.
func loads(rec *command.Record) bool {
	switch rec.Load.Stage {
	case rangeapi.LoadBulk, rangeapi.LoadFollow:
		return rec.Merge.Role == command.MergeNone
	case rangeapi.LoadNone:
		return rec.Merge.Role == command.MergeNone && rec.LastRevision <= 1
	case rangeapi.LoadEnded:
	}
	return false
}

// applyLoad is a part of a load on every replica.
func (r *Replica) applyLoad(b *engine.Batch, body []byte, out *outcome) error {
	s := &r.applying
	c, versions, err := command.DecodeLoad(body)
	if err != nil {
		return refuse(err)
	}
	if !s.rec.Load.Equal(&c.From) || !loads(&s.rec) || len(s.txns.Locks) > 0 {
		return nil
	}
	if c.Hash != s.rec.Hash {
		if err := r.differs(&command.Batch{Hash: c.Hash}); err != nil {
			return err
		}
	}
	turns := c.Stage == rangeapi.LoadEnded || c.From.Stage == rangeapi.LoadNone
	switch {
	case c.Stage == rangeapi.LoadEnded:
		err = s.endLoad(&c)
	case len(c.Unused) > 0:
		err = r.trimLoaded(b, &c, versions, out)
	default:
		err = r.takeLoaded(b, &c, versions, out)
	}
	if err != nil {
		return err
	}
	out.ok, out.turns = true, turns
	return nil
}

// endLoad ends the load of the range. Its versions are to be seen from now on.
func (s *applyState) endLoad(c *command.Load) error {
	if s.rec.LastRevision > c.Revision {
		return refuse(fmt.Errorf("a load ends at revision %d, and the range has revision %d", c.Revision, s.rec.LastRevision))
	}
	s.rec.LastRevision, s.rec.Compacted = c.Revision, max(s.rec.Compacted, c.Compacted)
	s.rec.Load.LoadCursor = rangeapi.LoadCursor{Stage: rangeapi.LoadEnded, Revision: c.Revision}
	return nil
}

// trimLoaded takes attachments away that no key of the range needs any more.
func (r *Replica) trimLoaded(b *engine.Batch, c *command.Load, rest []byte, out *outcome) error {
	if len(rest) > 0 {
		return refuse(fmt.Errorf("%d bytes behind %d leases", len(rest), len(c.Unused)))
	}
	for _, lease := range c.Unused {
		if err := r.applyDetachment(b, rangeapi.Attachment{Lease: lease, Incarnation: c.Incarnation}, out); err != nil {
			return err
		}
	}
	return nil
}

// takeLoaded writes the versions of a load.
func (r *Replica) takeLoaded(b *engine.Batch, c *command.Load, versions []byte, out *outcome) error {
	s := &r.applying
	var last mvcc.Version
	err := command.VisitLoad(c, versions, func(v *mvcc.Version, before command.LoadPrior) error {
		if !s.rec.Span.Contains(v.Key) {
			return fmt.Errorf("key %q is outside of %s", v.Key, s.rec.Span)
		}
		last = *v
		if before.Attach && s.txns.Attachments[v.Lease] != c.Incarnation {
			if err := r.applyAttachment(b, rangeapi.Attachment{Lease: v.Lease, Incarnation: c.Incarnation}, out); err != nil {
				return err
			}
		}
		s.addLoaded(v, before)
		return nil
	})
	if err = refuse(err); err == nil {
		err = s.write(b)
	}
	s.forgetVersions()
	if err != nil {
		return err
	}
	s.rec.Load.LoadCursor = c.Stage.At(&last)
	s.rec.Load.Key = bytes.Clone(last.Key)
	return nil
}

// addLoaded takes a version in: into counts, hash, index of leases, and what is written.
func (s *applyState) addLoaded(v *mvcc.Version, before command.LoadPrior) {
	for w := v; w != nil; w = w.Earlier {
		h := mvcc.HashWrite(w)
		s.rec.Hash += h
		s.rec.Load.Sum += h
		s.rec.Load.Versions++
	}
	s.rec.LastRevision = max(s.rec.LastRevision, v.Mod)
	s.versions = append(s.versions, *v)
	if before.Old {
		return
	}
	switch {
	case v.Tombstone && before.Lived:
		s.rec.Live--
	case !v.Tombstone && !before.Lived:
		s.rec.Live++
	}
	change := indexChange{key: v.Key, from: before.Lease}
	if before.Attach {
		change.to = v.Lease
	}
	if change.to != 0 || change.from != 0 {
		s.attached = append(s.attached, change)
	}
}

// publishLoadLocked takes over what a load has brought. Feeds show nothing of a range that is being loaded:
// they are opened again when it ends, and read history.
func (r *Replica) publishLoadLocked(o *outcome, feeds *rangefeed.Publication) {
	r.publishTxnsLocked(o.locks)
	r.epochs.End(r.store.cache)
	r.live.Reset(r.rec.LastRevision)
	if o.turns {
		r.feeds.Publish(feeds)
		r.feeds.End(r.errorLocked(kverror.WrongRange, "the range is loaded"))
	}
	if r.pipe.Leads() {
		r.pipe.Rebase()
	}
}

// Load answers a request about the load of a new cluster. Versions are on a quorum when it returns; those that the
// range has already are left out. Errors are of package kverror. A request whose fate is unknown can be
// repeated.
func (s *Store) Load(ctx context.Context, q *rangeapi.LoadRequest) (*rangeapi.LoadAnswer, error) {
	r := s.Replica(q.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", q.Range, s.cfg.Self)
	}
	if q.Step == rangeapi.LoadLook {
		return r.lookLoad(ctx, q)
	}
	if err := r.loadAll(ctx, q); err != nil {
		return nil, err
	}
	if q.Step == rangeapi.LoadPut && q.Stage == rangeapi.LoadFollow {
		if err := r.trimFollowing(ctx, q); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.loadAnswerLocked(), nil
}

// loadAll has all entries of a request applied.
func (r *Replica) loadAll(ctx context.Context, q *rangeapi.LoadRequest) error {
	for {
		term, err := r.awaitLead(ctx, q.Generation)
		if err != nil {
			return err
		}
		if more, err := r.loadOnce(ctx, term, q); !more || err != nil {
			return err
		}
	}
}

// trimFloor is how many attachments a range has without a trim while it follows.
const trimFloor = 4096

// trimFollowing trims a range once its attachments have doubled. A source may end leases and grant others for as long as
// the range follows, so memory would have no bound otherwise.
func (r *Replica) trimFollowing(ctx context.Context, put *rangeapi.LoadRequest) error {
	r.mu.Lock()
	due := len(r.leases.attached) > max(trimFloor, 2*r.leases.trimmed)
	r.mu.Unlock()
	if !due {
		return nil
	}
	err := r.loadAll(ctx, &rangeapi.LoadRequest{Range: put.Range, Generation: put.Generation, Step: rangeapi.LoadTrim, Incarnation: put.Incarnation})
	if err == nil {
		r.mu.Lock()
		r.leases.trimmed = len(r.leases.attached)
		r.mu.Unlock()
	}
	return err
}

// awaitLead waits until this replica leads the range of the generation, and returns its term.
func (r *Replica) awaitLead(ctx context.Context, g keyspace.Generation) (term uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		wait, err := r.leadsLocked(g)
		if err != nil || wait == nil {
			return r.pipe.Term(), err
		}
		r.mu.Unlock()
		_, err = clock.Await(ctx, wait)
		r.mu.Lock()
		if err != nil {
			return 0, kverror.Of(err)
		}
	}
}

func (r *Replica) loadAnswerLocked() *rangeapi.LoadAnswer {
	return &rangeapi.LoadAnswer{LoadState: r.rec.Load, Span: r.rec.Span, LastRevision: r.rec.LastRevision}
}

// lookLoad tells what the range has taken, as of a moment after the question.
func (r *Replica) lookLoad(ctx context.Context, q *rangeapi.LoadRequest) (*rangeapi.LoadAnswer, error) {
	term, err := r.awaitLead(ctx, q.Generation)
	if err != nil {
		return nil, err
	}
	if !r.group.LeaseHeld(term) {
		if err := r.awaitReadIndex(ctx, &waits{}); err != nil {
			return nil, err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.leadsLocked(q.Generation); err != nil {
		return nil, err
	}
	if r.pipe.Term() != term || r.change != nil {
		return nil, r.errorLocked(kverror.Busy, "the range is being changed")
	}
	a := r.loadAnswerLocked()
	for lease := range r.leases.attached {
		if lease >= q.Lease {
			a.Leases = append(a.Leases, lease)
		}
	}
	slices.Sort(a.Leases)
	if len(a.Leases) > rangeapi.MaxLoadLeases {
		a.Leases, a.More = a.Leases[:rangeapi.MaxLoadLeases], true
	}
	return a, nil
}

// loadOnce has one entry of a load applied. more says that there are versions or leases left.
func (r *Replica) loadOnce(ctx context.Context, term uint64, q *rangeapi.LoadRequest) (more bool, err error) {
	if q.Step == rangeapi.LoadPut {
		if err := r.store.noSpace(); err != nil {
			return false, err
		}
	}
	err = r.closePipeline(ctx)
	defer r.reopen()
	if err != nil {
		return false, kverror.New(kverror.Busy, "load range %s: %v", r.id, err)
	}
	p, more, err := r.proposeLoad(term, q)
	if p == nil || err != nil {
		return false, err
	}
	select {
	case <-p.done:
		return more, p.err
	case <-ctx.Done():
		return false, kverror.New(kverror.LeaderChanged, "load range %s: %v", r.id, ctx.Err())
	}
}

// proposeLoad proposes the next entry. The pipeline is closed and empty. nil without an error says that nothing is left to do.
func (r *Replica) proposeLoad(term uint64, q *rangeapi.LoadRequest) (p *pendingChange, more bool, err error) {
	r.mu.Lock()
	rec := r.rec
	locks, records := r.locks.Len()
	switch {
	case r.pipe.Term() != term || r.change != nil || q.Generation != rec.Generation:
		err = r.errorLocked(kverror.Dropped, "the range changed before the load")
	case rec.Merge.Role != command.MergeNone || locks+records > 0:
		err = r.errorLocked(kverror.Busy, "the range is being merged, or has locks of transactions")
	case rec.Load.Stage == rangeapi.LoadEnded && q.Step == rangeapi.LoadEnd && rec.Load.Revision == q.Revision:
		if q.Compacted < rec.Compacted {
			err = kverror.New(kverror.BadRequest, "the load of range %s has ended with compacted revision %d, and cannot end with %d: finish with the same revisions as before", r.id, rec.Compacted, q.Compacted)
		}
		r.mu.Unlock()
		return nil, false, err
	case q.Step == rangeapi.LoadTrim && (rec.Load.Stage == rangeapi.LoadEnded || rec.Load.Stage == rangeapi.LoadNone):
		r.mu.Unlock() // it was trimmed before it ended, or has no lease yet
		return nil, false, nil
	case !loads(&rec):
		err = kverror.New(kverror.BadRequest, "range %s takes no versions of a load: it has revision %d, and its load is in stage %s: load into a new cluster", r.id, rec.LastRevision, rec.Load.Stage)
	case rec.LastRevision > q.Revision && q.Step == rangeapi.LoadEnd:
		err = kverror.New(kverror.BadRequest, "a load cannot end at revision %d: range %s has revision %d", q.Revision, r.id, rec.LastRevision)
	}
	if err != nil {
		r.mu.Unlock()
		return nil, false, err
	}
	p = &pendingChange{kind: command.KindLoad}
	r.beginChangeLocked(p)
	r.mu.Unlock()

	entry, more, err := r.loadEntry(&rec, term, q)
	if entry == nil || err != nil {
		r.mu.Lock()
		if r.change == p {
			r.endChangeLocked(err)
			r.notifyLocked()
		}
		r.mu.Unlock()
		return nil, false, err
	}
	if err := r.proposeChange(term, entry, p); err != nil {
		return nil, false, kverror.New(kverror.Dropped, "load range %s: %v", r.id, err)
	}
	return p, more, nil
}

// loadEntry makes the next entry of what is asked for, nil if the range has it all. Nothing changes the range meanwhile.
func (r *Replica) loadEntry(rec *command.Record, term uint64, q *rangeapi.LoadRequest) (entry []byte, more bool, err error) {
	c := command.Load{Stage: q.Stage, Hash: rec.Hash, From: rec.Load.LoadCursor, Incarnation: q.Incarnation, Revision: q.Revision, Compacted: q.Compacted}
	head := command.Header{Kind: command.KindLoad, Term: term, Generation: rec.Generation}
	// A larger entry would be proposed for ever: a log with small segments takes less than a request may write.
	most := min(r.store.cfg.Limits.MaxEntryBytes, r.store.cfg.Limits.MaxRecordBytes-len(c.From.Key))
	switch q.Step {
	case rangeapi.LoadEnd:
		c.Stage = rangeapi.LoadEnded
		return command.AppendLoad(command.AppendHeader(nil, head), &c), false, nil
	case rangeapi.LoadTrim:
		r.mu.Lock()
		leases := slices.Sorted(maps.Keys(r.leases.attached))
		r.mu.Unlock()
		c.Stage = c.From.Stage
		if c.Unused, more, err = eval.UnusedLeases(r.store.cfg.Engine, leases, rec.Span, most); err != nil {
			return nil, false, fmt.Errorf("shard: leases without keys of range %s: %w", r.id, err)
		}
		if len(c.Unused) == 0 {
			return nil, false, nil
		}
		return command.AppendLoad(command.AppendHeader(nil, head), &c), more, nil
	case rangeapi.LoadPut, rangeapi.LoadLook:
	}
	if c.From.Stage > q.Stage {
		return nil, false, kverror.New(kverror.BadRequest, "range %s follows revisions already: its bulk is over", r.id)
	}
	l := eval.LoadWriter{Record: rec, Request: q, Limit: most}
	if err := l.Versions(r.store.cfg.Engine); err != nil {
		return nil, false, fmt.Errorf("shard: load range %s: %w", r.id, err)
	}
	if l.Count == 0 {
		return nil, false, nil
	}
	c.Versions = l.Count
	entry = command.AppendLoad(command.AppendHeader(make([]byte, 0, len(l.Body)+len(c.From.Key)+96), head), &c)
	return append(entry, l.Body...), l.More, nil
}
