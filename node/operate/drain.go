package operate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
)

// waits says for which silent nodes ranges wait that are to leave a node: nothing but repair touches
// a range while one of its replicas is not heard. It is no refusal: they go on when it is heard
// again, or counts as lost.
func (v *clusterView) waits(node keyspace.NodeID) error {
	var ranges []keyspace.RangeID
	silent := map[keyspace.NodeID]bool{}
	for _, d := range v.held(node) {
		wait := false
		for _, m := range d.Replicas {
			if m.Node != node && v.silent(m.Node) {
				wait, silent[m.Node] = true, true
			}
		}
		if wait {
			ranges = append(ranges, d.Range)
		}
	}
	if len(ranges) == 0 {
		return nil
	}
	who := v.namedNodes(silent)
	which := fmt.Sprintf("range %s has a replica on %s too, which does not answer", ranges[0], who)
	if len(ranges) > 1 {
		which = fmt.Sprintf("%d ranges have replicas on %s too, which does not answer", len(ranges), who)
	}
	return &adminapi.Refusal{
		Reason:   which,
		NextStep: "bring " + who + " back, or wait until it counts as lost (--node-dead-after), and its replicas are rebuilt elsewhere",
	}
}

// silent says whether placement waits for a node: whom its leader does not hear, whoever else does.
func (v *clusterView) silent(n keyspace.NodeID) bool {
	if r := v.reports[v.placement.Leader]; len(r.Hears) > 0 {
		return n != v.placement.Leader && !slices.Contains(r.Hears, n)
	}
	return !v.alive(n)
}

// namedNodes names some nodes, in the order of their names.
func (v *clusterView) namedNodes(ids map[keyspace.NodeID]bool) string {
	var all []string
	for id := range ids {
		all = append(all, "node "+cmp.Or(v.byName[id], id.String()))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// whatOfDead says that a dead node has nothing to drain, and what to do about it.
func (v *clusterView) whatOfDead(n *fsm.Node) error {
	others := 0
	for i := range v.nodes {
		if o := &v.nodes[i]; o.ID != n.ID && o.State == fsm.NodeServing && v.alive(o.ID) {
			others++
		}
	}
	next := "start it again, or wait: its replicas are rebuilt on other nodes once it counts as lost (--node-dead-after)"
	if want := placement.Replication(v.settings); others < want {
		next = fmt.Sprintf("start it again, or add a node: ranges have %d replicas, and %d other nodes serve, so that nothing can be rebuilt elsewhere", want, others)
	}
	return &adminapi.Refusal{Reason: fmt.Sprintf("node %s is dead, and leads nothing", n.Name), NextStep: next}
}

// mayDrain says why the node cannot be drained and then stopped, and what to do.
func (v *clusterView) mayDrain(n *fsm.Node, now clock.Time) error {
	refuse := func(reason, next string) error {
		return &adminapi.Refusal{Reason: fmt.Sprintf("node %s cannot be drained: %s", n.Name, reason), NextStep: next}
	}
	switch {
	case v.unsure(n.ID):
		return refuse(unknownNode, lookForNode)
	case len(v.missing) > 0:
		return refuse(unknownRanges, lookForRanges)
	}
	if id := v.leaderless(n.ID); id != 0 {
		return refuse(fmt.Sprintf("it does not answer, and nobody who does leads range %s, of which it has a replica", id),
			fmt.Sprintf("try again in a moment; if it stays so, look with skein range show %s which nodes have it, and bring them back", id))
	}
	if err := v.decider(now).CanDrain(n.ID); err != nil {
		return v.refusal(n, err)
	}
	group := v.placement.Replicas
	switch {
	case len(group) == 0:
		return refuse(unknownGroup, lookForGroup)
	case !v.answered(n.ID):
		return nil // it stands still already
	}
	silent := func(id keyspace.NodeID) bool { return !v.answered(id) }
	leaving := map[keyspace.NodeID]bool{}
	for _, o := range v.nodes {
		if o.State.Leaving() {
			leaving[o.ID] = true
		}
	}
	away := func(id keyspace.NodeID) bool { return silent(id) || leaving[id] }
	heir := func(m keyspace.Replica) bool {
		return m.Node != n.ID && m.Role == keyspace.RoleVoter && !away(m.Node) && !v.isolated[m.Node]
	}
	nobody := func(keyspace.NodeID) bool { return false }
	switch {
	case stopsWithout(group, n.ID, nobody):
		return refuse("without it there is no quorum of the placement group", "add nodes until there are three")
	case stopsWithout(group, n.ID, silent):
		return refuse("without it there is no quorum of the placement group, whose other members "+v.named(group, n.ID, silent)+" do not answer",
			"bring those back first, or add nodes")
	case stopsWithout(group, n.ID, away):
		return refuse("once it is stopped beside "+v.named(group, n.ID, away)+" there is no quorum of the placement group",
			v.takeBack(group, n.ID, away))
	case v.placement.Leader == n.ID && !slices.ContainsFunc(group, heir):
		return refuse("nobody else can lead the placement group: "+v.named(group, n.ID, func(id keyspace.NodeID) bool { return v.isolated[id] })+" hears hardly any other node",
			"let that one hear the others first")
	}
	for i := range v.ranges {
		if d := &v.ranges[i]; stopsWithout(d.Replicas, n.ID, away) {
			return refuse(fmt.Sprintf("once it is stopped beside %s there is no quorum of range %s", v.named(d.Replicas, n.ID, away), d.Range),
				v.takeBack(d.Replicas, n.ID, away))
		}
	}
	return nil
}

// Refusals for an unknown state: it may be the very reason why a node cannot leave.
const (
	unknownGroup = "who holds the placement group is not known: none of its replicas answers"
	lookForGroup = "try again; if it stays so, look with skein node list which nodes are down"

	unknownNode = "it has not answered in time, and is heard or taken for a leader: what it leads is not known"
	lookForNode = "try again in a moment; if it stays so, with a longer --command-timeout or by another of the --endpoints; or look in its log what it is busy with, or stop it"

	unknownRanges = "who holds some of the keys is not known now, as behind a split or a merge that not all have heard of"
	lookForRanges = "try again; if it stays so, look with skein range list which are missing"
)

// takeBack returns how to bring back the group's members that are away, other than the node. A
// silent one has to be started, whatever its state. One of them is enough.
func (v *clusterView) takeBack(group []keyspace.Replica, node keyspace.NodeID, away func(keyspace.NodeID) bool) string {
	var all []string
	for i := range v.nodes {
		n := &v.nodes[i]
		if !slices.ContainsFunc(group, func(m keyspace.Replica) bool { return m.Node == n.ID && n.ID != node && away(n.ID) }) {
			continue
		}
		back := ""
		switch n.State {
		case fsm.NodeDraining:
			back = "skein node undrain " + n.Name
		case fsm.NodeDecommissioned:
			back = "skein node recommission " + n.Name
		case fsm.NodeUnstarted, fsm.NodeUnstartedLearner, fsm.NodeServing, fsm.NodeLearner, fsm.NodeRemoved:
		}
		switch {
		case v.answered(n.ID):
			all = append(all, "take "+n.Name+" back first ("+back+")")
		case back != "":
			all = append(all, "bring "+n.Name+" back, which does not answer, and take it back ("+back+")")
		default:
			all = append(all, "bring "+n.Name+" back, which does not answer")
		}
	}
	if len(all) == 0 {
		return "add nodes"
	}
	slices.Sort(all)
	return strings.Join(all, ", or ")
}

// mayDecommission says why the node's replicas have nowhere to go, and what to do.
func (v *clusterView) mayDecommission(n *fsm.Node, now clock.Time) error {
	if n.State == fsm.NodeLearner {
		return nil // it never got anything
	}
	refuse := func(reason, next string) error {
		return &adminapi.Refusal{Reason: fmt.Sprintf("node %s cannot be decommissioned: %s", n.Name, reason), NextStep: next}
	}
	switch {
	case v.unsure(n.ID) && n.State != fsm.NodeDecommissioned: // what is under way does not wait for its answer
		return refuse(unknownNode, lookForNode) // how much it has is known of what others lead alone
	case len(v.missing) > 0:
		return refuse(unknownRanges, lookForRanges)
	}
	if err := v.decider(now).CanDecommission(n.ID); err != nil {
		return v.refusal(n, err)
	}
	group := v.placement.Replicas
	if len(group) == 0 {
		return refuse(unknownGroup, lookForGroup)
	}
	votes := map[keyspace.NodeID]bool{} // once what is under way has ended
	for _, m := range group {
		votes[m.Node] = m.Role == keyspace.RoleVoter || m.Role == keyspace.RoleVoterIncoming
	}
	if o := v.operations[fsm.OwnGroup]; o.Kind == fsm.OperationMove || o.Kind == fsm.OperationRemove {
		votes[o.From] = false
	}
	if o := v.operations[fsm.OwnGroup]; o.Kind == fsm.OperationMove || o.Kind == fsm.OperationAdd {
		votes[o.To] = true
	}
	if !votes[n.ID] {
		return nil
	}
	silent := func(id keyspace.NodeID) bool { return !v.answered(id) }
	// Each voter that goes, this one and those that leave already, needs a node for its place,
	// except for as many as there are above the least.
	voters, places := 0, 0
	for i := range v.nodes {
		o := &v.nodes[i]
		if votes[o.ID] {
			voters++
		}
		switch {
		case o.ID == n.ID, votes[o.ID] && o.State == fsm.NodeDecommissioned:
			places--
		case !votes[o.ID] && o.State == fsm.NodeServing && v.answered(o.ID) && !v.isolated[o.ID]:
			places++
		}
	}
	room := places+max(0, voters-driver.OwnLeast) >= 0
	switch {
	case stopsWithout(group, 0, silent):
		return refuse("the placement group has no quorum to change its members: "+v.named(group, 0, silent)+" do not answer", "bring those back first")
	case !room:
		return refuse("it has a replica of the placement group, and no other node serves that could take it", "add a node first")
	}
	return nil
}

// stopsWithout says whether a group goes on no longer without the node, where others are
// away. Node 0 is none; else a group that the node has no vote in goes on as before.
func stopsWithout(group []keyspace.Replica, node keyspace.NodeID, away func(keyspace.NodeID) bool) bool {
	voters, left, votes := 0, 0, node == 0
	for _, m := range group {
		if m.Role == keyspace.RoleLearner {
			continue
		}
		voters++
		votes = votes || m.Node == node
		if m.Node != node && !away(m.Node) {
			left++
		}
	}
	return voters > 0 && votes && left < voters/2+1
}

// named names the group's members besides the node that are away.
func (v *clusterView) named(group []keyspace.Replica, node keyspace.NodeID, away func(keyspace.NodeID) bool) string {
	var all []string
	for _, m := range group {
		if m.Node != node && away(m.Node) {
			all = append(all, v.byName[m.Node])
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}
