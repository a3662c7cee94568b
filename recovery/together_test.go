package recovery_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

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
