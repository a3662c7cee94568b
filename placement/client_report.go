package placement

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/transport"
)

// How often a node tells placement's leader of itself.
const (
	// reportEvery lies between two reports of what has changed.
	reportEvery = 10 * time.Second
	// reportSoon is how long news of a range wait for others: what has a new leader is
	// told then.
	reportSoon = time.Second
	// reportTimeout bounds how long a leader is looked for to tell it one part.
	reportTimeout = 5 * time.Second
	// reportTries is how often a report is begun anew at once.
	reportTries = 3
)

// nodeReporter tells placement's leader what this node leads and has. But for kick it
// belongs to one goroutine.
type nodeReporter struct {
	// kick says that this node newly leads a range, or that one of its ranges has changed.
	kick wake.Signal
	// told is what the leader has taken in, up to the part with this number.
	told        map[keyspace.RangeID]driver.Measure
	quarantined map[keyspace.RangeID]driver.Quarantined
	number      uint64
	// whole says that everything is to be told: the leader knows nothing, or it is not
	// known what it knows.
	whole bool
}

func (r *nodeReporter) init() { r.kick, r.whole = wake.New(), true }

// nodeReportLoop reports until the Client stops. It reports at once to a new leader, and when
// a node without a replica has lost the leader that it knew. It reports soon after ranges of
// this node change, and at intervals.
func (c *Client) nodeReportLoop() {
	timer := c.o.Clock.NewTimer(reportEvery)
	defer timer.Stop()
	for {
		leader, moved := c.leaderNow()
		next := reportEvery
		if err := c.reportNode(); err != nil {
			c.o.Logger.Debug("report this node to placement", zap.Error(err))
			next = reportSoon
		}
		timer.Reset(next)
		if !c.awaitReport(timer, leader, moved) {
			return
		}
	}
}

// awaitReport waits until there is a reason to report; false says that the Client stops.
func (c *Client) awaitReport(timer clock.Timer, leader keyspace.NodeID, moved <-chan struct{}) bool {
	for {
		select {
		case <-c.ctx.Done():
			return false
		case <-timer.C():
			return true
		case <-c.reporter.kick:
			return clock.Sleep(c.ctx, c.o.Clock, reportSoon) == nil
		case <-moved:
			was := leader
			// Without a replica, raft does not name the leader; the report finds it.
			if leader, moved = c.leaderNow(); leader != was && (leader != 0 || !c.o.Service.HasReplica()) {
				return true
			}
		}
	}
}

// reportNode tells what has changed since the last time, or everything.
func (c *Client) reportNode() error {
	r := &c.reporter
	for range reportTries {
		led := c.o.Measurer.Led()
		whole := r.whole
		if whole {
			r.told = make(map[keyspace.RangeID]driver.Measure, len(led))
			r.quarantined = map[keyspace.RangeID]driver.Quarantined{}
			r.number++ // the one before may have been taken, or not
		}
		anew, err := c.sendParts(whole, r.changes(led, c.o.Service.driver.Steps()), r.quarantines(c.o.Measurer.Quarantined()))
		// Unanswered parts may have arrived: nobody knows what the leader knows.
		r.whole = anew || err != nil
		if !anew {
			return err
		}
	}
	return nil // there is a new leader every time; the next report says it all
}

// changes returns what differs from what was told, by much.
func (r *nodeReporter) changes(led []driver.Measure, least driver.Steps) []driver.Measure {
	var out []driver.Measure
	leads := make(map[keyspace.RangeID]bool, len(led))
	for i := range led {
		m := &led[i]
		m.Clamp()
		leads[m.Range] = true
		if old, ok := r.told[m.Range]; !ok || m.Differs(&old, least) {
			out = append(out, *m)
		}
	}
	for id := range r.told {
		if !leads[id] {
			out = append(out, driver.Measure{Range: id})
		}
	}
	return out
}

// quarantines returns what differs from what was told.
func (r *nodeReporter) quarantines(now []driver.Quarantined) []driver.Quarantined {
	var out []driver.Quarantined
	has := make(map[keyspace.RangeID]bool, len(now))
	for _, q := range now {
		q.Clamp()
		has[q.Range] = true
		if r.quarantined[q.Range] != q {
			out = append(out, q)
		}
	}
	for id := range r.quarantined {
		if !has[id] {
			out = append(out, driver.Quarantined{Range: id})
		}
	}
	return out
}

// sendParts sends a report in parts, at least one, and takes over what was taken in.
func (c *Client) sendParts(whole bool, ms []driver.Measure, qs []driver.Quarantined) (anew bool, err error) {
	r := &c.reporter
	p := driver.Part{Boot: c.o.Boot, Whole: whole, Full: c.o.Measurer.Full()}
	p.NoSpace, p.Corrupt = c.o.Measurer.Alarms()
	capacity, used := c.o.Measurer.Disk()
	p.Capacity, p.Used = min(max(capacity, 0), driver.MaxAmount), min(max(used, 0), driver.MaxAmount)
	for {
		n, k, size := 0, 0, 0
		for ; k < len(qs) && k < driver.ReportRanges && size < driver.ReportBytes; k++ {
			size += 24 + len(qs[k].Reason)
		}
		for ; n < len(ms) && n < driver.ReportRanges && size < driver.ReportBytes; n++ {
			size += 24
		}
		r.number++
		p.Number, p.Led, p.Quarantined, p.More = r.number, ms[:n], qs[:k], n < len(ms) || k < len(qs)
		if anew, err = c.sendPart(&p); anew || err != nil {
			return anew, err
		}
		for _, m := range p.Led {
			if r.told[m.Range] = m; m.Term == 0 {
				delete(r.told, m.Range)
			}
		}
		for _, q := range p.Quarantined {
			if r.quarantined[q.Range] = q; q.Replica == 0 {
				delete(r.quarantined, q.Range)
			}
		}
		if ms, qs, p.Whole = ms[n:], qs[k:], false; !p.More {
			return false, nil
		}
	}
}

// sendPart sends one part to whoever leads. To send it again does no harm.
func (c *Client) sendPart(p *driver.Part) (anew bool, err error) {
	ctx, cancel := clock.WithTimeout(c.ctx, c.o.Clock, reportTimeout)
	defer cancel()
	err = c.attempts(ctx, true, func(ctx context.Context, node keyspace.NodeID) (err error) {
		var b []byte
		if node == c.o.Self {
			anew, err = c.o.Service.takeReport(c.o.Self, p)
		} else if b, err = c.o.Bus.Call(ctx, node, transport.MethodPlacementReport, p.Encode(c.o.Written())); err == nil {
			anew, err = driver.DecodePartAnswer(b)
		}
		if err == nil {
			c.answered(node)
		}
		return err
	})
	return anew, err
}
