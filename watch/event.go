package watch

import (
	"bytes"
	"cmp"
	"iter"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// event is an event as the hub holds it, shared by all who watch its key.
type event struct {
	rev   keyspace.Revision
	sub   uint32
	bytes int64
	// plain is the event without the version before, whole the one with it, nil where
	// that was not looked for. Both are not changed once they are made.
	plain, whole *mvccpb.Event
}

func (e *event) key() []byte { return e.plain.Kv.Key }

// message returns what a watcher gets that wants the version before, or does not.
func (e *event) message(prev bool) *mvccpb.Event {
	if prev && e.whole != nil {
		return e.whole
	}
	return e.plain
}

// newEvent makes an event of what a replica has told. It takes nothing of the message
// along that brought it, which may be a thousand times as large: what it holds is what is
// counted.
func newEvent(s *rangeapi.Event) *event {
	size := len(s.Key) + len(s.Value)
	if s.Prev != nil {
		size += len(s.Prev.Key) + len(s.Prev.Value)
	}
	own := make([]byte, 0, size)
	e := &event{rev: s.Mod, sub: s.Sub, bytes: s.Bytes(), plain: &mvccpb.Event{Kv: keyValue(&s.Version, &own)}}
	if s.Tombstone {
		e.plain.Type = mvccpb.Event_DELETE
	}
	if s.Looked {
		e.whole = e.plain
		if s.Prev != nil {
			e.whole = &mvccpb.Event{Type: e.plain.Type, Kv: e.plain.Kv, PrevKv: keyValue(s.Prev, &own)}
		}
	}
	return e
}

// keyValue is a version as etcd shows it: of a deletion key and revision alone. Its key
// and value are in what own had room for.
func keyValue(v *mvcc.Version, own *[]byte) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: keep(own, v.Key), Value: keep(own, v.Value), CreateRevision: int64(v.Create), ModRevision: int64(v.Mod), Version: v.Version, Lease: int64(v.Lease),
	}
}

// keep appends to a buffer, and returns where.
func keep(own *[]byte, b []byte) []byte {
	at := len(*own)
	*own = append(*own, b...)
	return (*own)[at:len(*own):len(*own)]
}

// compare orders events by revision, place in the transaction, and key.
func compare(a, b *event) int {
	return cmp.Or(cmp.Compare(a.rev, b.rev), cmp.Compare(a.sub, b.sub), bytes.Compare(a.key(), b.key()))
}

// recentEvents are the events that came last, in order, within a bound.
type recentEvents struct {
	limit, bytes int64
	list         eventList
	// Events at or below floor are gone.
	floor keyspace.Revision
}

// add takes an event in, and says whether it was new. One that comes again with the
// version before, and had come without, is completed.
func (r *recentEvents) add(e *event) bool {
	if e.rev <= r.floor {
		return true
	}
	if twin := r.list.insert(e); twin != nil {
		if twin.whole == nil {
			twin.whole = e.whole
		}
		return false
	}
	r.bytes += e.bytes
	r.trim()
	return true
}

// trim lets the oldest revisions go, whole ones.
func (r *recentEvents) trim() {
	for r.bytes > r.limit && r.list.len() > 0 {
		r.floor = r.list.first().rev
		for r.list.len() > 0 && r.list.first().rev == r.floor {
			r.bytes -= r.list.shift().bytes
		}
	}
}

// between calls for the events with revisions in (after, to].
func (r *recentEvents) between(after, to keyspace.Revision) iter.Seq[*event] {
	return r.list.between(after, to)
}
