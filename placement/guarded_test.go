package placement

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// proposals is a placement group that notes what is proposed.
type proposals struct {
	Group
	mu  sync.Mutex
	ops []fsm.Effect
}

func (p *proposals) Propose(term uint64, data []byte, dropped func(error)) error {
	c, err := fsm.DecodeCommand(data)
	if err != nil {
		panic(err)
	}
	p.mu.Lock()
	p.ops = append(p.ops, c.Op)
	p.mu.Unlock()
	return p.Group.Propose(term, data, dropped)
}

// take returns what was proposed since it was called last.
func (p *proposals) take() []fsm.Effect {
	p.mu.Lock()
	defer p.mu.Unlock()
	ops := p.ops
	p.ops = nil
	return ops
}

func (n *rigNode) noteProposals() *proposals {
	n.service.mu.Lock()
	defer n.service.mu.Unlock()
	p := &proposals{Group: n.service.group}
	n.service.group = p
	return p
}

// userCommands are what users command, each harmless.
func userCommands(n *rigNode) map[string]func(context.Context) error {
	c := n.client
	return map[string]func(context.Context) error{
		"compact": func(ctx context.Context) error { _, err := c.Compact(ctx, 1); return err },
		"setting": func(ctx context.Context) error { return c.PutSetting(ctx, "s", []byte("v")) },
		"urls":    func(ctx context.Context) error { return c.SetPeerURLs(ctx, 2, []string{"http://elsewhere"}) },
		"drain":   func(ctx context.Context) error { return c.SetNodeState(ctx, 3, fsm.NodeServing, fsm.NodeDraining) },
		"leave":   func(ctx context.Context) error { return c.LeaveNode(ctx, 4, fsm.NodeServing) },
		"remove":  func(ctx context.Context) error { return c.RemoveNode(ctx, 4) },
		"border":  func(ctx context.Context) error { return c.KeepBorder(ctx, []byte("m")) },
		"version": func(ctx context.Context) error { return c.RaiseVersion(ctx, keyspace.VersionAccess) },
		"leader":  func(ctx context.Context) error { return c.TransferLeader(ctx, 1) },
		"operation": func(ctx context.Context) error {
			_, err := c.BeginOperation(ctx, fsm.Operation{Range: 1, Kind: fsm.OperationMove, From: 1, To: 4})
			return err
		},
		"lease": func(ctx context.Context) error { _, _, err := c.GrantLease(ctx, 7, 60, false); return err },
		"role": func(ctx context.Context) error {
			return c.ChangeAccess(ctx, "root", rights.Change{Kind: rights.AddRole, Role: "guarded"})
		},
	}
}

// TestGuardedCommands: a user's command changes nothing if rights were taken after it was permitted. The
// leader looks before it proposes, and the state looks again.
func TestGuardedCommands(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRightsRig(t.Context(), t)
		leader := r.leader()
		old := keyspace.WithPermit(r.ctx, keyspace.PermitAt(leader.service.View().AccessIndex()))
		r.quickly(0, grant("a"))
		r.quickly(0, revoke("a"))
		noted := leader.noteProposals()
		for _, n := range r.nodes {
			for name, command := range userCommands(n) {
				begun := time.Now()
				if err := command(old); !errors.Is(err, kverror.AccessChanged) || time.Since(begun) > 20*time.Millisecond {
					t.Errorf("%s at node %s: %v, after %v", name, n.id, err, time.Since(begun))
				}
			}
		}
		if ops := noted.take(); len(ops) > 0 {
			t.Errorf("proposed %T", ops)
		}
		// The leader's look was before the revocation.
		term := leader.service.machine.leaderState().Term
		if err := leader.service.propose(old, term, fsm.PutSetting{Name: "s", Value: []byte("v")}).Err; !errors.Is(err, kverror.AccessChanged) {
			t.Errorf("proposed before it: %v", err)
		}
		// Commands without a permit are not guarded. Requests that are no commands are not either.
		noted.take()
		for _, ctx := range []context.Context{r.ctx, keyspace.WithPermit(r.ctx, 0)} {
			if err := leader.client.PutSetting(ctx, "s", []byte("w")); err != nil {
				t.Error(err)
			}
		}
		if _, err := leader.client.RangeIDs(old, 4); err != nil {
			t.Error(err)
		}
		if _, err := leader.client.Credential(old, "root"); err != nil {
			t.Error(err)
		}
		for _, op := range noted.take() {
			if _, ok := op.(fsm.Guarded); ok {
				t.Errorf("guarded: %+v", op)
			}
		}
		// A permit that lasts.
		lasts := keyspace.WithPermit(r.ctx, keyspace.PermitAt(leader.service.View().AccessIndex()))
		for name, command := range userCommands(r.nodes[3]) {
			if name == "leader" || name == "border" { // nobody has that border
				continue
			}
			if err := command(lasts); errors.Is(err, kverror.AccessChanged) || errors.Is(err, kverror.Timeout) {
				t.Errorf("%s: %v", name, err)
			}
		}
		guarded := map[string]bool{}
		for _, op := range noted.take() {
			if g, ok := op.(fsm.Guarded); ok {
				guarded[nameOf(g.Op)] = true
			}
		}
		for _, want := range []fsm.Effect{fsm.PutSetting{}, fsm.PutNode{}, fsm.SetNodeState{}, fsm.RemoveNode{}, fsm.RaiseVersion{}, fsm.GrantLease{}, fsm.ChangeAccess{}} {
			if !guarded[nameOf(want)] {
				t.Errorf("%T is not guarded", want)
			}
		}
		r.stopAllAtOnce()
	})
}

// TestGuardedInOldVersions: no guarded command is written before the cluster version that has them.
func TestGuardedInOldVersions(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := accessCluster(t.Context(), t)
		leader := r.leader()
		noted := leader.noteProposals()
		ctx := keyspace.WithPermit(t.Context(), keyspace.PermitAt(0))
		for _, n := range r.nodes {
			if err := n.client.PutSetting(ctx, "s", []byte{byte(n.id)}); err != nil {
				t.Error(err)
			}
		}
		if _, err := leader.service.serve(t.Context(), 1, &request{Kind: requestPutSetting, Permit: 1, Name: "s", Value: []byte("v")}); err != nil {
			t.Error(err)
		}
		for _, op := range noted.take() {
			if _, ok := op.(fsm.Guarded); ok {
				t.Errorf("guarded: %+v", op)
			}
		}
		r.stopAllAtOnce()
	})
}

func nameOf(op fsm.Effect) string { return fmt.Sprintf("%T", op) }
