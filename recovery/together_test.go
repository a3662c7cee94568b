package recovery_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/recovery"
)

// begun is a cluster of seven that has lost three nodes, with the plan for the other four. They have four of the five voters
// of the placement group.
func (r *rig) begun() (p *recovery.Plan, w *writers, survivors []*machine) {
	w = r.write(keysOf(7, 1), r.nodes...)
	time.Sleep(2 * time.Second)
	r.crash(r.nodes...)
	w.stop()
	survivors = r.nodes[:4]
	return r.plan(r.collect(survivors...), recovery.PlanOptions{Dead: []string{"n5", "n6", "n7"}, AcceptLost: true}), w, survivors
}

// waits opens nodes for a while and wants none of them to go on.
func (r *rig) waits(why string, ms ...*machine) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	errs := make([]error, len(ms))
	var wg sync.WaitGroup
	for i, m := range ms {
		wg.Go(func() { m.core, errs[i] = node.Open(ctx, r.options(m)) })
	}
	wg.Wait()
	for i, m := range ms {
		if errs[i] == nil {
			r.t.Errorf("node %s goes on, and not all survivors have the plan", m.id)
			continue
		}
		m.core = nil
		if !errors.Is(errs[i], context.DeadlineExceeded) || !strings.Contains(errs[i].Error(), why) {
			r.t.Errorf("node %s: %v, want %q", m.id, errs[i], why)
		}
	}
}

// Three of four survivors wait until the plan is applied on the fourth, and go on then. A later start waits for nobody
// (trap 128).
func TestSurvivorsWaitForEachOther(t *testing.T) {
	bubble(t, 7, bordersOf(7), func(r *rig) {
		p, w, survivors := r.begun()
		r.apply(p, survivors[:3]...)
		r.waits("not heard: n4; without it: )", survivors[:3]...)
		r.apply(p, survivors[3])
		r.start(survivors...)
		r.check(p, w, survivors...)
		r.crash(survivors...)
		r.start(survivors[1])
	})
}

// Apply was forgotten on three of four survivors, which have the majority of the placement group as it was. They go on as
// that group, and the fourth one does not go on beside them: there is one map (trap 128). No plan is made of both.
func TestApplyOnOneSurvivor(t *testing.T) {
	bubble(t, 7, bordersOf(7), func(r *rig) {
		p, w, survivors := r.begun()
		var one *machine
		var others []*machine
		for i, m := range survivors {
			if p.Nodes[i].Placement {
				one = m
			} else {
				others = append(others, m)
			}
		}
		r.apply(p, one)
		r.start(others...)
		r.wait(time.Minute, "the others have the placement group", func() bool {
			ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
			defer cancel()
			_, err := others[0].core.Placement().NodeTable(ctx, true)
			return err == nil
		})
		r.waits("without it: n", one)
		r.crash(others...)
		in := r.collect(survivors...)
		if _, err := recovery.MakePlan(in, recovery.PlanOptions{Dead: []string{"n5", "n6", "n7"}, AcceptLost: true}); err == nil || !strings.Contains(err.Error(), "was applied on node") {
			t.Errorf("a plan of both: %v", err)
		}
		dead := []string{"n5", "n6", "n7", one.id.String()}
		p = r.plan(r.collect(others...), recovery.PlanOptions{Dead: dead, AcceptLost: true})
		r.apply(p, others...)
		r.start(others...)
		r.check(p, w, others...)
	})
}

// A plan gives every group to one of two survivors, and the other one is lost before the first start. The one that has
// everything waits for it; a new plan without the lost one, and --force-new-cluster, let it serve.
func TestForceWithoutALostSurvivor(t *testing.T) {
	bubble(t, 5, nil, func(r *rig) {
		w := r.write(keysOf(1, 2), r.nodes[0])
		time.Sleep(time.Second)
		w.stop()
		time.Sleep(20 * time.Second) // all of it has reached all replicas
		r.crash(r.nodes...)
		p, one, lost := r.givesAllToOne()
		r.apply(p, one)
		r.waits("not heard: n", one)
		var dead []string
		for _, m := range r.nodes {
			if m != one {
				dead = append(dead, m.id.String())
			}
		}
		r.plan(r.collect(one), recovery.PlanOptions{Dead: dead})
		forced, err := recovery.Force(r.t.Context(), one.dir(), time.Now())
		if err != nil || forced == nil {
			t.Fatalf("force without node %s: plan %v, %v", lost.id, forced, err)
		}
		r.start(one)
		r.check(forced, w, one)
		r.crash(one)
		if again, err := recovery.Force(r.t.Context(), one.dir(), time.Now()); err != nil || again != nil {
			t.Errorf("force once more: plan %v, %v", again, err)
		}
	})
}

// givesAllToOne plans for two survivors of which one gets every group.
func (r *rig) givesAllToOne() (p *recovery.Plan, one, other *machine) {
	r.t.Helper()
	for _, one := range r.nodes {
		for _, other := range r.nodes {
			if one == other {
				continue
			}
			var dead []string
			for _, m := range r.nodes {
				if m != one && m != other {
					dead = append(dead, m.id.String())
				}
			}
			p, err := recovery.MakePlan(r.collect(one, other), recovery.PlanOptions{Dead: dead})
			if errors.Is(err, recovery.ErrLostSpans) {
				continue
			}
			if err != nil {
				r.t.Fatal(err)
			}
			all := !slices.ContainsFunc(p.Groups, func(v recovery.Verdict) bool {
				return v.Verdict == recovery.Kept || keyspace.NodeID(v.Node) != one.id
			})
			if all {
				return p, one, other
			}
		}
	}
	r.t.Fatal("no two nodes of which one would get every group")
	return nil, nil, nil
}
