package recovery

import (
	"context"
	"errors"
	"time"
)

// Force makes a cluster of one node of a directory: it collects, plans and applies with all other nodes
// dead, as etcd's --force-new-cluster does. It returns nil without an error
// if the node needs nobody else already.
// Spans of which the node has no copy are not given up: the error names them.
func Force(ctx context.Context, d Dir, now time.Time) (*Plan, error) {
	c, err := Collect(d)
	if err != nil {
		return nil, err
	}
	var o PlanOptions
	if c.Placement != nil {
		for _, n := range c.Placement.Nodes {
			if n.Node != c.Node && n.State != "removed" {
				o.Dead = append(o.Dead, n.Node.node().String())
			}
		}
	}
	p, err := MakePlan([]*Collected{c}, o)
	if errors.Is(err, ErrNothing) {
		return nil, nil
	}
	if err != nil {
		return p, err
	}
	_, err = Apply(ctx, d, p, now)
	return p, err
}
