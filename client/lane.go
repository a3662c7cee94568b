package client

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/pipepb"
)

// lane is a way to a node, or to any: calls that are not sent, and the pipe that takes them. Who has a pipe open takes
// what is in the queue.
type lane struct {
	c *Client
	// wake has who sends look at the queue.
	wake chan struct{}
	// queue are the calls that are not sent, in their order. Guarded by the client's mu.
	queue []*call
}

// enqueue has a call sent, by the best way that there is.
func (c *Client) enqueue(call *call) {
	c.mu.Lock()
	closed := c.closed
	var l *lane
	first := false
	if !closed {
		l = c.laneOf(call)
		l.queue = append(l.queue, call)
		first = len(l.queue) == 1
	}
	c.mu.Unlock()
	if closed {
		call.end(nil, ErrClosed)
	} else if first {
		l.look()
	}
}

// again puts calls that were not sent, or may be sent again, before all others. Any node takes them.
func (c *Client) again(calls []*call) {
	if len(calls) == 0 {
		return
	}
	slices.SortFunc(calls, func(a, b *call) int { return cmp.Compare(a.op.GetTag(), b.op.GetTag()) })
	for _, call := range calls {
		call.state.Store(queued)
	}
	c.mu.Lock()
	c.any.queue = append(calls, c.any.queue...)
	c.mu.Unlock()
	c.any.look()
}

// look wakes who sends.
func (l *lane) look() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// failQueue ends all calls that are not sent, and wait for any node.
func (c *Client) failQueue(err error) {
	c.mu.Lock()
	calls := c.any.queue
	c.any.queue = nil
	c.mu.Unlock()
	for _, call := range calls {
		call.end(nil, err)
	}
}

// take takes calls out of the queue, as many as a message and the window have room for: operations and bytes are what the
// window has left. Calls that nobody waits for any more, and those that are too large for any message, end.
func (l *lane) take(operations int, bytes uint64, w *pipepb.Window) (calls []*call) {
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	frame, n := w.GetFrameBytes(), 0
	for ; n < len(l.queue) && len(calls) < operations; n++ {
		call := l.queue[n]
		framed := call.size + framingBytes
		if framed > w.GetFrameBytes() {
			call.end(nil, rpctypes.ErrRequestTooLarge)
			continue
		}
		if framed > frame || call.size > bytes {
			break
		}
		if err := call.ctx.Err(); err != nil || !call.state.CompareAndSwap(queued, sent) {
			// It may have been given up since the look at its context.
			call.end(nil, cmp.Or(err, call.ctx.Err()))
			continue
		}
		frame, bytes = frame-framed, bytes-call.size
		calls = append(calls, call)
	}
	clear(l.queue[:n])
	l.queue = l.queue[n:]
	return calls
}

// framingBytes is the most that an operation takes of a message beside its own size: tag and length.
const framingBytes = 1 + 5

// leader is a node that operations are sent to because it leads the ranges of their keys. What cannot be sent there goes
// by any other node, which costs a hop and changes no answer.
type leader struct {
	lane
	node uint64
	// Guarded by the client's mu. urls are where the node serves clients, as far as this one may follow there.
	urls []string
	// running says that a goroutine opens a pipe or has one, and open that it takes calls.
	running, open bool
	// Before retry no pipe is opened. pause is how long the end of the last one had others wait.
	retry time.Time
	pause time.Duration
	// moved is when other URLs had retry and pause begin anew.
	moved time.Time
}

// The pauses before a pipe to a leader is opened again.
const (
	// leastLeaderPause is that after a first failure, and after a pipe that was used. A user with a password logs in for each.
	leastLeaderPause = time.Second
	mostLeaderPause  = 30 * time.Second
	// idleLeader is how long a pipe to a leader is kept without use, and at most twice that.
	idleLeader = time.Minute
)

// mostLeaders bounds the nodes that a client remembers.
const mostLeaders = 1 << 8

// laneOf returns the lane of a call, and has the node say where the call's key is led if that may bring news. mu is held.
func (c *Client) laneOf(call *call) *lane {
	if c.follows == nil || len(call.key) == 0 {
		return &c.any
	}
	p := c.places.find(call.key)
	if p == nil {
		call.locate()
		return &c.any
	}
	l := p.by
	switch {
	case l.node == c.anyNode:
		call.locate()
	case l.open:
		call.locate() // it says nothing as long as it leads
		return &l.lane
	case !l.running && time.Now().After(l.retry):
		call.locate()
		l.running = true
		c.workers.Go(l.run)
	}
	return &c.any
}

// locateBytes is the size of Operation.locate.
const locateBytes = 2

// locate asks the node where the call's key is led.
func (c *call) locate() {
	c.op.Locate = true
	c.size += locateBytes
}

// learn takes in where the key of a call is led.
func (c *Client) learn(call *call, p *pipepb.Place) {
	start, end, ok := spanOf(p, call.key)
	if !ok || c.follows == nil || p.GetNode() == 0 {
		return // of a node that does not know what it says
	}
	urls := slices.DeleteFunc(slices.Clone(p.GetClientUrls()), func(u string) bool { return !c.follows(u) })
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.leaders[p.GetNode()]
	if l == nil {
		if len(c.leaders) >= mostLeaders {
			c.forgetIdle()
		}
		if len(c.leaders) >= mostLeaders {
			return
		}
		l = &leader{lane: lane{c: c, wake: make(chan struct{}, 1)}, node: p.GetNode(), urls: urls}
		c.leaders[p.GetNode()] = l
	}
	if !slices.Equal(l.urls, urls) {
		l.urls = urls
		// Nodes that do not agree on the URLs change them with each answer.
		if now := time.Now(); now.Sub(l.moved) >= leastLeaderPause {
			l.moved, l.retry, l.pause = now, time.Time{}, 0
		}
	}
	c.places.put(place{start, end, l})
}

// forgetIdle forgets the leaders without a pipe. mu is held.
func (c *Client) forgetIdle() {
	maps.DeleteFunc(c.leaders, func(_ uint64, l *leader) bool { return !l.running })
	c.places = slices.DeleteFunc(c.places, func(p place) bool { return !p.by.running })
}

// forget forgets where the key of a call is led.
func (c *Client) forget(call *call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.places.remove(call.key)
}

// errNoURL says that a leader has no URL that the client may use.
var errNoURL = errors.New("client: the node has no client URL that this client may use")

// run has a pipe to the node open as long as it takes calls.
func (l *leader) run() {
	s, conn, err := l.connect()
	if err != nil {
		l.ended(false)
		return
	}
	l.c.mu.Lock()
	l.open = true
	l.c.mu.Unlock()
	idle := time.NewTicker(idleLeader)
	sent := s.serve(idle.C)
	idle.Stop()
	l.ended(sent)
	<-s.over // what was sent is answered
	_ = conn.Close()
}

// connect opens a pipe at the first of the node's URLs that it can.
func (l *leader) connect() (*stream, *grpc.ClientConn, error) {
	l.c.mu.Lock()
	urls := l.urls
	l.c.mu.Unlock()
	err := errNoURL
	for _, u := range urls {
		var conn *grpc.ClientConn
		if conn, err = l.c.etcd.Dial(u); err != nil {
			continue
		}
		var s *stream
		if s, err = l.lane.open(conn); err == nil {
			return s, conn, nil
		}
		_ = conn.Close()
	}
	return nil, nil, err
}

// ended has what waits for the node go by any other. Its places are forgotten, as others may lead there by now. If they do not, the
// places come again, and the node is tried again after a while.
func (l *leader) ended(sent bool) {
	c := l.c
	c.mu.Lock()
	l.running, l.open = false, false
	calls := l.queue
	l.queue = nil
	if l.pause = min(max(2*l.pause, leastLeaderPause), mostLeaderPause); sent {
		l.pause = leastLeaderPause // it may have ended for what it was sent, as by a token that the node does not take
	}
	l.retry = time.Now().Add(l.pause)
	c.places = slices.DeleteFunc(c.places, func(p place) bool { return p.by == l })
	if len(calls) > 0 {
		c.any.queue = append(calls, c.any.queue...)
	}
	c.mu.Unlock()
	c.any.look()
}

// spanOf returns the span of a place, which must hold the key.
func spanOf(p *pipepb.Place, key []byte) (start, end []byte, ok bool) {
	start, end = p.GetKey(), p.GetRangeEnd()
	switch {
	case len(end) == 0:
		end = append(slices.Clone(start), 0)
	case len(end) == 1 && end[0] == 0:
		end = nil
	}
	ok = slices.Compare(start, key) <= 0 && (len(end) == 0 || slices.Compare(key, end) < 0)
	return start, end, ok
}
