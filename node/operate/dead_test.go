package operate

import (
	"strings"
	"testing"
	"testing/synctest"
)

// A node that nobody hears is dead since then, and what there is to do depends on whether its replicas have
// somewhere to go.
func TestADeadNodeIsSaidToBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(4)
		f.dead[4] = true
		four, err := f.admin().ShowNode(t.Context(), "n4")
		if err != nil {
			t.Fatal(err)
		}
		if n := four.GetNode(); n.GetState() != "dead" || n.GetSinceUnixMs() == 0 || n.GetAlive() {
			t.Errorf("%v", n)
		}
		if r := four.GetDrain(); !strings.Contains(r.GetReason(), "is dead") || !strings.Contains(r.GetNextStep(), "rebuilt on other nodes") {
			t.Errorf("of four: %v", r)
		}
		f = newFake(3)
		f.dead[3] = true
		three, err := f.admin().ShowNode(t.Context(), "n3")
		if err != nil {
			t.Fatal(err)
		}
		if r := three.GetDrain(); !strings.Contains(r.GetReason(), "is dead") || !strings.Contains(r.GetNextStep(), "add a node") {
			t.Errorf("of three: %v", r)
		}
		if lives, err := f.admin().ShowNode(t.Context(), "n2"); err != nil || lives.GetNode().GetState() != "serving" {
			t.Errorf("%v, %v", lives, err)
		}
	})
}
