package replicas

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/lifecycle"
	"github.com/skeindb/skein/shard/command"
)

// maxUnknown bounds the unknown replicas that wait to be looked into. Peers repeat what is
// dropped.
const maxUnknown = 1024

// New returns a Manager. Start starts its goroutines, Open opens what the engine has.
func New(cfg Config) *Manager {
	m := &Manager{
		Tombstones: TombstonesOf(cfg.Engine),
		cfg:        cfg, log: cfg.Logger, kickChildren: wake.New(), claims: make(map[keyspace.RangeID]keyspace.Span),
	}
	m.lifecycle = lifecycle.New(lifecycle.Config{
		Self: cfg.Self, Clock: cfg.Clock, Owner: m, Tombstones: m.Tombstones, MaxUnknown: maxUnknown, Logger: cfg.Logger,
	})
	return m
}

// TombstonesOf has the notes of the replicas of ranges that have left a node.
func TombstonesOf(e *engine.Engine) lifecycle.Tombstones {
	return lifecycle.Tombstones{Engine: e, Key: leftKey}
}

// leftKey is the node's own note of the newest replica of a range that has left it.
func leftKey(g keyspace.GroupID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte("shard/left/"), uint64(g.Range())))
}

// Start starts the goroutines by run. They end with ctx.
func (m *Manager) Start(ctx context.Context, run func(f func())) {
	run(func() { m.lifecycle.RunGC(ctx) })
	run(func() { m.lifecycle.RunOpener(ctx) })
	run(func() { m.openChildren(ctx) })
}

// Open opens every replica that the engine holds. It is called once, before messages of peers
// come.
func (m *Manager) Open(ctx context.Context) error {
	if err := m.cfg.Groups.FinishRemovals(ctx, m.deleter()); err != nil {
		return fmt.Errorf("shard: open the replicas: %w", err)
	}
	type stored struct {
		id keyspace.RangeID
		a  engine.Applied
	}
	var all []stored
	err := m.cfg.Engine.VisitApplied(func(g keyspace.GroupID, a engine.Applied) error {
		if !g.IsSystem() {
			all = append(all, stored{g.Range(), a})
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("shard: open the replicas: %w", err)
	}
	txns, err := command.LoadAllTxns(m.cfg.Engine)
	for i := range all {
		id := all[i].id
		s := Start{Range: id, Applied: &all[i].a, Txns: txns[id]}
		if err != nil { // of some range
			s.Txns, s.Unreadable = command.LoadTxns(m.cfg.Engine, id)
		}
		if err := m.openRecord(&s); err != nil {
			return err
		}
	}
	return nil
}

// Unknown is raftgroup.Config's: a node speaks to a replica that is not open here. Either the
// parent has not applied the split yet that makes it, or a snapshot has carried the parent past
// the split, and nobody else makes it. It does not block.
func (m *Manager) Unknown(from keyspace.NodeID, g keyspace.GroupID, to keyspace.ReplicaID) {
	if !g.IsSystem() {
		m.lifecycle.Unknown(lifecycle.Unknown{From: from, Group: g, To: to})
	}
}
