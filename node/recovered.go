package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/offline"
)

// awaitLogInterval lies between two log lines about the survivors for which a node waits.
const awaitLogInterval = 10 * time.Second

// recovered is what the node knows of the recovery plan that was applied to its directory while it did not run
// (package recovery). It implements transport.Recovery.
//
// The plan takes members out of groups. A survivor to which it was not applied does not know that. With others like it
// it may go on as the group that the plan has ended: two of three replicas of placement would be a second map. So no node goes on by a plan before all its survivors have it, whatever the operator forgets.
type recovered struct {
	note offline.Note
	plan uint64
	log  *zap.Logger

	mu sync.Mutex // guards what follows
	// awaited are the other survivors that have not said yet that they have the plan. What those said that run
	// without it is in otherwise.
	awaited   map[keyspace.NodeID]offline.Survivor
	otherwise map[keyspace.NodeID]bool
	// all is closed when awaited becomes empty. open says that the node has noted that, and may have sessions.
	all    chan struct{}
	open   bool
	warned bool
}

func openRecovered(e engine.Reader, self keyspace.NodeID, log *zap.Logger) (*recovered, error) {
	note, _, err := offline.ReadNote(e)
	if err != nil {
		return nil, err
	}
	r := &recovered{note: note, log: log, awaited: map[keyspace.NodeID]offline.Survivor{}, otherwise: map[keyspace.NodeID]bool{}, all: make(chan struct{})}
	if r.plan, err = note.Number(); err != nil {
		return nil, err
	}
	for _, s := range note.Awaits(self) {
		r.awaited[s.Node] = s
	}
	if r.open = len(r.awaited) == 0; r.open {
		close(r.all)
	}
	return r, nil
}

// Now implements transport.Recovery.
func (r *recovered) Now() (plan uint64, together bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.plan, r.plan != 0 && len(r.awaited) == 0
}

// Meet implements transport.Recovery. A node that has come later has no plan, and needs none.
func (r *recovered) Meet(peer keyspace.NodeID, plan uint64, together bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open {
		if r.plan == 0 && plan != 0 && !together && !r.warned {
			r.warned = true
			r.log.Warn("a peer waits until all survivors of a recovery have applied its plan: if this node is one of them, stop it and run skein recover apply here",
				zap.Stringer("peer", peer), zap.String("plan", fmt.Sprintf("%016x", plan)))
		}
		return true
	}
	before := len(r.awaited)
	switch {
	case plan != r.plan:
		r.otherwise[peer] = true
	case together:
		clear(r.awaited)
	default:
		delete(r.awaited, peer)
		delete(r.otherwise, peer)
	}
	if before > 0 && len(r.awaited) == 0 {
		close(r.all)
	}
	return false
}

// missing names the survivors that are awaited: those that have not been heard, and those that run without the plan.
func (r *recovered) missing() (silent, without string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s, w []string
	for id := range r.awaited {
		if r.otherwise[id] {
			w = append(w, r.awaited[id].String())
		} else {
			s = append(s, r.awaited[id].String())
		}
	}
	slices.Sort(s)
	slices.Sort(w)
	return strings.Join(s, ", "), strings.Join(w, ", ")
}

// awaitSurvivors waits until all survivors of the recovery have applied its plan, and notes it: later starts do not
// wait.
func (c *Core) awaitSurvivors(ctx context.Context) error {
	r := c.recovered
	if r.open { // nobody else has it yet
		return nil
	}
	c.o.enter("wait for the other survivors of the recovery")
	for waits := true; waits; {
		timer := c.o.Clock.NewTimer(awaitLogInterval)
		select {
		case <-r.all:
			waits = false
		case <-ctx.Done():
			silent, without := r.missing()
			timer.Stop()
			return fmt.Errorf("wait until all survivors have recovery plan %s (not heard: %s; without it: %s): %w", r.note.Plan, silent, without, ctx.Err())
		case <-timer.C():
			silent, without := r.missing()
			c.log.Warn("this node goes on once all survivors of its recovery have applied the plan: start those that are not heard; stop those that run without it, and run skein recover apply there; if one is lost, collect from the others and plan again without it",
				zap.String("plan", r.note.Plan), zap.String("not heard", silent), zap.String("without the plan", without))
		}
		timer.Stop()
	}
	r.note.Together = true
	if err := offline.WriteNote(ctx, c.engine, r.note); err != nil {
		return err
	}
	c.log.Info("all survivors have applied the recovery plan: this node goes on", zap.String("plan", r.note.Plan))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open = true
	return nil
}
