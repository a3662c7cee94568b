package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// givenUpAfter is how long nodes must be silent before what needs them is refused at once. Until then it is tried, as they
// may just be restarted.
const givenUpAfter = 3 * time.Second

// Silent is a node that is not heard.
type Silent struct {
	ID   keyspace.NodeID
	Name string
	// Since is when it was heard last; 0 if it was not since the start of this node.
	Since fsm.UnixMillis
}

// Outage is what has no quorum, as one node hears the others.
type Outage struct {
	// Ranges counts the ranges, by this node's copy of the range map. Placement says that the placement group has none.
	Ranges    int
	Placement bool
	// Silent are the nodes that these wait for, and Closed those whose voters of these are in quarantine. Both are in the order of
	// their names.
	Silent, Closed []Silent
	// Unsure says that a node with replicas in quarantine lived and did not answer when it was last asked: there may be more without a
	// quorum.
	Unsure bool
}

// Any says whether anything has no quorum.
func (o *Outage) Any() bool { return o.Ranges > 0 || o.Placement }

// What names what has no quorum, in the words of a log.
func (o *Outage) What() string {
	ranges := fmt.Sprintf("%d ranges", o.Ranges)
	if o.Ranges == 1 {
		ranges = "one range"
	}
	switch {
	case !o.Placement:
		return ranges
	case o.Ranges == 0:
		return fsm.GroupName(fsm.OwnGroup)
	}
	return ranges + " and " + fsm.GroupName(fsm.OwnGroup)
}

// Who names the silent nodes, and says since when they are silent. It names those with replicas in quarantine too.
func (o *Outage) Who() string {
	text := silentText(o.Silent)
	if len(o.Closed) == 0 {
		return text
	}
	var names []string
	for _, s := range o.Closed {
		names = append(names, cmp.Or(s.Name, s.ID.String()))
	}
	if text != "" {
		text += "; "
	}
	return text + "replicas in quarantine on " + strings.Join(names, ", ")
}

// Next says what to do.
func (o *Outage) Next() string {
	if len(o.Closed) == 0 {
		return "start these nodes again; if they are lost for good, see docs/RECOVERY.md"
	}
	return "start the silent nodes again, if there are any; skein doctor says what waits for replicas in quarantine, and what to do"
}

func silentText(all []Silent) string {
	var heard, unheard []string
	var last fsm.UnixMillis
	for _, s := range all {
		name := cmp.Or(s.Name, s.ID.String())
		if s.Since == 0 {
			unheard = append(unheard, name)
			continue
		}
		heard, last = append(heard, name), max(last, s.Since)
	}
	var parts []string
	if len(heard) > 0 {
		parts = append(parts, strings.Join(heard, ", ")+" silent since "+last.Time().UTC().Format(time.RFC3339))
	}
	if len(unheard) > 0 {
		parts = append(parts, strings.Join(unheard, ", ")+" not heard since this node has started")
	}
	return strings.Join(parts, ", ")
}

// silent returns the started nodes that this one does not hear, by id.
func (a *Admin) silent(m *fsm.Map) map[keyspace.NodeID]Silent {
	var all map[keyspace.NodeID]Silent
	for id, n := range m.NodeRows() {
		if !n.State.Started() || a.o.Peers.Alive(id) {
			continue
		}
		s := Silent{ID: id, Name: n.Name}
		if d := a.o.Peers.SilentFor(id); d > 0 {
			s.Since = fsm.UnixMillis(a.o.Clock.Wall().Add(-d).UnixMilli())
		}
		if all == nil {
			all = map[keyspace.NodeID]Silent{}
		}
		all[id] = s
	}
	return all
}

// closedReplica names a replica in quarantine.
type closedReplica struct {
	of      keyspace.RangeID
	replica keyspace.ReplicaID
}

// closed returns the replicas in quarantine without which, and without the silent nodes, one of the groups has no quorum. This node
// knows its own. The others are asked that have the alarm CORRUPT in this node's copy of the map, but only if it could cost a quorum:
// mostly that is nobody. unsure says that one of them has not answered.
func (a *Admin) closed(ctx context.Context, m *fsm.Map, silent map[keyspace.NodeID]Silent, groups iter.Seq[*keyspace.Descriptor]) (all map[closedReplica]bool, unsure bool) {
	all = map[closedReplica]bool{}
	suspects := map[keyspace.NodeID]bool{}
	if r, err := a.report(ctx, a.o.Self); err == nil && len(r.Quarantined) > 0 {
		suspects[a.o.Self] = true // also while nobody has recorded it
	}
	if m.Alarms != nil {
		for _, alarm := range m.Alarms.All {
			if alarm.Type == fsm.AlarmCorrupt && a.o.Peers.Alive(alarm.Member) {
				suspects[alarm.Member] = true
			}
		}
	}
	if len(suspects) == 0 {
		return all, false
	}
	asked := map[keyspace.NodeID]fsm.Node{}
	for d := range groups {
		if d.HasQuorum(func(r keyspace.Replica) bool { _, is := silent[r.Node]; return !is && !suspects[r.Node] }) {
			continue
		}
		for _, r := range d.Replicas {
			if n, ok := m.Node(r.Node); ok && suspects[r.Node] {
				asked[r.Node] = n
			}
		}
	}
	reports := a.livingReports(ctx, slices.Collect(maps.Values(asked)))
	for _, r := range reports {
		for _, q := range r.Quarantined {
			all[closedReplica{q.Range, q.Replica}] = true
		}
	}
	return all, len(reports) < len(asked)
}

// askClosedEvery is how often whoever looks for outages asks which replicas are in quarantine. All nodes look, and ask the same few.
const askClosedEvery = 10 * time.Second

// Seen is what one who looks for outages keeps from one look to the next. Its zero value has seen nothing. It is for one goroutine.
type Seen struct {
	// closed are replicas in quarantine. None of them ever votes again: one is forgotten when its range has it no more, and not when the
	// alarm of its node is gone, which a client may end.
	closed map[closedReplica]bool
	unsure bool
	// next is when it is asked again.
	next clock.Time
}

// learn asks for what is in quarantine if it is time.
func (s *Seen) learn(ctx context.Context, a *Admin, m *fsm.Map, silent map[keyspace.NodeID]Silent) {
	if now := a.o.Clock.Now(); now >= s.next {
		s.next = now.Add(askClosedEvery)
		var all map[closedReplica]bool
		all, s.unsure = a.closed(ctx, m, silent, func(yield func(*keyspace.Descriptor) bool) {
			m.All(func(g *fsm.Range) bool { return yield(&g.Descriptor) })
		})
		maps.Copy(all, s.closed)
		s.closed = all
	}
	maps.DeleteFunc(s.closed, func(q closedReplica, _ bool) bool {
		d, _ := m.Of(q.of)
		return !slices.ContainsFunc(d.Replicas, func(r keyspace.Replica) bool { return r.ID == q.replica })
	})
}

// lack is what cannot vote as far as this node knows.
type lack struct {
	m      *fsm.Map
	silent map[keyspace.NodeID]Silent
	closed map[closedReplica]bool
}

// of returns the nodes of the voters that a group lacks, none if it has a quorum: those that are silent, and those that have the
// replica in quarantine. Both are in the order of their names.
func (l *lack) of(d *keyspace.Descriptor) (silent, closed []Silent) {
	shut := func(r keyspace.Replica) bool { return l.closed[closedReplica{d.Range, r.ID}] }
	if d.HasQuorum(func(r keyspace.Replica) bool { _, is := l.silent[r.Node]; return !is && !shut(r) }) {
		return nil, nil
	}
	for _, r := range d.Replicas {
		s, is := l.silent[r.Node]
		switch {
		case r.Role == keyspace.RoleLearner:
		case is:
			silent = append(silent, s)
		case shut(r):
			n, _ := l.m.Node(r.Node)
			closed = append(closed, Silent{ID: r.Node, Name: n.Name})
		}
	}
	return sorted(silent), sorted(closed)
}

func sorted(all []Silent) []Silent {
	slices.SortFunc(all, func(a, b Silent) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return all
}

// Outage says what has no quorum by what this node hears. seen is what it has seen so far: replicas in quarantine are asked for once in
// askClosedEvery. It looks at ranges only while a node is silent, or has some.
func (a *Admin) Outage(ctx context.Context, seen *Seen) (o Outage) {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return o
	}
	l := lack{m: m, silent: a.silent(m)}
	seen.learn(ctx, a, m, l.silent)
	l.closed, o.Unsure = seen.closed, seen.unsure
	if len(l.silent)+len(l.closed) == 0 {
		return o
	}
	silent, closed := map[keyspace.NodeID]Silent{}, map[keyspace.NodeID]Silent{}
	lacks := func(d *keyspace.Descriptor) bool {
		who, shut := l.of(d)
		for _, s := range who {
			silent[s.ID] = s
		}
		for _, s := range shut {
			closed[s.ID] = s
		}
		return len(who)+len(shut) > 0
	}
	if own, ok := m.Of(fsm.OwnGroup); ok {
		o.Placement = lacks(&own)
	}
	m.All(func(g *fsm.Range) bool {
		if lacks(&g.Descriptor) {
			o.Ranges++
		}
		return true
	})
	o.Silent, o.Closed = sorted(slices.Collect(maps.Values(silent))), sorted(slices.Collect(maps.Values(closed)))
	return o
}

// noQuorum returns a refusal if a group, a range or fsm.OwnGroup, has no quorum by what this node hears, because of nodes
// that have been silent for some time at least, and of replicas in quarantine.
func (a *Admin) noQuorum(ctx context.Context, id keyspace.RangeID, silentFor time.Duration) *adminapi.Refusal {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return nil
	}
	d, ok := m.Of(id)
	if !ok {
		return nil
	}
	l := lack{m: m, silent: a.silent(m)}
	for n := range l.silent {
		if a.o.Peers.SilentFor(n) < silentFor {
			delete(l.silent, n)
		}
	}
	if id != fsm.OwnGroup { // nodes do not report replicas of that one
		l.closed, _ = a.closed(ctx, m, l.silent, slices.Values([]*keyspace.Descriptor{&d}))
	}
	silent, closed := l.of(&d)
	if len(silent)+len(closed) == 0 {
		return nil
	}
	o := Outage{Silent: silent, Closed: closed}
	next := "start them again; if they are lost for good, see docs/RECOVERY.md. skein status shows what else waits for them"
	if len(closed) > 0 {
		next = o.Next()
	}
	return &adminapi.Refusal{
		Reason:   fmt.Sprintf("no quorum for %s: %s", fsm.GroupName(id), o.Who()),
		NextStep: next,
		Later:    len(silent) > 0, // what is in quarantine stays there
	}
}

// needs refuses at once what needs the quorum of a group that has none. After a nil error the command may still find out.
func (a *Admin) needs(ctx context.Context, ids ...keyspace.RangeID) error {
	for _, id := range ids {
		if r := a.noQuorum(ctx, id, givenUpAfter); r != nil {
			return r
		}
	}
	return nil
}

// explain puts the missing quorum in the place of an error that it may have caused. ids are the groups that the command
// needs; fsm.OwnGroup goes without saying. Once ctx has ended, replicas in quarantine on other nodes are not known.
func (a *Admin) explain(ctx context.Context, err *error, ids ...keyspace.RangeID) {
	if *err == nil || errors.As(*err, new(*adminapi.Refusal)) || errors.As(*err, new(*adminapi.Explained)) {
		return
	}
	switch kverror.Of(*err).Kind {
	case kverror.NoLeader, kverror.NotLeader, kverror.LeaderChanged, kverror.Timeout, kverror.TimeoutLeaderFail, kverror.TimeoutConnectionLost,
		kverror.DeadlineExceeded, kverror.Canceled, kverror.Unreachable, kverror.Dropped, kverror.Busy, kverror.Internal:
	default:
		return
	}
	for _, id := range append(slices.Clone(ids), fsm.OwnGroup) {
		if r := a.noQuorum(ctx, id, 0); r != nil {
			*err = &adminapi.Explained{
				Reason: r.Reason, NextStep: r.NextStep + "; look then whether it has happened all the same, before you repeat the command", Cause: *err,
			}
			return
		}
	}
}

// rangeOf returns the range that has a key by this node's copy of the range map, fsm.OwnGroup without a map.
func (a *Admin) rangeOf(key []byte) keyspace.RangeID {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return fsm.OwnGroup
	}
	return m.Lookup(key).Descriptor.Range
}
