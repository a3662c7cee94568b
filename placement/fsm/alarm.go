package fsm

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// AlarmType is etcd's number of a type of alarm. Clients may raise types that etcd does not name.
type AlarmType int32

// The types that have effects.
const (
	AlarmNoSpace AlarmType = 1
	AlarmCorrupt AlarmType = 2
)

// String returns etcd's name of the type.
func (t AlarmType) String() string {
	switch t {
	case AlarmNoSpace:
		return "NOSPACE"
	case AlarmCorrupt:
		return "CORRUPT"
	}
	return fmt.Sprintf("type %d", int32(t))
}

// AlarmID names an alarm: there is one of each type for each member. As in etcd, nobody checks whether
// there is such a member.
type AlarmID struct {
	Type   AlarmType
	Member keyspace.NodeID
}

// Alarm is raised. A sticky one was raised by a client, and stays until a client ends it. Any other one was
// observed, and ends with its cause.
type Alarm struct {
	AlarmID
	Sticky bool
}

// Alarms is an unchanging list of the alarms.
type Alarms struct {
	// All are ascending by type and member.
	All []Alarm
	// Changed is the index at or above that of the last change.
	Changed uint64
}

// maxAlarms bounds the alarms: two of each node.
const maxAlarms = 2 * maxNodes

// AlarmChange is what happens to an alarm; the numbers are stored.
type AlarmChange byte

const (
	// AlarmActivated says that a client raises it. It is sticky.
	AlarmActivated AlarmChange = iota + 1
	// AlarmDeactivated says that a client ends it. If it has a cause that lasts, it is observed again.
	AlarmDeactivated
	// AlarmObserved says that the member has a cause for it.
	AlarmObserved
	// AlarmPassed says that the member has no cause for it any more.
	AlarmPassed
)

// ChangeAlarm raises an alarm or ends one.
type ChangeAlarm struct {
	Change AlarmChange
	Alarm  AlarmID
}

func (ChangeAlarm) kind() opKind { return opChangeAlarm }

func (o ChangeAlarm) append(dst []byte) []byte { return AppendAlarmChange(dst, o) }

// AppendAlarmChange appends a change of an alarm, which requests hold too.
func AppendAlarmChange(dst []byte, o ChangeAlarm) []byte {
	return appendAlarmID(append(dst, byte(o.Change)), o.Alarm)
}

// AlarmChange reads a change of an alarm. In requests it may be none.
func (r *Reader) AlarmChange() ChangeAlarm {
	o := ChangeAlarm{Change: AlarmChange(r.Byte())}
	if o.Change > AlarmPassed {
		r.Failf("unknown change of an alarm %d", byte(o.Change))
	}
	o.Alarm = r.alarmID()
	return o
}

// applyChangeAlarm raises or ends an alarm. A client's alarm refuses writes, also those that were checked
// before it: so it moves the access index.
func (s *State) applyChangeAlarm(index uint64, o ChangeAlarm) Result {
	a, raised := s.alarms[o.Alarm]
	next := Alarm{AlarmID: o.Alarm, Sticky: a.Sticky || o.Change == AlarmActivated}
	switch o.Change {
	case AlarmActivated, AlarmObserved:
		switch {
		case o.Change == AlarmObserved && !s.nodes[o.Alarm.Member].State.Started():
			return Result{} // it was removed since it said so
		case raised && next == a:
			return Result{Alarm: &a}
		case !raised && len(s.alarms) >= maxAlarms:
			return Result{Err: kverror.New(kverror.TooManyRequests, "there are %d alarms, and no more are raised: end some (etcdctl alarm disarm)", len(s.alarms))}
		}
		s.alarms[o.Alarm] = next
		if next.Sticky && !mutation.Is(mutation.AlarmUnseen) && (o.Alarm.Type == AlarmNoSpace || o.Alarm.Type == AlarmCorrupt) {
			// What was permitted before is refused by it. An alarm of any other type refuses nothing.
			s.access.Access, s.accessChanged, s.dirty.access = index, index, true
		}
	case AlarmDeactivated, AlarmPassed:
		if !raised || o.Change == AlarmPassed && a.Sticky {
			return Result{}
		}
		delete(s.alarms, o.Alarm)
		next = a
	}
	s.alarmChanged(index, o.Alarm)
	return Result{Alarm: &next}
}

func (s *State) alarmChanged(index uint64, id AlarmID) {
	s.dirty.alarms[id] = true
	s.alarmsChanged = index
	s.changedMap(index)
}

// endAlarmsOf ends the alarms of a member that is removed: nobody would say that their cause is gone.
func (s *State) endAlarmsOf(index uint64, member keyspace.NodeID) {
	for id := range s.alarms {
		if id.Member == member && !mutation.Is(mutation.AlarmOfNobody) {
			delete(s.alarms, id)
			s.alarmChanged(index, id)
		}
	}
}

// viewAlarms returns the list for a View, the previous one's if nothing has changed since. Before the first
// change there is none.
func (s *State) viewAlarms(prev *View) *Alarms {
	if s.alarmsChanged == 0 {
		return nil
	}
	if prev != nil && prev.Alarms != nil && prev.Alarms.Changed == s.alarmsChanged {
		return prev.Alarms
	}
	list := &Alarms{All: make([]Alarm, 0, len(s.alarms)), Changed: s.alarmsChanged}
	for _, a := range s.alarms {
		list.All = append(list.All, a)
	}
	slices.SortFunc(list.All, compareAlarms)
	return list
}

func compareAlarms(a, b Alarm) int {
	return cmp.Or(cmp.Compare(a.Type, b.Type), cmp.Compare(a.Member, b.Member))
}

// Find returns an alarm of the list, which may be nil.
func (l *Alarms) Find(id AlarmID) (Alarm, bool) {
	if l == nil {
		return Alarm{}, false
	}
	i, ok := slices.BinarySearchFunc(l.All, Alarm{AlarmID: id}, compareAlarms)
	if !ok {
		return Alarm{}, false
	}
	return l.All[i], true
}

func alarmKey(id AlarmID) []byte {
	key := binary.BigEndian.AppendUint32([]byte{recordAlarm}, uint32(id.Type))
	return binary.BigEndian.AppendUint64(key, uint64(id.Member))
}

// flushAlarms writes the records of alarms that changed.
func (s *State) flushAlarms(w recordWriter) error {
	for id := range s.dirty.alarms {
		a, ok := s.alarms[id]
		if err := put(w, alarmKey(id), ok, func(b []byte) []byte { return appendAlarm(b, a) }); err != nil {
			return err
		}
	}
	clear(s.dirty.alarms)
	return nil
}

// loadAlarm takes one record into the state.
func (s *State) loadAlarm(key, value []byte) error {
	a, err := decodeAlarm(value)
	if err != nil {
		return err
	}
	if string(key) != string(alarmKey(a.AlarmID)) {
		return fmt.Errorf("placement: alarm %d of member %s under key %x", a.Type, a.Member, key)
	}
	s.alarms[a.AlarmID] = a
	return nil
}

func appendAlarmID(dst []byte, id AlarmID) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(dst, uint64(uint32(id.Type))), uint64(id.Member))
}

func (r *Reader) alarmID() AlarmID {
	t := r.Uvarint()
	if t > 1<<32-1 {
		r.Failf("alarm of type %d", t)
	}
	return AlarmID{Type: AlarmType(int32(uint32(t))), Member: keyspace.NodeID(r.Uvarint())}
}

func appendAlarm(dst []byte, a Alarm) []byte {
	return AppendBool(appendAlarmID(dst, a.AlarmID), a.Sticky)
}

func (r *Reader) alarm() Alarm { return Alarm{AlarmID: r.alarmID(), Sticky: r.Bool()} }

func decodeAlarm(b []byte) (Alarm, error) {
	r := NewReader(b)
	r.Version()
	a := r.alarm()
	if err := r.Finish(); err != nil {
		return Alarm{}, fmt.Errorf("decode placement alarm record: %w", err)
	}
	return a, nil
}

// AppendAlarms appends a list of alarms, for answers and feeds.
func AppendAlarms(dst []byte, all []Alarm) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(all)))
	for _, a := range all {
		dst = appendAlarm(dst, a)
	}
	return dst
}

// Alarms reads a list of alarms.
func (r *Reader) Alarms() []Alarm {
	var all []Alarm
	for range r.CountUpTo(maxAlarms, 3) {
		a := r.alarm()
		if !r.OK() {
			return nil
		}
		if n := len(all); n > 0 && compareAlarms(all[n-1], a) >= 0 {
			r.Failf("alarm %d of member %s behind a later one", a.Type, a.Member)
			return nil
		}
		all = append(all, a)
	}
	return all
}
