package operate

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// splitTimeout bounds a split by command, and splitPause lies between attempts to
// find the range's leader.
const (
	splitTimeout = 15 * time.Second
	splitPause   = 50 * time.Millisecond
)

// SplitRange implements adminapi.Backend.
func (a *Admin) SplitRange(ctx context.Context, key []byte) (left, right *adminpb.Range, err error) {
	id := a.rangeOf(key)
	if err := a.needs(ctx, id, fsm.OwnGroup); err != nil { // a split needs the ids of a range, too
		return nil, nil, err
	}
	defer a.explain(ctx, &err, id)
	ctx, cancel := context.WithTimeout(ctx, splitTimeout)
	defer cancel()
	nodes, err := a.o.Placement.Members(ctx, false)
	if err != nil {
		return nil, nil, err
	}
	ds, leader, err := a.split(ctx, key, true)
	if err != nil {
		return nil, nil, err
	}
	if len(ds) != 2 {
		return nil, nil, kverror.New(kverror.Internal, "a split at %q gave %d ranges", key, len(ds))
	}
	a.o.Routes.Learn(ds...)
	// The range is split by now, whoever may do less since.
	if err := a.o.Placement.KeepBorder(keyspace.WithPermit(ctx, keyspace.Internal), key); err != nil {
		return nil, nil, &adminapi.Refusal{
			Reason:   fmt.Sprintf("a range begins at %q now, but placement does not know yet that it is to stay: %v", key, err),
			NextStep: "repeat the command when placement has a leader, or the range is merged with its neighbour if both stay small and cold",
		}
	}
	byName := names(nodes)
	row := func(d *keyspace.Descriptor) *adminpb.Range {
		return rangeRow(d, byName, byName[leader], -1, 0, "awake")
	}
	left, right = row(&ds[0]), row(&ds[1])
	left.Kept, right.Kept = a.kept(ds[0].Span.Start), true
	return left, right, nil
}

// SplitForLoad has a range begin at a key, as SplitRange does, but not for good. One that begins there already is no
// error.
func (a *Admin) SplitForLoad(ctx context.Context, key []byte) error {
	ctx, cancel := context.WithTimeout(ctx, splitTimeout)
	defer cancel()
	ds, _, err := a.split(ctx, key, false)
	if err != nil || ds == nil {
		return err
	}
	a.o.Routes.Learn(ds...)
	return nil
}

// kept says whether somebody has set that a range begins at the key, by the map as this node
// knows it.
func (a *Admin) kept(key []byte) bool {
	m, _ := a.o.Placement.WatchMap()
	if m == nil {
		return false
	}
	g := m.Lookup(key)
	return g.Kept && bytes.Equal(g.Descriptor.Span.Start, key)
}

// split asks the leader of the key's range, wherever it is, to split it. It also asks again if the
// fate of an attempt is unknown, for instance because the leader has died. Each attempt names the
// range's generation, so at most one of them splits. Without keep a range that begins there is no error.
func (a *Admin) split(ctx context.Context, key []byte, keep bool) ([]keyspace.Descriptor, keyspace.NodeID, error) {
	var unsure error                  // what an attempt ended with whose fate is unknown
	var whole []byte                  // the first key of the range that it was to split
	failed := func(err error) error { // the earlier one says more than that there is no leader
		if unsure != nil {
			return unsure
		}
		return err
	}
	for turn := 0; ; turn++ {
		l, err := a.o.Routes.Locate(ctx, keyspace.Single(key))
		if err != nil {
			return nil, 0, failed(err)
		}
		d := &l[0].Descriptor
		if string(d.Span.Start) == string(key) && unsure != nil {
			left, err := a.o.Routes.Locate(ctx, keyspace.Single(whole))
			if err != nil {
				return nil, 0, unsure
			}
			return []keyspace.Descriptor{left[0].Descriptor, *d}, l[0].Leader, nil
		}
		if string(d.Span.Start) == string(key) && !keep {
			return nil, 0, nil
		}
		if string(d.Span.Start) == string(key) {
			if len(key) > 0 {
				if err := a.o.Placement.KeepBorder(ctx, key); err != nil {
					return nil, 0, err // whoever made it, it is to stay
				}
			}
			return nil, 0, &adminapi.Refusal{
				Reason:   fmt.Sprintf("range %s begins at %q already", d.Range, key),
				NextStep: "nothing is left to do: it stays until it is merged by command. Or choose another key (skein range list shows the borders)",
			}
		}
		node := l[0].Leader
		if node == 0 || turn%2 == 1 {
			node = d.Replicas[turn/2%len(d.Replicas)].Node
		}
		ds, heir, err := a.splitAt(ctx, node, d, key)
		if err == nil {
			return ds, node, nil
		}
		if heir != 0 {
			a.o.Routes.Led(d.Range, heir)
			turn = -1 // it is asked next
		}
		e := kverror.Of(err)
		if ctx.Err() == nil && e.Kind != kverror.Internal && e.Fate() == kverror.Unknown {
			unsure, whole = err, d.Span.Start
		} else if e.Retry() != kverror.RetryRouter || ctx.Err() != nil {
			return nil, 0, failed(err)
		}
		a.o.Routes.Learn(e.Descriptors...)
		if e.Leader != 0 {
			a.o.Routes.Led(d.Range, e.Leader)
		}
		if clock.Sleep(ctx, a.o.Clock, splitPause) != nil {
			return nil, 0, failed(err)
		}
	}
}

// splitAt asks one node to split the range, as atLeader has it asked.
func (a *Admin) splitAt(ctx context.Context, node keyspace.NodeID, d *keyspace.Descriptor, key []byte) (ds []keyspace.Descriptor, heir keyspace.NodeID, err error) {
	heir, err = a.atLeader(ctx, node, d, func(ctx context.Context) (err error) {
		ds, err = a.o.Replicas.Split(ctx, node, d.Range, d.Generation, key)
		return err
	})
	return ds, heir, err
}
