package node

import (
	"strings"
	"testing"
)

// A node that is started with the directory of another one is refused, and told whose it is. The directory
// stays that node's.
func TestTheDirectoryOfAnotherNodeIsRefused(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		n3 := r.nodes[2]
		r.stop(n3)
		o := r.optionsOf(n3)
		o.Name = "n2"
		c, err := Open(r.t.Context(), o)
		if err == nil {
			c.Crash()
			r.t.Fatal("n2 runs with the directory of n3")
		}
		if !strings.Contains(err.Error(), "data is the data directory of node n3") || !strings.Contains(err.Error(), "--name n3") {
			r.t.Error(err)
		}
		o.Name = "n3"
		if c, err = Open(r.t.Context(), o); err != nil {
			r.t.Fatal(err)
		}
		n3.set(c)
		if names := r.rows("n2"); len(names) != 1 {
			r.t.Errorf("%d nodes are named n2", len(names))
		}
	})
}
