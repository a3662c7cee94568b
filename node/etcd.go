package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
)

// etcdNode answers etcd's questions about this node.
type etcdNode struct{ c *Core }

// statusTimeout bounds what a node without a placement replica asks another for
// its Status; after it the answer leaves those fields out.
const statusTimeout = time.Second

// Leader implements etcdapi.Node.
func (s etcdNode) Leader() keyspace.NodeID { return s.c.client.Leader() }

// Term implements etcdapi.Node.
func (s etcdNode) Term() uint64 { return s.c.client.Term() }

// Status implements etcdapi.Node.
func (s etcdNode) Status() etcdapi.Status {
	st := etcdapi.Status{Revision: s.c.shards.Floor()}
	st.DBQuotaBytes = s.c.engine.QuotaBytes()
	st.DBSizeBytes, st.DBSizeInUseBytes = s.c.engine.DiskBytes()
	ctx, cancel := context.WithTimeout(s.c.ctx, statusTimeout)
	defer cancel()
	if p, err := s.c.client.Status(ctx); err == nil {
		st.RaftIndex, st.AppliedIndex = p.Index, p.Applied
	}
	if m, _ := s.c.client.WatchMap(); m != nil {
		n, _ := m.Node(s.c.o.Self)
		st.Learner = n.State.Learner()
	}
	return st
}

// etcdDowngrades implements etcdapi.Downgrades.
type etcdDowngrades struct{ c *Core }

// GoingBack implements etcdapi.Downgrades. The release before reads this build's oldest version, and no
// later one.
func (d etcdDowngrades) GoingBack(ctx context.Context, linearizable bool) (may, held, ready bool, err error) {
	var all []fsm.Setting
	if linearizable {
		all, _, err = d.c.client.Settings(ctx)
	} else {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, statusTimeout)
		defer cancel()
		all, err = d.c.client.LastSettings(ctx)
	}
	if err != nil {
		return false, false, false, err
	}
	for _, s := range all {
		held = held || s.Name == fsm.SettingUpgradeHeld && len(s.Value) > 0
	}
	m, err := d.c.client.Map(ctx)
	if err != nil {
		return false, false, false, err
	}
	reads := d.c.o.versions()
	return m.ClusterVersion == reads.Oldest && d.c.version.written() == reads.Oldest && reads.Oldest < reads.Newest, held, m.ClusterVersion != 0, nil
}

// Hold implements etcdapi.Downgrades.
func (d etcdDowngrades) Hold(ctx context.Context, hold bool) error {
	return d.c.client.SetUpgradeHeld(ctx, hold)
}

// MoveLeader implements etcdapi.Node.
func (s etcdNode) MoveLeader(ctx context.Context, to keyspace.NodeID) error {
	return s.c.admin.MoveLeader(ctx, to)
}

// place is etcdapi.Options.Place.
func (c *Core) place(key []byte) (span keyspace.Span, leader keyspace.NodeID, clientURLs []string) {
	span, leader = c.router.LeaderOf(key)
	if leader == 0 || leader == c.o.Self {
		return span, leader, nil
	}
	m, _ := c.client.WatchMap()
	if m == nil {
		return span, 0, nil
	}
	n, _ := m.Node(leader)
	return span, leader, n.ClientURLs
}

// learnLoadTimeout bounds how long a request waits for placement before a cluster that is being loaded refuses it.
const learnLoadTimeout = time.Second / 2

// learnLoadAgain is for how long an answer of placement is good enough.
const learnLoadAgain = 100 * time.Millisecond

// loadQuestion is the question to placement that all requests share which a load would have refused.
type loadQuestion struct {
	mu sync.Mutex
	// asked is closed when the one under way has ended; nil without one. answered is when the last one had.
	asked    chan struct{}
	answered clock.Time
}

// learnLoad makes the node know of the load what placement does. It waits at most learnLoadTimeout. Without an answer the node goes by
// what it knows.
func (c *Core) learnLoad(ctx context.Context) {
	q, clk := &c.loadQuestion, c.o.Clock
	ctx, cancel := clock.WithTimeout(ctx, clk, learnLoadTimeout)
	defer cancel()
	q.mu.Lock()
	if q.answered != 0 && clk.Now().Sub(q.answered) < learnLoadAgain {
		q.mu.Unlock()
		return
	}
	if asked := q.asked; asked != nil {
		q.mu.Unlock()
		select {
		case <-asked:
		case <-ctx.Done():
		}
		return
	}
	q.asked = make(chan struct{})
	q.mu.Unlock()
	_, err := c.client.Loading(ctx)
	q.mu.Lock()
	defer q.mu.Unlock()
	if err == nil {
		q.answered = clk.Now()
	}
	close(q.asked)
	q.asked = nil
}

// Face sets what etcd's services ask of the node. Whoever serves them calls their RightsTaken by OnRevoked and
// their LoadBegun by OnLoad.
func (c *Core) Face(o *etcdapi.Options) error {
	passwords, err := auth.NewPasswords(c.o.BcryptCost)
	if err != nil {
		return fmt.Errorf("--bcrypt-cost: %w", err)
	}
	o.Users = &etcdapi.Users{Gate: c.access.gate, Holds: c.MayServe, Tokens: c.access.tokens, Passwords: passwords, Records: c.client}
	o.KV, o.Watches, o.Leases, o.Node, o.Clock, o.Logger = c.router, c.watches, c.grants, etcdNode{c}, c.o.Clock, c.log
	o.Loading = func() (follows bool, err error) {
		l := c.client.KnownLoading()
		return l.Active() && l.Phase == fsm.PhaseFollow, l.Err()
	}
	o.LearnLoad = c.learnLoad
	o.Slow, o.Names = c.slow.Add, c.names.inText
	o.Alarms, o.Downgrades, o.Hashes, o.Answers = etcdAlarms{c}, etcdDowngrades{c}, c.router, c.answers
	o.Place, o.Start = c.place, c.router.Start
	if c.o.Snapshots {
		files, err := newSnapshots(c)
		if err != nil {
			return err
		}
		o.Snapshots = files
	}
	return nil
}
