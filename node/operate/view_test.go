package operate

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/shard"
)

// TestViewOfHistories: whatever map and lists have of a history, the view is what a slow reading of all of them gives. Often the map
// has everything, which is the case that is read quickly.
func TestViewOfHistories(t *testing.T) {
	const nodes = 5
	quick, near, slow := 0, 0, 0
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 2))
		past, before, now := history(rng, nodes)
		v := viewOf(nodes)
		v.heard = map[keyspace.NodeID]bool{}
		v.reports = map[keyspace.NodeID]Report{1: {}}
		for id := range keyspace.NodeID(nodes) {
			if id++; rng.IntN(5) == 0 {
				delete(v.lists, id)
				v.heard[id] = rng.IntN(2) == 0
			}
		}
		mapped := now
		switch rng.IntN(4) {
		case 0:
			mapped = before
		case 1:
			mapped = slices.DeleteFunc(append(slices.Clone(past), now...), func(keyspace.Descriptor) bool { return rng.IntN(2) == 0 })
		}
		heard := now
		if rng.IntN(2) == 0 {
			heard = append(slices.Clone(past), now...)
		}
		lists(v, rng, heard, nodes)
		if rng.IntN(4) == 0 && len(v.lists[2]) > 0 {
			d := &v.lists[2][0].Descriptor
			v.reports[2] = Report{Quarantined: []Quarantined{{Range: d.Range, Replica: 2}}}
		}
		v.settle(mapped)
		if diff := v.unlike(mapped); diff != "" {
			t.Fatalf("seed %d: %s", seed, diff)
		}
		switch {
		case !whole(mapped):
			slow++
		case &v.ranges[0] == &mapped[0]:
			quick++
		default:
			near++
		}
	}
	if min(quick, near, slow) < 40 {
		t.Errorf("%d maps had everything, %d not what is newer, and %d lacked keys", quick, near, slow)
	}
}

// history splits and merges ranges and moves their replicas; each node's replicas have its number for their ids. before is how all
// ranges were a few steps ago.
func history(rng *rand.Rand, nodes int) (past, before, now []keyspace.Descriptor) {
	replicas := func() (all []keyspace.Replica) {
		for _, n := range rng.Perm(nodes)[:3] {
			all = append(all, keyspace.Replica{ID: keyspace.ReplicaID(n + 1), Node: keyspace.NodeID(n + 1)})
		}
		return all
	}
	first := rangeOf(1, 1, "", "-")
	first.Replicas = replicas()
	now, next := []keyspace.Descriptor{first}, keyspace.RangeID(2)
	for step := range 20 {
		if step == 17 {
			before = slices.Clone(now)
		}
		i := rng.IntN(len(now))
		d := &now[i]
		key := fmt.Appendf(nil, "%02d", rng.IntN(100))
		switch {
		case rng.IntN(4) == 0:
			past = append(past, *d)
			d.Replicas, d.ConfIndex = replicas(), uint64(step+1)
		case rng.IntN(3) > 0 && d.Span.Contains(key) && string(d.Span.Start) != string(key):
			past = append(past, *d)
			right := *d
			right.Range, right.Generation, right.Span.Start = next, d.Generation+1, key
			d.Generation, d.Span.End, next = d.Generation+1, key, next+1
			now = slices.Insert(now, i+1, right)
		case i+1 < len(now):
			past = append(past, *d, now[i+1])
			d.Generation, d.Span.End = max(d.Generation, now[i+1].Generation)+1, now[i+1].Span.End
			now = slices.Delete(now, i+1, i+2)
		}
	}
	return past, before, now
}

// lists has nodes that answer list some of the ranges: mostly each once, in one of its states; of some, several say that they lead.
func lists(v *clusterView, rng *rand.Rand, of []keyspace.Descriptor, nodes int) {
	for _, n := range slices.Sorted(maps.Keys(v.lists)) {
		had := map[keyspace.RangeID]bool{}
		for _, i := range rng.Perm(len(of)) {
			d := of[i]
			if _, member := d.ReplicaOn(n); !member && rng.IntN(10) > 0 || had[d.Range] && rng.IntN(20) > 0 {
				continue
			}
			had[d.Range] = true
			v.lists[n] = append(v.lists[n], shard.Summary{
				Descriptor: d, LeaderNode: keyspace.NodeID(rng.IntN(nodes + 1)), IsLeader: rng.IntN(3) == 0,
			})
		}
		if rng.IntN(4) > 0 { // as nodes list them; in another order it is right too
			slices.SortFunc(v.lists[n], func(a, b shard.Summary) int {
				return cmp.Or(bytes.Compare(a.Descriptor.Span.Start, b.Descriptor.Span.Start), cmp.Compare(a.Descriptor.Range, b.Descriptor.Range))
			})
		}
	}
}

// unlike says what of a view is not as a slow reading of map and lists has it.
func (v *clusterView) unlike(mapped []keyspace.Descriptor) string {
	all := slices.Clone(mapped)
	leaders := map[keyspace.RangeID]map[keyspace.NodeID]bool{}
	said := map[keyspace.RangeID][]replicaSaid{}
	for n, l := range v.lists {
		for i, s := range l {
			all = append(all, s.Descriptor)
			if s.IsLeader {
				said[s.Descriptor.Range] = append(said[s.Descriptor.Range], replicaSaid{n, &l[i]})
				if leaders[s.Descriptor.Range] == nil {
					leaders[s.Descriptor.Range] = map[keyspace.NodeID]bool{}
				}
				leaders[s.Descriptor.Range][n] = true
			}
		}
	}
	ranges, missing := cover(all)
	if got, want := covered(v.ranges, v.missing), covered(ranges, missing); got != want {
		return fmt.Sprintf("%s, want %s", got, want)
	}
	holders := map[keyspace.NodeID]map[keyspace.RangeID]bool{}
	for i, d := range ranges {
		switch l := v.led[i]; {
		case (l.by != 0) != (len(leaders[d.Range]) > 0), (l.by != 0) != (l.says != nil), l.by != 0 && !leaders[d.Range][l.by], l.says != nil && l.says.Descriptor.Range != d.Range:
			return fmt.Sprintf("range %s is led by %s, by lists by %v", d.Range, l.by, leaders[d.Range])
		case !rightly(said[d.Range], &d, l):
			return fmt.Sprintf("range %s is led by %s, which is no present member, and others lead that are", d.Range, l.by)
		case v.stopped[d.Range] == d.HasQuorum(v.up(&d)):
			return fmt.Sprintf("range %s is stopped: %t", d.Range, v.stopped[d.Range])
		}
		for _, r := range d.Replicas {
			if holders[r.Node] == nil {
				holders[r.Node] = map[keyspace.RangeID]bool{}
			}
			holders[r.Node][d.Range] = true
		}
	}
	return v.unlikeByNode(leaders, holders)
}

// rightly says whether the leader is a member that knows the range as it is, if any such one says that it leads.
func rightly(said []replicaSaid, d *keyspace.Descriptor, l lead) bool {
	present := func(s replicaSaid) bool {
		_, member := d.ReplicaOn(s.node)
		return member && !d.Newer(&s.says.Descriptor)
	}
	return l.by == 0 || present(replicaSaid{l.by, l.says}) || !slices.ContainsFunc(said, present)
}

func (v *clusterView) unlikeByNode(leaders map[keyspace.RangeID]map[keyspace.NodeID]bool, holders map[keyspace.NodeID]map[keyspace.RangeID]bool) string {
	for i := range v.nodes {
		n := v.nodes[i].ID
		held, leads := maps.Clone(holders[n]), map[keyspace.RangeID]bool{}
		if held == nil {
			held = map[keyspace.RangeID]bool{}
		}
		for _, s := range v.lists[n] {
			held[s.Descriptor.Range] = true
			if s.IsLeader {
				leads[s.Descriptor.Range] = true
			}
		}
		if !v.answered(n) {
			for _, l := range v.lists {
				for _, s := range l {
					if s.LeaderNode == n && len(leaders[s.Descriptor.Range]) == 0 {
						leads[s.Descriptor.Range] = true
					}
				}
			}
		}
		stopped := int64(0)
		for id := range leads {
			if v.stopped[id] {
				stopped++
			}
		}
		switch node := (&fsm.Node{ID: n}); {
		case v.holds(n) != int64(len(held)) || len(v.held(n)) != len(held):
			return fmt.Sprintf("node %s holds %d of %d, %v", n, v.holds(n), len(held), v.held(n))
		case v.leads(n) != int64(len(leads)) || !maps.Equal(v.ledBy(n), leads) && len(leads) > 0:
			return fmt.Sprintf("node %s leads %d, %v, want %v", n, v.leads(n), v.ledBy(n), leads)
		case v.row(node).GetLeaders() != int64(len(leads)) || v.listed(node).GetLeaders() != int64(len(leads))-stopped:
			return fmt.Sprintf("node %s is listed with %d leaders of %d, %d of them stopped", n, v.listed(node).GetLeaders(), len(leads), stopped)
		}
	}
	return ""
}
