package placement

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
)

// state is the placement group's state in memory: a pure function of the first
// state and the entries applied since. It belongs to whoever applies; readers get
// a View.
type state struct {
	meta
	tree     *rangeTree
	recent   *rangeTree // the same rows, by (Changed, range id)
	ranges   map[keyspace.RangeID]*Range
	nodes    map[keyspace.NodeID]Node
	settings map[string][]byte
	leases   leases
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
}

func newState() *state {
	return &state{
		tree:       newRangeTree(),
		recent:     newRecentTree(),
		ranges:     map[keyspace.RangeID]*Range{},
		nodes:      map[keyspace.NodeID]Node{},
		settings:   map[string][]byte{},
		operations: map[keyspace.RangeID]Operation{},
		absorbing:  map[keyspace.RangeID]keyspace.RangeID{},
		leases:     newLeases(),
		dirty: dirty{
			ranges:     map[keyspace.RangeID]bool{},
			nodes:      map[keyspace.NodeID]bool{},
			settings:   map[string]bool{},
			operations: map[keyspace.RangeID]bool{},
		},
	}
}

// result is what applying a command came to.
type result struct {
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
}

// apply changes the state by one command of the entry at index. It never fails:
// what the state refuses is a result like any other, the same on every replica.
func (s *state) apply(index uint64, op effect) result {
	switch o := op.(type) {
	case raiseCeiling:
		if o.To > s.Ceiling {
			s.Ceiling = o.To
			s.dirty.meta = true
		}
	case lowerCeiling:
		if o.To < s.Ceiling {
			s.Ceiling = o.To
			s.dirty.meta = true
		}
	case compact:
		return s.applyCompact(o)
	case allocate:
		return s.applyAllocate(o)
	case report:
		return s.applyReport(index, o)
	case putNode:
		return s.applyPutNode(index, o)
	case setNodeState:
		return s.applySetNodeState(index, o)
	case removeNode:
		return s.applyRemoveNode(index, o)
	case markCreated:
		s.applyMarkCreated(index, o)
	case putSetting:
		s.applyPutSetting(o)
	case keepBorder:
		return s.applyKeepBorder(index, o)
	case grantLease:
		return s.leases.grant(index, o)
	case registerLease:
		return s.leases.register(o)
	case revokeLeases:
		return s.leases.revoke(o)
	case removeLeases:
		s.leases.forget(o)
	case beginOperation:
		return s.applyBeginOperation(index, o)
	case endOperation:
		s.applyEndOperation(o)
	case alignMerge:
		return s.applyAlignMerge(o)
	case bindMerge:
		return s.applyBindMerge(o)
	case commitMerge:
		return s.applyCommitMerge(index, o)
	case abortMerge:
		return s.applyAbortMerge(o)
	default:
		panic(fmt.Sprintf("placement: no way to apply a %T at index %d", op, index))
	}
	return result{}
}

// applyCompact is etcd's rule: at or below the compacted revision is Compacted,
// above what exists is FutureRevision. The latter was checked against the counter
// before the command was proposed; the ceiling is all that the state knows.
func (s *state) applyCompact(o compact) result {
	switch {
	case o.At <= s.Compacted:
		return result{Err: &kverror.Error{Kind: kverror.Compacted, CompactRevision: max(s.Compacted, 0)}}
	case o.At > s.Ceiling:
		return result{Err: kverror.FutureRevision}
	}
	s.Compacted = o.At
	s.dirty.meta = true
	return result{}
}

func (s *state) applyAllocate(o allocate) result {
	// Range ids share their space with system groups, whose ids have the top bit.
	if uint64(s.NextRange) > math.MaxInt64-o.Count {
		return result{Err: kverror.New(kverror.Internal, "range ids are used up at %s", s.NextRange)}
	}
	first := s.NextRange
	s.NextRange += keyspace.RangeID(o.Count)
	s.dirty.meta = true
	return result{First: first}
}

func (s *state) applyReport(index uint64, o report) result {
	f := fit(s.tree, s.ranges, s.NextRange, o.Descriptors)
	for _, c := range f.Apply {
		s.replace(index, c)
	}
	return result{Held: f.Held}
}

// replace puts a component's descriptors in the place of its rows.
func (s *state) replace(index uint64, c component) {
	for _, g := range c.Old {
		s.tree.Delete(g)
		s.recent.Delete(g)
		delete(s.ranges, g.Descriptor.Range)
		s.dirty.ranges[g.Descriptor.Range] = true
	}
	for _, d := range c.New {
		// A child inherits its parent's preferred leader: the row in whose span it was. Whoever
		// begins where a range began that was to begin there keeps that border.
		parent := c.Old[0]
		kept := false
		for _, g := range c.Old {
			if g.Descriptor.Span.Contains(d.Span.Start) {
				parent = g
			}
			kept = kept || g.Kept && bytes.Equal(g.Descriptor.Span.Start, d.Span.Start)
		}
		s.insert(&Range{Descriptor: d, Preferred: preferredFor(&d, parent.Preferred), Created: true, Kept: kept, Changed: index})
	}
	s.changedMap(index)
}

// preferredFor returns want where it has a replica, else the first replica's node.
func preferredFor(d *keyspace.Descriptor, want keyspace.NodeID) keyspace.NodeID {
	if _, ok := d.ReplicaOn(want); ok {
		return want
	}
	return d.Replicas[0].Node
}

// insert puts a row into all indexes, in the place of the one with its start key
// and id if there is one.
func (s *state) insert(g *Range) {
	if old, ok := s.tree.ReplaceOrInsert(g); ok {
		s.recent.Delete(old)
	}
	s.recent.ReplaceOrInsert(g)
	s.ranges[g.Descriptor.Range] = g
	s.dirty.ranges[g.Descriptor.Range] = true
}

// applyKeepBorder has a range begin for good where it does. Busy says that none begins
// there yet, as far as the map knows.
func (s *state) applyKeepBorder(index uint64, o keepBorder) result {
	if len(o.Key) == 0 {
		return result{Err: kverror.New(kverror.BadRequest, "no range ends before the first key")}
	}
	old := rowOf(s.tree, o.Key)
	switch {
	case !bytes.Equal(old.Descriptor.Span.Start, o.Key):
		return result{Err: kverror.New(kverror.Busy, "no range begins at %q", o.Key)}
	case old.Kept:
		return result{}
	}
	g := *old
	g.Kept, g.Changed = true, index
	s.insert(&g)
	s.changedMap(index)
	return result{}
}

func (s *state) changedMap(index uint64) {
	s.Changed = index
	s.dirty.meta = true
}

func (s *state) applyMarkCreated(index uint64, o markCreated) {
	for _, id := range o.Ranges {
		old, ok := s.ranges[id]
		if !ok || old.Created {
			continue
		}
		g := *old
		g.Created, g.Changed = true, index
		s.insert(&g)
		s.changedMap(index)
	}
}

func (s *state) applyPutSetting(o putSetting) {
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

// recordWriter is what the records are written to.
type recordWriter interface {
	Set(key, value []byte) error
	Delete(key []byte) error
}

// flush writes the records that changed since the last flush.
func (s *state) flush(w recordWriter) error {
	if s.dirty.meta {
		if err := w.Set([]byte{recordMeta}, appendMeta(nil, &s.meta)); err != nil {
			return err
		}
		s.dirty.meta = false
	}
	for id := range s.dirty.ranges {
		g, ok := s.ranges[id]
		if err := put(w, rangeKey(id), ok, func(b []byte) []byte { return appendRange(b, g) }); err != nil {
			return err
		}
	}
	for id := range s.dirty.nodes {
		n, ok := s.nodes[id]
		if err := put(w, nodeKey(id), ok, func(b []byte) []byte { return appendNode(b, &n) }); err != nil {
			return err
		}
	}
	for name := range s.dirty.settings {
		v, ok := s.settings[name]
		if err := put(w, settingKey(name), ok, func(b []byte) []byte { return appendBytes(b, v) }); err != nil {
			return err
		}
	}
	for id := range s.dirty.operations {
		o, ok := s.operations[id]
		if err := put(w, operationKey(id), ok, func(b []byte) []byte { return appendOperation(b, &o) }); err != nil {
			return err
		}
	}
	clear(s.dirty.ranges)
	clear(s.dirty.nodes)
	clear(s.dirty.settings)
	clear(s.dirty.operations)
	return s.leases.flush(w)
}

func put(w recordWriter, key []byte, exists bool, encode func([]byte) []byte) error {
	if !exists {
		return w.Delete(key)
	}
	return w.Set(key, encode([]byte{formatVersion}))
}

// load takes one record, read from the engine, into the state.
func (s *state) load(key, value []byte) error {
	if len(key) == 0 {
		return fmt.Errorf("placement: record without a name")
	}
	switch key[0] {
	case recordMeta:
		m, err := decodeMeta(value)
		s.meta = m
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

// check returns an error where the state breaks an invariant.
func (s *state) check() error {
	if s.Compacted > s.Ceiling {
		return fmt.Errorf("placement: compacted revision %d above the ceiling %d", s.Compacted, s.Ceiling)
	}
	for id := range s.ranges {
		if id >= s.NextRange {
			return fmt.Errorf("placement: range %s exists, and the next id is %s", id, s.NextRange)
		}
	}
	for _, o := range s.operations {
		if o.Replica >= s.NextReplica {
			return fmt.Errorf("placement: operation %d has replica %d, and the next id is %d", o.ID, o.Replica, s.NextReplica)
		}
	}
	return checkMap(s.tree, s.ranges)
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

// view returns a View of the state. prev, where not nil, is an older View, whose
// parts are shared where nothing has changed since.
func (s *state) view(index, term uint64, prev *View) *View {
	v := &View{meta: s.meta, Index: index, Term: term, leasesVersion: s.leases.version, operationsChanged: s.operationsChanged}
	switch {
	case prev != nil && prev.Version == s.Changed:
		v.Map = prev.Map
	default:
		v.Map = Map{Version: s.Changed, tree: s.tree.Clone(), recent: s.recent.Clone(), nodes: maps.Clone(s.nodes), own: s.own()}
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

// Settings returns all settings, by name.
func (v *View) Settings() []Setting {
	out := make([]Setting, 0, len(v.settings))
	for name, value := range v.settings {
		out = append(out, Setting{Name: name, Value: value})
	}
	slices.SortFunc(out, func(a, b Setting) int { return strings.Compare(a.Name, b.Name) })
	return out
}
