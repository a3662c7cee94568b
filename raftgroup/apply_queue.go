package raftgroup

import (
	"slices"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// taskKind says what an applyTask is.
type taskKind uint8

const (
	taskEntries taskKind = iota
	taskLeader
	taskCall
	taskInstall
)

// applyTask is one step in a group's order: entries to apply, a change of leader, a
// callback, or a snapshot to install.
type applyTask struct {
	kind taskKind
	msg  *pb.Message // taskEntries: raft's MsgStorageApply
	// Of taskEntries: whose acknowledgement committed them, how long they waited for this node's disk then, and when
	// they were handed out.
	by      keyspace.NodeID
	disk    time.Duration
	at      clock.Time
	leader  LeaderState
	call    func()
	install *install
}

// startApplies queues the tasks of a pass.
func (h *Host) startApplies(tasks []scheduledTask) {
	for _, a := range h.appliers {
		a.enqueue(tasks)
	}
}

func (a *applier) enqueue(tasks []scheduledTask) {
	if !slices.ContainsFunc(tasks, func(k scheduledTask) bool { return k.g.a == a }) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range tasks {
		if g := tasks[i].g; g.a == a {
			g.apply.tasks = append(g.apply.tasks, tasks[i].t)
			a.queueLocked(g)
		}
	}
}

func (a *applier) queueLocked(g *Group) {
	if !g.apply.queued && !g.apply.held && len(g.apply.tasks) > 0 {
		g.apply.queued = true
		a.mu.queue = append(a.mu.queue, g)
		a.cond.Signal()
	}
}

// hold stops the group's tasks until release.
func (a *applier) hold(g *Group) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g.apply.held = true
}

// release lets the group's tasks continue.
func (a *applier) release(g *Group) {
	a.mu.Lock()
	defer a.mu.Unlock()
	g.apply.held = false
	a.queueLocked(g)
}
