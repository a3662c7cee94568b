package placement

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// renewal is a keepalive that waits for its call.
type renewal struct {
	id keyspace.LeaseID
	ch chan renewed
}

type renewed struct {
	status   LeaseStatus
	revision keyspace.Revision
	err      error
}

// renewQueue holds the keepalives that wait while a call with others is under way.
type renewQueue struct {
	mu sync.Mutex
	// Guarded by mu.
	waiting []renewal
	closed  bool

	wake wake.Signal
}

func (q *renewQueue) init() { q.wake = wake.New() }

// LeaseInfo is what a look at a lease finds.
type LeaseInfo struct {
	// Phase is LeaseGone or LeaseLive.
	LeaseStatus
	// Spans are where keys of it can be.
	Spans []keyspace.Span
	// Revision is the current one.
	Revision keyspace.Revision
}

func (c *Client) askLease(ctx context.Context, q leaseRequest, repeat bool) (leaseResponse, error) {
	a, err := c.ask(ctx, &request{Kind: requestLease, Lease: q}, repeat)
	return a.Lease, err
}

// one is a request about one lease. An answer about none is an older or a newer node's.
func (c *Client) one(ctx context.Context, q leaseRequest, repeat bool) (leaseResponse, error) {
	a, err := c.askLease(ctx, q, repeat)
	if err == nil && len(a.Leases) != 1 {
		err = kverror.New(kverror.Internal, "an answer about %d leases to a question about %x", len(a.Leases), int64(q.ID))
	}
	return a, err
}

// GrantLease grants a lease with the id for at least ttl seconds, and returns what was granted
// and the current revision. repeat says that nobody else can have chosen the id. An attempt of
// unknown fate is then made again, and an existing lease is the one that it made. The errors
// are etcd's: LeaseTTLTooLarge, LeaseExists, NoSpace, and TooManyLeases.
func (c *Client) GrantLease(ctx context.Context, id keyspace.LeaseID, ttl int64, repeat bool) (int64, keyspace.Revision, error) {
	if ttl > fsm.MaxLeaseTTL {
		return 0, 0, kverror.New(kverror.LeaseTTLTooLarge, "%d seconds", ttl)
	}
	a, err := c.one(ctx, leaseRequest{Op: leaseGrant, ID: id, TTL: max(ttl, 0)}, repeat)
	if repeat && err != nil && kverror.Of(err).Kind == kverror.LeaseExists {
		a, err = c.one(ctx, leaseRequest{Op: leaseLook, ID: id}, true)
	}
	if err != nil {
		return 0, 0, err
	}
	return a.Leases[0].TTL, a.Revision, nil
}

// KeepLeaseAlive begins the TTL of a lease anew and returns it, 0 where there is no such
// lease, and a revision that was current before. The lease does not expire before the
// TTL has passed since the call. A lease that has expired, and is still there, is waited
// for. Calls of one node that are made at a time go together.
func (c *Client) KeepLeaseAlive(ctx context.Context, id keyspace.LeaseID) (int64, keyspace.Revision, error) {
	for {
		a, err := c.renew(ctx, id)
		if err != nil {
			return 0, 0, c.leaderless(err)
		}
		switch a.status.Phase {
		case LeaseLive:
			return a.status.TTL, a.revision, nil
		case LeaseGone:
			return 0, a.revision, nil
		case LeaseEnding, LeaseUnregistered:
		}
		wait := leaseRequest{Op: leaseWait, ID: id, Incarnation: a.status.Incarnation}
		if _, err = c.one(ctx, wait, true); err == nil {
			err = patient(ctx, id)
		}
		if err != nil {
			return 0, 0, c.leaderless(err)
		}
	}
}

// leaderless is etcd's word for who waited in vain because nobody leads.
func (c *Client) leaderless(err error) error {
	if kverror.Of(err).Kind == kverror.Timeout && c.Leader() == 0 {
		return kverror.New(kverror.NoLeader, "%v", err)
	}
	return err
}

// renew hands a keepalive to the loop and waits for its answer.
func (c *Client) renew(ctx context.Context, id keyspace.LeaseID) (renewed, error) {
	w := renewal{id, make(chan renewed, 1)}
	q := &c.renewals
	q.mu.Lock()
	switch {
	case q.closed:
		q.mu.Unlock()
		return renewed{}, kverror.Stopped
	case len(q.waiting) >= c.o.MaxQueued:
		q.mu.Unlock()
		return renewed{}, kverror.New(kverror.TooManyRequests, "%d keepalives wait", c.o.MaxQueued)
	}
	q.waiting = append(q.waiting, w)
	q.mu.Unlock()
	q.wake.Set()
	a, err := clock.Await(ctx, w.ch)
	if err != nil {
		return renewed{}, kverror.New(kverror.Timeout, "keepalive of lease %x: %v", int64(id), err)
	}
	return a, a.err
}

// renewLoop makes the calls for keepalives, one at a time.
func (c *Client) renewLoop() {
	q := &c.renewals
	for {
		select {
		case <-q.wake:
		case <-c.ctx.Done():
		}
		for {
			batch := q.take(c.ctx.Err() != nil)
			if len(batch) == 0 {
				break
			}
			c.renewBatch(batch)
		}
		if c.ctx.Err() != nil {
			return
		}
	}
}

// take returns the keepalives that have waited longest, as many as go into one call.
func (q *renewQueue) take(closing bool) []renewal {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = q.closed || closing
	n := min(len(q.waiting), fsm.MaxLeaseBatch)
	batch := slices.Clone(q.waiting[:n])
	q.waiting = slices.Delete(q.waiting, 0, n)
	return batch
}

func (c *Client) renewBatch(batch []renewal) {
	ids := make([]keyspace.LeaseID, len(batch))
	for i := range batch {
		ids[i] = batch[i].id
	}
	ctx, cancel := clock.WithTimeout(c.ctx, c.o.Clock, c.o.SequenceTimeout)
	defer cancel()
	a, err := c.askLease(ctx, leaseRequest{Op: leaseRenew, IDs: ids}, true)
	if err == nil && len(a.Leases) != len(ids) {
		err = kverror.New(kverror.Internal, "%d keepalives answered of %d", len(a.Leases), len(ids))
	}
	if err != nil && c.ctx.Err() != nil {
		err = kverror.Stopped
	}
	for i := range batch {
		r := renewed{revision: a.Revision, err: err}
		if err == nil {
			r.status = a.Leases[i]
		}
		batch[i].ch <- r
	}
}

// LookLease returns what is known of a lease. One whose end is decided is waited for.
func (c *Client) LookLease(ctx context.Context, id keyspace.LeaseID) (LeaseInfo, error) {
	for {
		a, err := c.one(ctx, leaseRequest{Op: leaseLook, ID: id}, true)
		if err != nil {
			return LeaseInfo{}, err
		}
		if st := a.Leases[0]; st.Phase != LeaseEnding {
			return LeaseInfo{LeaseStatus: st, Spans: a.Spans, Revision: a.Revision}, nil
		}
		if _, _, err := c.awaitLeaseEnd(ctx, a.Leases[0].LeaseRef); err != nil {
			return LeaseInfo{}, err
		}
	}
}

// ListLeases returns all leases, those first that expire first, and the current
// revision. Leases whose end is decided are waited for, but for those that it was tried in
// vain to end: they are listed.
func (c *Client) ListLeases(ctx context.Context) ([]LeaseStatus, keyspace.Revision, error) {
	live, ending, rev, err := c.listLeases(ctx)
	for err == nil && len(ending) > 0 {
		if err = c.awaitLeaseEnds(ctx, ending[:min(len(ending), maxLeaseWaits)]); err == nil {
			err = patient(ctx, ending[0].ID)
		}
		if err != nil {
			break
		}
		// A lease that begins to end only now existed when the list was asked for.
		asked := make(map[fsm.LeaseRef]bool, len(ending))
		for _, ref := range ending {
			asked[ref] = true
		}
		var now []LeaseStatus
		now, ending, rev, err = c.listLeases(ctx)
		ending = slices.DeleteFunc(ending, func(ref fsm.LeaseRef) bool { return !asked[ref] })
		for _, st := range now {
			if asked[st.LeaseRef] {
				live = append(live, st)
			}
		}
	}
	if err != nil {
		return nil, 0, err
	}
	slices.SortStableFunc(live, func(a, b LeaseStatus) int { return cmp.Compare(a.Remaining, b.Remaining) })
	return live, rev, nil
}

// listLeases returns the leases that are there, those whose end is decided apart, and the
// current revision.
func (c *Client) listLeases(ctx context.Context) (live []LeaseStatus, ending []fsm.LeaseRef, rev keyspace.Revision, err error) {
	q := leaseRequest{Op: leaseList, ID: minLeaseID}
	for {
		a, err := c.askLease(ctx, q, true)
		if err != nil {
			return nil, nil, 0, err
		}
		rev = max(rev, a.Revision)
		for _, st := range a.Leases {
			switch st.Phase {
			case LeaseLive:
				live = append(live, st)
			case LeaseEnding:
				ending = append(ending, st.LeaseRef)
			case LeaseGone, LeaseUnregistered:
			}
		}
		if !a.More || len(a.Leases) == 0 {
			return live, ending, rev, nil
		}
		q.ID = a.Leases[len(a.Leases)-1].ID + 1
	}
}

// maxLeaseWaits bounds the ends of leases that one list waits for at a time.
const maxLeaseWaits = 64

// awaitLeaseEnds waits a while for the ends of several leases, at most maxLeaseWaits.
func (c *Client) awaitLeaseEnds(ctx context.Context, refs []fsm.LeaseRef) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, ref := range refs {
		g.Go(func() error {
			_, err := c.one(ctx, leaseRequest{Op: leaseWait, ID: ref.ID, Incarnation: ref.Incarnation}, true)
			return err
		})
	}
	return g.Wait()
}

// minLeaseID is the lowest id: clients may choose negative ones.
const minLeaseID keyspace.LeaseID = -1 << 63

// RevokeLease ends a lease and deletes its keys. It returns when that is done, with the
// revision of the deletion, or a later one. LeaseNotFound where there is no such lease,
// or where somebody else has ended it.
func (c *Client) RevokeLease(ctx context.Context, id keyspace.LeaseID) (keyspace.Revision, error) {
	return c.revokeLease(ctx, leaseRequest{Op: leaseRevoke, ID: id})
}

// RevokeLeaseChecked is RevokeLease on behalf of somebody who may delete the lease's keys as of a revision. If one of
// them was written later, the lease stays and the error is KeysChanged.
func (c *Client) RevokeLeaseChecked(ctx context.Context, ref fsm.LeaseRef, checked keyspace.Revision) (keyspace.Revision, error) {
	return c.revokeLease(ctx, leaseRequest{Op: leaseRevokeChecked, ID: ref.ID, Incarnation: ref.Incarnation, Checked: checked})
}

func (c *Client) revokeLease(ctx context.Context, q leaseRequest) (keyspace.Revision, error) {
	a, err := c.one(ctx, q, false)
	if err != nil {
		return 0, err
	}
	rev, stays, err := c.awaitLeaseEnd(ctx, a.Leases[0].LeaseRef)
	switch {
	case err != nil:
		return 0, err
	case stays:
		// Of two revokes that check, only one is decided. The other one shares its outcome.
		return 0, kverror.New(kverror.KeysChanged, "lease %x was to be revoked, and stays", int64(q.ID))
	case a.Leases[0].Phase == LeaseEnding:
		return 0, kverror.LeaseNotFound
	}
	return rev, nil
}

// patient is the end of the patience with a lease that does not end.
func patient(ctx context.Context, id keyspace.LeaseID) error {
	if ctx.Err() == nil {
		return nil
	}
	return kverror.New(kverror.Timeout, "lease %x ends, and has not yet: %v", int64(id), ctx.Err())
}

// awaitLeaseEnd waits until a lease whose end is decided has ended, and returns the
// revision of the deletion of its keys, or a later one. It also returns when the decision is taken back: the lease
// stays.
func (c *Client) awaitLeaseEnd(ctx context.Context, ref fsm.LeaseRef) (rev keyspace.Revision, stays bool, err error) {
	for {
		a, err := c.one(ctx, leaseRequest{Op: leaseWait, ID: ref.ID, Incarnation: ref.Incarnation}, true)
		if err != nil {
			return 0, false, err
		}
		if phase := a.Leases[0].Phase; phase != LeaseEnding {
			return a.Revision, phase == LeaseLive, nil
		}
		if err := patient(ctx, ref.ID); err != nil {
			return 0, false, err
		}
	}
}
