package placement

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/transport"
)

// Map returns the node's newest copy of the range map and the node table, waiting
// for the first one until ctx ends. It may be older than what ranges say of
// themselves.
func (c *Client) Map(ctx context.Context) (*fsm.Map, error) {
	for {
		m, changed := c.maps.current()
		if m != nil {
			return m, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, kverror.New(kverror.NoLeader, "no range map yet: %v", ctx.Err())
		case <-c.ctx.Done():
			return nil, kverror.New(kverror.Stopped, "no range map yet")
		}
	}
}

// WatchMap returns the node's newest copy, nil if there is none yet, and a channel
// that is closed when there is a newer one.
func (c *Client) WatchMap() (*fsm.Map, <-chan struct{}) { return c.maps.current() }

// Descriptor returns the row of a range in the node's newest copy of the map.
func (c *Client) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	m, _ := c.maps.current()
	if m == nil {
		return keyspace.Descriptor{}, false
	}
	g, ok := m.ByID(id)
	return g.Descriptor, ok
}

// Ranges returns how many ranges the node's newest copy of the map has.
func (c *Client) Ranges() int {
	m, _ := c.maps.current()
	if m == nil {
		return 0
	}
	return m.Len()
}

// At returns the row of the range that holds the key in the node's newest copy of the map.
func (c *Client) At(key []byte) (keyspace.Descriptor, bool) {
	m, _ := c.maps.current()
	if m == nil {
		return keyspace.Descriptor{}, false
	}
	return m.Lookup(key).Descriptor, true
}

// RangeMap returns all ranges in key order, covering the keyspace exactly once, as
// of the node's newest copy of the map. It waits for the first copy until ctx ends.
func (c *Client) RangeMap(ctx context.Context) ([]keyspace.Descriptor, error) {
	m, err := c.Map(ctx)
	if err != nil {
		return nil, err
	}
	return m.Descriptors(), nil
}

func (c *Client) storeMap(m *fsm.Map) {
	if m.Version == 0 || !c.maps.store(m) {
		return
	}
	c.o.Metrics.MapVersion.Set(float64(m.Version))
	c.o.Metrics.Ranges.Set(float64(m.Len()))
	held, oldest := m.Holds.Count()
	c.o.Metrics.Holds.Set(float64(held))
	c.o.Metrics.OldestHold.Set(float64(oldest) / 1000)
	c.o.Metrics.ClusterVersion.Set(float64(m.ClusterVersion))
	self, _ := m.Node(c.o.Self)
	c.o.Metrics.IsLearner.Set(0)
	if self.State.Learner() {
		c.o.Metrics.IsLearner.Set(1)
	}
	c.o.Metrics.AuthRevision.Set(1) // etcd's first
	if m.Access != nil {
		c.o.Metrics.AuthRevision.Set(float64(m.Access.Revision))
	}
}

// feedLoop keeps the copy of the map new by feeds from other nodes while this one's
// replica does not: there is none, or it has no leader. A replica that was removed while
// its node was away never has one again, and knows only nodes that may have left too.
func (c *Client) feedLoop() {
	var receiver feedReceiver
	pause := attemptPauseMin
	for c.awaitNeed() {
		node := c.target()
		progress, err := c.followFeed(node, &receiver)
		if progress {
			pause = attemptPauseMin
		}
		if led, _ := c.o.Service.led(); !led {
			c.streamEnded(node, err)
		}
		if clock.Sleep(c.ctx, c.o.Clock, pause) != nil {
			return
		}
		pause = min(2*pause, attemptPauseMax)
	}
}

// awaitNeed returns when feeds are needed; false is the Client's end.
func (c *Client) awaitNeed() bool {
	for c.ctx.Err() == nil {
		led, moved := c.o.Service.led()
		switch {
		case !led && !c.o.Service.HasReplica():
			return true
		case led:
			select {
			case <-moved:
			case <-c.ctx.Done():
			}
		default:
			// An election takes a moment.
			if clock.Sleep(c.ctx, c.o.Clock, c.o.AttemptTimeout) != nil {
				return false
			}
			if led, _ = c.o.Service.led(); !led {
				return true
			}
		}
	}
	return false
}

// awaitLed returns when this node's replica tells the map's changes, or ctx ends.
func (c *Client) awaitLed(ctx context.Context) {
	for ctx.Err() == nil {
		led, moved := c.o.Service.led()
		if led {
			return
		}
		select {
		case <-moved:
		case <-ctx.Done():
		}
	}
}

// streamEnded takes over what the end of a node's stream says of the leader.
func (c *Client) streamEnded(node keyspace.NodeID, err error) {
	var remote *transport.RemoteError
	if !errors.As(err, &remote) {
		c.heard(node, 0)
	} else if e, derr := kverror.Decode(remote.Detail); derr == nil && e.Leader == node {
		c.leadsByNow(node)
	} else if derr == nil {
		c.heard(node, e.Leader)
	}
}

// followReplica takes over what this node's replica applies, while there is one.
func (c *Client) followReplica() {
	for {
		v, changed := c.o.Service.machine.current()
		c.storeMap(&v.Map)
		select {
		case <-changed:
		case <-c.ctx.Done():
			return
		}
	}
}

// followFeed follows one node's feed until it ends; progress says that it brought
// a map.
func (c *Client) followFeed(node keyspace.NodeID, f *feedReceiver) (progress bool, err error) {
	if node == c.o.Self {
		return false, c.o.Service.refusal()
	}
	since := uint64(0)
	if f.base != nil {
		since = f.base.Version
	}
	*f = feedReceiver{base: f.base}
	ctx, cancel := context.WithCancel(c.ctx)
	var replica sync.WaitGroup
	defer replica.Wait()
	defer cancel()
	replica.Go(func() {
		c.awaitLed(ctx)
		cancel()
	})
	st, err := c.o.Bus.OpenStream(ctx, node, transport.MethodPlacementFeed, encodeFeedRequest(since))
	if err != nil {
		return false, err
	}
	defer st.Close(nil)
	for {
		b, err := st.Recv(ctx)
		if err != nil {
			return progress, err
		}
		m, err := f.receive(b)
		if err != nil {
			// What was received does not fit over what is here: begin anew.
			*f = feedReceiver{}
			c.o.Logger.Error("feed of the range map", zap.Stringer("peer", node), zap.Error(err))
			return progress, err
		}
		if m != nil {
			progress = true
			c.storeMap(m)
			c.o.Service.Removed() // it may say so
		}
	}
}

// reportPause is how long reported descriptors wait for their next attempt.
const reportPause = 500 * time.Millisecond

// maxReports bounds the descriptors that wait to be reported. Ranges beyond it are
// reported by their next leader or after their next change.
const maxReports = 1 << 16

// reportQueue holds the newest descriptor of each range that placement has not
// taken over yet.
type reportQueue struct {
	mu sync.Mutex
	// pending is guarded by mu.
	pending map[keyspace.RangeID]keyspace.Descriptor
	wake    wake.Signal
}

func (q *reportQueue) init() {
	q.pending, q.wake = map[keyspace.RangeID]keyspace.Descriptor{}, wake.New()
}

// ReportDescriptors tells placement what a range's replica has applied. It returns at once;
// the report is repeated until the map holds this or something newer. It is cheap if the
// node's copy of the map does already. So every new leader of a range reports its descriptor,
// in case a report died with the leader before it. Parent and children of a split are best
// reported together.
func (c *Client) ReportDescriptors(ds ...keyspace.Descriptor) {
	m := c.maps.load()
	c.reporter.kick.Set()
	q := &c.reports
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, d := range ds {
		if knows(m, &d) {
			continue
		}
		old, ok := q.pending[d.Range]
		if ok && !d.Newer(&old) || !ok && len(q.pending) >= maxReports {
			continue
		}
		q.pending[d.Range] = d
		q.wake.Set()
	}
}

// knows says whether the map holds this copy of a range, or a newer one.
func knows(m *fsm.Map, d *keyspace.Descriptor) bool {
	if m == nil {
		return false
	}
	g := m.Lookup(d.Span.Start)
	if g.Descriptor.Range != d.Range {
		return g.Descriptor.Generation >= d.Generation // it was absorbed since, or gave the key away
	}
	return !d.Newer(&g.Descriptor)
}

// reportLoop reports until nothing is pending, with a pause after what did not fit.
func (c *Client) reportLoop() {
	timer := c.o.Clock.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.reports.wake:
		case <-timer.C():
		}
		if !c.report() {
			timer.Reset(reportPause)
		}
	}
}

// report sends one report and returns whether nothing is left.
func (c *Client) report() bool {
	ds := c.reports.next(c.maps.load())
	if len(ds) == 0 {
		return true
	}
	ctx, cancel := clock.WithTimeout(c.ctx, c.o.Clock, c.o.SequenceTimeout)
	defer cancel()
	a, err := c.ask(ctx, &request{Kind: requestReport, Descriptors: ds}, true)
	if err != nil {
		c.o.Logger.Warn("report ranges", zap.Int("ranges", len(ds)), zap.Error(err))
		return false
	}
	return c.reports.settle(ds, a.Held)
}

// next returns descriptors to report, by range id, and forgets what the map knows.
func (q *reportQueue) next(m *fsm.Map) []keyspace.Descriptor {
	q.mu.Lock()
	defer q.mu.Unlock()
	ds := make([]keyspace.Descriptor, 0, min(len(q.pending), fsm.MaxDescriptors))
	for id, d := range q.pending {
		if knows(m, &d) {
			delete(q.pending, id)
		} else if len(ds) < fsm.MaxDescriptors {
			ds = append(ds, d)
		}
	}
	slices.SortFunc(ds, func(a, b keyspace.Descriptor) int {
		if a.Range < b.Range {
			return -1
		}
		return 1
	})
	return ds
}

// settle forgets what was reported and not held, unless it has changed meanwhile.
func (q *reportQueue) settle(reported, held []keyspace.Descriptor) (empty bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	kept := map[keyspace.RangeID]bool{}
	for i := range held {
		kept[held[i].Range] = true
	}
	for i := range reported {
		d := &reported[i]
		if now, ok := q.pending[d.Range]; ok && !kept[d.Range] && !now.Newer(d) {
			delete(q.pending, d.Range)
		}
	}
	return len(q.pending) == 0
}

// KeepBorder has the range that begins at the key stay one, whatever it holds, until it is
// merged by command. It waits until the map knows of one, or ctx ends: a split is heard of
// a moment after it.
func (c *Client) KeepBorder(ctx context.Context, key []byte) error {
	_, err := c.ask(ctx, &request{Kind: requestKeepBorder, Key: key}, true)
	return err
}
