package decide

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// TestDecisions tells for each decision when it is made, and when it is not.
//
//	new [factor=3] [node-copies=2] [max-operations=8192] [min-ranges=1] [merge-age=1h]
//	node id=1 [zone=a] [state=draining] [leaves] [silent=10s] [isolated] [capacity=100MiB] [used=1MiB] [full]
//	remove-node id=1
//	range id=1 on=(1,2,3) [learner=4] [incoming=4] [outgoing=3] [quarantined=3] [leader=1] [bytes=1MiB]
//	      [load=10] [born=1h] [start=a] [end=b] [generation=1] [kept]
//	remove-range id=1
//	begin range=1 other=2        a merge that somebody else has begun; without other one that is committed
//	decide at=10s [brief]        the operations, what they require, what is given up
//	finish range=1 [failed]
//	refuse [wait]                nothing of what was decided last was begun
//	pause [off]
//	factor to=5
//	gather to=1                  the sequencer's node has little to do; 0: it has much
//	check                        the requirements of what was decided last, against what is now
//	explain range=1 | can-drain node=1 | can-decommission node=1 |
//	can-replicate factor=5 | pending
func TestDecisions(t *testing.T) {
	datadriven.Walk(t, "testdata/decisions", func(t *testing.T, path string) {
		s := &story{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type story struct {
	c    *Cluster
	now  clock.Time
	conf uint64
	last []Operation
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	a := args{t, d}
	switch d.Cmd {
	case "new":
		set := Defaults()
		set.ReplicationFactor = int(a.number("factor", 3))
		set.NodeCopies = int(a.number("node-copies", 2))
		set.MaxOperations = int(a.number("max-operations", 8192))
		set.MinRanges = int(a.number("min-ranges", 1))
		if a.d.HasArg("merge-age") {
			set.MergeAge = a.duration("merge-age")
		}
		*s = story{c: New(set, 1, 0)}
	case "node":
		s.node(a)
	case "remove-node":
		s.c.RemoveNode(keyspace.NodeID(a.number("id", 0)))
	case "range":
		s.c.PutRange(s.rangeOf(a))
	case "remove-range":
		s.c.RemoveRange(keyspace.RangeID(a.number("id", 0)))
	case "begin":
		op := Operation{Kind: Merge, Range: keyspace.RangeID(a.number("range", 0)), Other: keyspace.RangeID(a.number("other", 0)), Why: "asked for"}
		if err := s.c.Begin(op); err != nil {
			return err.Error() + "\n"
		}
	case "decide":
		return s.decide(a)
	case "finish":
		s.c.Finish(keyspace.RangeID(a.number("range", 0)), s.now, !d.HasArg("failed"))
	case "refuse":
		for i := range s.last {
			s.c.Refuse(s.last[i].Range, s.now, d.HasArg("wait"))
		}
	case "pause":
		set := s.c.settings
		set.Paused = !d.HasArg("off")
		s.c.Set(set)
	case "factor":
		set := s.c.settings
		set.ReplicationFactor = int(a.number("to", 3))
		s.c.Set(set)
	case "gather":
		s.c.Gather(keyspace.NodeID(a.number("to", 0)))
	case "check":
		return s.check()
	case "explain":
		return s.c.Explain(keyspace.RangeID(a.number("range", 0))) + "\n"
	case "can-drain":
		return answer(s.c.CanDrain(keyspace.NodeID(a.number("node", 0))))
	case "can-decommission":
		return answer(s.c.CanDecommission(keyspace.NodeID(a.number("node", 0))))
	case "can-replicate":
		out, err := s.c.CanReplicate(int(a.number("factor", 0)))
		if err != nil {
			return answer(err)
		}
		return fmt.Sprintf("%+v\n", out)
	case "pending":
		return fmt.Sprintln(s.c.Pending())
	default:
		t.Fatalf("no command %q", d.Cmd)
	}
	return ""
}

func answer(err error) string {
	if err != nil {
		return err.Error() + "\n"
	}
	return "yes\n"
}

func (s *story) node(a args) {
	n := Node{
		ID: keyspace.NodeID(a.number("id", 0)), Zone: a.text("zone", ""),
		Capacity: a.number("capacity", 0), Used: a.number("used", 0), Isolated: a.d.HasArg("isolated"), Leaves: a.d.HasArg("leaves"), Full: a.d.HasArg("full"),
	}
	for st := Serving; st <= Decommissioning; st++ {
		if a.text("state", "serving") == st.String() {
			n.State = st
		}
	}
	if since := a.text("silent", ""); since != "" {
		n.Silent, n.SilentSince = true, clock.Time(a.duration("silent"))
	}
	n.IsolatedSince = s.c.now
	s.c.PutNode(n)
}

func (s *story) rangeOf(a args) Range {
	s.conf++
	r := Range{
		Leader: keyspace.NodeID(a.number("leader", 0)), Bytes: a.number("bytes", 1<<20), Load: a.number("load", 10),
		Born: clock.Time(a.duration("born")), Kept: a.d.HasArg("kept"),
	}
	r.Descriptor = keyspace.Descriptor{
		Range: keyspace.RangeID(a.number("id", 0)), Generation: keyspace.Generation(a.number("generation", 1)), ConfIndex: s.conf,
		Span: keyspace.Span{Start: []byte(a.text("start", a.text("id", ""))), End: []byte(a.text("end", a.text("id", "")+"!"))},
	}
	for role, name := range map[keyspace.Role]string{
		keyspace.RoleVoter: "on", keyspace.RoleLearner: "learner",
		keyspace.RoleVoterIncoming: "incoming", keyspace.RoleVoterOutgoing: "outgoing",
	} {
		for _, id := range a.list(name) {
			r.Descriptor.Replicas = append(r.Descriptor.Replicas, keyspace.Replica{
				ID: keyspace.ReplicaID(id), Node: keyspace.NodeID(id), Role: role,
			})
		}
	}
	for _, id := range a.list("quarantined") {
		r.Quarantined = append(r.Quarantined, Quarantined{Replica: keyspace.ReplicaID(id), Reason: "a bad table"})
	}
	slices.SortFunc(r.Descriptor.Replicas, func(x, y keyspace.Replica) int { return compare(x.Node, y.Node) })
	if r.Leader == 0 {
		r.Leader = r.Descriptor.Replicas[0].Node
	}
	return r
}

func (s *story) decide(a args) string {
	s.now = clock.Time(a.duration("at"))
	round := s.c.Decide(s.now)
	var b strings.Builder
	for _, x := range round.Abandon {
		fmt.Fprintf(&b, "give up %s\n", x.Why)
	}
	for i := range round.Operations {
		op := &round.Operations[i]
		fmt.Fprintf(&b, "%s: %s\n", op.Reason, op)
		if !a.d.HasArg("brief") {
			q := &op.Requires
			fmt.Fprintf(&b, "  since %s\n  requires live %v silent %v leaving %v\n", op.Why, q.Live, q.Silent, q.Leaving)
			if len(q.Heard) > 0 {
				fmt.Fprintf(&b, "  heard %v\n", q.Heard)
			}
		}
	}
	s.last = round.Operations
	return b.String()
}

// Descriptor, Busy and Node are the facts of a check: what the cluster was told last,
// with what was decided in the last round not begun.
func (s *story) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	r, ok := s.c.ranges[id]
	if !ok {
		return keyspace.Descriptor{}, false
	}
	return r.Descriptor, true
}

func (s *story) Busy(id keyspace.RangeID) bool {
	op, busy := s.c.UnderWay(id)
	return busy && !slices.ContainsFunc(s.last, func(l Operation) bool { return l.String() == op.String() })
}

func (s *story) Node(id keyspace.NodeID) (Node, bool) {
	n, ok := s.c.nodes[id]
	if !ok {
		return Node{}, false
	}
	return n.Node, true
}

func (s *story) check() string {
	var b strings.Builder
	for i := range s.last {
		fmt.Fprintf(&b, "%s: %v\n", &s.last[i], s.last[i].Requires.Check(s))
	}
	return b.String()
}

// args reads the arguments of a command.
type args struct {
	t *testing.T
	d *datadriven.TestData
}

func (a args) list(name string) []int64 {
	var out []int64
	for i := range a.d.CmdArgs {
		if a.d.CmdArgs[i].Key == name {
			for _, v := range a.d.CmdArgs[i].Vals {
				out = append(out, a.parse(v))
			}
		}
	}
	return out
}

func (a args) text(name, other string) string {
	for i := range a.d.CmdArgs {
		if a.d.CmdArgs[i].Key == name {
			return a.d.CmdArgs[i].Vals[0]
		}
	}
	return other
}

func (a args) number(name string, other int64) int64 {
	if s := a.text(name, ""); s != "" {
		return a.parse(s)
	}
	return other
}

func (a args) duration(name string) time.Duration {
	a.t.Helper()
	v, err := time.ParseDuration(a.text(name, "0s"))
	if err != nil {
		a.t.Fatal(err)
	}
	return v
}

func (a args) parse(s string) int64 {
	a.t.Helper()
	factor := int64(1)
	if rest, ok := strings.CutSuffix(s, "MiB"); ok {
		s, factor = rest, 1<<20
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		a.t.Fatal(err)
	}
	return v * factor
}
