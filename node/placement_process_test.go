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

// placementGroup returns the nodes that hold the placement group, and one that does
// not.
func (o *operatorAt) placementGroup() (p *adminpb.PlacementShowResponse, free string) {
	o.t.Helper()
	p, err := o.c.PlacementShow(o.t.Context())
	if err != nil {
		o.t.Fatal(err)
	}
	for _, n := range []string{"n1", "n2", "n3", "n4"} {
		if !slices.ContainsFunc(p.GetReplicas(), func(r *adminpb.PlacementReplica) bool { return r.GetNode() == n }) {
			free = n
		}
	}
	if len(p.GetReplicas()) != 3 || free == "" {
		o.t.Fatalf("the placement group is held by %v", p.GetReplicas())
	}
	return p, free
}

// An operator moves the placement group's three replicas between four real nodes under
// load, the leader's last. No request fails, and no revision is used twice or skipped.
// All data survive a kill of all nodes.
func TestMovePlacementByCommand(t *testing.T) {
	c := newProcessesOf(t, 4)
	c.startAll()
	puts := c.ready()
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
	o := &operatorAt{t: t, c: op}
	first, _ := o.placementGroup()
	slices.SortFunc(first.GetReplicas(), func(a, b *adminpb.PlacementReplica) int {
		leads := func(r *adminpb.PlacementReplica) int {
			if r.GetNode() == first.GetLeader() {
				return 1
			}
			return 0
		}
		return leads(a) - leads(b)
	})
	for _, r := range first.GetReplicas() {
		_, free := o.placementGroup()
		o.movePlacement(r.GetNode(), free)
	}
	now, free := o.placementGroup()
	for _, r := range now.GetReplicas() {
		if slices.ContainsFunc(first.GetReplicas(), func(f *adminpb.PlacementReplica) bool { return f.GetReplicaId() == r.GetReplicaId() }) {
			t.Errorf("replica %d of %s is one of the founders'", r.GetReplicaId(), r.GetNode())
		}
		if err := op.PlacementTransferLeader(t.Context(), r.GetNode()); err != nil {
			t.Errorf("%s is to lead: %v", r.GetNode(), err)
		}
	}
	o.placementRefusals(now.GetReplicas()[0].GetNode(), free)
	cancel()
	writers.Wait()
	if len(h.failed) > 0 {
		t.Errorf("of %d puts failed %v", h.count(), h.failed)
	}
	h.verify(t, c.clientOf(c.nodes[0]), c.clientOf(c.nodes[3]))
	resp, err := all.Get(t.Context(), "x")
	if err != nil || resp.Header.Revision != int64(1+puts+h.count()) {
		t.Errorf("revision %v after %d puts, %v", resp, puts+h.count(), err)
	}
	for _, p := range c.nodes {
		p.kill()
	}
	c.startAll()
	c.ready()
	h.verify(t, c.clientOf(c.nodes[1]))
	after, _ := o.placementGroup()
	for i, r := range after.GetReplicas() {
		if want := now.GetReplicas()[i]; r.GetNode() != want.GetNode() || r.GetReplicaId() != want.GetReplicaId() {
			t.Errorf("after a restart of all nodes the group is held by %v", after.GetReplicas())
		}
	}
}

// movePlacement moves a replica of the placement group and waits until that is over.
func (o *operatorAt) movePlacement(from, to string) {
	o.t.Helper()
	ctx, cancel := context.WithTimeout(o.t.Context(), time.Minute)
	defer cancel()
	m, err := o.c.PlacementMove(ctx, from, to)
	if err == nil {
		err = o.c.AwaitOperation(ctx, m.GetOperation().GetId())
	}
	if err != nil {
		o.t.Fatalf("move the placement group from %s to %s: %v", from, to, err)
	}
}

// placementRefusals are orders that make no sense.
func (o *operatorAt) placementRefusals(has, free string) {
	move := func(from, to string) error {
		_, err := o.c.PlacementMove(o.t.Context(), from, to)
		return err
	}
	for what, err := range map[string]error{
		"no such node":        move(has, "n9"),
		"a node without it":   move(free, free),
		"a node that has it":  move(has, has),
		"a leader without it": o.c.PlacementTransferLeader(o.t.Context(), free),
		"an unknown leader":   o.c.PlacementTransferLeader(o.t.Context(), "n9"),
	} {
		var refused *adminapi.Refusal
		if !errors.As(err, &refused) || strings.TrimSpace(refused.NextStep) == "" {
			o.t.Errorf("%s: %v", what, err)
		}
	}
}
