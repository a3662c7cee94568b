package rangefeed

import (
	"bytes"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Events are the events of one applied batch, encoded once for all feeds.
type Events struct {
	bytes []byte
	count int
	// lowest is where in bytes the lowest event begins, in the order of (revision, key).
	lowest int
}

// eventOverheadBytes is about what an encoded event has beside key and value.
const eventOverheadBytes = 56

// Capture encodes the versions of a batch in the order in which they are given.
func Capture(versions []mvcc.Version) *Events {
	e := &Events{count: len(versions)}
	size, lowest := 0, 0
	for i := range versions {
		size += int(versions[i].Size()) + eventOverheadBytes
		if (place{versions[i].Mod, versions[i].Key}).before(place{versions[lowest].Mod, versions[lowest].Key}) {
			lowest = i
		}
	}
	e.bytes = make([]byte, 0, size)
	for i := range versions {
		if i == lowest {
			e.lowest = len(e.bytes)
		}
		ev := rangeapi.Event{Version: versions[i]}
		e.bytes = rangeapi.AppendEvent(e.bytes, &ev)
	}
	return e
}

// lowestPlace returns the place of the lowest event.
func (e *Events) lowestPlace() place {
	var low rangeapi.Event
	if _, err := rangeapi.DecodeEvent(e.bytes[e.lowest:], &low); err != nil {
		panic("rangefeed: an event that was encoded here: " + err.Error())
	}
	return place{low.Mod, low.Key}
}

// Publication collects what is to be published at once. The zero value is empty.
type Publication struct {
	block *block
	// missed says that a batch was applied without a capture, before the first feed came.
	missed bool
}

// Add adds a batch that was applied, with the range's resolved revision and position behind
// it. e is nil if the batch was not captured.
func (p *Publication) Add(e *Events, resolved keyspace.Revision, at rangeapi.FeedPosition) {
	if e == nil {
		p.missed = true
		return
	}
	if p.block == nil {
		p.block = &block{}
	}
	p.block.events = append(p.block.events, e)
	p.block.bytes += int64(len(e.bytes))
	p.block.resolved, p.block.position = resolved, at
}

// block is what a feed is given at a time. Feeds share it and do not change it.
type block struct {
	events   []*Events
	bytes    int64
	resolved keyspace.Revision
	// position is the range's behind the block, zero if not everything up to there is sent.
	position rangeapi.FeedPosition
}

// place is a place among the events in the order of (revision, key): before the events of
// the key, behind all lower ones. The zero place is none.
type place struct {
	rev keyspace.Revision
	key []byte
}

func (p place) before(o place) bool {
	return p.rev < o.rev || p.rev == o.rev && bytes.Compare(p.key, o.key) < 0
}
