package fsm

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// State is the placement group's state in memory: a pure function of the first
// state and the entries applied since. It belongs to whoever applies; readers get
// a View.
type State struct {
	meta
	rows
	nodes    map[keyspace.NodeID]Node
	settings map[string][]byte
	leases   leases
	// access has the users and roles, as of the entry at accessChanged.
	access        *rights.State
	accessChanged uint64
	accessKey     []byte
	accessLog     accessLog
	// alarms are those raised. They have changed at alarmsChanged, or before where that is not known.
	alarms        map[AlarmID]Alarm
	alarmsChanged uint64
	// standing are the holds in force. They have changed at holdsChanged, or before where that is not known.
	standing     map[HoldID]Hold
	holdsChanged uint64
	// loading is the load of the cluster, nil if there was none. It is never changed: another takes its place.
	loading *Loading
	// operations are those under way; operationsChanged counts their changes since the
	// state was loaded.
	operations        map[keyspace.RangeID]Operation
	operationsChanged uint64
	// absorbing has, for ranges that merges are to end, those that absorb them.
	absorbing map[keyspace.RangeID]keyspace.RangeID
	// members are the group's own, as of the entry at membersIndex.
	members      []keyspace.Replica
	membersIndex uint64

	// dirty is what changed since the records were last written.
	dirty dirty
}

// dirty names the records that must be written.
type dirty struct {
	meta     bool
	ranges   map[keyspace.RangeID]bool
	nodes    map[keyspace.NodeID]bool
	settings map[string]bool
	// operations are by range.
	operations map[keyspace.RangeID]bool
	users      map[string]bool
	roles      map[string]bool
	// access is users, roles, or what is stored of them together.
	access bool
	alarms map[AlarmID]bool
	holds  map[HoldID]bool
	// loading is the load.
	loading bool
}

// NewState returns the state of a cluster that does not exist yet.
func NewState() *State {
	return &State{
		rows:       newRows(),
		nodes:      map[keyspace.NodeID]Node{},
		settings:   map[string][]byte{},
		operations: map[keyspace.RangeID]Operation{},
		absorbing:  map[keyspace.RangeID]keyspace.RangeID{},
		leases:     newLeases(),
		access:     rights.New(),
		alarms:     map[AlarmID]Alarm{},
		standing:   map[HoldID]Hold{},
		dirty: dirty{
			ranges:     map[keyspace.RangeID]bool{},
			nodes:      map[keyspace.NodeID]bool{},
			settings:   map[string]bool{},
			operations: map[keyspace.RangeID]bool{},
			users:      map[string]bool{},
			roles:      map[string]bool{},
			alarms:     map[AlarmID]bool{},
			holds:      map[HoldID]bool{},
		},
	}
}

// Result is what applying a command came to.
type Result struct {
	// Err is a kverror where the state refused the command; it changed nothing then.
	Err error
	// First is the first of the allocated range ids.
	First keyspace.RangeID
	// Held are the reported descriptors that did not fit yet.
	Held []keyspace.Descriptor
	// Lease is the record that a lease's command has found or left.
	Lease *Lease
	// Operation is the one that was begun.
	Operation Operation
	// Access is the access index that every node has to have before the change of rights is
	// acknowledged, 0 for none. An Enable has one though rights were checked before: the answer to
	// the one that began it may be lost.
	Access keyspace.AccessIndex
	// Alarm is the one that a change of an alarm has raised, found or ended.
	Alarm *Alarm
	// Hold is the one that a command about holds has made, renewed or ended.
	Hold *Hold
	// Loading is the load that a step has left.
	Loading *Loading
}

// Apply changes the state by one command of the entry at index. It never fails:
// what the state refuses is a result like any other, the same on every replica.
func (s *State) Apply(index uint64, op Effect) Result {
	if s.loading.Active() && restsWhileLoading(op) {
		return Result{Err: s.loading.Err()}
	}
	switch o := op.(type) {
	case RaiseCeiling:
		s.setCeiling(max(s.Ceiling, o.To))
	case LowerCeiling:
		s.setCeiling(min(s.Ceiling, o.To))
	case Compact:
		return s.applyCompact(o)
	case AllocateRanges:
		return s.applyAllocate(o)
	case Report:
		return s.applyReport(index, o)
	case PutNode:
		return s.applyPutNode(index, o)
	case SetNodeState:
		return s.applySetNodeState(index, o)
	case RemoveNode:
		return s.removeNode(index, o)
	case MarkCreated:
		s.applyMarkCreated(index, o)
	case PutSetting:
		s.applyPutSetting(o)
	case KeepBorder:
		return s.applyKeepBorder(index, o)
	case GrantLease, GrantLeaseIn, RegisterLease, RegisterLeases, RevokeLeases, RevokeChecked, KeepLease, RemoveLeases:
		return s.leases.apply(index, op)
	case BeginOperation:
		return s.applyBeginOperation(index, o)
	case EndOperation:
		s.applyEndOperation(o)
	case AlignMerge:
		return s.applyAlignMerge(o)
	case BindMerge:
		return s.applyBindMerge(o)
	case CommitMerge:
		return s.applyCommitMerge(index, o)
	case AbortMerge:
		return s.applyAbortMerge(o)
	case RaiseVersion:
		return s.applyRaiseVersion(index, o)
	case ChangeAccess:
		return s.applyChangeAccess(index, o)
	case ChangeAlarm:
		return s.applyChangeAlarm(index, o)
	case PutHold, EndHold:
		return s.applyHold(index, o)
	case ChangeLoad:
		return s.applyChangeLoad(index, o)
	case Guarded:
		if at := keyspace.AccessIndex(s.access.Meta.Access); o.Permit.Ended(at) {
			return Result{Err: kverror.New(kverror.AccessChanged, "rights were taken away at index %d", at)}
		}
		return s.Apply(index, o.Op)
	default:
		panic(fmt.Sprintf("placement: no way to apply a %T at index %d", op, index))
	}
	return Result{}
}

// removeNode removes a node, and ends its alarms.
func (s *State) removeNode(index uint64, o RemoveNode) Result {
	r := s.applyRemoveNode(index, o)
	if r.Err == nil {
		s.endAlarmsOf(index, o.Node)
	}
	return r
}

func (s *State) setCeiling(to keyspace.Revision) {
	if to != s.Ceiling {
		s.Ceiling, s.dirty.meta = to, true
	}
}

// applyCompact is etcd's rule: at or below the compacted revision is Compacted,
// above what exists is FutureRevision. The latter was checked against the last revision
// before the command was proposed; the ceiling is all that the state knows.
func (s *State) applyCompact(o Compact) Result {
	switch {
	case o.At <= s.Compacted:
		return Result{Err: &kverror.Error{Kind: kverror.Compacted, CompactRevision: max(s.Compacted, 0)}}
	case o.At > s.Ceiling:
		return Result{Err: kverror.FutureRevision}
	}
	s.Compacted = o.At
	s.dirty.meta = true
	return Result{}
}

func (s *State) applyAllocate(o AllocateRanges) Result {
	// Range ids share their space with system groups, whose ids have the top bit.
	if uint64(s.NextRange) > math.MaxInt64-o.Count {
		return Result{Err: kverror.New(kverror.Internal, "range ids are used up at %s", s.NextRange)}
	}
	first := s.NextRange
	s.NextRange += keyspace.RangeID(o.Count)
	s.dirty.meta = true
	return Result{First: first}
}

func (s *State) applyReport(index uint64, o Report) Result {
	f := fit(s.rows, s.NextRange, o.Descriptors)
	for _, c := range f.Apply {
		s.replace(index, c)
	}
	return Result{Held: f.Held}
}

// applyKeepBorder has a range begin for good where it does. Busy says that none begins
// there yet, as far as the map knows.
func (s *State) applyKeepBorder(index uint64, o KeepBorder) Result {
	if len(o.Key) == 0 {
		return Result{Err: kverror.New(kverror.BadRequest, "no range ends before the first key")}
	}
	old := rowOf(s.tree, o.Key)
	switch {
	case !bytes.Equal(old.Descriptor.Span.Start, o.Key):
		return Result{Err: kverror.New(kverror.Busy, "no range begins at %q", o.Key)}
	case old.Kept:
		return Result{}
	}
	g := *old
	g.Kept, g.Changed = true, index
	s.insert(&g)
	s.changedMap(index)
	return Result{}
}

func (s *State) applyMarkCreated(index uint64, o MarkCreated) {
	for _, id := range o.Ranges {
		old := s.row(id)
		if old == nil || old.Created {
			continue
		}
		g := *old
		g.Created, g.Changed = true, index
		s.insert(&g)
		s.changedMap(index)
	}
}

func (s *State) applyPutSetting(o PutSetting) {
	if bytes.Equal(s.settings[o.Name], o.Value) {
		return
	}
	if len(o.Value) == 0 {
		delete(s.settings, o.Name)
	} else {
		s.settings[o.Name] = o.Value
	}
	s.Settings++
	s.dirty.settings[o.Name] = true
	s.dirty.meta = true
}

// Flush writes the records that changed since the last flush.
func (s *State) Flush(w recordWriter) error {
	if s.dirty.meta {
		if err := w.Set([]byte{recordMeta}, appendMeta(nil, &s.meta)); err != nil {
			return err
		}
		s.dirty.meta = false
	}
	for id := range s.dirty.ranges {
		g := s.row(id)
		if err := put(w, rangeKey(id), g != nil, func(b []byte) []byte { return AppendRange(b, g) }); err != nil {
			return err
		}
	}
	for id := range s.dirty.nodes {
		n, ok := s.nodes[id]
		if err := put(w, nodeKey(id), ok, func(b []byte) []byte { return AppendNode(b, &n) }); err != nil {
			return err
		}
	}
	for name := range s.dirty.settings {
		v, ok := s.settings[name]
		if err := put(w, settingKey(name), ok, func(b []byte) []byte { return AppendBytes(b, v) }); err != nil {
			return err
		}
	}
	for id := range s.dirty.operations {
		o, ok := s.operations[id]
		if err := put(w, operationKey(id), ok, func(b []byte) []byte { return AppendOperation(b, &o) }); err != nil {
			return err
		}
	}
	clear(s.dirty.ranges)
	clear(s.dirty.nodes)
	clear(s.dirty.settings)
	clear(s.dirty.operations)
	if err := s.flushAccess(w); err != nil {
		return err
	}
	if err := s.flushAlarms(w); err != nil {
		return err
	}
	if err := s.flushHolds(w); err != nil {
		return err
	}
	if err := s.flushLoading(w); err != nil {
		return err
	}
	return s.leases.flush(w)
}

// Load takes one record, read from the engine, into the state.
func (s *State) Load(key, value []byte) error {
	if len(key) == 0 {
		return fmt.Errorf("placement: record without a name")
	}
	switch key[0] {
	case recordMeta:
		m, err := decodeMeta(value)
		s.meta = m
		s.alarmsChanged, s.holdsChanged = m.Changed, m.Changed // when they changed is not stored
		return err
	case recordNode:
		n, err := decodeNode(value)
		if err == nil && !bytes.Equal(key, nodeKey(n.ID)) {
			err = fmt.Errorf("placement: node %s under key %x", n.ID, key)
		}
		s.nodes[n.ID] = n
		return err
	case recordRange:
		g, err := decodeRange(value)
		if err == nil && !bytes.Equal(key, rangeKey(g.Descriptor.Range)) {
			err = fmt.Errorf("placement: range %s under key %x", g.Descriptor.Range, key)
		}
		if err == nil {
			s.insert(&g)
			clear(s.dirty.ranges)
		}
		return err
	case recordSetting:
		v, err := decodeSetting(value)
		s.settings[string(key[1:])] = v
		return err
	case recordLease:
		return s.leases.load(key, value)
	case recordUser, recordRole, recordAccess:
		return s.loadAccess(key, value)
	case recordAlarm:
		return s.loadAlarm(key, value)
	case recordHold:
		return s.loadHold(key, value)
	case recordLoading:
		return s.loadLoading(value)
	case recordOperation:
		o, err := decodeOperation(value)
		if err == nil && !bytes.Equal(key, operationKey(o.Range)) {
			err = fmt.Errorf("placement: operation of range %s under key %x", o.Range, key)
		}
		if err == nil {
			s.setOperation(o)
			clear(s.dirty.operations)
		}
		return err
	}
	return fmt.Errorf("placement: unknown record %x", key)
}

// Check returns an error where the state breaks an invariant.
func (s *State) Check() error {
	if s.Compacted > s.Ceiling {
		return fmt.Errorf("placement: compacted revision %d above the ceiling %d", s.Compacted, s.Ceiling)
	}
	if last, ok := s.ids.Max(); ok && last.Descriptor.Range >= s.NextRange {
		return fmt.Errorf("placement: range %s exists, and the next id is %s", last.Descriptor.Range, s.NextRange)
	}
	for _, o := range s.operations {
		if o.Replica >= s.NextReplica {
			return fmt.Errorf("placement: operation %d has replica %d, and the next id is %d", o.ID, o.Replica, s.NextReplica)
		}
	}
	if err := s.access.Check(); err != nil {
		return err
	}
	return s.check()
}

// View is an unchanging copy of the state at one applied index. It may be read by
// many goroutines.
type View struct {
	meta
	// Index and Term are those of the last entry in it.
	Index, Term uint64
	Map
	settings      map[string][]byte
	leases        *leaseTree
	leasesVersion uint64
	operations    []Operation
	// operationsChanged is the state's.
	operationsChanged uint64
}

// View returns a View of the state. prev is an older View or nil. The new View shares its
// unchanged parts.
func (s *State) View(index, term uint64, prev *View) *View {
	v := &View{meta: s.meta, Index: index, Term: term, leasesVersion: s.leases.version, operationsChanged: s.operationsChanged}
	switch {
	case prev != nil && prev.Version == s.Changed:
		v.Map = prev.Map
	default:
		v.Map = Map{Version: s.Changed, ClusterVersion: s.ClusterVersion, Access: s.viewAccess(prev), Alarms: s.viewAlarms(prev), Holds: s.viewHolds(prev), Loading: s.loading, rows: s.clone(), nodes: maps.Clone(s.nodes), own: s.own()}
	}
	if prev != nil && prev.meta.Settings == s.Settings {
		v.settings = prev.settings
	} else {
		v.settings = maps.Clone(s.settings)
	}
	if prev != nil && prev.leasesVersion == s.leases.version {
		v.leases = prev.leases
	} else {
		v.leases = s.leases.tree.Clone()
	}
	if prev != nil && prev.operationsChanged == s.operationsChanged {
		v.operations = prev.operations
	} else {
		v.operations = slices.SortedFunc(maps.Values(s.operations), func(a, b Operation) int { return cmp.Compare(a.ID, b.ID) })
	}
	return v
}

// Operations returns the operations under way, oldest first. The list must not be
// changed.
func (v *View) Operations() []Operation { return v.operations }

// OperationsVersion counts the changes of operations in this process.
func (v *View) OperationsVersion() uint64 { return v.operationsChanged }

// WithOperations returns a copy of the View that has these operations under way, to try out
// what would be decided beside them.
func (v *View) WithOperations(ops []Operation) *View {
	next := *v
	next.operations = ops
	next.operationsChanged++
	return &next
}

// SettingsRevision counts the changes of settings.
func (v *View) SettingsRevision() keyspace.Revision { return v.meta.Settings }

// SettingValue returns the value of a setting, nil where it is not set.
func (v *View) SettingValue(name string) []byte { return v.settings[name] }

// Settings returns all settings, by name.
func (v *View) Settings() []Setting {
	out := make([]Setting, 0, len(v.settings))
	for name, value := range v.settings {
		out = append(out, Setting{Name: name, Value: value})
	}
	slices.SortFunc(out, func(a, b Setting) int { return strings.Compare(a.Name, b.Name) })
	return out
}
