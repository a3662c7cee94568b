package recovery

import (
	"fmt"
	"io"
	"strings"
)

// Write tells people what the plan does, group by group. A plan that cannot be applied is told as far as
// it goes.
func (p *Plan) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "survivors: %s\ngone for good: %s\n", named(p.Survivors), named(p.Dead))
	count := map[string]int{}
	for i := range p.Groups {
		v := &p.Groups[i]
		count[v.Verdict]++
		what := groupName(v.Range)
		switch {
		case v.Range == 0 && v.Verdict == Lost:
			what = "keys"
		case v.Range != 0:
			what += " of"
		}
		fmt.Fprintf(&b, "%-22s%s", strings.ToUpper(v.Verdict), what)
		if v.NoSpan {
			b.WriteString(" a span that is not known")
		} else if v.Range != 0 || v.Verdict == Lost {
			end, _ := v.End.MarshalText()
			start, _ := v.Start.MarshalText()
			if fmt.Fprintf(&b, " [%s, ", start); len(end) == 0 {
				b.WriteString("end)")
			} else {
				fmt.Fprintf(&b, "%s)", end)
			}
		}
		if v.Node != 0 && v.Verdict != Kept {
			fmt.Fprintf(&b, " goes on from %s", p.nodeName(v.Node))
		}
		fmt.Fprintf(&b, ": %s\n", v.Why)
	}
	fmt.Fprintf(&b, "in all: %d kept, %d safe, %d that may have lost writes, %d lost", count[Kept], count[Safe], count[Doubtful], count[Lost])
	if count[Unusable] > 0 {
		fmt.Fprintf(&b, ", %d without a usable copy", count[Unusable])
	}
	if count[Covered] > 0 {
		fmt.Fprintf(&b, ", %d covered by others", count[Covered])
	}
	b.WriteByte('\n')
	fmt.Fprintf(&b, "the next revision is above %d; the highest that a survivor knows is %d\n", p.Ceiling, p.Highest)
	if p.Compacted > 0 {
		fmt.Fprintf(&b, "history up to revision %d is compacted, because it may be incomplete: watchers begin anew\n", p.Compacted)
	}
	b.WriteString(advice(count))
	_, err := io.WriteString(w, b.String())
	return err
}

// advice says what an operator can do about what is not safe.
func advice(count map[string]int) string {
	var b strings.Builder
	if count[Doubtful] > 0 {
		b.WriteString("may have lost writes: all that the survivor has goes on, and writes that were acknowledged last may be missing. Compare with a backup if you have one\n")
	}
	if count[Unusable] > 0 {
		b.WriteString("no usable copy: apply deletes these copies, so keep a copy of the directories first. If a disk can be read again, collect anew\n")
	}
	if count[Lost] > 0 {
		b.WriteString("lost: nothing of these keys survives here. Collect from one more node that has them, or restore a backup into a new cluster. With --accept-lost-spans they begin empty\n")
	}
	return b.String()
}

func (p *Plan) nodeName(n id) string {
	for _, r := range p.Survivors {
		if r.Node == n {
			return r.text()
		}
	}
	return n.node().String()
}

// NodeName names the node for people.
func (c *Collected) NodeName() string { return (&NodeRow{Node: c.Node, Name: c.Name}).text() }

// text names the node for people: by its name, if it has one, and its id, which logs have.
func (n *NodeRow) text() string {
	if n.Name == "" {
		return n.Node.node().String()
	}
	return fmt.Sprintf("%s (%s)", n.Name, n.Node.node())
}

func named(ns []NodeRow) string {
	names := make([]string, len(ns))
	for i, n := range ns {
		names[i] = n.text()
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
