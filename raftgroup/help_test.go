package raftgroup

import (
	"testing"

	pb "go.etcd.io/raft/v3/raftpb"
)

// TestWhoBringsWorkRunsThePass: without a worker's goroutine, what is brought is done all the same. It is left to that
// goroutine while a pass is under way, if much waits, and at the end.
func TestWhoBringsWorkRunsThePass(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 1, nil)
		r.startAll()
		defer r.close()
		h := r.nodes[1].host
		w := newWorker(h, 1)
		group := func() *Group { return &Group{h: h, w: w, closed: true, awakeAt: -1} }
		bring := func(gs ...*Group) {
			var all []routed
			for _, g := range gs {
				all = append(all, routed{g, &message{kind: pb.MsgHeartbeat}})
			}
			w.deliver(all)
		}
		left := func() int {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.waitingLocked()
		}
		g := group()
		if bring(g); left() != 1 {
			t.Errorf("a message before the host's start: %d groups wait", left())
		}
		w.mu.running = true
		if w.help(); left() != 0 {
			t.Errorf("after it: %d groups wait", left())
		}
		if bring(g); left() != 0 || g.work != nil || w.mu.inPass {
			t.Errorf("a message: %d groups wait, %+v", left(), g.work)
		}
		w.mu.inPass = true
		if bring(g); left() != 1 {
			t.Errorf("a message beside a pass: %d groups wait", left())
		}
		w.mu.inPass = false
		w.help()
		g.afterRead = 2
		if bring(g); left() != 1 {
			t.Errorf("a message to a group that has read the log's files: %d groups wait", left())
		}
		w.mu.Lock()
		w.passLocked()
		w.mu.Unlock()
		if bring(g); left() != 1 || g.afterRead != 1 {
			t.Errorf("after a visit without a read: %d groups wait, and %d visits are left", left(), g.afterRead)
		}
		g.afterRead = 0
		many := []*Group{g}
		for range helpGroupsMax {
			many = append(many, group())
		}
		if bring(many...); left() != len(many) {
			t.Errorf("messages of %d groups: %d wait", len(many), left())
		}
		w.stop()
		if w.help(); left() != len(many) {
			t.Errorf("at the end: %d groups wait, want %d", left(), len(many))
		}
		if w.run(); left() != 0 {
			t.Errorf("the worker's goroutine has left %d groups", left())
		}
	})
}
