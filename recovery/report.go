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
		if v.Range != 0 || v.Verdict == Lost {
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
	if count[Covered] > 0 {
		fmt.Fprintf(&b, ", %d covered by others", count[Covered])
	}
	b.WriteByte('\n')
	fmt.Fprintf(&b, "the next revision is above %d; the highest that a survivor knows is %d\n", p.Ceiling, p.Highest)
	if p.Compacted > 0 {
		fmt.Fprintf(&b, "history up to revision %d is compacted, because it may be incomplete: watchers begin anew\n", p.Compacted)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (p *Plan) nodeName(n id) string {
	for _, r := range p.Survivors {
		if r.Node == n {
			return named([]NodeRow{r})
		}
	}
	return n.node().String()
}

func named(ns []NodeRow) string {
	names := make([]string, len(ns))
	for i, n := range ns {
		if names[i] = n.Name; n.Name == "" {
			names[i] = n.Node.node().String()
		}
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
