package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// viewLease says whether what this node knows of rights may be served by. Ask it after the data have been
// read, or right before an event leaves, and compare the access index then too.
//
// Before the node has heard of rights there is no lease. While rights are not checked, the lease lasts for
// ever, because the change that begins the checks waits for every node. While they are checked, each
// question to placement's leader extends the lease.
type viewLease struct {
	clk clock.Clock
	// until is a clock.Time, changed under mu alone.
	until atomic.Int64

	mu sync.Mutex
	// Guarded by mu: whether rights are checked, and by which access index.
	on bool
	at keyspace.AccessIndex
	// from is when the lease was dropped last: an answer to an earlier question proves nothing.
	from clock.Time
}

// The times of until that are none.
const (
	leaseNever   = math.MinInt64
	leaseForever = math.MaxInt64
)

func newViewLease(clk clock.Clock) *viewLease {
	l := &viewLease{clk: clk, from: math.MinInt64}
	l.until.Store(leaseNever)
	return l
}

// Valid says whether this node may serve by the rights that it knows.
func (l *viewLease) Valid() bool {
	until := l.until.Load()
	return until == leaseForever || int64(l.clk.Now()) < until || mutation.Is(mutation.ViewLeaseIgnored)
}

// end ends the lease, unless rights were checked before too: then it lasts on for newer rights.
func (l *viewLease) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.on {
		l.until.Store(leaseNever)
	}
}

// drop ends the lease where time has passed that the clock did not count.
func (l *viewLease) drop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.from = l.clk.Now()
	if l.until.Load() != leaseForever {
		l.until.Store(leaseNever)
	}
}

// take notes what this node serves by from now on.
func (l *viewLease) take(on bool, at keyspace.AccessIndex) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.on, l.at = on, at
	if !on {
		l.until.Store(leaseForever)
	}
}

// taken returns what take has noted last.
func (l *viewLease) taken() (on bool, at keyspace.AccessIndex) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.on, l.at
}

// extend takes the answer to a question in: the access index was now at a moment after it was sent. An index that
// is not taken in yet extends nothing, and neither does a question from before time that was not counted.
func (l *viewLease) extend(now keyspace.AccessIndex, sent, until clock.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.on && now <= l.at && sent > l.from {
		l.until.Store(max(l.until.Load(), int64(until)))
	}
}

// accessSource is what access needs of placement.
type accessSource interface {
	WatchMap() (*fsm.Map, <-chan struct{})
	TakenAccess(ctx context.Context, at keyspace.AccessIndex) (now keyspace.AccessIndex, err error)
}

// access keeps the gate at the rights that placement has. The gate gets each change first. Then watchers
// that it does not cover are cancelled. Only then placement is told that nobody is served by older rights.
type access struct {
	clk      clock.Clock
	election time.Duration
	log      *zap.Logger
	source   accessSource
	tokens   auth.Tokens
	gate     *auth.Gate
	lease    *viewLease
	// note makes durable that rights are checked since an index.
	note func(ctx context.Context, since uint64) error
	// revoked cancels watchers that a view does not cover; nil before there are any.
	revoked atomic.Pointer[func(*auth.View)]
	// loads ends the watchers from before a load; nil before there are any.
	loads atomic.Pointer[func(error)]
	// told says that placement is to be asked at once.
	told wake.Signal

	// The following belong to follow: the view that the gate has, nil before the first, and the index since
	// when rights are checked, as noted.
	view  *auth.View
	noted uint64
	// loaded says that the node knows of a load.
	loaded bool
}

// follow takes in what the node hears of rights.
func (a *access) follow(ctx context.Context) {
	for {
		m, changed := a.source.WatchMap()
		var again <-chan time.Time
		if m != nil {
			a.takeLoad(m.Loading)
			if err := a.take(ctx, m); err != nil && ctx.Err() == nil {
				a.log.Warn("the node goes by new rights, and tells placement once it has noted that they are checked", zap.Error(err))
				again = a.clk.NewTimer(raiseAgain).C()
			}
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// takeLoad ends the watchers from before a load when the node hears of it, perhaps once it is over.
func (a *access) takeLoad(l *fsm.Loading) {
	if l == nil || a.loaded {
		return
	}
	a.loaded = true
	if f := a.loads.Load(); f != nil {
		(*f)(l.Refusal())
	}
}

// take takes one state of the rights in, nil for that before all users.
func (a *access) take(ctx context.Context, m *fsm.Map) error {
	v := a.viewOf(m)
	on := v.Rights.Enabled
	if !on && v.Index < a.noted {
		return nil // an old map: this node has known better before it was started again
	}
	if last := a.view; last == nil || v.Index > last.Index || v.Index == last.Index && v.Permits && !last.Permits {
		if on {
			a.lease.end()
		}
		a.gate.Update(v)
		if f := a.revoked.Load(); f != nil && last != nil && v.Rights.Access > last.Rights.Access && !mutation.Is(mutation.WatchersKept) {
			(*f)(v)
		}
		a.view = v
	}
	if v = a.view; v.Rights.Enabled && v.Rights.EnabledSince > a.noted {
		// From a disk that has forgotten it, this node would serve everybody: it needs no lease for that.
		if err := a.note(ctx, v.Rights.EnabledSince); err != nil {
			return err
		}
		a.noted = v.Rights.EnabledSince
	}
	a.lease.take(v.Rights.Enabled, keyspace.AccessIndex(v.Rights.Access))
	if v.Rights.Enabled {
		a.told.Set()
	}
	return nil
}

// viewOf returns what the gate goes by.
func (a *access) viewOf(m *fsm.Map) *auth.View {
	permits, rows := m.ClusterVersion >= keyspace.VersionAccess, m.Access
	if rows == nil {
		return &auth.View{Rights: rights.New(), Permits: permits}
	}
	v := &auth.View{Rights: rows.State, Index: rows.Changed, Permits: permits}
	if len(rows.Key) == 0 {
		return v
	}
	// One secret at a time: a token from before has another MAC.
	key, err := auth.NewKey(1, rows.Key)
	if err != nil {
		a.log.Error("the secret of tokens is none: nobody can log in", zap.Uint64("index", rows.Changed), zap.Error(err))
		return v
	}
	v.Keys.Current = key
	return v
}

// ask keeps the view lease while rights are checked. It asks at once when they have changed, and then every
// third of the lease.
func (a *access) ask(ctx context.Context) {
	timer := a.clk.NewTimer(a.election)
	defer timer.Stop()
	for {
		select {
		case <-a.told:
		case <-timer.C():
		case <-ctx.Done():
			return
		}
		if pause := a.askOnce(ctx); pause > 0 {
			timer.Reset(pause)
		}
	}
}

// askOnce asks once and returns when to ask again, 0 for never. The lease counts from before the question:
// the answer is about a later moment.
func (a *access) askOnce(ctx context.Context) (pause time.Duration) {
	on, at := a.lease.taken()
	if !on {
		return 0
	}
	sent := a.clk.Now()
	once, cancel := clock.WithTimeout(ctx, a.clk, a.election)
	defer cancel()
	now, err := a.source.TakenAccess(once, at)
	if err != nil {
		return a.election / 8
	}
	a.lease.extend(now, sent, sent.Add(placement.ViewLease(a.election)))
	return a.election
}

// accessKey is where a node notes since which index rights are checked.
var accessKey = engine.NodeLocalKey([]byte("node/rights"))

// storedAccess returns what storeAccess has stored, 0 for nothing.
func (c *Core) storedAccess() (since uint64, err error) {
	b, ok, err := c.engine.Get(accessKey)
	switch {
	case err != nil:
		return 0, fmt.Errorf("read since when rights are checked: %w", err)
	case !ok:
		return 0, nil
	case len(b) != 8:
		return 0, fmt.Errorf("the note since when rights are checked has %d bytes, and should have 8", len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

// storeAccess makes it durable since when rights are checked.
func (c *Core) storeAccess(ctx context.Context, since uint64) error {
	b := c.engine.NewBatch()
	err := b.Set(accessKey, binary.BigEndian.AppendUint64(nil, since))
	if err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = c.engine.Flush(ctx)
	}
	if err = errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("note that rights are checked since index %d: %w", since, err)
	}
	return nil
}
