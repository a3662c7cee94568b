package mirror

import (
	"context"
	"maps"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
)

// lookupLeases notes the granted TTLs of leases that are not known yet. One that is gone at the
// source is left out: its keys go with a later revision.
func (m *Mirror) lookupLeases(ctx context.Context, ids []keyspace.LeaseID) error {
	m.mu.Lock()
	var unknown []keyspace.LeaseID
	for _, id := range ids {
		if _, known := m.leases[id]; !known {
			unknown = append(unknown, id)
		}
	}
	m.mu.Unlock()
	ttls, err := diff.TTLs(ctx, m.o.SourceData, unknown)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// What was looked up saves time at the cut-over. It is no loss to forget what is not
	// asked for now.
	if len(m.leases) > maxLeases {
		asked := make(map[keyspace.LeaseID]bool, len(ids))
		for _, id := range ids {
			asked[id] = true
		}
		maps.DeleteFunc(m.leases, func(id keyspace.LeaseID, _ int64) bool { return !asked[id] })
	}
	for id, ttl := range ttls {
		m.leases[id] = ttl
	}
	return nil
}

// maxLeases bounds the leases whose TTLs are kept while the source is followed.
const maxLeases = 1 << 20

// ttls returns the granted TTLs of those leases that are known.
func (m *Mirror) ttls(ids []keyspace.LeaseID) map[keyspace.LeaseID]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[keyspace.LeaseID]int64{}
	for _, id := range ids {
		if ttl, known := m.leases[id]; known {
			out[id] = ttl
		}
	}
	return out
}
