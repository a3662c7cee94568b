package rights

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/skeindb/skein/kverror"
)

// Kind says what a change does; the numbers are stored.
type Kind byte

// The kinds, with the fields of a Change that count.
const (
	Enable           Kind = iota + 1
	Disable               // Afterwards nothing is checked.
	AddUser               // User, NoPassword, Hash
	DeleteUser            // User
	ChangePassword        // User, Hash
	GrantRole             // User, Role
	RevokeRole            // User, Role
	AddRole               // Role
	DeleteRole            // Role
	GrantPermission       // Role, Permission
	RevokePermission      // Role, Permission's span
)

// numKinds is one more than the last kind.
const numKinds = int(RevokePermission) + 1

// Known says whether there is such a kind.
func (k Kind) Known() bool { return k >= Enable && int(k) < numKinds }

// Change is one change of users and roles. The fields that its kind does not name are empty.
type Change struct {
	Kind       Kind
	User, Role string
	NoPassword bool
	// Hash is bcrypt's of the new password.
	Hash       []byte
	Permission Permission
}

// Touched is what a change has changed beside the Meta: the users and roles whose records are new, or
// gone.
type Touched struct {
	Users, Roles []string
}

// Apply makes a change on behalf of a caller, empty for none, at an index above all before. It refuses
// with etcd's error for the case. A change that etcd ignores, as a role that the user has already,
// succeeds and touches nothing.
func (s *State) Apply(index uint64, caller string, c *Change) (Touched, error) {
	if err := s.Admin(caller); err != nil {
		return Touched{}, err
	}
	if err := s.room(c); err != nil {
		return Touched{}, err
	}
	switch c.Kind {
	case Enable:
		return Touched{}, s.enable(index)
	case Disable:
		if s.Enabled {
			s.Enabled = false
			s.Revision++
		}
		return Touched{}, nil
	case AddUser:
		return s.addUser(index, c)
	case DeleteUser:
		return s.deleteUser(index, c.User)
	case ChangePassword:
		return s.changePassword(index, c)
	case GrantRole:
		return s.grantRole(c)
	case RevokeRole:
		return s.revokeRole(index, c)
	case AddRole:
		return s.addRole(c.Role)
	case DeleteRole:
		return s.deleteRole(index, c.Role)
	case GrantPermission:
		return s.grantPermission(index, c)
	case RevokePermission:
		return s.revokePermission(index, c)
	}
	panic(fmt.Sprintf("rights: no way to apply a change of kind %d at index %d", c.Kind, index))
}

// room refuses what is too large, or makes the whole too large.
func (s *State) room(c *Change) error {
	for _, name := range []string{c.User, c.Role} {
		if len(name) > MaxNameBytes {
			return kverror.New(kverror.BadRequest, "a name of %d bytes, at most %d", len(name), MaxNameBytes)
		}
	}
	if n := len(c.Hash); n > MaxHashBytes {
		return kverror.New(kverror.BadRequest, "the hash of a password of %d bytes, at most %d", n, MaxHashBytes)
	}
	if n := max(len(c.Permission.Key), len(c.Permission.RangeEnd)); n > MaxKeyBytes {
		return kverror.New(kverror.BadRequest, "a permission for a key of %d bytes, at most %d", n, MaxKeyBytes)
	}
	grows := c.Kind == AddUser || c.Kind == GrantRole || c.Kind == AddRole || c.Kind == GrantPermission
	adds := overheadBytes + len(c.User) + len(c.Role) + len(c.Hash) + len(c.Permission.Key) + len(c.Permission.RangeEnd)
	if grows && s.bytes+adds > MaxBytes {
		return kverror.TooManyUsers
	}
	return nil
}

func (s *State) enable(index uint64) error {
	if s.Enabled {
		return nil
	}
	switch u := s.User(Root); {
	case u == nil:
		return kverror.RootUserNotExist
	case !u.isRoot():
		return kverror.RootRoleNotExist
	}
	s.Enabled, s.EnabledSince, s.Access = true, index, index
	return nil
}

func (s *State) addUser(index uint64, c *Change) (Touched, error) {
	switch {
	case c.User == "":
		return Touched{}, kverror.UserEmpty
	case s.User(c.User) != nil:
		return Touched{}, kverror.UserExists
	}
	u := &User{Name: c.User, NoPassword: c.NoPassword, Since: index}
	if !c.NoPassword {
		u.Hash = c.Hash
	}
	return s.changedUser(u), nil
}

func (s *State) deleteUser(index uint64, name string) (Touched, error) {
	switch {
	case s.Enabled && name == Root:
		return Touched{}, kverror.InvalidAuthManagement
	case s.User(name) == nil:
		return Touched{}, kverror.UserNotFound
	}
	s.RemoveUser(name)
	s.taken(index)
	return Touched{Users: []string{name}}, nil
}

func (s *State) changePassword(index uint64, c *Change) (Touched, error) {
	old := s.User(c.User)
	if old == nil {
		return Touched{}, kverror.UserNotFound
	}
	u := *old
	u.Hash, u.Since = nil, index
	if !u.NoPassword {
		u.Hash = c.Hash
	}
	s.Access = index
	return s.changedUser(&u), nil
}

func (s *State) grantRole(c *Change) (Touched, error) {
	old := s.User(c.User)
	switch {
	case old == nil:
		return Touched{}, kverror.UserNotFound
	case c.Role != Root && s.Role(c.Role) == nil: // etcd's root needs no record
		return Touched{}, kverror.RoleNotFound
	}
	at, has := slices.BinarySearch(old.Roles, c.Role)
	if has {
		return Touched{}, nil
	}
	u := *old
	u.Roles = slices.Insert(slices.Clone(old.Roles), at, c.Role)
	return s.changedUser(&u), nil
}

func (s *State) revokeRole(index uint64, c *Change) (Touched, error) {
	if s.Enabled && c.User == Root && c.Role == Root {
		return Touched{}, kverror.InvalidAuthManagement
	}
	old := s.User(c.User)
	if old == nil {
		return Touched{}, kverror.UserNotFound
	}
	u, had := old.without(c.Role)
	if !had {
		return Touched{}, kverror.RoleNotGranted
	}
	s.Access = index
	return s.changedUser(u), nil
}

// without returns the user without a role, if he has it.
func (u *User) without(role string) (_ *User, had bool) {
	at, had := slices.BinarySearch(u.Roles, role)
	if !had {
		return u, false
	}
	less := *u
	less.Roles = slices.Delete(slices.Clone(u.Roles), at, at+1)
	return &less, true
}

func (s *State) addRole(name string) (Touched, error) {
	switch {
	case name == "":
		return Touched{}, kverror.RoleEmpty
	case s.Role(name) != nil:
		return Touched{}, kverror.RoleExists
	}
	return s.changedRole(&Role{Name: name}), nil
}

func (s *State) deleteRole(index uint64, name string) (Touched, error) {
	switch {
	case s.Enabled && name == Root:
		return Touched{}, kverror.InvalidAuthManagement
	case s.Role(name) == nil:
		return Touched{}, kverror.RoleNotFound
	}
	s.RemoveRole(name)
	touched := Touched{Roles: []string{name}}
	for _, u := range s.Users() {
		if less, had := u.without(name); had {
			s.PutUser(less)
			touched.Users = append(touched.Users, u.Name)
		}
	}
	s.taken(index)
	return touched, nil
}

// grantPermission is etcd's, which looks at the first permission of the key alone: that one gets the
// new type if its span is the same. Otherwise the role has one permission more, even where a later one
// has the same span.
func (s *State) grantPermission(index uint64, c *Change) (Touched, error) {
	p := &c.Permission
	if !p.valid() {
		return Touched{}, kverror.InvalidAuthManagement
	}
	old := s.Role(c.Role)
	if old == nil {
		return Touched{}, kverror.RoleNotFound
	}
	r := &Role{Name: old.Name, Permissions: slices.Clone(old.Permissions)}
	first, _ := slices.BinarySearchFunc(r.Permissions, p.Key, func(e Permission, key []byte) int { return bytes.Compare(e.Key, key) })
	if first < len(r.Permissions) && r.Permissions[first].same(p.Key, p.RangeEnd) {
		if e := &r.Permissions[first]; !p.Type.permits(e.Type) {
			s.Access = index
		}
		r.Permissions[first].Type = p.Type
		return s.changedRole(r), nil
	}
	at := first
	for at < len(r.Permissions) && bytes.Equal(r.Permissions[at].Key, p.Key) {
		at++
	}
	r.Permissions = slices.Insert(r.Permissions, at, *p)
	return s.changedRole(r), nil
}

func (s *State) revokePermission(index uint64, c *Change) (Touched, error) {
	old := s.Role(c.Role)
	if old == nil {
		return Touched{}, kverror.RoleNotFound
	}
	r := &Role{Name: old.Name}
	for _, p := range old.Permissions {
		if !p.same(c.Permission.Key, c.Permission.RangeEnd) {
			r.Permissions = append(r.Permissions, p)
		}
	}
	if len(r.Permissions) == len(old.Permissions) {
		return Touched{}, kverror.PermissionNotGranted
	}
	s.Access = index
	return s.changedRole(r), nil
}

func (s *State) changedUser(u *User) Touched {
	s.PutUser(u)
	s.Revision++
	return Touched{Users: []string{u.Name}}
}

func (s *State) changedRole(r *Role) Touched {
	s.PutRole(r)
	s.Revision++
	return Touched{Roles: []string{r.Name}}
}

// taken notes that the change at an index has removed something.
func (s *State) taken(index uint64) {
	s.Revision++
	s.Access = index
}
