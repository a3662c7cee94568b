package sequencer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/internal/testkit"
)

// TestStops tells how the sequencer decides for stopping nodes.
//
//	closing node=N boot=B / closed node=N boot=B / started node=N boot=B
//	decide live=(1,2,3) voters=(1,2,3) [before=(1,2,4)] [stay=(2,3)]
//
// before are who voted before, in a joint configuration.
//
// Who stays, where it is not said, are all that live and are not known to stop.
func TestStops(t *testing.T) {
	s := newStops()
	datadriven.RunTest(t, "testdata/stops", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "new":
			s = newStops()
		case "closing", "closed", "started":
			node, boot := keyspace.NodeID(testkit.Arg(t, d, "node")), keyspace.BootID(testkit.Arg(t, d, "boot"))
			switch d.Cmd {
			case "closing":
				s.note(node, Standing{Boot: boot, Phase: StopClosing})
			case "closed":
				s.note(node, Standing{Boot: boot, Phase: StopClosed})
			default:
				s.started(Process{Node: node, Boot: boot})
			}
		case "decide":
			live, voters := nodeList(t, d, "live"), electorate{nodeList(t, d, "voters")}
			if d.HasArg("before") {
				voters[1] = nodeList(t, d, "before")
			}
			stay := s.mayStay(live, voters)
			if d.HasArg("stay") {
				stay = nodeList(t, d, "stay")
			}
			v := [...]string{"wait", "go", "seal"}[s.decide(live, voters, stay)]
			return fmt.Sprintf("%s, successor %s\n", v, s.successor(voters, stay))
		}
		var b strings.Builder
		for n := keyspace.NodeID(1); n < 10; n++ {
			if st, ok := s.nodes[n]; ok {
				fmt.Fprintf(&b, "node %s of boot %s: %s\n", n, st.Boot, [...]string{"", "closing", "closed"}[st.Phase])
			}
		}
		return b.String()
	})
}

func nodeList(t *testing.T, d *datadriven.TestData, name string) []keyspace.NodeID {
	t.Helper()
	var ns []keyspace.NodeID
	for _, n := range testkit.Args(t, d, name) {
		ns = append(ns, keyspace.NodeID(n))
	}
	return ns
}
