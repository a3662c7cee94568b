package auth

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// Caller is who sends a request. It knows what that user may do in one state of the rights, and does not change.
// The zero Caller may do nothing.
type Caller struct {
	// User is the user's name. It is empty where no user is known.
	User string
	// Node is the name of the node whose certificate the request came with. Nodes are no users.
	Node string
	// Revision is the auth revision for which the user's identity stands, 0 where no user is known.
	Revision uint64
	// Subject is what the user may do; nil if there is no such user, or checks are off.
	Subject *rights.Subject
	// Index is that of a view with these rights, and Access the access index there.
	Index, Access uint64

	roles []string
	// since is the user's Since, 0 where there is no such user.
	since uint64
	// permits says that requests have permits.
	permits bool
	// off says that checks are off, and known that a token or a certificate was accepted. The user need
	// not exist for that: tokens of others and certificates may name any.
	off, known bool
	// stale is the error of an identity of an older auth revision.
	stale error
}

// caller returns who an identity is in a view. subject is nil if there is no such user.
func (v *View) caller(id Identity, subject *rights.Subject) *Caller {
	c := v.nobody()
	c.User, c.Revision, c.Subject, c.known, c.stale = id.User, id.Revision, subject, true, id.Current(v.Rights)
	if u := v.Rights.User(id.User); u != nil {
		c.roles, c.since = u.Roles, u.Since
	}
	return c
}

// nobody returns who sends a request without user, and everybody where checks are off.
func (v *View) nobody() *Caller {
	return &Caller{Index: v.Index, Access: v.Rights.Access, permits: v.Permits, off: !v.Rights.Enabled}
}

// Permit returns the permit of a request that was checked with the caller.
func (c *Caller) Permit() keyspace.Permit {
	if !c.permits {
		return keyspace.Internal
	}
	return keyspace.PermitAt(keyspace.AccessIndex(c.Access))
}

// Incarnation returns the user's name, and since when that is the same user with the same password. Both are
// empty where no user is known.
func (c *Caller) Incarnation() (user string, since uint64) { return c.User, c.since }

// Stale returns an error where the identity is of an older auth revision.
func (c *Caller) Stale() error { return c.stale }

// Off says that checks are off: everybody may do everything.
func (c *Caller) Off() bool { return c.off }

// AnyUser returns an error where the request has no user.
func (c *Caller) AnyUser() error {
	if c.off || c.known {
		return nil
	}
	return kverror.UserEmpty
}

// Root returns an error where the user may not do what only root may. As in etcd the auth revision of the
// identity does not matter.
func (c *Caller) Root() error {
	switch {
	case c.off:
		return nil
	case c.User == "":
		return kverror.UserEmpty
	case c.Subject == nil:
		return kverror.UserNotFound
	case !c.Subject.Root():
		return kverror.PermissionDenied
	}
	return nil
}

// May returns an error where the user may not do what the type says to the keys of a request, in etcd's
// form.
func (c *Caller) May(what rights.Type, key, end []byte) error {
	switch {
	case c.off:
		return nil
	case !c.known:
		return kverror.UserEmpty
	case c.stale != nil:
		return c.stale
	case c.Subject == nil || !c.Subject.May(what, key, end):
		return kverror.PermissionDenied
	}
	return nil
}

// Readable returns the largest span around a key that the user may read all of: the key alone if it may not read even that.
func (c *Caller) Readable(key []byte) keyspace.Span {
	switch {
	case c.off:
		return keyspace.Span{}
	case !c.known || c.stale != nil || c.Subject == nil:
		return keyspace.Single(key)
	}
	start, end, ok := c.Subject.Readable(key)
	if !ok {
		return keyspace.Single(key)
	}
	return keyspace.Span{Start: start, End: end}
}

// has says whether the user has a role.
func (c *Caller) has(role string) bool { return slices.Contains(c.roles, role) }
