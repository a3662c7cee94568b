package operate

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// The map is that of all nodes that answer. A node that is dead or fails is named with the reason. One that has not started, or is
// removed, is not asked.
func TestHeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(6)
		f.dead[2] = true
		f.nodes[3].State, f.nodes[4].State = fsm.NodeRemoved, fsm.NodeUnstarted
		f.heat = func(n keyspace.NodeID) error {
			if n == 3 {
				return errors.New("the node is an older build")
			}
			return nil
		}
		now := time.Now().Unix()
		m, err := f.admin().Heat(t.Context(), &adminpb.HeatRequest{LastSeconds: 60})
		if err != nil {
			t.Fatal(err)
		}
		got := fmt.Sprintf("%q %q %v %v %v", m.GetStarts(), m.GetEnd(), m.GetWrites(), m.GetReads(), m.GetColumns()[0].GetSeconds())
		if want := `["n1" "n1/" "n6"] "n6/" [1 1 0 0 6 6] [0 0 0 0 0 0] 60`; got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
		if l := m.GetMissing(); len(l) != 2 || l[0].GetNode() != "n2" || l[0].GetReason() != "it is not heard" || l[1].GetNode() != "n3" || l[1].GetReason() != "the node is an older build" {
			t.Errorf("missing: %v", l)
		}
		if c := m.GetColumns(); len(c) != 2 || c[0].GetStartUnixSeconds() != now/60*60-60 || c[1].GetStartUnixSeconds() != now/60*60 || m.GetUnixMs() != 1000*now {
			t.Errorf("columns: %v at %d", c, m.GetUnixMs())
		}
		same, err := f.admin().Heat(t.Context(), &adminpb.HeatRequest{FromUnixSeconds: now - 60, ToUnixSeconds: now})
		if err != nil || !proto.Equal(same, m) {
			t.Errorf("by the clock it is %v, %v", same, err)
		}
		for _, q := range []*adminpb.HeatRequest{{FromUnixSeconds: now + 1}, {Start: []byte("b"), End: []byte("a")}} {
			var refused *adminapi.Refusal
			if _, err := f.admin().Heat(t.Context(), q); !errors.As(err, &refused) {
				t.Errorf("%v: %v", q, err)
			}
		}
	})
}
