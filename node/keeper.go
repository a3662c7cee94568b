package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/decide"
)

// find returns the node of a name or id.
func (v *survey) find(name string) (placement.Node, error) {
	id, err := nodeNamed(v.nodes, name)
	if err == nil {
		i := slices.IndexFunc(v.nodes, func(n placement.Node) bool { return n.ID == id })
		return v.nodes[i], nil
	}
	if id, gerr := nodeNamed(v.gone, name); gerr == nil {
		i := slices.IndexFunc(v.gone, func(n placement.Node) bool { return n.ID == id })
		return placement.Node{}, &adminapi.Refusal{
			Reason: fmt.Sprintf("node %s was removed from the cluster%s, and its id %s is never let in again",
				name, at(v.gone[i].Since), id),
			NextStep: "add a new node in its place, with an empty data directory (--join, or etcdctl member add)",
			Removed:  true,
		}
	}
	return placement.Node{}, err
}

// at says when something was, where that is known.
func at(when placement.UnixMillis) string {
	if when == 0 {
		return ""
	}
	return " at " + when.Time().UTC().Format("2006-01-02 15:04:05 UTC")
}

// ShowNode implements adminapi.Backend.
func (a admin) ShowNode(ctx context.Context, name string) (*adminpb.NodeShowResponse, error) {
	v, err := a.surveyWhole(ctx)
	if err != nil {
		return nil, err
	}
	n, err := v.find(name)
	if err != nil {
		return nil, err
	}
	out := &adminpb.NodeShowResponse{Node: v.row(&n), Stale: v.stale}
	bytes, leads := map[keyspace.RangeID]int64{}, v.ledBy(n.ID)
	for _, s := range v.lists[n.ID] {
		bytes[s.Descriptor.Range] = s.Bytes
	}
	for _, d := range v.held(n.ID) {
		m, _ := d.ReplicaOn(n.ID)
		out.Ranges = append(out.Ranges, &adminpb.NodeRange{
			Id: uint64(d.Range), Start: d.Span.Start, End: d.Span.End, Role: roleName(m.Role),
			Leads: leads[d.Range], Bytes: bytes[d.Range],
		})
	}
	for _, o := range v.operations { // also of the placement group, and of what it does not hold yet
		if o.From == n.ID || o.To == n.ID {
			out.Operations = append(out.Operations, operationRow(&o, v.byName))
		}
	}
	slices.SortFunc(out.Operations, func(a, b *adminpb.Operation) int { return cmp.Compare(a.GetId(), b.GetId()) })
	row := out.GetNode()
	// What is under way may be held up by what has happened since. A node that is drained counts as
	// one that leads nothing only where there is no refusal: what is not known is none.
	unknown := v.unsure(n.ID) || v.leaderless(n.ID) != 0 || len(v.placement.Replicas) == 0
	if n.State == placement.NodeServing || n.State == placement.NodeDraining && (unknown || row.GetLeaders() > 0 || row.GetPlacementLeader()) {
		out.Drain = refusalRow(a.mayBecome(v, &n, placement.NodeDraining))
	}
	if n.State == placement.NodeServing || n.State == placement.NodeDraining ||
		n.State == placement.NodeDecommissioned && (row.GetRanges() > 0 || row.GetPlacement()) {
		out.Decommission = refusalRow(a.mayBecome(v, &n, placement.NodeDecommissioned))
	}
	if n.State == placement.NodeDecommissioned && out.GetDecommission() == nil && len(out.GetOperations()) == 0 {
		out.Decommission = refusalRow(v.waits(n.ID))
	}
	return out, nil
}

// waits says for which silent nodes ranges wait that are to leave a node: nothing but repair touches
// a range while one of its replicas is not heard. It is no refusal: they go on when it is heard
// again, or counts as lost.
func (v *survey) waits(node keyspace.NodeID) error {
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
func (v *survey) silent(n keyspace.NodeID) bool {
	if r := v.reports[v.placement.Leader]; len(r.Hears) > 0 {
		return n != v.placement.Leader && !slices.Contains(r.Hears, n)
	}
	return !v.alive(n)
}

// namedNodes names some nodes, in the order of their names.
func (v *survey) namedNodes(ids map[keyspace.NodeID]bool) string {
	var all []string
	for id := range ids {
		all = append(all, "node "+cmp.Or(v.byName[id], id.String()))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

func refusalRow(err error) *adminpb.Refusal {
	var r *adminapi.Refusal
	if !errors.As(err, &r) {
		return nil
	}
	return &adminpb.Refusal{Reason: r.Reason, NextStep: r.NextStep}
}

// changeAttempts bounds how often a change of a node is looked at anew because others began to
// leave meanwhile.
const changeAttempts = 16

// ChangeNode implements adminapi.Backend.
func (a admin) ChangeNode(ctx context.Context, change adminapi.NodeChange, name string) (row *adminpb.Node, err error) {
	for range changeAttempts {
		if row, err = a.changeNode(ctx, change, name); !errors.Is(err, kverror.BadRequest) {
			return row, err
		}
	}
	return nil, &adminapi.Refusal{Reason: kverror.Of(err).Detail, NextStep: "look with skein node show " + name + " how it is now, and try again"}
}

// changeNode is one attempt. BadRequest says that the nodes are not as they were looked at.
func (a admin) changeNode(ctx context.Context, change adminapi.NodeChange, name string) (*adminpb.Node, error) {
	v, err := a.surveyWhole(ctx)
	if err != nil {
		return nil, err
	}
	n, err := v.find(name)
	if err != nil {
		return nil, err
	}
	if v.stale { // neither what the node is now nor what it may become is known
		return nil, kverror.NoLeader
	}
	to, err := plan(change, &n)
	if err != nil {
		return nil, err
	}
	if to == n.State {
		return v.row(&n), nil // it was asked for before
	}
	if err := a.mayBecome(v, &n, to); err != nil {
		return nil, err
	}
	if to == placement.NodeRemoved {
		err = a.c.client.RemoveNode(ctx, n.ID)
	} else {
		err = a.c.client.SetNodeState(ctx, n.ID, n.State, to, leaving(v.nodes)...)
	}
	if err != nil {
		return nil, err
	}
	n.State, n.Leaves, n.Since = to, false, placement.UnixMillis(a.c.o.Clock.Wall().UnixMilli())
	return v.row(&n), nil
}

// leaving returns the nodes that are on their way out.
func leaving(nodes []placement.Node) []keyspace.NodeID {
	var ids []keyspace.NodeID
	for i := range nodes {
		if nodes[i].State.Leaving() {
			ids = append(ids, nodes[i].ID)
		}
	}
	return ids
}

// plan returns the state to which a change leads.
func plan(change adminapi.NodeChange, n *placement.Node) (placement.NodeState, error) {
	targets := map[adminapi.NodeChange]placement.NodeState{
		adminapi.Drain: placement.NodeDraining, adminapi.Undrain: placement.NodeServing,
		adminapi.Decommission: placement.NodeDecommissioned, adminapi.Recommission: placement.NodeServing,
		adminapi.Remove: placement.NodeRemoved,
	}
	to, ok := targets[change]
	if !ok {
		return 0, kverror.New(kverror.BadRequest, "there is no change %q of a node", change)
	}
	is, next := n.State, ""
	switch {
	case (is == placement.NodeUnstarted || is == placement.NodeUnstartedLearner) && change != adminapi.Remove:
		next = fmt.Sprintf("start it, or have it removed: etcdctl member remove %s", n.ID)
	case is == placement.NodeDecommissioned && (change == adminapi.Drain || change == adminapi.Undrain):
		next = fmt.Sprintf("skein node recommission %s takes it back", n.Name)
	case is == placement.NodeDraining && change == adminapi.Recommission:
		next = fmt.Sprintf("skein node undrain %s takes it back", n.Name)
	case is == placement.NodeLearner && change == adminapi.Drain:
		next = "it leads nothing: stop it as it is"
	case is == placement.NodeLearner && to == placement.NodeServing:
		next = fmt.Sprintf("etcdctl member promote %s has it serve", n.ID)
	case is.Started() && is != placement.NodeDecommissioned && change == adminapi.Remove:
		next = fmt.Sprintf("skein node decommission %s empties it first", n.Name)
	}
	if next == "" {
		return to, nil
	}
	return 0, &adminapi.Refusal{Reason: fmt.Sprintf("node %s is %s", cmp.Or(n.Name, n.ID.String()), is), NextStep: next}
}

// mayBecome says before a change why it would not come to its end.
func (a admin) mayBecome(v *survey, n *placement.Node, to placement.NodeState) error {
	switch to {
	case placement.NodeDraining, placement.NodeDecommissioned:
		if placement.Paused(v.settings) {
			return &adminapi.Refusal{Reason: "placement is paused, so that nothing would leave the node", NextStep: "have it go on with skein placement resume"}
		}
		if to == placement.NodeDraining {
			return v.mayDrain(n, a.c.o.Clock.Now())
		}
		return v.mayDecommission(n, a.c.o.Clock.Now())
	case placement.NodeRemoved:
		if held := len(v.held(n.ID)); held > 0 {
			return &adminapi.Refusal{
				Reason:   fmt.Sprintf("node %s still holds %d replicas", n.Name, held),
				NextStep: fmt.Sprintf("wait until it holds none: skein node decommission %s shows how far it is", n.Name),
			}
		}
	case placement.NodeUnstarted, placement.NodeServing, placement.NodeUnstartedLearner, placement.NodeLearner:
	}
	return nil
}

// decider tells package decide what the survey has found.
func (v *survey) decider(now clock.Time) *decide.Cluster {
	set := decide.Defaults()
	set.ReplicationFactor = placement.Replication(v.settings)
	c := decide.New(set, 1, now)
	states := map[placement.NodeState]decide.NodeState{
		placement.NodeServing: decide.Serving, placement.NodeDraining: decide.Draining, placement.NodeDecommissioned: decide.Decommissioning,
	}
	for i := range v.nodes {
		n := &v.nodes[i]
		state, takesPart := states[n.State]
		if !takesPart {
			continue
		}
		row := decide.Node{ID: n.ID, Zone: n.Attribute(zoneAttribute), State: state, Capacity: v.reports[n.ID].Capacity, Used: v.reports[n.ID].Used}
		if row.Silent = !v.answered(n.ID); row.Silent {
			row.SilentSince = now
		}
		row.Lonely = !row.Silent && v.lonely[n.ID]
		c.PutNode(row)
	}
	for i := range v.ranges {
		d := v.ranges[i]
		c.PutRange(decide.Range{Descriptor: d, Leader: v.leaders[d.Range], Bytes: v.led[d.Range].Bytes})
	}
	return c
}

// zoneAttribute is the attribute by whose value replicas are kept apart.
const zoneAttribute = "zone"

// mayDrain says why the node cannot be drained and then stopped, and what to do.
func (v *survey) mayDrain(n *placement.Node, now clock.Time) error {
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
		return m.Node != n.ID && m.Role == keyspace.RoleVoter && !away(m.Node) && !v.lonely[m.Node]
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
		return refuse("nobody else can lead the placement group: "+v.named(group, n.ID, func(id keyspace.NodeID) bool { return v.lonely[id] })+" hears hardly any other node",
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

// What is not known of the placement group may be what keeps a node from leaving.
const (
	unknownGroup = "who holds the placement group is not known: none of its replicas answers"
	lookForGroup = "try again; if it stays so, look with skein node list which nodes are down"

	unknownNode = "it has not answered in time, and is heard or taken for a leader: what it leads is not known"
	lookForNode = "try again in a moment; if it stays so, with a longer --command-timeout or by another of the --endpoints; or look in its log what it is busy with, or stop it"

	unknownRanges = "who holds some of the keys is not known now, as behind a split or a merge that not all have heard of"
	lookForRanges = "try again; if it stays so, look with skein range list which are missing"
)

// takeBack says what has the group's members besides the node take part again that are away:
// one that is silent has to come back, whatever it is to the cluster. One of them is enough.
func (v *survey) takeBack(group []keyspace.Replica, node keyspace.NodeID, away func(keyspace.NodeID) bool) string {
	var all []string
	for i := range v.nodes {
		n := &v.nodes[i]
		if !slices.ContainsFunc(group, func(m keyspace.Replica) bool { return m.Node == n.ID && n.ID != node && away(n.ID) }) {
			continue
		}
		back := ""
		switch n.State {
		case placement.NodeDraining:
			back = "skein node undrain " + n.Name
		case placement.NodeDecommissioned:
			back = "skein node recommission " + n.Name
		case placement.NodeUnstarted, placement.NodeUnstartedLearner, placement.NodeServing, placement.NodeLearner, placement.NodeRemoved:
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
func (v *survey) mayDecommission(n *placement.Node, now clock.Time) error {
	if n.State == placement.NodeLearner {
		return nil // it never got anything
	}
	refuse := func(reason, next string) error {
		return &adminapi.Refusal{Reason: fmt.Sprintf("node %s cannot be decommissioned: %s", n.Name, reason), NextStep: next}
	}
	switch {
	case v.unsure(n.ID) && n.State != placement.NodeDecommissioned: // what is under way does not wait for its answer
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
	if o := v.operations[placement.OwnGroup]; o.Kind == placement.OperationMove || o.Kind == placement.OperationRemove {
		votes[o.From] = false
	}
	if o := v.operations[placement.OwnGroup]; o.Kind == placement.OperationMove || o.Kind == placement.OperationAdd {
		votes[o.To] = true
	}
	if !votes[n.ID] {
		return nil
	}
	silent := func(id keyspace.NodeID) bool { return !v.answered(id) }
	// Each voter that goes, this one and those that go already, needs a node that can take its
	// place, but as many as there are above the least.
	voters, places := 0, 0
	for i := range v.nodes {
		o := &v.nodes[i]
		if votes[o.ID] {
			voters++
		}
		switch {
		case o.ID == n.ID, votes[o.ID] && o.State == placement.NodeDecommissioned:
			places--
		case !votes[o.ID] && o.State == placement.NodeServing && v.answered(o.ID) && !v.lonely[o.ID]:
			places++
		}
	}
	room := places+max(0, voters-placement.OwnLeast) >= 0
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
func (v *survey) named(group []keyspace.Replica, node keyspace.NodeID, away func(keyspace.NodeID) bool) string {
	var all []string
	for _, m := range group {
		if m.Node != node && away(m.Node) {
			all = append(all, v.byName[m.Node])
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// refusal puts the names of nodes into what decide says.
func (v *survey) refusal(n *placement.Node, err error) error {
	var r *decide.Refusal
	if !errors.As(err, &r) {
		return err
	}
	words := v.words()
	return &adminapi.Refusal{Reason: fmt.Sprintf("node %s cannot be %s: %s", n.Name, r.What, words.Replace(r.Why)), NextStep: words.Replace(r.Do)}
}

// words puts the names of nodes in the place of their ids.
func (v *survey) words() *strings.Replacer { return nodeWords(v.nodes) }

// nodeWords puts the names of nodes in the place of their ids.
func nodeWords(nodes []placement.Node) *strings.Replacer {
	named := slices.Clone(nodes)
	// Of two that fit, the first one of the pairs is taken: it must be the longer one.
	slices.SortFunc(named, func(a, b placement.Node) int {
		return cmp.Or(len(b.ID.String())-len(a.ID.String()), cmp.Compare(a.ID, b.ID))
	})
	var pairs []string
	for i := range named {
		// One that etcd's MemberAdd has added has no name before it starts.
		pairs = append(pairs, "node "+named[i].ID.String(), "node "+cmp.Or(named[i].Name, named[i].ID.String()))
	}
	return strings.NewReplacer(pairs...)
}
