package node

import (
	"context"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// leaseTimer counts the time of leases for placement; package lease is made after it.
type leaseTimer struct{ c *Core }

// Lead implements placement.LeaseObserver.
func (l leaseTimer) Lead(ctx context.Context, term uint64, records func(yield func(*fsm.Lease) bool)) {
	l.c.leases.Lead(ctx, term, records)
}

// Changed implements placement.LeaseObserver.
func (l leaseTimer) Changed(term uint64, changes []fsm.LeaseChange) {
	l.c.leases.Changed(term, changes)
}

// Renew implements placement.LeaseTimes.
func (l leaseTimer) Renew(term uint64, ids []keyspace.LeaseID) ([]placement.LeaseStatus, error) {
	return l.c.leases.Renew(term, ids)
}

// Look implements placement.LeaseTimes.
func (l leaseTimer) Look(term uint64, ids []keyspace.LeaseID) ([]placement.LeaseStatus, error) {
	return l.c.leases.Look(term, ids)
}

// Wait implements placement.LeaseTimes.
func (l leaseTimer) Wait(ctx context.Context, term uint64, ref fsm.LeaseRef) (placement.LeaseStatus, keyspace.Revision, error) {
	return l.c.leases.Wait(ctx, term, ref)
}

// minLeaseTTL is the shortest TTL of a lease in seconds, as etcd reckons it: one and a
// half election timeouts in ticks, rounded down, and that in seconds, rounded up.
func minLeaseTTL(heartbeat, election time.Duration) int64 {
	ticks := int64(election / heartbeat)
	shortest := time.Duration(3*ticks/2) * heartbeat
	return int64((shortest + time.Second - 1) / time.Second)
}
