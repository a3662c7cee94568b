package recovery

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
)

// TestPlans runs the stories of testdata/plan. Their commands:
//
//	cluster nodes=(1,2,3)                       the node table; begins anew
//	node id=1 [cluster=2] [interrupted=x] [awaits=(2)]
//	                                            what a node has: a line for each copy
//	  range N replica=R last=I/T [span=a..c] [gen=G] [members=1/1v,2/2v] [commit] [conf=...] ...
//	plan dead=(n3) [accept]                     the plan, as people read it, the map and the orders
func TestPlans(t *testing.T) {
	datadriven.Walk(t, "testdata/plan", func(t *testing.T, path string) {
		s := &planStory{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "cluster":
				*s = planStory{t: t}
				d.ScanArgs(t, "nodes", &s.nodes)
			case "node":
				s.node(d)
			case "plan":
				return s.plan(d)
			default:
				d.Fatalf(t, "unknown command %s", d.Cmd)
			}
			return ""
		})
	})
}

type planStory struct {
	t     *testing.T
	nodes []uint64
	in    []*Collected
}

func (s *planStory) node(d *datadriven.TestData) {
	c := &Collected{Cluster: 0xc1}
	n := uint64(0)
	d.ScanArgs(s.t, "id", &n)
	c.Node = id(n)
	if d.HasArg("cluster") {
		d.ScanArgs(s.t, "cluster", &n)
		c.Cluster = id(n)
	}
	d.MaybeScanArgs(s.t, "interrupted", &c.Interrupted)
	var awaits []uint64
	d.MaybeScanArgs(s.t, "awaits", &awaits)
	for _, n := range awaits {
		c.Awaits = append(c.Awaits, id(n))
	}
	for line := range strings.SplitSeq(strings.TrimSpace(d.Input), "\n") {
		if line != "" {
			c.Copies = append(c.Copies, s.copyOf(line))
		}
	}
	if c.Copies != nil && c.Copies[0].Range == 0 {
		c.Placement = s.placement(c)
	}
	s.in = append(s.in, c)
}

// placement is the state of placement: the node table, and the rows of the node's ranges.
func (s *planStory) placement(*Collected) *Placement {
	p := &Placement{Ceiling: 10_001, Compacted: -1, NextRange: 100, NextReplica: 50}
	for _, n := range s.nodes {
		p.Nodes = append(p.Nodes, NodeRow{Node: id(n), Name: fmt.Sprintf("n%d", n), State: "serving"})
	}
	return p
}

// copyOf reads a line: the range, then name=value.
func (s *planStory) copyOf(line string) (c Copy) {
	fields := strings.Fields(line)
	if fields[0] != "placement" {
		c.Range = keyspace.RangeID(s.number(fields[0]))
	}
	c.End.Generation = 1
	var confs []string
	for _, f := range fields[1:] {
		name, v, _ := strings.Cut(f, "=")
		switch name {
		case "replica":
			c.Replica = keyspace.ReplicaID(s.number(v))
		case "last":
			i, t, _ := strings.Cut(v, "/")
			c.Last, c.Term = Position{s.number(i), s.number(t)}, s.number(t)
		case "gen":
			c.End.Generation = keyspace.Generation(s.number(v))
		case "span":
			a, b, _ := strings.Cut(v, "..")
			c.End.Start, c.End.End = key(a), key(b)
		case "members":
			confs = strings.Split(v, ";")
		case "revision":
			c.Revision = keyspace.Revision(s.number(v))
		case "merge":
			c.End.Merge = s.number(v)
		case "unsettled":
			c.Unsettled = true
		case "tentative":
			c.Tentative = true
		case "settled": // generation/end
			g, end, _ := strings.Cut(v, "/")
			c.Settled = &Settled{keyspace.Generation(s.number(g)), key(end)}
		case "unusable":
			c.Unusable = v
		case "absorbs":
			c.Absorbs = append(c.Absorbs, keyspace.RangeID(s.number(v)))
		case "made": // parent@index/generation, and ! where it is certain
			p, rest, _ := strings.Cut(v, "@")
			i, g, _ := strings.Cut(strings.TrimSuffix(rest, "!"), "/")
			c.Made = &Made{keyspace.RangeID(s.number(p)), s.number(i), keyspace.Generation(s.number(g)), strings.HasSuffix(v, "!")}
		default:
			s.t.Fatalf("unknown field %s", f)
		}
	}
	for _, conf := range confs {
		c.End.Members = s.members(conf)
		c.InForce = append(c.InForce, c.End.Members)
	}
	return c
}

// members reads replica/node and the role: v, l, i, o, d.
func (s *planStory) members(text string) (ms []Member) {
	for m := range strings.SplitSeq(text, ",") {
		r, n, _ := strings.Cut(m[:len(m)-1], "/")
		role := roles[strings.IndexByte("vliod", m[len(m)-1])]
		ms = append(ms, Member{keyspace.ReplicaID(s.number(r)), id(s.number(n)), role})
	}
	return ms
}

func (s *planStory) number(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *planStory) plan(d *datadriven.TestData) string {
	var o PlanOptions
	d.MaybeScanArgs(s.t, "dead", &o.Dead)
	o.AcceptLost = d.HasArg("accept")
	p, err := MakePlan(s.in, o)
	var b strings.Builder
	if p != nil {
		if werr := p.Write(&b); werr != nil {
			s.t.Fatal(werr)
		}
	}
	if err != nil {
		fmt.Fprintf(&b, "error: %v\n", err)
		if p != nil && !errors.Is(err, ErrLostSpans) {
			s.t.Errorf("a plan beside %v", err)
		}
		return b.String()
	}
	for _, r := range p.Map {
		fmt.Fprintf(&b, "map: range %s [%s, %s) generation %d, members of index %d:", r.Range, r.Start, r.End, r.Generation, r.ConfIndex)
		for _, m := range r.Members {
			fmt.Fprintf(&b, " %d/%s", m.Replica, m.Node.node())
		}
		if r.New {
			b.WriteString(" new")
		}
		b.WriteByte('\n')
	}
	for _, n := range p.Nodes {
		for _, x := range n.Sole {
			fmt.Fprintf(&b, "node %s: sole range %s replica %d release %d splits %v\n", n.Node.node(), x.Range, x.Replica, x.Release, x.Splits)
		}
		for _, x := range n.Drop {
			fmt.Fprintf(&b, "node %s: drop range %s replica %d log %t\n", n.Node.node(), x.Range, x.Replica, x.Log)
		}
		for _, x := range n.Leave {
			fmt.Fprintf(&b, "node %s: leave range %s replica %d through %d\n", n.Node.node(), x.Range, x.Replica, x.Through)
		}
	}
	fmt.Fprintf(&b, "term %d, ids from range %s and replica %d\n", p.Term, p.NextRange, p.NextReplica)
	again, err := MakePlan(s.in, o)
	if err != nil || again.ID != p.ID {
		x, _ := p.Encode()
		y, _ := again.Encode()
		s.t.Errorf("made again it is another plan: %v\n%s\n%s", err, x, y)
	}
	return b.String()
}
