package placement

import (
	"context"
	"fmt"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// RangeIDs returns n range ids (at most 4096) that nobody else has or gets.
func (c *Client) RangeIDs(ctx context.Context, n int) ([]keyspace.RangeID, error) {
	if n <= 0 || n > fsm.MaxRangeIDs {
		return nil, kverror.New(kverror.BadRequest, "%d range ids asked for, at most %d", n, fsm.MaxRangeIDs)
	}
	// Ids that an unknown attempt took are lost, which harms nobody.
	a, err := c.ask(ctx, &request{Kind: requestAllocate, Count: uint64(n)}, true)
	if err != nil {
		return nil, err
	}
	ids := make([]keyspace.RangeID, n)
	for i := range ids {
		ids[i] = a.First + keyspace.RangeID(i)
	}
	return ids, nil
}

// Compact raises the cluster's compacted revision and returns the current one. The
// errors are etcd's: Compacted at or below the compacted revision, FutureRevision
// above the current one. After it has returned nil, every answer of the sequencer
// tells of the new compacted revision. Timeout leaves the outcome open.
func (c *Client) Compact(ctx context.Context, at keyspace.Revision) (current keyspace.Revision, err error) {
	if at < 0 {
		return 0, kverror.New(kverror.Compacted, "compact at %d", at)
	}
	if at >= keyspace.MaxRevision {
		return 0, kverror.New(kverror.FutureRevision, "compact at %d", at)
	}
	a, err := c.ask(ctx, &request{Kind: requestCompact, Revision: at}, false)
	return a.Revision, err
}

// Status returns the placement group's state: that of this node's replica where it
// has one, else the leader's.
func (c *Client) Status(ctx context.Context) (Status, error) {
	a, err := c.last(ctx, requestStatus)
	return a.Status, err
}

// LastSettings returns all settings as a replica of the placement group has them, which may be
// older than the call: there need be no quorum.
func (c *Client) LastSettings(ctx context.Context) ([]fsm.Setting, error) {
	a, err := c.last(ctx, requestSettings)
	return a.Settings, err
}

// LastOperations returns the operations under way, oldest first, as LastSettings does.
func (c *Client) LastOperations(ctx context.Context) ([]fsm.Operation, error) {
	a, err := c.last(ctx, requestOperations)
	return a.Operations, err
}

// PlacementGroup returns who holds the placement group and who leads it, not older than
// the call. What each node knows of it by itself is in its Map.
func (c *Client) PlacementGroup(ctx context.Context) (Status, error) {
	a, err := c.ask(ctx, &request{Kind: requestStatus, Linearizable: true}, true)
	return a.Status, err
}

// TransferLeader moves the placement leadership, and with it the sequencer, to a
// node with a voting replica, without a gap between revisions.
func (c *Client) TransferLeader(ctx context.Context, to keyspace.NodeID) error {
	if _, err := c.ask(ctx, &request{Kind: requestTransfer, To: to}, false); err != nil {
		return err
	}
	// The one before says that it leads no more before the next one does. So that one is asked, and answers once it leads.
	ctx, cancel := clock.WithTimeout(ctx, c.o.Clock, c.o.AttemptTimeout)
	defer cancel()
	_, _ = c.PlacementGroup(ctx) // the lead is handed over in any case
	return nil
}

// PutSetting writes one of the cluster's settings, or removes it where value is
// empty. Every later answer of the sequencer carries a higher settings revision.
func (c *Client) PutSetting(ctx context.Context, name string, value []byte) error {
	if len(name) > fsm.MaxNameBytes || len(value) > fsm.MaxSettingBytes {
		return kverror.New(kverror.BadRequest, "a setting has at most %d bytes of name and %d of value", fsm.MaxNameBytes, fsm.MaxSettingBytes)
	}
	_, err := c.ask(ctx, &request{Kind: requestPutSetting, Name: name, Value: value}, true)
	return err
}

// Settings returns all settings and their revision, not older than the call.
func (c *Client) Settings(ctx context.Context) ([]fsm.Setting, keyspace.Revision, error) {
	a, err := c.ask(ctx, &request{Kind: requestSettings, Linearizable: true}, true)
	return a.Settings, a.Revision, err
}

// BeginOperation has placement change the replicas of a range, or with fsm.OwnGroup for the
// range those of the placement group itself, and returns the operation once it has begun; Operations says when it is over. Only Range, Kind, From, To and Why
// of what is given count. BadRequest says why it cannot be done, as where the range
// has another one under way; Timeout leaves the outcome open.
func (c *Client) BeginOperation(ctx context.Context, o fsm.Operation) (fsm.Operation, error) {
	if len(o.Why) > fsm.MaxNameBytes {
		return fsm.Operation{}, kverror.New(kverror.BadRequest, "%d bytes say why, at most %d", len(o.Why), fsm.MaxNameBytes)
	}
	a, err := c.ask(ctx, &request{Kind: requestBegin, Operation: o}, false)
	if err != nil {
		return fsm.Operation{}, err
	}
	if len(a.Operations) != 1 {
		return fsm.Operation{}, fmt.Errorf("placement: %d operations have begun", len(a.Operations))
	}
	return a.Operations[0], nil
}

// Operations returns the operations under way, oldest first, not older than the call.
func (c *Client) Operations(ctx context.Context) ([]fsm.Operation, error) {
	a, err := c.ask(ctx, &request{Kind: requestOperations, Linearizable: true}, true)
	return a.Operations, err
}
