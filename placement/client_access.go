package placement

import (
	"context"
	"math"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rights"
)

// ViewLease returns for how long a node may go by the rights that it knows, from when it has asked whether
// they still hold: see TakenAccess. All nodes have the same election timeout, as etcd demands.
func ViewLease(election time.Duration) time.Duration { return 3 * election }

// Credential returns what proves that somebody is the user: as of a moment after the call. The hash is
// for the comparison with a password alone.
func (c *Client) Credential(ctx context.Context, user string) (rights.Credential, error) {
	a, err := c.ask(ctx, &request{Kind: requestCredential, User: user}, true)
	return a.Credential, err
}

// AccessRows returns all records of users and roles as they are at one moment after the call, with the hashes of
// passwords: for a copy of the whole store.
func (c *Client) AccessRows(ctx context.Context) ([]fsm.AccessRow, error) {
	var rows []fsm.AccessRow
	for index := uint64(0); ; {
		q := request{Kind: requestAccessRows}
		if len(rows) > 0 {
			q.Key = rows[len(rows)-1].Key
		}
		a, err := c.ask(ctx, &q, true)
		if err != nil {
			return nil, err
		}
		if len(rows) > 0 && a.MapVersion != index {
			rows = nil // they have changed meanwhile
			continue
		}
		if index, rows = a.MapVersion, append(rows, a.AccessRows...); !a.More {
			return rows, nil
		}
	}
}

// ChangeAccess changes users, roles or permissions, or whether they are checked, on behalf of a user;
// empty is nobody. It is not repeated where its fate is unknown: then it returns kverror.Timeout, as etcd
// does. Its other errors are etcd's for the case.
//
// After it has returned nil no node serves anybody by rights that the change has taken away. So where it
// takes rights, it returns once each node has taken the change in or has no view lease any more. A node
// that does not know yet that rights are checked needs no lease. So the change that begins the checks waits
// for all nodes, and Timeout names those that are missing.
func (c *Client) ChangeAccess(ctx context.Context, caller string, change rights.Change) error {
	a, err := c.ask(ctx, &request{Kind: requestChangeAccess, Caller: caller, Access: change}, false)
	if err != nil || a.Index == 0 {
		return err
	}
	return c.awaitAccess(ctx, a.Index, change.Kind == rights.Enable)
}

// awaitAccess returns when every node has taken in an access index that is applied. With all unset, nodes without an
// answer for a view lease do not count, as far as the leader knows. It also returns when the view leases of earlier
// rights have run out, which is one lease after the call. Another leader does not change that: every answer that
// proves contact at a later moment tells this index too.
func (c *Client) awaitAccess(ctx context.Context, at keyspace.AccessIndex, all bool) error {
	wait := ctx
	q := request{Kind: requestAwaitAccess, Index: at}
	if !all {
		lease := ViewLease(c.o.AttemptTimeout)
		q.Silence = lease + time.Duration(math.Ceil(float64(lease)*raftgroup.DefaultClockDrift))
		var cancel context.CancelFunc
		wait, cancel = clock.WithTimeout(ctx, c.o.Clock, q.Silence)
		defer cancel()
	}
	var lacking []keyspace.NodeID
	for wait.Err() == nil && c.ctx.Err() == nil {
		a, err := c.ask(wait, &q, true)
		switch {
		case err != nil:
			_ = clock.Sleep(wait, c.o.Clock, attemptPauseMax)
		case len(a.Lacking) == 0:
			return nil
		default:
			lacking = a.Lacking
		}
	}
	if ctx.Err() == nil && c.ctx.Err() == nil {
		return nil
	}
	return kverror.New(kverror.Timeout, "rights have changed at index %d, and nodes %v have not said yet that they go by it: repeat the request when they are back, or remove them", at, lacking)
}

// TakenAccess tells placement's leader which access index this node has taken in, and that nobody is served
// here by rights of an earlier one. It returns the index at a moment after the call.
func (c *Client) TakenAccess(ctx context.Context, at keyspace.AccessIndex) (now keyspace.AccessIndex, err error) {
	a, err := c.ask(ctx, &request{Kind: requestTakenAccess, Index: at}, true)
	return a.Index, err
}
