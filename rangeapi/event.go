package rangeapi

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Event is one applied version, as watchers see it.
type Event struct {
	mvcc.Version
	// Looked says that the version before was looked for. Prev is that version, or nil if there is
	// none or if it may be compacted.
	Looked bool
	Prev   *mvcc.Version
}

// Bytes returns roughly what the event takes in memory.
func (e *Event) Bytes() int64 {
	n := e.Size() + eventOverheadBytes
	if e.Prev != nil {
		n += e.Prev.Size()
	}
	return n
}

const eventOverheadBytes = 160

// Flags of an event on the bus.
const (
	eventTombstone = 1 << iota
	// A lease follows eventLease. eventLooked and eventPrev are Looked and Prev.
	eventLease
	eventLooked
	eventPrev
	// The version before has a lease.
	eventPrevLease

	eventFlags = eventTombstone | eventLease | eventLooked | eventPrev | eventPrevLease
)

// AppendEvent appends the binary form of an event; docs/format/rangeapi.md has the bytes.
func AppendEvent(dst []byte, e *Event) []byte {
	flags := wire.Flag(e.Tombstone, eventTombstone) | wire.Flag(e.Lease != 0, eventLease) | wire.Flag(e.Looked, eventLooked)
	if e.Prev != nil {
		flags |= eventPrev | wire.Flag(e.Prev.Lease != 0, eventPrevLease)
	}
	dst = append(dst, flags)
	dst = binary.AppendUvarint(dst, uint64(e.Mod))
	dst = binary.AppendUvarint(dst, uint64(e.Sub))
	dst = wire.AppendBytes(dst, e.Key)
	if !e.Tombstone {
		dst = AppendPut(dst, &e.Version)
	}
	if e.Prev != nil {
		dst = binary.AppendUvarint(dst, uint64(e.Mod-e.Prev.Mod))
		dst = AppendPut(dst, e.Prev)
	}
	return dst
}

// AppendPut appends a put without key and revision, as it stands in events and in entries.
func AppendPut(dst []byte, v *mvcc.Version) []byte {
	dst = binary.AppendUvarint(dst, uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	if v.Lease != 0 {
		dst = binary.AppendUvarint(dst, uint64(v.Lease))
	}
	return wire.AppendBytes(dst, v.Value)
}

var errEvent = errors.New("rangeapi: impossible event")

// DecodeEvent decodes an event into e, whose keys and values stay parts of b.
func DecodeEvent(b []byte, e *Event) (rest []byte, err error) {
	if len(b) == 0 {
		return nil, wire.ErrTruncated
	}
	flags := b[0]
	if flags&^eventFlags != 0 || flags&eventPrevLease != 0 && flags&eventPrev == 0 || flags&eventPrev != 0 && flags&eventLooked == 0 {
		return nil, fmt.Errorf("%w: flags %#x", errEvent, flags)
	}
	mod, b, err := wire.Uvarint(b[1:])
	if err != nil {
		return nil, err
	}
	sub, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if mod == 0 || mod >= uint64(keyspace.MaxRevision) || sub > 1<<32-1 {
		return nil, fmt.Errorf("%w: revision %d, operation %d", errEvent, mod, sub)
	}
	*e = Event{Looked: flags&eventLooked != 0}
	e.Mod, e.Sub, e.Tombstone = keyspace.Revision(mod), uint32(sub), flags&eventTombstone != 0
	if e.Key, b, err = wire.Bytes(b); err != nil {
		return nil, err
	}
	switch {
	case len(e.Key) == 0:
		return nil, fmt.Errorf("%w: no key", errEvent)
	case !e.Tombstone:
		b, err = DecodePut(b, flags&eventLease != 0, &e.Version)
	case flags&eventLease != 0:
		err = fmt.Errorf("%w: tombstone with a lease", errEvent)
	}
	if err != nil || flags&eventPrev == 0 {
		return b, err
	}
	age, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if age == 0 || age >= mod {
		return nil, fmt.Errorf("%w: version before %d revisions older", errEvent, age)
	}
	e.Prev = &mvcc.Version{Key: e.Key, Mod: e.Mod - keyspace.Revision(age)}
	return DecodePut(b, flags&eventPrevLease != 0, e.Prev)
}

// DecodePut decodes what AppendPut wrote into v, whose Mod is set already.
func DecodePut(b []byte, leased bool, v *mvcc.Version) (rest []byte, err error) {
	age, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	version, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if age >= uint64(v.Mod) || version == 0 || version > uint64(v.Mod) {
		return nil, fmt.Errorf("rangeapi: version %d, %d revisions old, at revision %d", version, age, v.Mod)
	}
	v.Create, v.Version = v.Mod-keyspace.Revision(age), int64(version)
	if leased {
		var lease uint64
		if lease, b, err = wire.Uvarint(b); err != nil {
			return nil, err
		}
		if v.Lease = keyspace.LeaseID(lease); v.Lease == 0 {
			return nil, errors.New("rangeapi: lease 0")
		}
	}
	v.Value, rest, err = wire.Bytes(b)
	return rest, err
}

// appendEvents appends the number of events and the events.
func appendEvents(dst []byte, events []Event) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(events)))
	for i := range events {
		dst = AppendEvent(dst, &events[i])
	}
	return dst
}

// minEventBytes is the least that an event takes on the bus.
const minEventBytes = 5

// decodeEvents decodes what appendEvents wrote. Keys and values stay parts of b.
func decodeEvents(b []byte) (events []Event, rest []byte, err error) {
	n, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, nil, err
	}
	if n > uint64(len(b)/minEventBytes) {
		return nil, nil, wire.ErrTruncated
	}
	for range n {
		events = append(events, Event{})
		if b, err = DecodeEvent(b, &events[len(events)-1]); err != nil {
			return nil, nil, err
		}
	}
	return events, b, nil
}
