package watch

import (
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// Delivery is what a watcher's client is told in one message.
type Delivery struct {
	Watcher *Watcher
	// Events are all those of whole revisions, in order. They are shared and must not be changed.
	Events []*mvccpb.Event
	// Revision is at or above all events, and there are no other events up to it. A delivery
	// without events, Compacted and TooLarge answers RequestProgress for all watchers of the
	// stream. Its Watcher is nil, and no watcher was told an event above Revision.
	Revision keyspace.Revision
	// Compacted, if not 0, ends the watcher: its next events were compacted up to there.
	Compacted keyspace.Revision
	// TooLarge, if not 0, ends the watcher: that revision alone has more bytes of its span than
	// four times Config.RevisionBytes.
	TooLarge keyspace.Revision

	// parts make up Events, if other watchers get all of them too.
	parts []*sharedEvents
}

// delivery waits for a watcher's client.
type delivery struct {
	events []*mvccpb.Event
	bytes  int64
	rev    keyspace.Revision
	of     *sharedEvents
}

// first is the revision of its first event.
func (d *delivery) first() keyspace.Revision {
	return keyspace.Revision(d.events[0].Kv.ModRevision)
}

// last is the revision of its last event.
func (d *delivery) last() keyspace.Revision {
	return keyspace.Revision(d.events[len(d.events)-1].Kv.ModRevision)
}

// sharedEvents wait for the clients of several watchers. Their bytes are counted once, until the
// last client has taken them.
type sharedEvents struct {
	// Guarded by the hub's mu.
	bytes int64
	users int

	// events are set for more than one watcher. The first client that takes them has them encoded
	// for all.
	events []*mvccpb.Event
	once   sync.Once
	// encoded is set by once.
	encoded []byte
}

// share is called before the events are offered to several watchers. Both forms of the events wait
// together.
func (s *sharedEvents) share(events []*mvccpb.Event) {
	s.events = events
	s.bytes *= 2
}

// encode returns the events as a WatchResponse encodes them.
func (s *sharedEvents) encode() []byte {
	s.once.Do(func() { s.encoded = appendEvents(nil, s.events) })
	return s.encoded
}

// fieldEvents is the field of a WatchResponse that holds an event.
const fieldEvents protowire.Number = 11

// appendEvents appends events as a WatchResponse encodes them.
func appendEvents(dst []byte, events []*mvccpb.Event) []byte {
	size := 0
	for _, e := range events {
		size += protowire.SizeTag(fieldEvents) + protowire.SizeBytes(proto.Size(e))
	}
	dst = slices.Grow(dst, size)
	for _, e := range events {
		dst = protowire.AppendTag(dst, fieldEvents, protowire.BytesType)
		dst = protowire.AppendVarint(dst, uint64(proto.Size(e)))
		var err error
		if dst, err = (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend(dst, e); err != nil {
			panic("watch: encode an event: " + err.Error()) // it has no string and no required field
		}
	}
	return dst
}

// AppendEncoded appends slices to parts that together encode the events as a WatchResponse does. ok
// is false if there is no form that several watchers share. The bytes must not be changed.
func (d *Delivery) AppendEncoded(parts [][]byte) (_ [][]byte, ok bool) {
	for _, s := range d.parts {
		parts = append(parts, s.encode())
	}
	return parts, len(d.parts) > 0
}

// deliveryBytes is what each watcher holds of a delivery by itself.
const deliveryBytes = 64

// newDelivery makes a delivery of a batch, with the versions before if they are wanted. As in etcd,
// an event has none if the revision before it is compacted when it is sent.
func (h *Hub) newDelivery(batch []*event, prev bool, rev keyspace.Revision) delivery {
	d := delivery{rev: rev, events: make([]*mvccpb.Event, len(batch)), of: &sharedEvents{}}
	for i, e := range batch {
		d.events[i] = e.message(prev && e.rev > h.compacted)
		d.bytes += e.bytes
	}
	d.of.bytes = d.bytes
	return d
}

// adds returns the bytes that one more watcher of the delivery adds to the queues.
func (d *delivery) adds() int64 {
	if d.of.users > 0 {
		return deliveryBytes
	}
	return deliveryBytes + d.of.bytes
}

// releaseDelivery returns what a watcher holds of a delivery.
func (h *Hub) releaseDelivery(d *delivery) {
	d.of.users--
	h.queuedBytes -= d.adds()
	h.queuedEvents -= len(d.events)
}

// Bounds of one message to a client: a client that takes no more in one would otherwise never catch
// up. One revision is never divided.
const (
	maxDeliveryRevisions = 1000
	maxDeliveryBytes     = 1 << 20
)

// fitting returns how many of the events fit into one delivery. None is above the ceiling; the
// first one is not.
func fitting(events []*mvccpb.Event, ceiling keyspace.Revision) int {
	border, revisions, bytes := 0, 1, 0
	for i, e := range events {
		if i > 0 && e.Kv.ModRevision != events[i-1].Kv.ModRevision {
			if border, revisions = i, revisions+1; revisions > maxDeliveryRevisions || e.Kv.ModRevision > int64(ceiling) {
				return border
			}
		}
		bytes += len(e.Kv.Key) + len(e.Kv.Value) + 64
		if e.PrevKv != nil {
			bytes += len(e.PrevKv.Key) + len(e.PrevKv.Value) + 64
		}
		if bytes > maxDeliveryBytes && border > 0 {
			return border
		}
	}
	return len(events)
}
