package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
)

// An operator moves ranges between four real nodes under load, those that lead them too:
// no request fails, and the node that was left holds nothing more. What cannot be done is
// refused with what to do instead.
func TestMoveByCommand(t *testing.T) {
	c := newProcessesOf(t, 4)
	c.startAll()
	c.ready()
	h := newHistory()
	ctx, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	all := c.clientOf(c.nodes...)
	for w := range 8 {
		writers.Go(func() { h.write(ctx, t, all, w, time.Millisecond) })
	}
	op, err := adminapi.NewClient([]string{c.nodes[3].client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Else n2 gets its share again while it is emptied.
	if err := op.PlacementPause(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	o := &operatorAt{t: t, c: op}
	moved := o.empty("n2")
	if moved < 2 {
		t.Errorf("%d ranges were moved away from n2: too few to show anything", moved)
	}
	for _, r := range o.ranges() {
		last := r.GetReplicas()[len(r.GetReplicas())-1]
		if err := op.RangeTransferLeader(t.Context(), r.GetId(), last); err != nil {
			t.Errorf("%s is to lead range %d: %v", last, r.GetId(), err)
		}
	}
	o.refusals()
	cancel()
	writers.Wait()
	if len(h.failed) > 0 {
		t.Errorf("of %d puts failed %v", h.count(), h.failed)
	}
	h.verify(t, c.clientOf(c.nodes[1]), c.clientOf(c.nodes[3]))
	// The node that holds nothing still serves, also after a restart.
	c.nodes[1].kill()
	c.start(c.nodes[1])
	c.ready()
	h.verify(t, c.clientOf(c.nodes[1]))
}

// operatorAt is an operator with the commands' client.
type operatorAt struct {
	t *testing.T
	c *adminapi.Client
}

func (o *operatorAt) ranges() []*adminpb.Range {
	o.t.Helper()
	l, err := o.c.RangeList(o.t.Context())
	if err != nil {
		o.t.Fatal(err)
	}
	return l.GetRanges()
}

// empty moves every range of the node to one that does not hold it, and waits until the
// node says that it holds none.
func (o *operatorAt) empty(node string) (moved int) {
	o.t.Helper()
	for _, r := range o.ranges() {
		if !slices.Contains(r.GetReplicas(), node) {
			continue
		}
		to := ""
		for _, n := range []string{"n1", "n3", "n4"} {
			if !slices.Contains(r.GetReplicas(), n) {
				to = n
			}
		}
		ctx, cancel := context.WithTimeout(o.t.Context(), time.Minute)
		m, err := o.c.RangeMove(ctx, r.GetId(), node, to)
		if err == nil {
			err = o.c.AwaitOperation(ctx, m.GetOperation().GetId())
		}
		cancel()
		if err != nil {
			o.t.Fatalf("move range %d from %s to %s: %v", r.GetId(), node, to, err)
		}
		moved++
	}
	for _, r := range o.ranges() {
		if slices.Contains(r.GetReplicas(), node) || len(r.GetReplicas()) != 3 {
			o.t.Errorf("range %d is on %v", r.GetId(), r.GetReplicas())
		}
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		l, err := o.c.NodeList(o.t.Context())
		if err != nil {
			o.t.Fatal(err)
		}
		i := slices.IndexFunc(l.GetNodes(), func(n *adminpb.Node) bool { return n.GetName() == node })
		if l.GetNodes()[i].GetRanges() == 0 {
			return moved
		}
		if time.Now().After(deadline) {
			o.t.Fatalf("%s still holds %d ranges", node, l.GetNodes()[i].GetRanges())
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// refusals are orders that make no sense.
func (o *operatorAt) refusals() {
	r := o.ranges()[0]
	has := r.GetReplicas()[0]
	for what, err := range map[string]error{
		"no such node":        o.move(r.GetId(), has, "n9"),
		"no such range":       o.move(999, has, "n2"),
		"a node without it":   o.move(r.GetId(), "n2", "n2"),
		"a node that has it":  o.move(r.GetId(), has, r.GetReplicas()[1]),
		"a leader without it": o.c.RangeTransferLeader(o.t.Context(), r.GetId(), "n2"),
		"a leader of nothing": o.c.RangeTransferLeader(o.t.Context(), 999, "n1"),
	} {
		var refused *adminapi.Refusal
		if !errors.As(err, &refused) || strings.TrimSpace(refused.NextStep) == "" {
			o.t.Errorf("%s: %v", what, err)
		}
	}
}

func (o *operatorAt) move(id uint64, from, to string) error {
	_, err := o.c.RangeMove(o.t.Context(), id, from, to)
	return err
}
