package watch

import (
	"bytes"
	"cmp"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// event is an event in the hub, shared by all watchers of its key.
type event struct {
	rev   keyspace.Revision
	sub   uint32
	bytes int64
	// plain is the event without the version before. whole is the one with it, or nil if nobody
	// looked for that version. Neither changes once it is made.
	plain, whole *mvccpb.Event
}

func (e *event) key() []byte { return e.plain.Kv.Key }

// message returns the event with or without the version before.
func (e *event) message(prev bool) *mvccpb.Event {
	if prev && e.whole != nil {
		return e.whole
	}
	return e.plain
}

// newEvent copies a replica's event. It keeps nothing of the message that brought it, which may be a thousand times as large.
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

// keyValue returns a version as etcd shows it; a deletion has key and revision alone. Key and value
// are appended to own, which has room for them.
func keyValue(v *mvcc.Version, own *[]byte) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key: keep(own, v.Key), Value: keep(own, v.Value), CreateRevision: int64(v.Create), ModRevision: int64(v.Mod), Version: v.Version, Lease: int64(v.Lease),
	}
}

// keep appends to a buffer and returns the appended part.
func keep(own *[]byte, b []byte) []byte {
	at := len(*own)
	*own = append(*own, b...)
	return (*own)[at:len(*own):len(*own)]
}

// compare orders events by revision, operation and key.
func compare(a, b *event) int {
	return cmp.Or(cmp.Compare(a.rev, b.rev), cmp.Compare(a.sub, b.sub), bytes.Compare(a.key(), b.key()))
}
