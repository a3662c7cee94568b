package placement

import (
	"context"
	"slices"
	"sync"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// registration is a span that is to be registered with a lease.
type registration struct {
	fsm.RegisterLease
	done func(keyspace.LeaseRegistration, error)
}

// registrations holds those that wait while a call with others is under way.
type registrations struct {
	mu sync.Mutex
	// Guarded by mu. running counts those that wait and those under way.
	waiting []registration
	running int
	closed  bool

	wake wake.Signal
}

// maxRegistrations bounds those that wait or are under way. As a rule one call has all that wait, so that nobody waits for more
// than two.
const maxRegistrations = fsm.MaxLeaseBatch

// maxRegisteredBytes bounds the borders of spans in a call, which is an entry of the placement group.
const maxRegisteredBytes = 512 << 10

func (g *registrations) init() { g.wake = wake.New() }

func (g *registrations) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// take returns the registrations that have waited longest, as many as go into one call.
func (g *registrations) take() (batch []registration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for size := 0; n < len(g.waiting); n++ {
		size += len(g.waiting[n].Span.Start) + len(g.waiting[n].Span.End)
		if size > maxRegisteredBytes && n > 0 {
			break
		}
	}
	batch = slices.Clone(g.waiting[:n])
	g.waiting = slices.Delete(g.waiting, 0, n)
	return batch
}

// Register registers a span with a lease, as RegisterLease does, and calls done exactly once,
// from a goroutine of the Client's; only after Stop, with Stopped, before Register returns. If
// the answer does not come in time, done gets a Timeout: the span may be registered or not.
// Registrations of one node that are made at a time go together.
func (c *Client) Register(id keyspace.LeaseID, span keyspace.Span, done func(keyspace.LeaseRegistration, error)) {
	g := &c.registrations
	g.mu.Lock()
	closed := g.closed
	switch {
	case closed:
	case g.running >= maxRegistrations:
		c.wait.Go(func() {
			done(keyspace.LeaseRegistration{}, kverror.New(kverror.TooManyRequests, "%d registrations with leases under way", maxRegistrations))
		})
	default:
		g.running++
		g.waiting = append(g.waiting, registration{fsm.RegisterLease{ID: id, Span: span}, done})
		g.wake.Set()
	}
	g.mu.Unlock()
	if closed {
		done(keyspace.LeaseRegistration{}, kverror.New(kverror.Stopped, "register a span with lease %x", int64(id)))
	}
}

// registerLoop makes the calls for several registrations, one at a time.
func (c *Client) registerLoop() {
	g := &c.registrations
	for {
		select {
		case <-g.wake:
		case <-c.ctx.Done():
		}
		for batch := g.take(); len(batch) > 0; batch = g.take() {
			c.registerBatch(batch)
		}
		if c.ctx.Err() != nil {
			return // nothing more comes: Stop has closed the queue first
		}
	}
}

// registerBatch registers spans by one call. What that leaves open gets a call of its own: it waits for a lease that ends, or
// learns why a record cannot list the span.
func (c *Client) registerBatch(batch []registration) {
	if c.o.Written() < keyspace.VersionLeases {
		for i := range batch {
			c.registerAlone(&batch[i])
		}
		return
	}
	q := leaseRequest{Op: leaseRegisterAll}
	for i := range batch {
		q.Registrations = append(q.Registrations, batch[i].RegisterLease)
	}
	ctx, cancel := clock.WithTimeout(c.ctx, c.o.Clock, c.o.SequenceTimeout)
	defer cancel()
	a, err := c.askLease(ctx, q, true)
	if err == nil && len(a.Leases) != len(batch) {
		err = kverror.New(kverror.Internal, "%d registrations with leases answered of %d", len(a.Leases), len(batch))
	}
	for i := range batch {
		switch r := &batch[i]; {
		case err != nil:
			c.registered(r, keyspace.LeaseRegistration{}, err)
		case a.Leases[i].Phase == LeaseGone:
			c.registered(r, keyspace.LeaseRegistration{}, kverror.LeaseNotFound)
		case a.Leases[i].Phase == LeaseLive:
			c.registered(r, keyspace.LeaseRegistration{Incarnation: a.Leases[i].Incarnation}, nil)
		default:
			c.registerAlone(r)
		}
	}
}

func (c *Client) registerAlone(r *registration) {
	c.wait.Go(func() {
		reg, err := c.RegisterLease(c.ctx, r.ID, r.Span)
		c.registered(r, reg, err)
	})
}

// registered answers a registration.
func (c *Client) registered(r *registration, reg keyspace.LeaseRegistration, err error) {
	c.registrations.mu.Lock()
	c.registrations.running--
	c.registrations.mu.Unlock()
	if err != nil && c.ctx.Err() != nil {
		err = kverror.New(kverror.Stopped, "register a span with lease %x", int64(r.ID))
	}
	r.done(reg, err)
}

// RegisterLease adds a span to those where keys of a lease can be. It waits while the end of
// the lease is decided and not done, and for an answer up to SequenceTimeout. LeaseNotFound where there is no such lease;
// TooManyRanges where it has keys in too many.
func (c *Client) RegisterLease(ctx context.Context, id keyspace.LeaseID, span keyspace.Span) (keyspace.LeaseRegistration, error) {
	for {
		asking, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.SequenceTimeout)
		a, err := c.one(asking, leaseRequest{Op: leaseRegister, ID: id, Span: span}, true)
		cancel()
		if err != nil {
			return keyspace.LeaseRegistration{}, err
		}
		if st := a.Leases[0]; st.Phase == LeaseLive {
			return keyspace.LeaseRegistration{Incarnation: st.Incarnation}, nil
		}
		if _, _, err := c.awaitLeaseEnd(ctx, a.Leases[0].LeaseRef); err != nil {
			return keyspace.LeaseRegistration{}, err
		}
	}
}
