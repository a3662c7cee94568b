package placement

import (
	"context"

	"github.com/skeindb/skein/placement/fsm"
)

// PutHold makes a hold, renews it or moves it up; Now is not looked at. It waits until the node's map has
// the hold, at most until ctx ends. HoldEnded says that there was none and none was to be made, Compacted that
// the revision is compacted already.
func (c *Client) PutHold(ctx context.Context, o fsm.PutHold) (fsm.Hold, error) {
	o.Now = 0
	a, err := c.ask(ctx, &request{Kind: requestPutHold, PutHold: o}, true)
	if err != nil {
		return fsm.Hold{}, err
	}
	c.maps.await(ctx, c.ctx, a.MapVersion)
	return a.Hold, nil
}

// EndHold ends a hold. One that has ended already is no error.
func (c *Client) EndHold(ctx context.Context, id fsm.HoldID) error {
	_, err := c.ask(ctx, &request{Kind: requestEndHold, EndHold: fsm.EndHold{ID: id}}, true)
	return err
}

// KnownHolds returns all holds by the node's newest copy of the map.
func (c *Client) KnownHolds() []fsm.Hold {
	if m := c.maps.load(); m != nil && m.Holds != nil {
		return m.Holds.All
	}
	return nil
}
