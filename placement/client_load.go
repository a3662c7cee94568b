package placement

import (
	"context"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/placement/fsm"
)

// Loading returns the load of the cluster as of a moment after the call, nil if there was none.
func (c *Client) Loading(ctx context.Context) (*fsm.Loading, error) {
	return c.loading(ctx, fsm.ChangeLoad{})
}

// KnownLoading returns the load by the node's newest copy of the map, nil if there is none.
func (c *Client) KnownLoading() *fsm.Loading {
	if m := c.maps.load(); m != nil {
		return m.Loading
	}
	return nil
}

// ChangeLoad takes a step of a load. A step can be repeated, so it is asked again until its fate is known. The
// error is BadRequest where the load is another loader's, or cannot go on so. A step that has users checked returns once
// every node has noted that: none will serve without, whatever it knows of the load. Else Timeout names those that lack it.
func (c *Client) ChangeLoad(ctx context.Context, o fsm.ChangeLoad) (*fsm.Loading, error) {
	return c.loading(ctx, o)
}

// loadTimeout bounds a step of a load, through elections.
const loadTimeout = 15 * time.Second

// loading asks about the load, and waits until the node's map has what the answer says, at most until ctx ends.
func (c *Client) loading(ctx context.Context, o fsm.ChangeLoad) (*fsm.Loading, error) {
	ctx, cancel := clock.WithTimeout(ctx, c.o.Clock, loadTimeout)
	defer cancel()
	a, err := c.ask(ctx, &request{Kind: requestLoad, Load: o}, true)
	if err != nil {
		return nil, err
	}
	c.maps.await(ctx, c.ctx, a.MapVersion)
	if a.Index != 0 {
		if err := c.awaitAccess(ctx, a.Index, true); err != nil {
			return nil, err
		}
	}
	return a.Loading, nil
}
