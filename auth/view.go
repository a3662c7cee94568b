package auth

import (
	"bytes"
	"fmt"
	"io"
	"time"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// View is what a node knows at an index of the placement group's log. It does not change.
type View struct {
	// Rights has all changes up to Index.
	Rights *rights.State
	Index  uint64
	Keys   Keys
	// Permits says that all nodes know requests with permits.
	Permits bool
}

// since returns the Since of a user, 0 where there is none.
func (v *View) since(user string) uint64 {
	if u := v.Rights.User(user); u != nil {
		return u.Since
	}
	return 0
}

// Identity is who sends a request.
type Identity struct {
	User string
	// Revision is the auth revision for which the identity stands.
	Revision uint64
	// Until is when the same token has to be verified again in a view of the same rights and keys, by the
	// wall clock.
	Until time.Time
}

// Current returns etcd's error where the identity is of an older auth revision than the state. etcd asks
// that later, after the checks of size and alarms. So Verify does not.
func (id Identity) Current(s *rights.State) error {
	switch {
	case id.Revision == 0:
		return kverror.UserEmpty
	case id.Revision < s.Revision:
		return kverror.AuthOldRevision
	}
	return nil
}

// Proof says that a user has proved to be that in the state of an index.
type Proof struct {
	User string
	// Index is that of the placement group's log, and Revision the auth revision there.
	Index, Revision uint64
}

// Tokens makes and verifies the tokens of one kind. Its methods may be called by many goroutines.
type Tokens interface {
	// Issue makes a token for a user who has proved the identity.
	Issue(keys Keys, p Proof) (string, error)
	// Verify returns whose the token is. It refuses with InvalidAuthToken, and with AheadOf where the
	// view has to reach an index first.
	Verify(v *View, token string) (Identity, error)
}

// AheadOf says that a token is genuine and of a later index than the view. The same token is to be
// verified again in a view of the index. Who does not wait for that refuses it as an invalid one.
type AheadOf struct{ Index uint64 }

// Error implements error.
func (e AheadOf) Error() string {
	return fmt.Sprintf("auth: a token of index %d, ahead of this node", e.Index)
}

// Unwrap says what it is for who does not wait.
func (e AheadOf) Unwrap() error { return kverror.InvalidAuthToken }

// KeyID names a key. A later key has a greater one; 0 is no key.
type KeyID uint32

// Keys are those for MACs: new tokens get one of Current. Before is the one that was current before, so
// that a change of keys logs nobody out.
type Keys struct{ Current, Before Key }

// MinKeyBytes is the least length of a key: that of the MAC.
const MinKeyBytes = 32

// Key is a key for MACs. The zero Key is none: it makes and verifies nothing.
type Key struct {
	id     KeyID
	secret []byte
}

// NewKey returns a key. The secret must not be changed any more.
func NewKey(id KeyID, secret []byte) (Key, error) {
	if id == 0 {
		return Key{}, fmt.Errorf("auth: a key of %d bytes has the id 0, which says that there is none", len(secret))
	}
	if len(secret) < MinKeyBytes {
		return Key{}, fmt.Errorf("auth: key %d has %d bytes, at least %d", id, len(secret), MinKeyBytes)
	}
	return Key{id: id, secret: secret}, nil
}

// Format implements fmt.Formatter: no verb shows the secret.
func (k Key) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, fmt.Sprint("key ", uint32(k.id))) }

// same says whether both are the same keys.
func (k *Keys) same(o *Keys) bool {
	same := func(a, b Key) bool { return a.id == b.id && bytes.Equal(a.secret, b.secret) }
	return same(k.Current, o.Current) && same(k.Before, o.Before)
}

// find returns the key of an id.
func (k *Keys) find(id KeyID) (Key, bool) {
	for _, key := range []Key{k.Current, k.Before} {
		if id != 0 && key.id == id {
			return key, true
		}
	}
	return Key{}, false
}
