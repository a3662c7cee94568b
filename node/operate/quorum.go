package operate

import (
	"cmp"
	"errors"
	"fmt"
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
	// Silent are the nodes that these wait for, in the order of their names.
	Silent []Silent
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

// Who names the silent nodes, and says since when they are silent.
func (o *Outage) Who() string { return silentText(o.Silent) }

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

// without returns the silent nodes whose votes a group lacks; none if it has a quorum.
func without(d *keyspace.Descriptor, silent map[keyspace.NodeID]Silent) (lacks []Silent) {
	if d.HasQuorum(func(r keyspace.Replica) bool { _, is := silent[r.Node]; return !is }) {
		return nil
	}
	for _, r := range d.Replicas {
		if s, is := silent[r.Node]; is && r.Role != keyspace.RoleLearner {
			lacks = append(lacks, s)
		}
	}
	return sorted(lacks)
}

func sorted(all []Silent) []Silent {
	slices.SortFunc(all, func(a, b Silent) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return all
}

// Outage says what has no quorum by what this node hears. It asks nobody, and looks at ranges only while a node is silent.
func (a *Admin) Outage() (o Outage) {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return o
	}
	silent := a.silent(m)
	if len(silent) == 0 {
		return o
	}
	waited := map[keyspace.NodeID]Silent{}
	lacks := func(d *keyspace.Descriptor) bool {
		who := without(d, silent)
		for _, s := range who {
			waited[s.ID] = s
		}
		return len(who) > 0
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
	for _, s := range waited {
		o.Silent = append(o.Silent, s)
	}
	sorted(o.Silent)
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
	lacks := without(&d, silent)
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
