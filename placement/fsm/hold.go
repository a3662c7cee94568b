package fsm

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// HoldID names a hold. Who makes the hold chooses it at random, and repeats the command without harm.
type HoldID uint64

// String returns the id as operators see it.
func (id HoldID) String() string { return fmt.Sprintf("%016x", uint64(id)) }

// Hold keeps the versions of all ranges that are readable at its revision or above it, until it expires or
// its owner ends it. Clients' compactions go on: what they read is refused as ever.
type Hold struct {
	ID HoldID
	// Kind says for people what holds, as backup or snapshot, in at most MaxHoldKindBytes, and Owner who does, in at most
	// MaxHoldOwnerBytes.
	Kind, Owner string
	// Revision is the lowest one that is held. The owner may move it up.
	Revision keyspace.Revision
	// Made is when the hold was made.
	Made UnixMillis
	// Expires is when placement's leader may end the hold. Until it has done so the hold can be renewed.
	Expires UnixMillis
}

// Holds is an unchanging list of the holds.
type Holds struct {
	// All are ascending by id.
	All []Hold
	// Changed is the index at or above that of the last change.
	Changed uint64
}

// Bounds of holds.
const (
	// MaxHolds bounds the holds of a cluster: each of them may cost disk space everywhere.
	MaxHolds = 16
	// MaxHoldKindBytes and MaxHoldOwnerBytes bound what says who holds.
	MaxHoldKindBytes  = 32
	MaxHoldOwnerBytes = 256
	// MaxHoldLife bounds how long a hold lasts without being renewed.
	MaxHoldLife = 24 * time.Hour
)

// Lowest returns the lowest revision that is held, keyspace.MaxRevision where none is. The list may be nil.
func (l *Holds) Lowest() keyspace.Revision {
	low := keyspace.MaxRevision
	if l != nil {
		for i := range l.All {
			low = min(low, l.All[i].Revision)
		}
	}
	return low
}

// Count returns how many holds there are, and when the oldest was made, 0 if there is none. The list may be nil.
func (l *Holds) Count() (n int, oldest UnixMillis) {
	if l == nil {
		return 0, 0
	}
	for i := range l.All {
		if made := l.All[i].Made; i == 0 || made < oldest {
			oldest = made
		}
	}
	return len(l.All), oldest
}

// Find returns a hold of the list, which may be nil.
func (l *Holds) Find(id HoldID) (Hold, bool) {
	if l == nil {
		return Hold{}, false
	}
	i, ok := slices.BinarySearchFunc(l.All, Hold{ID: id}, compareHolds)
	if !ok {
		return Hold{}, false
	}
	return l.All[i], true
}

func compareHolds(a, b Hold) int { return cmp.Compare(a.ID, b.ID) }

// PutHold makes a hold, renews one or moves it up. It is written from keyspace.VersionData on.
type PutHold struct {
	// Create says that the hold is made if there is none of this id. Without it an ended hold is refused.
	Create bool
	ID     HoldID
	// Kind and Owner are for a new hold.
	Kind, Owner string
	// Revision is the lowest one to hold from now on. 0 is the compacted revision for a new hold, and
	// leaves an older one where it is.
	Revision keyspace.Revision
	// Now is the proposer's time, Life how long the hold lasts from then on.
	Now  UnixMillis
	Life time.Duration
}

// EndHold ends a hold.
type EndHold struct {
	ID HoldID
	// Expires, if not 0, ends the hold only if it was not renewed since it had that time.
	Expires UnixMillis
}

func (PutHold) kind() opKind { return opPutHold }
func (EndHold) kind() opKind { return opEndHold }

func (o PutHold) append(dst []byte) []byte { return AppendPutHold(dst, o) }
func (o EndHold) append(dst []byte) []byte { return AppendEndHold(dst, o) }

// AppendPutHold appends the command, which requests hold too.
func AppendPutHold(dst []byte, o PutHold) []byte {
	dst = AppendBool(dst, o.Create)
	dst = binary.BigEndian.AppendUint64(dst, uint64(o.ID))
	dst = AppendRevision(AppendString(AppendString(dst, o.Kind), o.Owner), o.Revision)
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(o.Now)), uint64(o.Life/time.Millisecond))
}

// PutHold reads what AppendPutHold wrote.
func (r *Reader) PutHold() PutHold {
	return PutHold{
		Create: r.Bool(), ID: r.holdID(), Kind: r.StringUpTo(MaxHoldKindBytes), Owner: r.StringUpTo(MaxHoldOwnerBytes), Revision: r.Revision(), Now: r.millis(),
		Life: time.Duration(r.Bounded(int(MaxHoldLife/time.Millisecond))) * time.Millisecond,
	}
}

// AppendEndHold appends the command, which requests hold too.
func AppendEndHold(dst []byte, o EndHold) []byte {
	return binary.AppendUvarint(binary.BigEndian.AppendUint64(dst, uint64(o.ID)), uint64(o.Expires))
}

// EndHold reads what AppendEndHold wrote.
func (r *Reader) EndHold() EndHold { return EndHold{ID: r.holdID(), Expires: r.millis()} }

// holdID reads an id, which is not 0.
func (r *Reader) holdID() HoldID {
	id := HoldID(r.Uint64BE())
	if r.OK() && id == 0 {
		r.Failf("a hold without an id")
	}
	return id
}

// applyHold applies a command about holds.
func (s *State) applyHold(index uint64, op Effect) Result {
	if o, ok := op.(EndHold); ok {
		return s.applyEndHold(index, o)
	}
	return s.applyPutHold(index, op.(PutHold)) //nolint:forcetypeassert // there is no third one
}

// applyPutHold makes a hold, renews it or moves it up. A hold that is made names no revision that is compacted
// already, because versions at it may be gone.
func (s *State) applyPutHold(index uint64, o PutHold) Result {
	h, known := s.standing[o.ID]
	switch {
	case o.Revision > s.Ceiling:
		return Result{Err: kverror.New(kverror.FutureRevision, "a hold of revision %d, none above %d is given out", o.Revision, s.Ceiling)}
	case !known && !o.Create:
		return Result{Err: kverror.New(kverror.HoldEnded, "there is no hold %s any more: it has expired or was released", o.ID)}
	case !known && len(s.standing) >= MaxHolds:
		return Result{Err: kverror.New(kverror.TooManyRequests, "there are %d holds, and no more are made: skein hold list shows them, and skein hold release ends one of a dead backup", len(s.standing))}
	case !known && o.Revision != 0 && o.Revision < s.Compacted:
		return Result{Err: &kverror.Error{Kind: kverror.Compacted, CompactRevision: s.Compacted, Detail: fmt.Sprintf("revision %d cannot be held", o.Revision)}}
	case !known:
		h = Hold{ID: o.ID, Kind: o.Kind, Owner: o.Owner, Revision: o.Revision, Made: o.Now}
		if o.Revision == 0 {
			h.Revision = max(s.Compacted, 0)
		}
	case o.Revision != 0 && o.Revision < h.Revision:
		return Result{Err: kverror.New(kverror.BadRequest, "hold %s holds what is at revision %d or above, and cannot go back to %d", o.ID, h.Revision, o.Revision)}
	case o.Revision != 0:
		h.Revision = o.Revision
	}
	h.Expires = o.Now + UnixMillis(o.Life/time.Millisecond) // also where an earlier leader's clock was ahead
	if old, ok := s.standing[o.ID]; !ok || old != h {
		s.standing[o.ID] = h
		s.holdChanged(index, o.ID)
	}
	return Result{Hold: &h}
}

// applyEndHold ends a hold, also one that has ended before.
func (s *State) applyEndHold(index uint64, o EndHold) Result {
	h, known := s.standing[o.ID]
	if !known || o.Expires != 0 && h.Expires > o.Expires {
		return Result{}
	}
	delete(s.standing, o.ID)
	s.holdChanged(index, o.ID)
	return Result{Hold: &h}
}

func (s *State) holdChanged(index uint64, id HoldID) {
	s.dirty.holds[id] = true
	s.holdsChanged = index
	s.changedMap(index)
}

// viewHolds returns the list for a View, the previous one's if nothing has changed since. Before the first
// change there is none.
func (s *State) viewHolds(prev *View) *Holds {
	if s.holdsChanged == 0 {
		return nil
	}
	if prev != nil && prev.Holds != nil && prev.Holds.Changed == s.holdsChanged {
		return prev.Holds
	}
	list := &Holds{All: make([]Hold, 0, len(s.standing)), Changed: s.holdsChanged}
	for _, h := range s.standing {
		list.All = append(list.All, h)
	}
	slices.SortFunc(list.All, compareHolds)
	return list
}

func holdKey(id HoldID) []byte {
	return binary.BigEndian.AppendUint64([]byte{recordHold}, uint64(id))
}

// flushHolds writes the records of holds that changed.
func (s *State) flushHolds(w recordWriter) error {
	for id := range s.dirty.holds {
		h, ok := s.standing[id]
		if err := put(w, holdKey(id), ok, func(b []byte) []byte { return appendHold(b, h) }); err != nil {
			return err
		}
	}
	clear(s.dirty.holds)
	return nil
}

// loadHold takes one record into the state.
func (s *State) loadHold(key, value []byte) error {
	h, err := decodeHold(value)
	if err != nil {
		return err
	}
	if string(key) != string(holdKey(h.ID)) {
		return fmt.Errorf("placement: hold %s under key %x", h.ID, key)
	}
	s.standing[h.ID] = h
	return nil
}

func appendHold(dst []byte, h Hold) []byte {
	dst = AppendString(AppendString(binary.BigEndian.AppendUint64(dst, uint64(h.ID)), h.Kind), h.Owner)
	dst = AppendRevision(dst, h.Revision)
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(h.Made)), uint64(h.Expires))
}

func (r *Reader) hold() Hold {
	return Hold{
		ID: r.holdID(), Kind: r.StringUpTo(MaxHoldKindBytes), Owner: r.StringUpTo(MaxHoldOwnerBytes), Revision: r.Revision(), Made: r.millis(), Expires: r.millis(),
	}
}

func decodeHold(b []byte) (Hold, error) {
	r := NewReader(b)
	r.Version()
	h := r.hold()
	if err := r.Finish(); err != nil {
		return Hold{}, fmt.Errorf("decode placement hold record: %w", err)
	}
	return h, nil
}

// AppendHolds appends a list of holds, for answers and feeds.
func AppendHolds(dst []byte, all []Hold) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(all)))
	for _, h := range all {
		dst = appendHold(dst, h)
	}
	return dst
}

// Holds reads a list of holds.
func (r *Reader) Holds() []Hold {
	var all []Hold
	for range r.CountUpTo(MaxHolds, 13) {
		h := r.hold()
		if !r.OK() {
			return nil
		}
		if n := len(all); n > 0 && all[n-1].ID >= h.ID {
			r.Failf("hold %s behind a later one", h.ID)
			return nil
		}
		all = append(all, h)
	}
	return all
}
