// Package quarantine knows which replicas of a node are kept closed: their state cannot be trusted,
// or cannot be read. Such a replica comes back with another id, by a snapshot. Notes in the node's
// store keep it closed over restarts. Package raftgroup closes and opens.
//
// A note is written behind everything else: what it keeps away until then is met again after a
// crash. A removal forgets its replicas before it deletes their notes, and Note looks again behind
// its write. So no note outlives the removal of its replica.
package quarantine

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Entry says why a replica is in quarantine.
type Entry struct {
	Replica keyspace.ReplicaID `json:"replica"`
	Reason  string             `json:"reason"`
	Since   time.Time          `json:"since"`
}

// note is an Entry in the store.
type note struct {
	Version uint64 `json:"version"`
	Entry
}

const noteVersion = 1

// List has the replicas in quarantine, one for each group.
type List struct {
	engine  *engine.Engine
	count   prometheus.Gauge
	mu      sync.RWMutex
	entries map[keyspace.GroupID]Entry // guarded by mu
}

const prefix = "raftgroup/quarantine/"

// key is that of a note.
func key(g keyspace.GroupID) []byte {
	return engine.NodeLocalKey(binary.BigEndian.AppendUint64([]byte(prefix), uint64(g)))
}

// Load returns the replicas of which earlier runs have left notes. count follows their number.
func Load(e *engine.Engine, count prometheus.Gauge) (_ *List, err error) {
	l := &List{engine: e, count: count, entries: make(map[keyspace.GroupID]Entry)}
	lower := engine.NodeLocalKey([]byte(prefix))
	upper := append(lower[:len(lower)-1:len(lower)-1], lower[len(lower)-1]+1)
	it, err := e.NewIter(engine.IterOptions{Lower: lower, Upper: upper})
	if err != nil {
		return nil, fmt.Errorf("replicas in quarantine: %w", err)
	}
	for ok := it.First(); ok && err == nil; ok = it.Next() {
		var q note
		var v []byte
		if v, err = it.ValueAndErr(); err == nil {
			if err = json.Unmarshal(v, &q); err == nil {
				err = keyspace.CheckVersion("note of a replica in quarantine", q.Version, noteVersion)
			}
		}
		if id := it.Key()[len(lower):]; err == nil && len(id) != 8 {
			err = fmt.Errorf("note of %d bytes", len(id))
		} else if err == nil {
			l.entries[keyspace.GroupID(binary.BigEndian.Uint64(id))] = q.Entry
		}
	}
	if err = errors.Join(err, it.Error(), it.Close()); err != nil {
		return nil, fmt.Errorf("replicas in quarantine: %w", err)
	}
	count.Set(float64(len(l.entries)))
	return l, nil
}

// Add adds a replica, unless it is there.
func (l *List) Add(g keyspace.GroupID, q Entry) (added bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if have, ok := l.entries[g]; ok && have.Replica == q.Replica {
		return false
	}
	l.entries[g] = q
	l.count.Set(float64(len(l.entries)))
	return true
}

// All returns the replicas in quarantine.
func (l *List) All() map[keyspace.GroupID]Entry {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return maps.Clone(l.entries)
}

// Has says whether the replica is in quarantine, and why.
func (l *List) Has(g keyspace.GroupID, r keyspace.ReplicaID) (Entry, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	q, ok := l.entries[g]
	return q, ok && q.Replica == r
}

// Forget ends the quarantine of replicas that are removed.
func (l *List) Forget(gs []keyspace.GroupID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range gs {
		delete(l.entries, g)
	}
	l.count.Set(float64(len(l.entries)))
}

// Note makes the quarantine of a replica durable, unless that has been removed.
func (l *List) Note(ctx context.Context, g keyspace.GroupID, q Entry) error {
	v, err := json.Marshal(note{noteVersion, q})
	if err == nil {
		err = l.commit(func(b *engine.Batch) error { return b.Set(key(g), v) })
	}
	if _, stands := l.Has(g, q.Replica); err == nil && !stands {
		return l.commit(func(b *engine.Batch) error { return DeleteNote(b, g) })
	}
	if err == nil {
		err = l.engine.Flush(ctx)
	}
	if err != nil {
		return fmt.Errorf("note the quarantine of group %s: %w", g, err)
	}
	return nil
}

// DeleteNote writes the deletion of a group's note.
func DeleteNote(b *engine.Batch, g keyspace.GroupID) error { return b.Delete(key(g)) }

func (l *List) commit(write func(b *engine.Batch) error) error {
	b := l.engine.NewBatch()
	err := write(b)
	if err == nil {
		err = b.Commit()
	}
	return errors.Join(err, b.Close())
}
