package rights

import "fmt"

// Credential is what proves that somebody is a user, read linearizably.
type Credential struct {
	// Enabled says that requests are checked at all.
	Enabled bool
	// Hash is bcrypt's of the password. It is empty where there is no such user, or one without password.
	Hash []byte
	// Since is the user's, 0 without one.
	Since uint64
	// Index is that of the placement group's log at which this was read, and Revision the auth revision.
	Index, Revision uint64
}

// String shows no hash.
func (c Credential) String() string {
	return fmt.Sprintf("credential since %d, read at index %d, auth revision %d, enabled %t", c.Since, c.Index, c.Revision, c.Enabled)
}

// GoString shows no hash.
func (c Credential) GoString() string { return c.String() }

// Credential returns what proves that somebody is the user, in the state of an index.
func (s *State) Credential(user string, index uint64) Credential {
	c := Credential{Enabled: s.Enabled, Revision: s.Revision, Index: index}
	if u := s.User(user); u != nil {
		c.Hash, c.Since = u.Hash, u.Since
	}
	return c
}
