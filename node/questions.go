package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/placement/fsm"
	slow "github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/load/heat"
	"github.com/skeindb/skein/transport"
)

// The questions of nodes to one another (MethodNodeAdmin), by their first byte. The rest is
// JSON, as are the answers: they are rare, and read by people when something is wrong.
const (
	questionCheck  = 1
	questionReport = 2
	questionHeat   = 3
	questionSlow   = 4
	questionSeries = 7
	// questionWatchers is answered by an adminpb.WatcherListResponse.
	questionWatchers = 8
)

// handleQuestion answers MethodNodeAdmin.
func (c *Core) handleQuestion(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	if len(payload) == 0 {
		return nil, errors.New("node: empty request")
	}
	switch body := payload[1:]; payload[0] {
	case questionCheck:
		return c.admission.Answer(ctx, from, body)
	case questionReport:
		return json.Marshal(c.report())
	case questionHeat:
		var q heat.Query
		if err := json.Unmarshal(body, &q); err != nil {
			return nil, fmt.Errorf("node: question for the heat map: %w", err)
		}
		g, err := c.shards.Heat(ctx, q)
		if err != nil {
			return nil, err
		}
		return json.Marshal(g)
	case questionSeries:
		return c.answerSeries(body)
	case questionWatchers:
		return c.answerWatchers(body)
	case questionSlow:
		return json.Marshal(c.slow.All())
	}
	return nil, fmt.Errorf("node: unknown request %d", payload[0])
}

func (c *Core) askCheck(ctx context.Context, peer keyspace.NodeID, question []byte) ([]byte, error) {
	return c.bus.Call(ctx, peer, transport.MethodNodeAdmin, append([]byte{questionCheck}, question...))
}

// peers tells operators what this node observes of the nodes.
type peers struct{ c *Core }

// SilentFor implements operate.Peers.
func (p peers) SilentFor(n keyspace.NodeID) time.Duration { return p.c.host.SilentFor(n) }

// Alive implements operate.Peers.
func (p peers) Alive(n keyspace.NodeID) bool { return p.c.alive(n) }

// Reached implements operate.Peers.
func (p peers) Reached(n keyspace.NodeID) bool { return p.c.reached(n) }

// Central implements operate.Peers.
func (p peers) Central(n keyspace.NodeID) bool { return p.c.host.Connected(n) }

// Report implements operate.Peers.
func (p peers) Report(ctx context.Context, node keyspace.NodeID) (r operate.Report, err error) {
	if node == p.c.o.Self {
		return p.c.report(), nil
	}
	b, err := p.c.bus.Call(ctx, node, transport.MethodNodeAdmin, []byte{questionReport})
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(b, &r)
}

// Heat implements operate.Served.
func (p peers) Heat(ctx context.Context, node keyspace.NodeID, q heat.Query) (*heat.Grid, error) {
	if node == p.c.o.Self {
		return p.c.shards.Heat(ctx, q)
	}
	question, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	b, err := p.c.bus.Call(ctx, node, transport.MethodNodeAdmin, append([]byte{questionHeat}, question...))
	if err != nil {
		return nil, err
	}
	return q.DecodeGrid(b)
}

// Slow implements operate.Served.
func (p peers) Slow(ctx context.Context, node keyspace.NodeID) (all []slow.Slow, err error) {
	if node == p.c.o.Self {
		return p.c.slow.All(), nil
	}
	b, err := p.c.bus.Call(ctx, node, transport.MethodNodeAdmin, []byte{questionSlow})
	if err != nil {
		return nil, err
	}
	return all, json.Unmarshal(b, &all)
}

// keepSlow keeps a request that another node has given up.
func (c *Core) keepSlow(s slow.Slow) {
	s.Unix, s.Cause = c.o.Clock.Wall().UnixNano(), c.names.inText(s.Cause)
	c.slow.Add(s)
}

// slowCalls are the slow requests that this node keeps.
func (c *Core) slowCalls() []*adminpb.SlowCall {
	return operate.SlowCalls(c.o.Self, c.o.Name, c.slow.All())
}

// report is what this node says of itself.
func (c *Core) report() operate.Report {
	total, _ := c.engine.DiskBytes()
	r := operate.Report{Bytes: total + c.wal.LiveBytes(), Isolated: !c.host.Connected(c.o.Self), Wall: fsm.UnixMillis(c.o.Clock.Wall().UnixMilli())}
	r.FsyncP99 = c.wal.FsyncP99()
	r.NoSpace, r.Corrupt = measurer{c}.Alarms()
	r.NoMemory = measurer{c}.Full()
	r.Capacity, r.Used = measurer{c}.Disk() // as placement has it: room that is reserved for root counts as used
	c.troubles.tell(&r)
	for g, q := range c.host.Quarantined() {
		if !g.IsSystem() {
			r.Quarantined = append(r.Quarantined, operate.Quarantined{
				Range: g.Range(), Replica: q.Replica, Reason: q.Reason, Since: fsm.UnixMillis(q.Since.UnixMilli()),
			})
		}
	}
	if m, _ := c.client.WatchMap(); m != nil {
		for _, n := range m.NodeTable() {
			if n.ID != c.o.Self && c.host.Liveness(n.ID) {
				r.Hears = append(r.Hears, n.ID)
			}
		}
	}
	return r
}
