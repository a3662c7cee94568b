package shard

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
)

// followSome has the follower go on by some entries of a range.
func (e *elastic) followSome() {
	ids := e.logged()
	id, n := ids[e.rng.IntN(len(ids))], 1+e.rng.IntN(12)
	if e.replay(e.follower, id, n) {
		e.say("follower: %d entries of range %s, or what there is", n, id)
		e.model.holds(e)
	}
}

func (e *elastic) copySome() { e.copyTo(e.some()) }

// copyTo brings a range to the follower by a snapshot, and says whether it did.
func (e *elastic) copyTo(id keyspace.RangeID) bool {
	snap := e.leader.engine.NewSnapshot()
	defer snap.Close()
	a, ok, err := engine.ReadApplied(snap, id.Group())
	if err != nil {
		e.fatal("%v", err)
	}
	src := e.leader.store.Replica(id)
	if src == nil || !ok {
		return false
	}
	r := e.receiver(src.Descriptor())
	if r == nil {
		return false
	}
	g := e.follower.groups.group(id)
	g.mu.Lock()
	old := a.Index <= g.index
	g.mu.Unlock()
	if old {
		return false
	}
	if err := r.AcceptSnapshot(a); err != nil {
		e.say("follower: no snapshot of range %s: %v", id, err)
		return false
	}
	had := r.Descriptor()
	e.install(src, r, snap, a)
	if e.one(2) { // what is read now is of before or behind
		e.pageAt(e.follower, r)
	}
	g.mu.Lock()
	g.index, g.replicas = a.Index, a.Replicas
	g.mu.Unlock()
	r.SnapshotDone(a, nil)
	synctest.Wait()
	e.say("follower: snapshot of range %s of %s at index %d", id, r.Descriptor().Span, a.Index)
	e.model.holds(e)
	if had.Generation > 0 {
		e.nothingLeft(had.Span)
	}
	return true
}

// receiver returns the follower's replica of a range, an empty one where there was none; nil
// where there can be none: its split is yet to come, or it has left.
func (e *elastic) receiver(d keyspace.Descriptor) *Replica {
	s := e.follower.store
	if r := s.Replica(d.Range); r != nil {
		return r
	}
	left, err := s.lifecycle.Tombstones.Left(d.Range.Group())
	if err != nil {
		e.fatal("%v", err)
	}
	_, stored, err := e.follower.engine.Applied(d.Range.Group())
	if err != nil {
		e.fatal("%v", err)
	}
	if left > 0 || stored || slices.ContainsFunc(s.Replicas(), func(o *Replica) bool { return holds(o, d.Span) }) {
		return nil
	}
	r := s.newReplica(d.Range)
	r.introduced = d
	if err := s.open(r, 1); err != nil {
		e.fatal("follower: range %s: %v", d.Range, err)
	}
	e.say("follower: opened range %s", d.Range)
	return r
}

// install writes a snapshot of the leader's replica into the follower's store, durably.
func (e *elastic) install(src, dst *Replica, snap engine.Reader, a engine.Applied) {
	leased, err := src.LeaseSpans(snap, a)
	if err != nil {
		e.fatal("%v", err)
	}
	b := e.follower.engine.NewBatch()
	for _, s := range append(dst.SnapshotSpans(a), leased...) {
		err = errors.Join(err, b.DeleteRange(s.Lower, s.Upper))
		it, ierr := snap.NewIter(engine.IterOptions{Lower: s.Lower, Upper: s.Upper})
		if ierr != nil {
			e.fatal("%v", ierr)
		}
		for ok := it.First(); ok; ok = it.Next() {
			v, verr := it.ValueAndErr()
			err = errors.Join(err, verr, b.Set(slices.Clone(it.Key()), slices.Clone(v)))
		}
		err = errors.Join(err, it.Close())
	}
	err = errors.Join(err, b.SetApplied(dst.id.Group(), a), b.Commit(), e.follower.engine.Flush(e.t.Context()))
	if err != nil {
		e.fatal("follower: snapshot of range %s: %v", dst.id, err)
	}
}

// nothingLeft fails if the follower's store has keys in the span that belong to none of its
// ranges.
func (e *elastic) nothingLeft(span keyspace.Span) {
	var spans []keyspace.Span
	err := e.follower.engine.VisitApplied(func(_ keyspace.GroupID, a engine.Applied) error {
		rec, err := command.DecodeRecord(a.Payload)
		spans = append(spans, rec.Span)
		return err
	})
	if err != nil {
		e.fatal("%v", err)
	}
	for _, v := range e.stored(e.follower) {
		if span.Contains(v.Key) && !slices.ContainsFunc(spans, func(s keyspace.Span) bool { return s.Contains(v.Key) }) {
			e.fatal("follower: %s is of no range here", versionText(&v))
		}
	}
}

// agree brings the follower to where the leader is, and compares the two.
func (e *elastic) agree() {
	e.hurry()
	for i := 0; i < 200; i++ {
		moved := e.catchUp(e.follower, 100)
		for _, r := range e.over(keyspace.Span{}) {
			if f := e.follower.store.Replica(r.id); !moved && (f == nil || f.Descriptor().Generation == 0) {
				moved = e.copyTo(r.id) || moved
			}
		}
		if moved {
			continue
		}
		if e.sameRanges() == nil && i > 1 {
			break
		}
		e.pass(3 * time.Second) // replicas that are gone are removed
	}
	if err := e.sameRanges(); err != nil {
		e.fatal("follower: %v", err)
	}
	for _, r := range e.over(keyspace.Span{}) {
		if a, b := replicatedText(r), replicatedText(e.follower.store.Replica(r.id)); a != b {
			e.fatal("range %s is at the leader\n%s\nand at the follower\n%s", r.id, a, b)
		}
	}
	e.check()
	if a, b := e.attachedText(e.leader), e.attachedText(e.follower); a != b {
		e.fatal("attached at the leader: %s\nand at the follower: %s", a, b)
	}
	e.say("follower agrees")
}

// sameRanges says why the nodes do not have the same ranges, and nothing else.
func (e *elastic) sameRanges() error {
	text := func(rs []*Replica) (s string) {
		for _, r := range rs {
			s += fmt.Sprintf(" %s%s", r.id, r.Descriptor().Span)
		}
		return s
	}
	is := text(e.follower.over(keyspace.Span{}))
	if want := text(e.over(keyspace.Span{})); is != want {
		return fmt.Errorf("has ranges%s, and the leader%s", is, want)
	}
	for _, w := range []*fakeWorld{e.leader, e.follower} {
		if n, m := len(w.store.Replicas()), len(w.over(keyspace.Span{})); n != m {
			return fmt.Errorf("the %s has %d replicas of %d ranges", e.name(w), n, m)
		}
	}
	return nil
}

// check compares all that a node knows of its ranges with what is stored there.
func (e *elastic) check() {
	e.model.holds(e)
	e.covered()
	e.checkAttachments()
	for _, w := range []*fakeWorld{e.leader, e.follower} {
		e.checkAttached(w)
		for _, r := range w.over(keyspace.Span{}) {
			e.checkReplica(w, r)
		}
	}
}

// covered fails where the leader's ranges have a gap.
func (e *elastic) covered() {
	var end []byte
	rs := e.over(keyspace.Span{})
	for i, r := range rs {
		s := r.Descriptor().Span
		if !bytes.Equal(s.Start, end) || i > 0 && len(s.Start) == 0 || len(s.End) == 0 && i+1 < len(rs) {
			e.fatal("range %s is %s behind %q", r.id, s, end)
		}
		end = s.End
	}
	if len(end) > 0 {
		e.fatal("the last range ends at %q", end)
	}
}

// checkReplica compares a replica with its store: locks, records and attachments, the index of
// leases, and the count of keys. The first three exist three times: stored, as the state that
// entries apply to, and as the state that requests see.
func (e *elastic) checkReplica(w *fakeWorld, r *Replica) {
	stored, err := command.LoadTxns(w.engine, r.id)
	if err != nil {
		e.fatal("%v", err)
	}
	r.mu.Lock()
	shown := command.TxnState{Attachments: r.leases.attached}
	for h := range r.locks.Locks() {
		if !h.Pending {
			shown.PutLock(h.Lock)
		}
	}
	for t := range r.locks.Records() {
		shown.PutRecord(t)
	}
	counted, live, span := r.rec.Counted, r.rec.Live, r.rec.Span
	r.mu.Unlock()
	want := heldText(&r.applying.txns)
	if a, b := heldText(&stored), heldText(&shown); a != want || b != want {
		e.fatal("%s: range %s: of transactions there is\n%s\nstored is\n%s\nand shown\n%s", e.name(w), r.id, want, a, b)
	}
	if n, err := mvcc.Count(w.engine, span, eval.Newest); err != nil || counted && n != live {
		e.fatal("%s: range %s has %d keys, counted %d: %v", e.name(w), r.id, n, live, err)
	}
}

// checkAttachments fails if a range of the leader has the attachment of a lease whose record does not
// list it.
func (e *elastic) checkAttachments() {
	for _, r := range e.over(keyspace.Span{}) {
		for lease, i := range r.applying.txns.Attachments {
			if s := r.applying.rec.Span; !e.leases.lists(rangeapi.Attachment{Lease: lease, Incarnation: i}, s) {
				e.fatal("range %s of %s has the attachment of lease %d/%d, the record is %+v", r.id, s, lease, i, e.leases.records[lease])
			}
		}
	}
	e.checkAttached(e.leader)
}

// checkAttached fails if a key's lease has no attachment, or if the index lacks the key. The index
// may have too many keys: those left by a crash, or by a replica that made way for a snapshot.
// The versions of these keys say otherwise.
func (e *elastic) checkAttached(w *fakeWorld) {
	index := map[string]bool{}
	for _, a := range allAttached(e.t, w.engine) {
		index[fmt.Sprint(a.to, string(a.key))] = true
	}
	rs := w.over(keyspace.Span{})
	_, err := mvcc.Scan(w.engine, mvcc.ScanOptions{At: eval.Newest, KeysOnly: true}, func(v *mvcc.Version) error {
		if v.Lease == 0 {
			return nil
		}
		if !index[fmt.Sprint(v.Lease, string(v.Key))] {
			return fmt.Errorf("%s: %s is not in the index", e.name(w), versionText(v))
		}
		for _, r := range rs {
			if _, attached := r.applying.txns.Attachments[v.Lease]; !attached && r.applying.rec.Span.Contains(v.Key) {
				return fmt.Errorf("%s: range %s: %s is attached to a lease without an attachment", e.name(w), r.id, versionText(v))
			}
		}
		return nil
	})
	if err != nil {
		e.fatal("%v", err)
	}
}

// replicatedText is all that the replicas of a range have in common at one index.
func replicatedText(r *Replica) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprintf("%+v\n%s", r.rec, heldText(&r.applying.txns))
}

// heldText prints locks, records and attachments.
func heldText(s *command.TxnState) string {
	var lines []string
	for id, l := range s.Locks {
		lines = append(lines, fmt.Sprintf("lock %s of %s: %q", id, l.Name, command.AppendLock(nil, l)))
	}
	for name, t := range s.Records {
		lines = append(lines, fmt.Sprintf("record of %s: %q", name, command.AppendCommitRecord(nil, t)))
	}
	for lease, i := range s.Attachments {
		lines = append(lines, fmt.Sprintf("attachment %d/%d", lease, i))
	}
	slices.Sort(lines)
	return fmt.Sprint(lines)
}

// attachedText is the index of leases of a node without what its keys' versions know better.
func (e *elastic) attachedText(w *fakeWorld) string {
	return fmt.Sprint(slices.DeleteFunc(allAttached(e.t, w.engine), func(a indexChange) bool {
		v, ok, err := mvcc.Get(w.engine, a.key, eval.Newest)
		return err == nil && (!ok || v.Lease != a.to)
	}))
}

// holds says whether the replica holds a part of the span.
func holds(r *Replica, span keyspace.Span) bool {
	s := lifecycleReplica{r}.State()
	return s.Holds() && s.Descriptor.Span.Overlaps(span)
}
