package shard

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// elasticStage is what a coordinator does next.
type elasticStage int

const (
	// elasticRevokes: a lease that has keys in one range is revoked there.
	elasticRevokes elasticStage = iota
	// elasticPrepares: the participants are locked, one after the other.
	elasticPrepares
	elasticCommits
	// elasticResolves: the locks end, at the revision or with the attachment of a lease without keys.
	elasticResolves
	elasticForgets
	// elasticAborts: the locks end at no revision.
	elasticAborts
	elasticOver
)

// String returns the stage as traces print it.
func (s elasticStage) String() string {
	return [...]string{"revokes", "prepares", "commits", "resolves", "forgets", "aborts", "over"}[s]
}

// elasticTxn is a transaction over several ranges, or the revoke of a lease, and its
// coordinator.
type elasticTxn struct {
	name         rangeapi.TxnName
	anchor       []byte
	participants []*elasticParticipant
	stage        elasticStage
	// rev is its revision, 0 while it has none.
	rev keyspace.Revision
	// unsure says that the answer to a commit was lost, committed that one said yes.
	unsure, committed bool
	// begun are the values that it puts, by their keys.
	begun map[string]string

	// lease is the lease that the transaction revokes, 0 if it revokes none. detaches says that
	// the lease has no key anywhere. merges counts the merges of its ranges before the attempt.
	lease       keyspace.LeaseID
	incarnation keyspace.LeaseIncarnation
	detaches    bool
	merges      int
}

// elasticParticipant is what a transaction does in one range.
type elasticParticipant struct {
	// at and generation are the range's as the coordinator knows it, span is what it
	// touches.
	at         keyspace.RangeID
	generation keyspace.Generation
	span       keyspace.Span
	op         *rangeapi.Prepare
	// answer is nil until the range has answered; sent says that it may hold a lock, and waits
	// that it is being asked.
	answer      *rangeapi.Prepared
	sent, waits bool
	// over says that the lock has ended.
	over bool
}

// cover widens the participant's span.
func (p *elasticParticipant) cover(s keyspace.Span) {
	if p.span.Start == nil || bytes.Compare(s.Start, p.span.Start) < 0 {
		p.span.Start = s.Start
	}
	if p.span.End == nil || bytes.Compare(s.End, p.span.End) > 0 {
		p.span.End = s.End
	}
}

// newName names the first attempt of a transaction, whose age is anything.
func (e *elastic) newName() rangeapi.TxnName {
	e.names++
	e.attempts++
	return rangeapi.TxnName{
		TxnID:   rangeapi.TxnID{Start: 1 + keyspace.Revision(e.rng.Uint64N(e.names)), Node: 1, Boot: 1, Counter: e.names},
		Attempt: e.attempts,
	}
}

// maxElasticTxns bounds the transactions that are under way.
const maxElasticTxns = 4

// beginTxn begins a transaction that writes some keys, and compares some perhaps.
func (e *elastic) beginTxn() {
	if len(e.txns) < maxElasticTxns {
		e.planTxn(e.newName())
	}
}

// planTxn begins an attempt of a transaction.
func (e *elastic) planTxn(name rangeapi.TxnName) {
	t := &elasticTxn{name: name, stage: elasticPrepares, begun: map[string]string{}}
	keys := map[string]bool{}
	for range 2 + e.rng.IntN(3) {
		keys[string(e.key())] = true
	}
	sorted := slices.Sorted(maps.Keys(keys))
	t.anchor = []byte(sorted[0])
	for i, k := range sorted {
		end := "~" // behind all keys
		if i+1 < len(sorted) {
			end = sorted[i+1]
		}
		e.addWrite(t, []byte(k), []byte(end))
	}
	for range e.rng.IntN(3) {
		e.addGuard(t, e.key())
	}
	e.anyOrder(t)
	e.txns = append(e.txns, t)
	e.model.txns = append(e.model.txns, t)
	e.say("%s begins: %s", t.name, t)
}

// anyOrder has the ranges asked in any order. Who holds nothing yet may wait for all.
func (e *elastic) anyOrder(t *elasticTxn) {
	e.rng.Shuffle(len(t.participants), func(i, j int) { t.participants[i], t.participants[j] = t.participants[j], t.participants[i] })
	t.participants[0].op.WaitForOlder = true
}

// String returns what the transaction does as traces print it.
func (t *elasticTxn) String() (s string) {
	for _, p := range t.participants {
		s += fmt.Sprintf("at range %s", p.at)
		for _, g := range p.op.Guards {
			s += fmt.Sprintf(" %s@%d?%d", g.Compare.GetKey(), g.Compare.GetModRevision(), g.Want)
		}
		for _, w := range p.op.Writes {
			switch o := w.Op.(type) {
			case *pb.PutRequest:
				s += fmt.Sprintf(" put %s=%s lease=%d", o.GetKey(), o.GetValue(), o.GetLease())
			case *pb.DeleteRangeRequest:
				s += fmt.Sprintf(" del [%s, %s)", o.GetKey(), o.GetRangeEnd())
			}
		}
		s += "; "
	}
	return s
}

// participant returns the transaction's participant in the range of a key.
func (e *elastic) participant(t *elasticTxn, key []byte) *elasticParticipant {
	d := e.at(key).Descriptor()
	for _, p := range t.participants {
		if p.at == d.Range {
			return p
		}
	}
	p := &elasticParticipant{at: d.Range, generation: d.Generation, op: &rangeapi.Prepare{Name: t.name, Anchor: t.anchor}}
	t.participants = append(t.participants, p)
	return p
}

// addWrite adds a put, or a delete of the key and perhaps some behind it, up to end.
func (e *elastic) addWrite(t *elasticTxn, key, end []byte) {
	p := e.participant(t, key)
	w := rangeapi.Write{Number: uint32(len(p.op.Writes) + 1)}
	if e.one(5) {
		o := &pb.DeleteRangeRequest{Key: key}
		if last := e.at(key).Descriptor().Span.End; len(last) > 0 && bytes.Compare(last, end) < 0 {
			end = last
		}
		if e.one(2) {
			o.RangeEnd = []byte{key[0] + 1 + byte(e.rng.IntN(int(end[0]-key[0])))}
		}
		s, _ := keyspace.FromEtcd(o.Key, o.RangeEnd)
		w.Op = o
		p.cover(s)
	} else {
		o := &pb.PutRequest{Key: key, Value: []byte(e.value())}
		if e.traits.merging || e.one(3) {
			o.Lease = int64(e.lease())
		}
		t.begun[string(key)] = string(o.Value)
		w.Op = o
		p.cover(keyspace.Single(key))
	}
	p.op.Writes = append(p.op.Writes, w)
}

// addGuard compares the revision of a key with one that it has, or had.
func (e *elastic) addGuard(t *elasticTxn, key []byte) {
	p := e.participant(t, key)
	p.op.Guards = append(p.op.Guards, rangeapi.Guard{
		Want: rangeapi.Want(e.rng.IntN(3)),
		Compare: &pb.Compare{
			Key: key, Target: pb.Compare_MOD, Result: pb.Compare_EQUAL,
			TargetUnion: &pb.Compare_ModRevision{ModRevision: int64(e.model.someRevision(e, key))},
		},
	})
	p.cover(keyspace.Single(key))
}

// advanceSome has a coordinator go on by some steps, or be gone for good.
func (e *elastic) advanceSome() {
	if len(e.txns) == 0 {
		return
	}
	t := e.txns[e.rng.IntN(len(e.txns))]
	if e.traits.merging && (t.stage == elasticCommits || t.stage == elasticResolves) && !e.one(6) {
		return
	}
	if t.lease == 0 && e.one(80) {
		e.say("the coordinator of %s, which %s, is gone", t.name, t.stage)
		e.drop(t)
		return
	}
	for range 1 + e.rng.IntN(3) {
		e.advance(t)
	}
}

func (e *elastic) drop(t *elasticTxn) {
	e.txns = slices.DeleteFunc(e.txns, func(o *elasticTxn) bool { return o == t })
}

// advance takes a coordinator's next step, as package router does it.
func (e *elastic) advance(t *elasticTxn) {
	switch t.stage {
	case elasticRevokes:
		e.revokeAtOnce(t)
	case elasticPrepares:
		e.prepareNext(t)
	case elasticCommits:
		e.commitTxn(t)
	case elasticResolves:
		e.resolveNext(t)
	case elasticForgets:
		e.forget(t)
	case elasticAborts:
		e.abortNext(t)
	case elasticOver:
	}
	if t.stage == elasticOver {
		e.drop(t)
	}
}

func (e *elastic) prepareNext(t *elasticTxn) {
	i := slices.IndexFunc(t.participants, func(p *elasticParticipant) bool { return p.answer == nil })
	if i < 0 {
		t.stage = elasticCommits
		if t.lease != 0 && !slices.ContainsFunc(t.participants, func(p *elasticParticipant) bool { return p.answer.Changes }) {
			t.stage, t.detaches = elasticResolves, true
		}
		return
	}
	p := t.participants[i]
	if p.waits {
		return
	}
	p.sent, p.waits = true, true
	e.prepare(p, func(a rangeapi.TxnAnswer, err error) {
		p.waits = false
		if err != nil {
			t.stage = elasticAborts
			return
		}
		p.answer = a.(*rangeapi.Prepared)
		if p.answer.Refused != nil || p.answer.Fence != 0 || !p.answer.Held {
			t.stage = elasticAborts
		}
	})
}

func (e *elastic) commitTxn(t *elasticTxn) {
	if t.rev == 0 {
		e.seq.mu.Lock()
		e.seq.last++
		t.rev = e.seq.last
		e.seq.mu.Unlock()
	}
	op := &rangeapi.Commit{Name: t.name, Anchor: t.anchor, Revision: t.rev}
	for _, p := range t.participants {
		op.Locks = append(op.Locks, rangeapi.LockRef{ID: p.answer.Lock, Span: p.span})
		if p.span.Contains(t.anchor) {
			op.AnchorLock = p.answer.Lock
		}
	}
	a, err := e.command(e.at(t.anchor), op)
	switch {
	case err != nil:
		t.unsure = t.unsure || kverror.Of(err).Fate() == kverror.Unknown
	case a.(*rangeapi.Decided).Revision != 0:
		t.stage, t.committed = elasticResolves, true
	case t.unsure && t.lease != 0:
		e.revokeAgain(t)
	case t.unsure:
		t.stage = elasticOver // who pushes its locks knows
	default:
		t.stage = elasticAborts
	}
}

func (e *elastic) resolveNext(t *elasticTxn) {
	for _, p := range t.participants {
		if p.over {
			continue
		}
		op := &rangeapi.Resolve{Name: t.name, Lock: p.answer.Lock, Revision: t.rev}
		if t.detaches {
			op.Detach, op.Incarnation = t.lease, t.incarnation
		}
		if err := e.commandOver(p.span, op); err == nil {
			p.over = true
		} else if t.detaches {
			t.stage = elasticAborts
		}
		return
	}
	switch {
	case t.lease != 0 && !e.revoked(t):
	case t.detaches:
		t.stage = elasticOver
	default:
		t.stage = elasticForgets
	}
}

func (e *elastic) forget(t *elasticTxn) {
	if t.lease != 0 && len(t.participants) == 0 {
		if e.revoked(t) {
			t.stage = elasticOver
		}
		return
	}
	if _, err := e.command(e.at(t.anchor), &rangeapi.Forget{Name: t.name, Anchor: t.anchor}); err == nil {
		t.stage = elasticOver
	}
}

func (e *elastic) abortNext(t *elasticTxn) {
	for _, p := range t.participants {
		if p.over || !p.sent {
			continue
		}
		p.over = e.commandOver(p.span, &rangeapi.Resolve{Name: t.name}) == nil
		return
	}
	if t.lease != 0 {
		e.revokeAgain(t)
		return
	}
	t.stage = elasticOver
	if !e.one(4) && !e.ending {
		e.attempts++
		again := t.name
		again.Attempt = e.attempts
		e.planTxn(again)
	}
}

// command has a range take a command of a transaction.
func (e *elastic) command(r *Replica, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	d := r.Descriptor()
	a, err := do(e, func(ctx context.Context) (rangeapi.TxnAnswer, error) {
		return e.leader.store.Txn(ctx, d.Range, d.Generation, op)
	})
	e.say("range %s: %s: %s", d.Range, opText(op), answerText(a, err))
	return a, err
}

// prepare has a participant prepare, if its range is the one that the coordinator knows, beside
// what else happens.
func (e *elastic) prepare(p *elasticParticipant, take func(rangeapi.TxnAnswer, error)) {
	store := e.leader.store
	var a rangeapi.TxnAnswer
	var err error
	e.call(true, func(ctx context.Context) { a, err = store.Txn(ctx, p.at, p.generation, p.op) }, func() {
		e.say("range %s: %s: %s", p.at, opText(p.op), answerText(a, err))
		e.sane(err)
		take(a, err)
	})
}

// commandOver has every range over the span take a command, until nothing is left of it to do.
func (e *elastic) commandOver(s keyspace.Span, op rangeapi.TxnCommand) error {
	for {
		r := e.over(s)[0]
		end := r.Descriptor().Span.End
		a, err := e.command(r, op)
		if err != nil {
			return err
		}
		if d, ok := a.(*rangeapi.Resolved); ok && d.More {
			continue
		}
		if len(end) == 0 || len(s.End) > 0 && bytes.Compare(end, s.End) >= 0 {
			return nil
		}
		s.Start = end
	}
}

// push asks what became of a lock's transaction, as one asks whose coordinator does not
// answer, though it may live; mostly the lock ends then.
func (e *elastic) push() {
	id := e.some()
	if ls := e.locks(id); len(ls) > 0 {
		e.pushLock(id, ls[e.rng.IntN(len(ls))], !e.one(3))
	}
}

// anyLock returns a lock of some range, nil where there is none.
func (e *elastic) anyLock() *command.Lock {
	var all []*command.Lock
	for _, r := range e.over(keyspace.Span{}) {
		all = append(all, e.locks(r.id)...)
	}
	if len(all) == 0 {
		return nil
	}
	return all[e.rng.IntN(len(all))]
}

// locks are those of a range that are applied, in order.
func (e *elastic) locks(id keyspace.RangeID) (all []*command.Lock) {
	r := e.leader.store.Replica(id)
	r.mu.Lock()
	defer r.mu.Unlock()
	for h := range r.locks.Locks() {
		if !h.Pending {
			all = append(all, h.Lock)
		}
	}
	slices.SortFunc(all, func(a, b *command.Lock) int { return compareLocks(a.ID, b.ID) })
	return all
}

func compareLocks(a, b rangeapi.LockID) int {
	return cmp.Or(cmp.Compare(a.Range, b.Range), cmp.Compare(a.Term, b.Term),
		cmp.Compare(a.Number, b.Number), cmp.Compare(a.Index, b.Index))
}

// pushLock decides about the transaction of a range's lock, and with ends has the lock end.
func (e *elastic) pushLock(id keyspace.RangeID, l *command.Lock, ends bool) {
	a, err := e.command(e.at(l.Anchor), &rangeapi.Decide{Name: l.Name, Anchor: l.Anchor})
	if err != nil || !ends {
		return
	}
	d := a.(*rangeapi.Decided)
	rev := d.Revision
	if !slices.ContainsFunc(d.Locks, func(o rangeapi.LockRef) bool { return o.ID == l.ID }) {
		rev = 0
	}
	if r := e.leader.store.Replica(id); r != nil {
		_, _ = e.command(r, &rangeapi.Resolve{Name: l.Name, Lock: l.ID, Revision: rev})
	}
}

// finishRecord ends what a committed transaction has left, as one does whose coordinator does
// not answer, though it may live.
func (e *elastic) finishRecord() {
	rs := e.records(e.some())
	if len(rs) > 0 {
		e.finish(rs[e.rng.IntN(len(rs))])
	}
}

// records are those of a range, in order.
func (e *elastic) records(id keyspace.RangeID) (all []*command.CommitRecord) {
	r := e.leader.store.Replica(id)
	r.mu.Lock()
	defer r.mu.Unlock()
	all = slices.AppendSeq(all, r.locks.Records())
	slices.SortFunc(all, func(a, b *command.CommitRecord) int { return cmp.Compare(a.Name.Attempt, b.Name.Attempt) })
	return all
}

func (e *elastic) finish(t *command.CommitRecord) {
	for _, l := range t.Locks {
		if e.commandOver(l.Span, &rangeapi.Resolve{Name: t.Name, Lock: l.ID, Revision: t.Revision}) != nil {
			return
		}
	}
	_, _ = e.command(e.at(t.Anchor), &rangeapi.Forget{Name: t.Name, Anchor: t.Anchor})
}

// opText prints a command as traces have it.
func opText(op rangeapi.TxnCommand) string {
	switch o := op.(type) {
	case *rangeapi.Prepare:
		if o.Revoke != 0 {
			return fmt.Sprintf("%s prepares its revoke of lease %d/%d", o.Name, o.Revoke, o.Incarnation)
		}
		return fmt.Sprintf("%s prepares, patient %t", o.Name, o.WaitForOlder)
	case *rangeapi.Commit:
		return fmt.Sprintf("%s commits %s at %d", o.Name, o.AnchorLock, o.Revision)
	case *rangeapi.Resolve:
		s := fmt.Sprintf("%s ends %s at %d", o.Name, o.Lock, o.Revision)
		if o.Detach != 0 {
			s += fmt.Sprintf(" with the attachment of lease %d", o.Detach)
		}
		return s
	case *rangeapi.Decide:
		return fmt.Sprintf("%s is decided", o.Name)
	case *rangeapi.Forget:
		return fmt.Sprintf("%s is forgotten", o.Name)
	}
	return fmt.Sprintf("%+v", op)
}

// answerText prints a command's answer as traces have it.
func answerText(a rangeapi.TxnAnswer, err error) string {
	if err != nil {
		return formatAnswer(nil, err)
	}
	switch d := a.(type) {
	case *rangeapi.Prepared:
		return fmt.Sprintf("lock %s held %t changes %t fence %d refused %v", d.Lock, d.Held, d.Changes, d.Fence, d.Refused)
	case *rangeapi.Decided:
		return fmt.Sprintf("at %d", d.Revision)
	case *rangeapi.Resolved:
		return fmt.Sprintf("done, more %t", d.More)
	}
	return fmt.Sprintf("%+v", a)
}
