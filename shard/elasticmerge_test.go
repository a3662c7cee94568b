package shard

import (
	"bytes"
	"context"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard/command"
)

// split splits a range at a key, as often as not one that a lock covers.
func (e *elastic) split() {
	if len(e.over(keyspace.Span{})) >= e.traits.ranges {
		return
	}
	k := e.key()
	if l := e.anyLock(); l != nil && len(l.Spans) > 1 && e.one(2) {
		k = l.Spans[1+e.rng.IntN(len(l.Spans)-1)].Span.Start
	}
	r := e.at(k)
	_, err := do(e, func(ctx context.Context) ([]keyspace.Descriptor, error) {
		return e.leader.store.admins.Split(ctx, 1, r.id, 0, k)
	})
	e.say("split range %s at %s: %s", r.id, k, errorText(err))
}

// elasticMerge is a merge as placement's record has it.
type elasticMerge struct {
	id          uint64
	left, right keyspace.RangeID
	hull        keyspace.Span
	phase       elasticPhase
}

// elasticPhase is what placement orders next.
type elasticPhase int

const (
	elasticBinds elasticPhase = iota
	elasticFreezes
	elasticSettles
	// elasticAbsorbs: the merge is committed.
	elasticAbsorbs
	// elasticReleases and elasticReleasesLeft: it is aborted, first at the right range.
	elasticReleases
	elasticReleasesLeft
)

// mergeStep begins a merge, or has the one that there is go on by a step, or be aborted.
func (e *elastic) mergeStep() {
	m := e.merge
	if m == nil {
		rs := e.over(keyspace.Span{})
		if len(rs) < 2 {
			return
		}
		i := e.rng.IntN(len(rs) - 1)
		for range len(rs) { // most of all what has the halves of a lock, or two locks of an attempt
			if e.share(rs[i].id, rs[i+1].id) {
				break
			}
			i = (i + 1) % (len(rs) - 1)
		}
		e.merges++
		l, r := rs[i].Descriptor(), rs[i+1].Descriptor()
		e.merge = &elasticMerge{id: e.merges, left: l.Range, right: r.Range, hull: keyspace.Span{Start: l.Span.Start, End: r.Span.End}}
		return
	}
	if m.phase < elasticAbsorbs && e.one(12) {
		m.phase = elasticReleases
	}
	e.takeMergeStep(m)
}

// share says whether both ranges have a half of one lock, or now and then whether an attempt
// has locks in both.
func (e *elastic) share(a, b keyspace.RangeID) bool {
	attempts := e.one(4)
	return slices.ContainsFunc(e.locks(a), func(l *command.Lock) bool {
		return slices.ContainsFunc(e.locks(b), func(o *command.Lock) bool { return l.ID == o.ID || attempts && l.Name == o.Name })
	})
}

// takeMergeStep takes the next step. A failure before the merge is committed aborts the merge, or
// the step is tried again.
func (e *elastic) takeMergeStep(m *elasticMerge) {
	left, right := e.leader.store.Replica(m.left), e.leader.store.Replica(m.right)
	switch m.phase {
	case elasticBinds, elasticFreezes, elasticSettles:
		l, r := left.Descriptor(), right.Descriptor()
		switch {
		case !bytes.Equal(l.Span.End, r.Span.Start) || m.phase > elasticBinds && !bytes.Equal(r.Span.End, m.hull.End):
			m.phase = elasticReleases
		case m.phase == elasticBinds:
			m.hull.End = r.Span.End
			e.bind(m, l)
		case m.phase == elasticFreezes:
			e.freeze(m, r)
		default:
			e.settleMerge(m)
		}
	case elasticAbsorbs:
		if e.order(e.leader, keyspace.MergeOrder{Step: keyspace.MergeAbsorb, ID: m.id, Range: m.left}) == nil {
			e.merge = nil
			e.pass(50 * time.Millisecond) // the right range's replica is removed
		}
	case elasticReleases:
		if e.order(e.leader, keyspace.MergeOrder{Step: keyspace.MergeRelease, ID: m.id, Range: m.right}) == nil {
			m.phase = elasticReleasesLeft
		}
	case elasticReleasesLeft:
		if e.order(e.leader, keyspace.MergeOrder{Step: keyspace.MergeRelease, ID: m.id, Range: m.left}) == nil {
			e.merge = nil
		}
	}
}

func (e *elastic) bind(m *elasticMerge, l keyspace.Descriptor) {
	err := e.order(e.leader, keyspace.MergeOrder{
		Step: keyspace.MergeBind, ID: m.id, Range: m.left, Other: m.right, Hull: m.hull,
		Generation: l.Generation, ConfIndex: l.ConfIndex,
	})
	if err == nil {
		m.phase = elasticFreezes
	} else if e.one(2) {
		m.phase = elasticReleases
	}
}

func (e *elastic) freeze(m *elasticMerge, r keyspace.Descriptor) {
	err := e.order(e.leader, keyspace.MergeOrder{
		Step: keyspace.MergeFreeze, ID: m.id, Range: m.right, Other: m.left,
		Generation: r.Generation, ConfIndex: r.ConfIndex,
	})
	if err == nil {
		m.phase = elasticSettles
	} else if e.one(4) {
		m.phase = elasticReleases
	}
}

// settleMerge commits the merge, once every replica of the right range is frozen for it, and
// durably.
func (e *elastic) settleMerge(m *elasticMerge) {
	for e.replay(e.follower, m.right, 1000) {
	}
	f := e.follower.store.Replica(m.right)
	if f == nil || f.Descriptor().Generation == 0 {
		e.copyTo(m.right)
		f = e.follower.store.Replica(m.right)
	}
	if f == nil || e.follower.store.Replica(m.left) == nil {
		m.phase = elasticReleases
		return
	}
	for _, w := range []*fakeWorld{e.leader, e.follower} {
		if e.order(w, keyspace.MergeOrder{Step: keyspace.MergeSettle, ID: m.id, Range: m.right}) != nil {
			m.phase = elasticReleases
			return
		}
	}
	m.phase = elasticAbsorbs
	e.leases.merged(m.hull)
	e.say("merge %d is committed", m.id)
}

// order has a node take a step of a merge.
func (e *elastic) order(w *fakeWorld, o keyspace.MergeOrder) error {
	_, err := do(e, func(ctx context.Context) (struct{}, error) { return struct{}{}, w.store.admins.Merge(ctx, 1, o) })
	e.say("merge %d: %s of range %s at the %s: %s", o.ID, o.Step, o.Range, e.name(w), errorText(err))
	return err
}

// errorText prints an error as traces have it.
func errorText(err error) string {
	if err == nil {
		return "done"
	}
	return formatAnswer(nil, err)
}
