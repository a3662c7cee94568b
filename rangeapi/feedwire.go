package rangeapi

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// FeedVersion is the first byte of the messages of bus methods 21 and 22; docs/format/rangeapi.md
// has the bytes.
const FeedVersion = 2

// FeedID names a feed in a gateway's stream. The gateway chooses it and never reuses one.
type FeedID uint64

// FeedOrder opens a feed or, with Close, ends it.
type FeedOrder struct {
	ID    FeedID
	Close bool
	Range keyspace.RangeID
	// Generation is the range's. At another one the feed ends at once with WrongRange, which has
	// the heirs' descriptors if the range is newer.
	Generation keyspace.Generation
	// From is the first revision wanted.
	From keyspace.Revision
	// Prev wants the version before each event.
	Prev bool
}

// FeedPosition is a position in the order in which a range of one generation applies its changes.
// It is the same on all replicas. The zero position is before all others.
type FeedPosition struct{ Term, Number uint64 }

// Reaches says whether a replica at m has applied everything that is applied at o.
func (m FeedPosition) Reaches(o FeedPosition) bool {
	return m.Term > o.Term || m.Term == o.Term && m.Number >= o.Number
}

// FeedPart is a part of a feed: events in the order of their application, and the resolved revision
// behind them. Every event at or below Resolved that any replica will ever have has been sent.
// Events above Resolved may come twice, and those of one revision in several parts. Everything
// applied up to Position has been sent too; it is zero if that is unknown. Err ends the feed.
type FeedPart struct {
	ID       FeedID
	Resolved keyspace.Revision
	Position FeedPosition
	Events   []Event
	Err      *kverror.Error
}

// Kinds of orders and parts.
const (
	orderOpen  = 1
	orderClose = 2
	orderPrev  = 1 // flag of an opening, and of a request for history

	partEvents = 1
	partEnd    = 2
)

func appendOrder(dst []byte, o *FeedOrder) []byte {
	if o.Close {
		return binary.AppendUvarint(append(dst, orderClose), uint64(o.ID))
	}
	dst = binary.AppendUvarint(append(dst, orderOpen), uint64(o.ID))
	dst = appendRange(dst, o.Range, o.Generation)
	dst = binary.AppendUvarint(dst, uint64(o.From))
	return append(dst, wire.Flag(o.Prev, orderPrev))
}

// EncodeOrders returns a message of orders.
func EncodeOrders(os []FeedOrder) []byte {
	dst := []byte{FeedVersion}
	for i := range os {
		dst = appendOrder(dst, &os[i])
	}
	return dst
}

// DecodeOrders reads what EncodeOrders wrote.
func DecodeOrders(b []byte) (os []FeedOrder, err error) {
	if b, err = checkVersion(b); err != nil {
		return nil, err
	}
	for len(b) > 0 {
		kind := b[0]
		var ints [4]uint64
		n := 1
		if kind == orderOpen {
			n = len(ints)
		} else if kind != orderClose {
			return nil, fmt.Errorf("rangeapi: order of kind %d to a feed", kind)
		}
		b = b[1:]
		for i := range n {
			if ints[i], b, err = wire.Uvarint(b); err != nil {
				return nil, err
			}
		}
		o := FeedOrder{
			ID: FeedID(ints[0]), Close: kind == orderClose, Range: keyspace.RangeID(ints[1]),
			Generation: keyspace.Generation(ints[2]), From: keyspace.Revision(ints[3]),
		}
		if !o.Close {
			if len(b) == 0 {
				return nil, wire.ErrTruncated
			}
			if b[0]&^orderPrev != 0 || ints[3] >= uint64(keyspace.MaxRevision) {
				return nil, fmt.Errorf("rangeapi: feed from revision %d with flags %#x", ints[3], b[0])
			}
			o.Prev, b = b[0]&orderPrev != 0, b[1:]
		}
		os = append(os, o)
	}
	return os, nil
}

func appendFeedPosition(dst []byte, m FeedPosition) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, m.Term), m.Number)
}

func decodeFeedPosition(b []byte) (m FeedPosition, rest []byte, err error) {
	if m.Term, b, err = wire.Uvarint(b); err != nil {
		return m, nil, err
	}
	m.Number, rest, err = wire.Uvarint(b)
	return m, rest, err
}

func checkVersion(b []byte) (rest []byte, err error) {
	if len(b) == 0 {
		return nil, wire.ErrTruncated
	}
	if b[0] != FeedVersion {
		return nil, fmt.Errorf("rangeapi: message of version %d, want %d", b[0], FeedVersion)
	}
	return b[1:], nil
}

// AppendPartHead appends a part without its events, of which count follow.
func AppendPartHead(dst []byte, id FeedID, resolved keyspace.Revision, m FeedPosition, count int) []byte {
	dst = binary.AppendUvarint(append(dst, partEvents), uint64(id))
	dst = binary.AppendUvarint(dst, uint64(resolved))
	dst = appendFeedPosition(dst, m)
	return binary.AppendUvarint(dst, uint64(count))
}

// AppendPart appends the binary form of a part to a message of parts.
func AppendPart(dst []byte, p *FeedPart) []byte {
	if p.Err != nil {
		dst = binary.AppendUvarint(append(dst, partEnd), uint64(p.ID))
		return wire.AppendBytes(dst, kverror.Append(nil, p.Err))
	}
	dst = AppendPartHead(dst, p.ID, p.Resolved, p.Position, len(p.Events))
	for i := range p.Events {
		dst = AppendEvent(dst, &p.Events[i])
	}
	return dst
}

// DecodeParts decodes a message of a feed. Keys and values stay parts of b.
func DecodeParts(b []byte) (ps []FeedPart, err error) {
	if b, err = checkVersion(b); err != nil {
		return nil, err
	}
	for len(b) > 0 {
		var p FeedPart
		kind := b[0]
		id, rest, err := wire.Uvarint(b[1:])
		if err != nil {
			return nil, err
		}
		p.ID, b = FeedID(id), rest
		switch kind {
		case partEvents:
			resolved, rest, err := wire.Uvarint(b)
			if err != nil {
				return nil, err
			}
			if resolved >= uint64(keyspace.MaxRevision) {
				return nil, fmt.Errorf("rangeapi: resolved revision %d", resolved)
			}
			p.Resolved = keyspace.Revision(resolved)
			if p.Position, b, err = decodeFeedPosition(rest); err != nil {
				return nil, err
			}
			if p.Events, b, err = decodeEvents(b); err != nil {
				return nil, err
			}
		case partEnd:
			var e []byte
			if e, b, err = wire.Bytes(b); err != nil {
				return nil, err
			}
			if p.Err, err = kverror.Decode(e); err != nil {
				return nil, err
			}
		default:
			return nil, fmt.Errorf("rangeapi: part of kind %d in a feed", kind)
		}
		ps = append(ps, p)
	}
	return ps, nil
}

// ResolvedRequest asks a range's leader for the feed position behind which a revision is resolved.
type ResolvedRequest struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	// Revision was allocated, or skipped for good, before the request.
	Revision keyspace.Revision
}

// HashRequest asks a replica for the hash of a part of its range at a revision, from a user key on.
type HashRequest struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	From       []byte
	// Revision is that of the state, and Compacted the compacted revision by whose rule versions count.
	Revision, Compacted keyspace.Revision
	// Position is where a leader has answered a ResolvedRequest for the revision, zero if none was
	// asked. The replica must have reached it, or have resolved the revision by itself.
	Position FeedPosition
}

// HistoryRequest asks a replica for the events of a span.
type HistoryRequest struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	Span       keyspace.Span
	// From and To are the first and last revision wanted.
	From, To keyspace.Revision
	// FromKey, if not nil, is where to continue within revision From: a page's NextKey. The answer
	// has no other revision then.
	FromKey []byte
	// Seen is the position that the replica must have reached: that of the asker's feeds.
	Seen FeedPosition
	// MaxBytes bounds the answer, with the versions before. The events of one key and revision may
	// exceed it.
	MaxBytes int64
	// Prev wants the version before each event, unless the revision before the event is below
	// Compacted. Compacted is the cluster's compacted revision as the asker knows it.
	Prev      bool
	Compacted keyspace.Revision
}

// HistoryPage is the events of a span in the order of their revisions, below revision Next. If one
// revision is larger than a page, the events are of revision Next, and NextKey, not nil, says where
// to continue in it.
type HistoryPage struct {
	Events  []Event
	Next    keyspace.Revision
	NextKey []byte
}

// Kinds of requests.
const (
	watchResolved  = 1
	watchHistory   = 2
	historyFromKey = 2 // flag
)

func (q *ResolvedRequest) encode() []byte {
	dst := appendRange([]byte{FeedVersion, watchResolved}, q.Range, q.Generation)
	return binary.AppendUvarint(dst, uint64(q.Revision))
}

func (q *HistoryRequest) encode() []byte {
	dst := appendRange([]byte{FeedVersion, watchHistory}, q.Range, q.Generation)
	dst = binary.AppendUvarint(dst, uint64(q.From))
	dst = binary.AppendUvarint(dst, uint64(q.To))
	dst = binary.AppendUvarint(dst, uint64(max(q.Compacted, 0)))
	dst = binary.AppendUvarint(dst, uint64(q.MaxBytes))
	dst = appendFeedPosition(dst, q.Seen)
	flags := wire.Flag(q.Prev, orderPrev) | wire.Flag(q.FromKey != nil, historyFromKey)
	dst = wire.AppendBytes(append(dst, flags), q.Span.Start)
	if dst = wire.AppendBytes(dst, q.Span.End); q.FromKey != nil {
		dst = wire.AppendBytes(dst, q.FromKey)
	}
	return dst
}

// DecodeWatchRequest returns one of the two requests.
func DecodeWatchRequest(b []byte) (*ResolvedRequest, *HistoryRequest, error) {
	b, err := checkVersion(b)
	if err != nil {
		return nil, nil, err
	}
	if len(b) == 0 {
		return nil, nil, wire.ErrTruncated
	}
	kind, b := b[0], b[1:]
	var ints [8]uint64
	n := 3
	if kind == watchHistory {
		n = len(ints)
	} else if kind != watchResolved {
		return nil, nil, fmt.Errorf("rangeapi: question of kind %d", kind)
	}
	for i := range n {
		if ints[i], b, err = wire.Uvarint(b); err != nil {
			return nil, nil, err
		}
		if i > 1 && i < 5 && ints[i] >= uint64(keyspace.MaxRevision) {
			return nil, nil, fmt.Errorf("rangeapi: question about revision %d", ints[i])
		}
	}
	if kind == watchResolved {
		if len(b) != 0 {
			return nil, nil, fmt.Errorf("rangeapi: %d bytes behind a question", len(b))
		}
		return &ResolvedRequest{keyspace.RangeID(ints[0]), keyspace.Generation(ints[1]), keyspace.Revision(ints[2])}, nil, nil
	}
	q := &HistoryRequest{
		Range: keyspace.RangeID(ints[0]), Generation: keyspace.Generation(ints[1]), From: keyspace.Revision(ints[2]),
		To: keyspace.Revision(ints[3]), Compacted: keyspace.Revision(ints[4]), MaxBytes: int64(ints[5]), Seen: FeedPosition{ints[6], ints[7]},
	}
	if len(b) == 0 {
		return nil, nil, wire.ErrTruncated
	}
	flags := b[0]
	if flags&^(orderPrev|historyFromKey) != 0 {
		return nil, nil, fmt.Errorf("rangeapi: history with flags %#x", flags)
	}
	q.Prev = flags&orderPrev != 0
	if q.Span.Start, b, err = wire.Bytes(b[1:]); err == nil {
		q.Span.End, b, err = wire.Bytes(b)
	}
	if err == nil && flags&historyFromKey != 0 {
		if q.FromKey, b, err = wire.Bytes(b); q.FromKey == nil {
			q.FromKey = []byte{} // an empty key is a key
		}
	}
	if err == nil && len(b) != 0 {
		err = fmt.Errorf("rangeapi: %d bytes behind a question", len(b))
	}
	return nil, q, err
}

// Encode returns the answer to a HistoryRequest.
func (p *HistoryPage) Encode() []byte {
	size := 16
	for i := range p.Events {
		size += int(p.Events[i].Bytes())
	}
	dst := append(make([]byte, 0, size+len(p.NextKey)), FeedVersion, StatusOK)
	dst = binary.AppendUvarint(dst, uint64(p.Next))
	// NextKey is never empty: it lies behind another key.
	return appendEvents(wire.AppendBytes(dst, p.NextKey), p.Events)
}

// EncodeResolved returns the answer to a ResolvedRequest.
func EncodeResolved(m FeedPosition) []byte {
	return appendFeedPosition([]byte{FeedVersion, StatusOK}, m)
}

// EncodeWatchError returns the answer to either request that has failed.
func EncodeWatchError(err error) []byte {
	return kverror.Append([]byte{FeedVersion, StatusError}, kverror.Of(err))
}

// watchAnswer returns what follows the head of a good answer, or the range's error.
func watchAnswer(b []byte) (rest []byte, err error) {
	if b, err = checkVersion(b); err != nil {
		return nil, err
	}
	switch {
	case len(b) == 0:
		return nil, wire.ErrTruncated
	case b[0] == StatusOK:
		return b[1:], nil
	case b[0] != StatusError:
		return nil, fmt.Errorf("rangeapi: answer of kind %d", b[0])
	}
	e, err := kverror.Decode(b[1:])
	if err != nil {
		return nil, err
	}
	return nil, e
}

func decodeResolved(b []byte) (m FeedPosition, err error) {
	rest, err := watchAnswer(b)
	if err == nil {
		m, rest, err = decodeFeedPosition(rest)
	}
	if err == nil && len(rest) != 0 {
		err = fmt.Errorf("rangeapi: %d bytes behind an answer", len(rest))
	}
	return m, err
}

// decodeHistoryPage decodes a page, whose keys and values stay parts of b.
func decodeHistoryPage(b []byte) (*HistoryPage, error) {
	rest, err := watchAnswer(b)
	if err != nil {
		return nil, err
	}
	next, rest, err := wire.Uvarint(rest)
	if err != nil {
		return nil, err
	}
	if next > uint64(keyspace.MaxRevision) {
		return nil, fmt.Errorf("rangeapi: page up to revision %d", next)
	}
	p := &HistoryPage{Next: keyspace.Revision(next)}
	if p.NextKey, rest, err = wire.Bytes(rest); err != nil {
		return nil, err
	}
	if len(p.NextKey) == 0 {
		p.NextKey = nil
	}
	if p.Events, rest, err = decodeEvents(rest); err != nil {
		return nil, err
	}
	if len(rest) != 0 {
		return nil, fmt.Errorf("rangeapi: %d bytes behind a page", len(rest))
	}
	return p, nil
}
