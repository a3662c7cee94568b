package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
)

// phases are how long the parts of a demo with a kill last.
type phases struct {
	before time.Duration // until the kill
	down   time.Duration // from the first write behind the kill to the restart
	after  time.Duration // from the restart to the end
}

var usualPhases = phases{before: 2 * time.Second, down: 3 * time.Second, after: 2 * time.Second}

// goOnTimeout bounds the wait for the first write behind the kill, and for the last event of a watcher.
const goOnTimeout = time.Minute

// kill shows what clients see of a node that is killed. Each node is a process. While clients write and watch, the node that
// allocates the revisions is killed, since all writes depend on it, and then started again. A lost write, and an event that is
// missing or out of order, is an error.
func kill(ctx context.Context, o *Options, p phases, out io.Writer) (err error) {
	began := clock.System().Now()
	c, err := startProcesses(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.stop()) }()
	defer func() {
		if ctx.Err() != nil {
			err = errStopped
		}
	}()
	fmt.Fprintf(out, "%d nodes with %d ranges, a process each, serve etcd clients after %v\n",
		o.Nodes, o.Ranges, rounded(clock.System().Now().Sub(began)))
	w, err := beginTraffic(ctx, c.endpoints())
	if err != nil {
		return err
	}
	defer w.end()
	fmt.Fprintf(out, "%d clients write, and a watcher at each node counts the events\n", writers)
	if err := clock.Sleep(ctx, clock.System(), p.before); err != nil {
		return errStopped
	}
	victim, led, err := c.sequencer(ctx)
	if err != nil {
		return err
	}
	written := w.mark()
	if err := victim.kill(); err != nil {
		return err
	}
	fmt.Fprintf(out, "kill -9 of %s, which allocated the revisions and led %d of %d ranges, after %d writes\n",
		victim.name, led, o.Ranges, written)
	if err := w.awaitWrite(ctx); err != nil {
		return err
	}
	if err := clock.Sleep(ctx, clock.System(), p.down); err != nil {
		return errStopped
	}
	gap, longest := w.gap()
	fmt.Fprintf(out, "writes stood still for %v, then went on; the longest one took %v\n", rounded(gap), rounded(longest))
	began = clock.System().Now()
	if err := victim.start(); err != nil {
		return err
	}
	if err := c.ready(ctx, victim); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s is started again, and serves after %v\n", victim.name, rounded(clock.System().Now().Sub(began)))
	if err := clock.Sleep(ctx, clock.System(), p.after); err != nil {
		return errStopped
	}
	return judge(ctx, w, out)
}

// judge ends the writes and says what has become of them.
func judge(ctx context.Context, w *traffic, out io.Writer) error {
	all, err := w.finish(ctx)
	if err != nil {
		return err
	}
	lost, err := w.lost(ctx, all)
	if err != nil {
		return err
	}
	if len(lost) > 0 {
		return fmt.Errorf("demo: %d of %d acknowledged writes are lost, the first is %q", len(lost), len(all), lost[0])
	}
	fmt.Fprintf(out, "%d writes were acknowledged: none is lost\n", len(all))
	for _, o := range w.observers {
		if err := o.judge(all); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "each of the %d watchers got all of them: none is missing, none came twice, all in order\n", len(w.observers))
	return nil
}

var errStopped = errors.New("demo: stopped before its end")

func rounded(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// sequencer returns the node that allocates the revisions, and how many ranges it leads.
func (c *processes) sequencer(ctx context.Context) (found *process, led int, err error) {
	for found == nil {
		for _, p := range c.nodes {
			leads, err := p.allocates(ctx)
			if err != nil {
				return nil, 0, err
			}
			if leads {
				found = p
			}
		}
		if found == nil && clock.Sleep(ctx, clock.System(), readyPause) != nil {
			return nil, 0, errStopped
		}
	}
	admin, err := adminapi.NewClient([]string{found.endpoint}, nil)
	if err != nil {
		return nil, 0, fmt.Errorf("demo: %w", err)
	}
	ranges, err := admin.RangeList(ctx)
	if err != nil {
		return nil, 0, fmt.Errorf("demo: list ranges: %w", err)
	}
	for _, r := range ranges.GetRanges() {
		if r.GetLeader() == found.name {
			led++
		}
	}
	return found, led, nil
}

// allocates says whether the node is what etcd calls the leader.
func (p *process) allocates(ctx context.Context) (bool, error) {
	cl, err := clientv3.New(clientv3.Config{Endpoints: []string{p.endpoint}, Logger: zap.NewNop()})
	if err != nil {
		return false, fmt.Errorf("demo: %w", err)
	}
	defer cl.Close()
	s, err := cl.Status(ctx, p.endpoint)
	if err != nil {
		return false, fmt.Errorf("demo: status of %s: %w", p.name, err)
	}
	return s.Leader == s.Header.MemberId, nil
}
