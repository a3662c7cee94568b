package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/adminapi"
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
	// Unsure says that a node with replicas in quarantine lives and has not answered: there may be more without a quorum.
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

// closed returns the replicas in quarantine, by the word of their nodes. Only those that have the alarm CORRUPT in this node's copy of
// the map are asked, which mostly is nobody. unsure says that one of them lives and has not answered.
func (a *Admin) closed(ctx context.Context, m *fsm.Map) (all map[closedReplica]bool, unsure bool) {
	var nodes []fsm.Node
	if m.Alarms != nil {
		for _, alarm := range m.Alarms.All {
			if n, ok := m.Node(alarm.Member); ok && alarm.Type == fsm.AlarmCorrupt && a.o.Peers.Alive(n.ID) {
				nodes = append(nodes, n)
			}
		}
	}
	if len(nodes) == 0 {
		return nil, false
	}
	reports := a.livingReports(ctx, nodes)
	all = map[closedReplica]bool{}
	for _, r := range reports {
		for _, q := range r.Quarantined {
			all[closedReplica{q.Range, q.Replica}] = true
		}
	}
	return all, len(reports) < len(nodes)
}

// lack is what cannot vote as far as this node knows.
type lack struct {
	silent map[keyspace.NodeID]Silent
	closed map[closedReplica]bool
}

// of returns the voters that a group lacks, none if it has a quorum: the nodes that are silent, and the nodes of replicas in
// quarantine.
func (l *lack) of(d *keyspace.Descriptor) (silent []Silent, closed []keyspace.NodeID) {
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
			closed = append(closed, r.Node)
		}
	}
	return sorted(silent), closed
}

func sorted(all []Silent) []Silent {
	slices.SortFunc(all, func(a, b Silent) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return all
}

// Outage says what has no quorum by what this node hears. It asks nobody but nodes with replicas in quarantine, and looks at ranges
// only while there are such, or a node is silent.
func (a *Admin) Outage(ctx context.Context) (o Outage) {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return o
	}
	l := lack{silent: a.silent(m)}
	l.closed, o.Unsure = a.closed(ctx, m)
	if len(l.silent)+len(l.closed) == 0 {
		return o
	}
	silent, closed := map[keyspace.NodeID]Silent{}, map[keyspace.NodeID]Silent{}
	lacks := func(d *keyspace.Descriptor) bool {
		who, shut := l.of(d)
		for _, s := range who {
			silent[s.ID] = s
		}
		for _, id := range shut {
			n, _ := m.Node(id)
			closed[id] = Silent{ID: id, Name: n.Name}
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
// that have been silent for some time at least.
func (a *Admin) noQuorum(id keyspace.RangeID, silentFor time.Duration) *adminapi.Refusal {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return nil
	}
	d, ok := m.Of(id)
	if !ok {
		return nil
	}
	silent := a.silent(m)
	for n := range silent {
		if a.o.Peers.SilentFor(n) < silentFor {
			delete(silent, n)
		}
	}
	lacks, _ := (&lack{silent: silent}).of(&d)
	if len(lacks) == 0 {
		return nil
	}
	return &adminapi.Refusal{
		Reason:   fmt.Sprintf("no quorum for %s: %s", fsm.GroupName(id), silentText(lacks)),
		NextStep: "start them again; if they are lost for good, see docs/RECOVERY.md. skein status shows what else waits for them",
		Later:    true,
	}
}

// needs refuses at once what needs the quorum of a group that has none. After a nil error the command may still find out.
func (a *Admin) needs(ids ...keyspace.RangeID) error {
	for _, id := range ids {
		if r := a.noQuorum(id, givenUpAfter); r != nil {
			return r
		}
	}
	return nil
}

// explain puts the missing quorum in the place of an error that it may have caused. ids are the groups that the command
// needs; fsm.OwnGroup goes without saying.
func (a *Admin) explain(err *error, ids ...keyspace.RangeID) {
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
		if r := a.noQuorum(id, 0); r != nil {
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
