package placement

import (
	"context"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// A founder is away while the first range is split. When it comes, nobody orders it
// to create that range as it was: its log from the beginning would write into what
// the child has brought by then. What was not split is created.
func TestRangeThatWasSplitIsNotCreatedAnew(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 21, 3, quiet, "p")
		r.nodes[2].refuse = 5
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		ids, err := r.nodes[0].client.RangeIDs(ctx, 1)
		if err != nil {
			t.Fatal(err)
		}
		parent := r.bootstrap.Ranges()[0]
		child := parent
		child.Range = ids[0]
		parent.Generation++
		child.Generation = parent.Generation
		parent.Span.End, child.Span.Start = []byte("c"), []byte("c")
		r.nodes[0].client.ReportDescriptors(parent, child)
		for r.leader().service.View().Len() != 3 {
			if ctx.Err() != nil {
				t.Fatal("the split is not in the map")
			}
			time.Sleep(time.Millisecond)
		}
		n := r.nodes[2]
		n.mu.Lock()
		if n.refuse == 0 {
			t.Fatal("the split came too late to test anything")
		}
		n.mu.Unlock()
		time.Sleep(10 * time.Second)
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.created[parent.Range] != 0 || n.created[child.Range] != 0 || n.created[2] == 0 {
			t.Errorf("created on the late node: %v", n.created)
		}
		r.leader().service.View().All(func(g *fsm.Range) bool {
			if !g.Created {
				t.Errorf("range %s is not marked created", g.Descriptor.Range)
			}
			return true
		})
	})
}

// A founder does not come before another node has the replica that it was to have. When it comes
// it gets none.
func TestRangeThatWasMovedIsNotCreatedAnew(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 22, 4, quiet)
		late := r.nodes[2]
		late.refuse = 1 << 30
		r.startAll()
		moved := r.bootstrap.Ranges()[0]
		moved.ConfIndex = 100
		moved.Replicas = []keyspace.Replica{moved.Replicas[0], moved.Replicas[1], {ID: 1000, Node: 4}}
		r.nodes[0].client.ReportDescriptors(moved)
		time.Sleep(10 * time.Second)
		if g := r.leader().service.View().Lookup(nil); g.Descriptor.ConfIndex != 100 {
			t.Fatalf("the move is not in the map: %+v", g)
		}
		late.mu.Lock()
		late.refuse = 0
		late.mu.Unlock()
		time.Sleep(10 * time.Second)
		late.mu.Lock()
		defer late.mu.Unlock()
		if len(late.created) > 0 {
			t.Errorf("created on the late node: %v", late.created)
		}
	})
}
