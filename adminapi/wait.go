package adminapi

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// Wait is how a command waits for a node.
type Wait struct {
	// Call bounds one question, Pause lies between two of them.
	Call, Pause time.Duration
	// Tell is called with a line whenever the node holds something else than before, or something
	// else holds it up.
	Tell func(string)
}

// maxFailedLooks is how many questions in a row may fail before the waiting ends: a node
// that is asked may just be restarted.
const maxFailedLooks = 30

// AwaitNode waits until a drained node leads nothing, or a decommissioned one holds
// nothing and is removed, by this call or by others, and returns it as it is then. It
// changes nothing but that last step, and may be called again at any time. It ends with
// ctx, and where somebody takes the node back. The node is as ChangeNode has returned it:
// from then on its id counts, since a name may go to another one when it is free.
func (c *Client) AwaitNode(ctx context.Context, w Wait, change NodeChange, node *adminpb.Node) (*adminpb.Node, error) {
	told, failed := "", 0
	for {
		s, over, err := c.lookAtNode(ctx, w, change, node)
		n := s.GetNode()
		if r := (*Refusal)(nil); errors.As(err, &r) && r.Removed {
			if change != Decommission {
				return nil, err
			}
			// It has left: placement removes a node by itself where etcd's MemberRemove has asked
			// for it, and whoever else waits for it may have come first.
			n, over, err = &adminpb.Node{Id: node.GetId(), Name: node.GetName(), State: "removed"}, true, nil
			w.Tell(NodeProgress(n))
		}
		switch {
		case over:
			return n, err
		case err != nil && ctx.Err() == nil:
			if failed++; failed == maxFailedLooks {
				return nil, err
			}
		case err == nil:
			failed = 0
			text := NodeProgress(n)
			if r := heldUp(s, change); r != nil {
				text += ", and is held up: " + r.GetReason() + "; next: " + r.GetNextStep()
			}
			if text != told {
				told = text
				w.Tell(text)
			}
		}
		if clock.Sleep(ctx, clock.System(), w.Pause) != nil {
			return nil, waitedLongEnough(change, node.GetName(), told)
		}
	}
}

// lookAtNode asks for the node once, and removes it if that is the only step left. over reports
// that there is nothing more to wait for.
func (c *Client) lookAtNode(ctx context.Context, w Wait, change NodeChange, node *adminpb.Node) (s *adminpb.NodeShowResponse, over bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, w.Call)
	defer cancel()
	s, err = c.NodeShow(ctx, node.GetId())
	if err != nil {
		return nil, false, err
	}
	n := s.GetNode()
	want := map[NodeChange]string{Drain: "draining", Decommission: "decommissioned"}[change]
	if s.GetStale() {
		n.State = want // what is known of it without a quorum may be older than the change
	}
	switch {
	case n.GetState() != want:
		return s, true, &Refusal{
			Reason:   node.GetName() + " is " + n.GetState() + " again: somebody has taken it back",
			NextStep: "repeat the command if it is still to be done",
		}
	case change == Drain:
		// Leadership is unknown without a quorum, and also if there is a refusal, for instance of a
		// node that lives and has not answered in time.
		return s, !s.GetStale() && n.GetLeaders() == 0 && !n.GetPlacementLeader() && s.GetDrain() == nil, nil
	case n.GetRanges() == 0 && !n.GetPlacement():
		// What the range map says may be a moment older than what the node says.
		removed, err := c.ChangeNode(ctx, Remove, node.GetId())
		return &adminpb.NodeShowResponse{Node: removed}, err == nil, err
	}
	return s, false, nil
}

func waitedLongEnough(change NodeChange, node, told string) error {
	reason := cmp.Or(told, node+" could not be looked at")
	back := Undrain
	if change == Decommission {
		back = Recommission
	}
	return &Refusal{
		Reason:   "the time for waiting is over, and " + reason,
		NextStep: "it goes on by itself: repeat the command to watch it, or take it back with skein node " + string(back) + " " + node,
	}
}
