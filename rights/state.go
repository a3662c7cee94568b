package rights

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/google/btree"

	"github.com/skeindb/skein/kverror"
)

// Root is the name of the user that must exist while checks are on, and of the role whose users may
// do everything.
const Root = "root"

// Bounds of what a state may hold.
const (
	// MaxNameBytes bounds the names of users and roles.
	MaxNameBytes = 1024
	// MaxHashBytes bounds the hash of a password; bcrypt's have 60 bytes.
	MaxHashBytes = 128
	// MaxKeyBytes bounds both ends of a permission's span.
	MaxKeyBytes = 64 << 10
	// MaxBytes bounds everything together, as Bytes counts it.
	MaxBytes = 16 << 20
	// overheadBytes is roughly what a user, a role, a role of a user or a permission takes beside its
	// names and keys.
	overheadBytes = 64
)

// User is somebody who may log in. It must not be changed: states share it.
type User struct {
	Name string
	// Roles are the names of the user's roles, ascending.
	Roles []string
	// NoPassword says that no password lets the user in; a certificate's common name does.
	NoPassword bool
	// Hash is bcrypt's of the password. It never leaves the placement group's members, but in a copy of the
	// whole store that root makes.
	Hash []byte
	// Since is the index of the change that created the user, or the last one of the password.
	Since uint64
}

// isRoot says whether the user may do everything.
func (u *User) isRoot() bool {
	_, ok := slices.BinarySearch(u.Roles, Root)
	return ok
}

// Bytes is roughly what the user takes in memory.
func (u *User) Bytes() (n int) {
	for _, r := range u.Roles {
		n += overheadBytes + len(r)
	}
	return n + overheadBytes + len(u.Name) + len(u.Hash)
}

// Role is a named set of permissions. It must not be changed: states share it.
type Role struct {
	Name string
	// Permissions are ascending by key. Those of one key are in the order in which they were granted.
	Permissions []Permission
}

// Bytes is roughly what the role takes in memory.
func (r *Role) Bytes() int {
	n := overheadBytes + len(r.Name)
	for i := range r.Permissions {
		n += overheadBytes + len(r.Permissions[i].Key) + len(r.Permissions[i].RangeEnd)
	}
	return n
}

// Type is what a permission permits; the numbers are etcd's. An unknown one permits nothing.
type Type int32

// The types.
const (
	Read      Type = 0
	Write     Type = 1
	ReadWrite Type = 2
)

// permits says whether a permission of the type permits all that the other type asks for.
func (t Type) permits(what Type) bool {
	return t == what || t == ReadWrite && (what == Read || what == Write)
}

// Permission permits something for a span of keys, in the form of etcd's requests: an empty RangeEnd
// is the key alone, and the single byte 0 is no end.
type Permission struct {
	Type          Type
	Key, RangeEnd []byte
}

// ByKey orders permissions as roles have them.
func ByKey(a, b Permission) int { return bytes.Compare(a.Key, b.Key) }

// same says whether two permissions have the same span.
func (p *Permission) same(key, end []byte) bool {
	return bytes.Equal(p.Key, key) && bytes.Equal(p.RangeEnd, end)
}

// valid says whether a role may have the permission: its span is not empty.
func (p *Permission) valid() bool {
	return len(p.Key) > 0 && (len(p.RangeEnd) == 0 || openEnd(p.RangeEnd) || bytes.Compare(p.Key, p.RangeEnd) < 0)
}

func openEnd(end []byte) bool { return len(end) == 1 && end[0] == 0 }

// State is all users and roles. Copies made by [State.Clone] go their own ways.
type State struct {
	Meta
	users *btree.BTreeG[*User]
	roles *btree.BTreeG[*Role]
	bytes int
}

// Meta is a state without its users and roles.
type Meta struct {
	// Enabled says that requests are checked.
	Enabled bool
	// Revision is etcd's auth revision: 1 at first, and one more with each change but enabling.
	Revision uint64
	// EnabledSince is the index of the change that enabled the checks last: what proved an identity
	// before does not do so any more.
	EnabledSince uint64
	// Access is the access index, see the package's comment.
	Access uint64
}

const degree = 32

// New returns a state without users and roles, with checks off.
func New() *State {
	return &State{
		Meta:  Meta{Revision: 1},
		users: btree.NewG(degree, func(a, b *User) bool { return a.Name < b.Name }),
		roles: btree.NewG(degree, func(a, b *Role) bool { return a.Name < b.Name }),
	}
}

// Clone returns a copy. It costs O(1).
func (s *State) Clone() *State {
	return &State{Meta: s.Meta, users: s.users.Clone(), roles: s.roles.Clone(), bytes: s.bytes}
}

// Bytes is roughly what the state takes in memory.
func (s *State) Bytes() int { return s.bytes }

// User returns a user, nil if there is none.
func (s *State) User(name string) *User {
	u, _ := s.users.Get(&User{Name: name})
	return u
}

// Role returns a role, nil if there is none.
func (s *State) Role(name string) *Role {
	r, _ := s.roles.Get(&Role{Name: name})
	return r
}

// Users returns all users in the order of their names.
func (s *State) Users() []*User { return all(s.users) }

// Roles returns all roles in the order of their names.
func (s *State) Roles() []*Role { return all(s.roles) }

func all[T any](tree *btree.BTreeG[T]) []T {
	out := make([]T, 0, tree.Len())
	tree.Ascend(func(t T) bool {
		out = append(out, t)
		return true
	})
	return out
}

// PutUser adds a user, or replaces the one of that name.
func (s *State) PutUser(u *User) {
	if old, ok := s.users.ReplaceOrInsert(u); ok {
		s.bytes -= old.Bytes()
	}
	s.bytes += u.Bytes()
}

// PutRole adds a role, or replaces the one of that name.
func (s *State) PutRole(r *Role) {
	if old, ok := s.roles.ReplaceOrInsert(r); ok {
		s.bytes -= old.Bytes()
	}
	s.bytes += r.Bytes()
}

// RemoveUser removes a user, if there is one of that name.
func (s *State) RemoveUser(name string) {
	if old, ok := s.users.Delete(&User{Name: name}); ok {
		s.bytes -= old.Bytes()
	}
}

// RemoveRole removes a role, if there is one of that name. Users keep its name.
func (s *State) RemoveRole(name string) {
	if old, ok := s.roles.Delete(&Role{Name: name}); ok {
		s.bytes -= old.Bytes()
	}
}

// Admin returns an error where a user may not do what only root may, etcd's for each case. The name is
// empty for a request without a user.
func (s *State) Admin(name string) error {
	if !s.Enabled {
		return nil
	}
	if name == "" {
		return kverror.UserEmpty
	}
	switch u := s.User(name); {
	case u == nil:
		return kverror.UserNotFound
	case !u.isRoot():
		return kverror.PermissionDenied
	}
	return nil
}

// Check returns an error where the state breaks an invariant.
func (s *State) Check() error {
	n := 0
	for _, u := range s.Users() {
		if !slices.IsSorted(u.Roles) {
			return fmt.Errorf("rights: the roles %q of user %q are not sorted", u.Roles, u.Name)
		}
		n += u.Bytes()
	}
	for _, r := range s.Roles() {
		if !slices.IsSortedFunc(r.Permissions, ByKey) {
			return fmt.Errorf("rights: the permissions of role %q are not sorted", r.Name)
		}
		n += r.Bytes()
	}
	if n != s.bytes {
		return fmt.Errorf("rights: %d bytes are counted, and there are %d", s.bytes, n)
	}
	if root := s.User(Root); s.Enabled && (root == nil || !root.isRoot()) {
		return fmt.Errorf("rights: checks are on, and user %q is there: %t, without the role", Root, root != nil)
	}
	return nil
}

// String names everything but hashes.
func (s *State) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "enabled %t, revision %d, enabled since %d, access %d\n", s.Enabled, s.Revision, s.EnabledSince, s.Access)
	for _, u := range s.Users() {
		fmt.Fprintf(&b, "user %q since %d: roles %q", u.Name, u.Since, u.Roles)
		if u.NoPassword {
			b.WriteString(", no password")
		}
		b.WriteByte('\n')
	}
	for _, r := range s.Roles() {
		fmt.Fprintf(&b, "role %q:", r.Name)
		for _, p := range r.Permissions {
			fmt.Fprintf(&b, " %s %q", p.Type, p.Key)
			if len(p.RangeEnd) > 0 {
				fmt.Fprintf(&b, " to %q", p.RangeEnd)
			}
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// String returns the type's name.
func (t Type) String() string {
	switch t {
	case Read:
		return "read"
	case Write:
		return "write"
	case ReadWrite:
		return "readwrite"
	}
	return fmt.Sprintf("type %d", int32(t))
}
