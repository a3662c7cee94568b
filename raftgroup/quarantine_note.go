package raftgroup

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Quarantine says why a replica is kept closed: its state cannot be trusted, or cannot be read.
// The rest of the node is unharmed. The replica comes back with another id, by a snapshot.
type Quarantine struct {
	Replica keyspace.ReplicaID `json:"replica"`
	Reason  string             `json:"reason"`
	Since   time.Time          `json:"since"`
}

// Quarantiner is an optional interface of a StateMachine. An error that would put a replica in
// quarantine ends the host where the state machine lacks it. Placement's does: placement replaces
// replicas of ranges, and its own only together with the node.
type Quarantiner interface {
	// Quarantined is called from any goroutine, also by Open. The replica answers nobody any
	// more.
	Quarantined(reason string)
}

// quarantineKey is the node's own note of a replica in quarantine.
func quarantineKey(g keyspace.GroupID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte(quarantinePrefix), uint64(g)))
}

const quarantinePrefix = "raftgroup/quarantine/"

// loadQuarantine reads the notes that earlier runs have left.
func (h *Host) loadQuarantine() (err error) {
	h.mu.quarantined = make(map[keyspace.GroupID]Quarantine)
	prefix := engine.NodeLocalKey([]byte(quarantinePrefix))
	upper := append(prefix[:len(prefix)-1:len(prefix)-1], prefix[len(prefix)-1]+1)
	it, err := h.cfg.Engine.NewIter(engine.IterOptions{Lower: prefix, Upper: upper})
	if err != nil {
		return fmt.Errorf("raftgroup: replicas in quarantine: %w", err)
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var q Quarantine
		var v []byte
		if v, err = it.ValueAndErr(); err == nil {
			err = json.Unmarshal(v, &q)
		}
		if id := it.Key()[len(prefix):]; err == nil && len(id) != 8 {
			err = fmt.Errorf("note of %d bytes", len(id))
		} else if err == nil {
			h.mu.quarantined[keyspace.GroupID(binary.BigEndian.Uint64(id))] = q
		}
	}
	if err = errors.Join(err, it.Error(), it.Close()); err != nil {
		return fmt.Errorf("raftgroup: replicas in quarantine: %w", err)
	}
	h.m.quarantined.Set(float64(len(h.mu.quarantined)))
	return nil
}

// Quarantined returns the replicas in quarantine.
func (h *Host) Quarantined() map[keyspace.GroupID]Quarantine {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return maps.Clone(h.mu.quarantined)
}

// inQuarantine says whether the replica is in quarantine, and why.
func (h *Host) inQuarantine(id keyspace.GroupID, r keyspace.ReplicaID) (Quarantine, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	q, ok := h.mu.quarantined[id]
	return q, ok && q.Replica == r
}

// forgetQuarantine ends the quarantine of replicas that are removed.
func (h *Host) forgetQuarantine(ids []keyspace.GroupID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		delete(h.mu.quarantined, id)
	}
	h.m.quarantined.Set(float64(len(h.mu.quarantined)))
}

// shut returns the group of a replica in quarantine. It refuses everything, and no message
// reaches it.
func (h *Host) shut(id keyspace.GroupID, self keyspace.ReplicaID, sm StateMachine) *Group {
	g := &Group{
		h: h, id: id, self: self, sm: sm, log: h.cfg.WAL.Group(id), awakeAt: -1, closed: true,
		zap: h.log.WithLazy(zap.Stringer("group", id), zap.Uint64("replica", uint64(self))),
	}
	g.w, g.a = h.workerOf(id)
	g.broken.Store(true)
	g.public.asleep.Store(true)
	return g
}
