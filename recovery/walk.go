package recovery

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/shard/command"
)

// walk follows a range's tail as package shard applies it, as far as it changes the range itself. It
// writes nothing and looks at no version.
type walk struct {
	node keyspace.NodeID
	// record returns the record of another range on the node.
	record func(keyspace.RangeID) (command.Record, bool, error)

	rec       command.Record
	confIndex uint64
	members   []keyspace.Replica
	revision  keyspace.Revision
	sequencer uint64
	absorbs   []keyspace.RangeID
	children  []child
}

// child is a range that the tail makes on this node.
type child struct {
	self keyspace.ReplicaID
	// index is that of the split.
	index   uint64
	applied engine.Applied
}

// changes says whether the entry changes members or span, or binds the range to a merge, if it is applied.
func changes(e *offline.Entry) bool {
	if e.Members != nil {
		return true
	}
	h, _, err := command.DecodeHeader(e.Data)
	if err != nil {
		return false
	}
	switch h.Kind {
	case command.KindSplit, command.KindBind, command.KindFreeze, command.KindAbsorb, command.KindRelease:
		return true
	case command.KindBatch, command.KindCompact, command.KindCount, command.KindLoad:
	}
	return false
}

// entry follows one entry.
func (w *walk) entry(e *offline.Entry) error {
	if e.Members != nil {
		w.members, w.confIndex = e.Members, e.Index
		return nil
	}
	if len(e.Data) == 0 {
		return nil
	}
	h, body, err := command.DecodeHeader(e.Data)
	if keyspace.IsVersionError(err) {
		return fmt.Errorf("entry %d: %w", e.Index, err)
	}
	if err != nil {
		return nil //nolint:nilerr // refused by every replica: it does nothing
	}
	if h.Kind == command.KindBatch {
		w.batch(body)
		return nil
	}
	if h.Term != e.Term || h.Generation != w.rec.Generation || h.Kind != command.KindRelease && w.rec.Merge.Frozen() {
		return nil
	}
	switch h.Kind {
	case command.KindSplit:
		w.split(e.Index, body)
	case command.KindBind, command.KindFreeze, command.KindAbsorb, command.KindRelease:
		return w.merge(h.Kind, body)
	case command.KindLoad:
		w.load(body)
	case command.KindBatch, command.KindCompact, command.KindCount:
	}
	return nil
}

// load takes note of the revisions that a load brings. No sequencer has given them out, so nobody else knows
// them for certain.
func (w *walk) load(body []byte) {
	c, rest, err := command.DecodeLoad(body)
	if err != nil {
		return // refused by every replica
	}
	w.revision = max(w.revision, c.Revision, c.From.Revision)
	// What comes behind a version that cannot be read is refused as well.
	_ = command.VisitLoad(&c, rest, func(v *mvcc.Version, _ command.LoadPrior) error {
		w.revision = max(w.revision, v.Mod)
		return nil
	})
}

// batch takes note of the revisions in a batch. Those of a batch that does nothing were allocated too.
func (w *walk) batch(body []byte) {
	c, rest, err := command.DecodeBatchHeader(body)
	if err != nil {
		return
	}
	w.sequencer = max(w.sequencer, c.SequencerTerm)
	if c.Txns > 0 {
		w.revision = max(w.revision, c.First+keyspace.Revision(c.Txns)-1)
	}
	items, err := command.VisitBatch(&c, rest, func(int, *mvcc.Version, command.Prior) error { return nil })
	if err != nil {
		return
	}
	for cur := command.NewCursor(items); cur.OK() && cur.Len() > 0; {
		i := cur.Item()
		w.revision = max(w.revision, i.Revision)
		if i.Record != nil {
			w.revision = max(w.revision, i.Record.Revision)
		}
	}
}

func (w *walk) split(index uint64, body []byte) {
	c, err := command.DecodeSplit(body)
	if err != nil || c.Child == w.rec.RangeID || c.Child.Group().IsSystem() || c.ConfIndex != w.confIndex ||
		w.rec.Merge.Role != command.MergeNone || !w.rec.Span.Contains(c.Key) || bytes.Equal(w.rec.Span.Start, c.Key) {
		return
	}
	made := w.rec
	made.RangeID, made.Generation, made.Merge = c.Child, w.rec.Generation+1, command.MergeState{}
	made.Span.Start = bytes.Clone(c.Key)
	made.Last, made.Merged, made.Absorbed, made.Hash = command.Link{}, 0, 0, 0
	w.rec.Span.End, w.rec.Generation = made.Span.Start, made.Generation
	if self := on(c.Replicas, w.node); self != 0 {
		w.children = append(w.children, child{self, index, engine.Applied{
			Index: raftgroup.InitIndex, Term: raftgroup.InitTerm, ConfIndex: raftgroup.InitIndex, Replicas: c.Replicas,
			Payload: command.AppendRecord(nil, &made),
		}})
	}
}

func (w *walk) merge(kind command.Kind, body []byte) error {
	c, err := command.DecodeMergeCommand(kind, body)
	if err != nil {
		return nil //nolint:nilerr // refused by every replica
	}
	m := &w.rec.Merge
	switch {
	case kind == command.KindRelease:
		w.rec.Merged = max(w.rec.Merged, c.ID)
		if m.ID == c.ID {
			*m = command.MergeState{}
		}
	case kind == command.KindAbsorb:
		if m.Role == command.MergeTarget && m.ID == c.ID {
			return w.absorb()
		}
	case c.ID <= w.rec.Merged || m.Role != command.MergeNone || c.ConfIndex != w.confIndex:
	case kind == command.KindBind:
		*m = command.MergeState{Role: command.MergeTarget, ID: c.ID, Other: c.Other, Hull: c.Hull}
	default:
		*m = command.MergeState{Role: command.MergeSource, ID: c.ID, Other: c.Other}
	}
	return nil
}

// errSource says that a tail absorbs a range that is not here as it must be.
var errSource = errors.New("its tail absorbs a range that is not here")

// absorb takes the source's place. The source was frozen durably on each of its nodes before the merge
// was committed.
func (w *walk) absorb() error {
	m := w.rec.Merge
	src, ok, err := w.record(m.Other)
	if err != nil {
		return err
	}
	if f := &src.Merge; !ok || !f.Frozen() || f.ID != m.ID || !slices.Equal(src.Span.Start, w.rec.Span.End) {
		return fmt.Errorf("%w: range %s for merge %d", errSource, m.Other, m.ID)
	}
	w.rec.Span.End = src.Span.End
	w.rec.Generation = max(w.rec.Generation, src.Generation) + 1
	w.rec.Merged, w.rec.Merge = max(w.rec.Merged, m.ID), command.MergeState{}
	w.revision = max(w.revision, src.LastRevision)
	w.sequencer = max(w.sequencer, src.SequencerTerm)
	w.absorbs = append(w.absorbs, m.Other)
	return nil
}

func on(rs []keyspace.Replica, n keyspace.NodeID) keyspace.ReplicaID {
	for _, r := range rs {
		if r.Node == n {
			return r.ID
		}
	}
	return 0
}
