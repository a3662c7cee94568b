package node

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// scrubPause lies between two attempts at a part of a replica that is not there yet, and scrubTries is
// how many there are. A range that cannot be compared now is compared in the next round.
const (
	scrubPause = time.Second
	scrubTries = 10
)

// scrub reads all replicas of this node each period and compares them with others.
func (c *Core) scrub() {
	for clock.Sleep(c.ctx, c.o.Clock, c.o.ScrubEvery) == nil {
		for _, r := range c.shards.Replicas() {
			d, leader := r.Look()
			if err := c.scrubReplica(c.ctx, &d, leader); err != nil && c.ctx.Err() == nil {
				c.log.Info("a replica was not compared: the next round does it", zap.Stringer("range", d.Range), zap.Error(err))
			}
		}
	}
}

// scrubReplica compares this node's replica with another voter's, as the disks have them. If they
// differ, the other voters are asked too. A replica that differs from an equal majority goes into
// quarantine: without it the range still has a quorum.
func (c *Core) scrubReplica(ctx context.Context, d *keyspace.Descriptor, leader keyspace.NodeID) error {
	if leader == 0 {
		return kverror.New(kverror.NoLeader, "range %s has no leader", d.Range)
	}
	var others []keyspace.NodeID
	voters := 0
	for _, m := range d.Replicas {
		switch {
		case m.Role != keyspace.RoleVoter && m.Role != keyspace.RoleLearner:
			return fmt.Errorf("the members of range %s are changing", d.Range)
		case m.Role == keyspace.RoleLearner:
			continue
		case m.Node != c.o.Self:
			others = append(others, m.Node)
		}
		voters++
	}
	got := make(chan keyspace.SequenceAnswer, 1)
	c.client.Sequence(keyspace.SequenceRequest{}, func(a keyspace.SequenceAnswer) { got <- a })
	now, err := clock.Await(ctx, got)
	if err == nil {
		err = now.Err
	}
	if err != nil {
		return err
	}
	limited, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.RequestTimeout)
	at, err := c.shards.Client().AwaitResolved(limited, leader, &rangeapi.ResolvedRequest{Range: d.Range, Generation: d.Generation, Revision: now.Current})
	cancel()
	if err != nil {
		return err
	}
	q := rangeapi.HashRequest{Range: d.Range, Generation: d.Generation, Revision: now.Current, Compacted: now.Compacted, Position: at}
	own, err := c.hashReplica(ctx, c.o.Self, d, q)
	if err != nil {
		return err
	}
	same := map[uint64]int{}
	var failed error
	for i, n := range others {
		h, err := c.hashReplica(ctx, n, d, q)
		if err != nil {
			failed = err
			continue
		}
		if h == own && i == 0 {
			return nil
		}
		same[h]++
		if h != own && same[h] > voters/2 {
			// A copy may have mended the replica meanwhile.
			if again, err := c.hashReplica(ctx, c.o.Self, d, q); err != nil || again != own {
				return err
			}
			if mutation.Is(mutation.DifferenceKept) {
				return nil
			}
			c.host.Quarantine(d.Range.Group(), fmt.Sprintf("at revision %d its data has the hash %016x, and that of a majority %016x", now.Current, own, h))
			return nil
		}
	}
	if same[own]+1 <= voters/2 && len(others) > 0 && failed == nil {
		c.log.Error("REPLICAS DISAGREE on the disk, and no majority agrees", zap.Stringer("range", d.Range),
			zap.Int64("revision", int64(now.Current)), zap.Uint64("hash", own), zap.Any("others", same))
	}
	return failed
}

// hashReplica returns the hash of a node's replica of a range.
func (c *Core) hashReplica(ctx context.Context, n keyspace.NodeID, d *keyspace.Descriptor, q rangeapi.HashRequest) (sum uint64, err error) {
	q.From = d.Span.Start
	for tries := 0; ; {
		limited, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.RequestTimeout)
		began := c.o.Clock.Now()
		part, next, err := c.shards.Admin().HashPart(limited, n, &q)
		cancel()
		pause := c.o.Clock.Now().Sub(began) // half of the disk's time at most
		switch {
		case err == nil && next == nil:
			return sum + part, nil
		case err == nil:
			sum, q.From, tries = sum+part, next, 0
		default:
			if tries++; tries == scrubTries || kverror.Of(err).Kind != kverror.ReadAgain {
				return 0, fmt.Errorf("node %s: %w", n, err)
			}
			pause = scrubPause
		}
		if err := clock.Sleep(ctx, c.o.Clock, pause); err != nil {
			return 0, err
		}
	}
}
