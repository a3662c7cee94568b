package placement

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/driver"
)

// ClientOptions are what a Client is made of. Zero values of the optional fields
// mean the default in the comment.
type ClientOptions struct {
	// Self and Boot are this node and its present run; Service is its own. All are
	// required, as are Clock and Bus.
	Self    keyspace.NodeID
	Boot    keyspace.BootID
	Service *Service
	Clock   clock.Clock
	Bus     Bus
	// Peers are the nodes that are asked while no leader and no node table is known:
	// the founders or the nodes to join. Required unless this node is alone.
	Peers []keyspace.NodeID

	// Measurer tells what placement decides by of this node. Without one the node says
	// nothing of itself, and nothing is decided for the ranges that it leads.
	Measurer driver.Measurer
	// Written returns the version in which the node writes. Default keyspace.OldestVersion.
	Written func() keyspace.Version

	// AttemptTimeout is how long one attempt at one node may take before the node
	// counts as lost and others are asked. Default 1 s, an election timeout.
	AttemptTimeout time.Duration
	// SequenceTimeout bounds how long a request for revisions waits, from Sequence to
	// done. Default 5 s.
	SequenceTimeout time.Duration
	// MaxQueued bounds the requests for revisions that wait. Default 65536.
	MaxQueued int

	Logger  *zap.Logger
	Metrics *Metrics
}

// Client is a node's access to the placement group and to the sequencer, wherever
// they are. Its methods may be called from many goroutines.
type Client struct {
	o ClientOptions

	ctx    context.Context
	cancel context.CancelFunc
	wait   sync.WaitGroup

	queue         sequenceQueue
	renewals      renewQueue
	reports       reportQueue
	reporter      nodeReporter
	maps          mapCache
	registrations registrations

	mu sync.Mutex
	// Guarded by mu: the leader as last heard, of which term; 0 is unknown. turn is
	// the next of the candidates to be asked where it is unknown.
	leader keyspace.NodeID
	term   uint64
	turn   int
	// running, guarded by mu, are the attempts under way that may be made again
	// elsewhere.
	running map[*attempt]struct{}
	// moved is closed and made anew when leader changes, for those who follow it; nil
	// until somebody does.
	moved chan struct{}
}

// attempt is one attempt at one node.
type attempt struct {
	node   keyspace.NodeID
	cancel context.CancelFunc
}

// NewClient returns a node's Client. Start follows.
func NewClient(o ClientOptions) *Client {
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = time.Second
	}
	if o.SequenceTimeout == 0 {
		o.SequenceTimeout = 5 * time.Second
	}
	if o.MaxQueued == 0 {
		o.MaxQueued = 1 << 16
	}
	if o.Written == nil {
		o.Written = func() keyspace.Version { return keyspace.OldestVersion }
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.Metrics == nil {
		o.Metrics = NewMetrics(nil)
	}
	c := &Client{o: o, running: make(map[*attempt]struct{})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.queue.init()
	c.renewals.init()
	c.registrations.init()
	c.reports.init()
	c.reporter.init()
	c.maps.init()
	o.Service.serveClient(c)
	return c
}

// Start starts the Client's goroutines. Stop ends them.
func (c *Client) Start() {
	c.wait.Go(c.sequenceLoop)
	c.wait.Go(c.refuseLoop)
	c.wait.Go(c.renewLoop)
	c.wait.Go(c.registerLoop)
	c.wait.Go(c.reportLoop)
	c.wait.Go(c.followReplica)
	c.wait.Go(c.feedLoop)
	if c.o.Measurer != nil {
		c.wait.Go(c.nodeReportLoop)
	}
}

// Stop ends the Client and waits for its goroutines. Requests for revisions that
// wait are answered with Stopped.
func (c *Client) Stop() {
	c.registrations.close()
	c.cancel()
	c.wait.Wait()
	c.drain()
}

// Pauses between attempts: at first short, since a new leader is usually there
// within milliseconds, then longer.
const (
	attemptPauseMin = 2 * time.Millisecond
	attemptPauseMax = 100 * time.Millisecond
	// maxHops is how many hints are followed without a pause: two nodes that name each
	// other must not be asked in a circle.
	maxHops = 2
)
