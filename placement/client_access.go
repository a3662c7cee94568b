package placement

import (
	"context"

	"github.com/skeindb/skein/rights"
)

// Credential returns what proves that somebody is the user: as of a moment after the call. The hash is
// for the comparison with a password alone.
func (c *Client) Credential(ctx context.Context, user string) (rights.Credential, error) {
	a, err := c.ask(ctx, &request{Kind: requestCredential, User: user}, true)
	return a.Credential, err
}

// ChangeAccess changes users, roles or permissions, or whether they are checked, on behalf of a user;
// empty is nobody. It is not repeated where its fate is unknown: then it returns kverror.Timeout, as etcd
// does. Its other errors are etcd's for the case.
func (c *Client) ChangeAccess(ctx context.Context, caller string, change rights.Change) error {
	_, err := c.ask(ctx, &request{Kind: requestChangeAccess, Caller: caller, Access: change}, false)
	return err
}
