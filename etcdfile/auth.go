package etcdfile

import (
	"fmt"
	"slices"

	"go.etcd.io/etcd/api/v3/authpb"

	"github.com/skeindb/skein/rights"
)

// Auth is users, roles and whether requests are checked, in etcd's form.
type Auth struct {
	Enabled bool
	// Revision is etcd's auth revision, 0 where there never was a user or role.
	Revision uint64
	Users    []*authpb.User
	Roles    []*authpb.Role
}

// AuthOf returns the rights in etcd's form. Hashes of passwords are the same in both.
func AuthOf(s *rights.State) Auth {
	a := Auth{Enabled: s.Enabled, Revision: s.Revision}
	for _, u := range s.Users() {
		a.Users = append(a.Users, &authpb.User{
			Name: []byte(u.Name), Password: u.Hash, Roles: u.Roles,
			Options: &authpb.UserAddOptions{NoPassword: u.NoPassword},
		})
	}
	for _, r := range s.Roles() {
		role := &authpb.Role{Name: []byte(r.Name)}
		for _, p := range r.Permissions {
			role.KeyPermission = append(role.KeyPermission, &authpb.Permission{PermType: authpb.Permission_Type(p.Type), Key: p.Key, RangeEnd: p.RangeEnd})
		}
		a.Roles = append(a.Roles, role)
	}
	return a
}

// Rights returns users and roles in Skein's form, as of index 0: who applies them gives them
// the index at which they are there. An error names what Skein cannot hold.
func (a *Auth) Rights() (*rights.State, error) {
	s := rights.New()
	s.Enabled, s.Revision = a.Enabled, max(a.Revision, 1)
	for _, u := range a.Users {
		user := &rights.User{Name: string(u.Name), Hash: u.Password, Roles: slices.Clone(u.Roles), NoPassword: u.GetOptions().GetNoPassword()}
		if len(user.Name) > rights.MaxNameBytes || len(user.Hash) > rights.MaxHashBytes {
			return nil, fmt.Errorf("user %.100q: a name of %d bytes and a hash of %d, where at most %d and %d are supported",
				user.Name, len(user.Name), len(user.Hash), rights.MaxNameBytes, rights.MaxHashBytes)
		}
		slices.Sort(user.Roles)
		user.Roles = slices.Compact(user.Roles)
		s.PutUser(user)
	}
	for _, r := range a.Roles {
		role := &rights.Role{Name: string(r.Name)}
		if len(role.Name) > rights.MaxNameBytes {
			return nil, fmt.Errorf("role %.100q: a name of %d bytes, where at most %d are supported", role.Name, len(role.Name), rights.MaxNameBytes)
		}
		for _, p := range r.KeyPermission {
			if len(p.Key) > rights.MaxKeyBytes || len(p.RangeEnd) > rights.MaxKeyBytes {
				return nil, fmt.Errorf("role %.100q: a permission for %.100q whose ends have %d and %d bytes, where at most %d are supported",
					role.Name, p.Key, len(p.Key), len(p.RangeEnd), rights.MaxKeyBytes)
			}
			role.Permissions = append(role.Permissions, rights.Permission{Type: rights.Type(p.PermType), Key: p.Key, RangeEnd: p.RangeEnd})
		}
		slices.SortStableFunc(role.Permissions, rights.ByKey)
		s.PutRole(role)
	}
	if s.Bytes() > rights.MaxBytes {
		return nil, fmt.Errorf("users and roles have %d bytes, and at most %d are supported: remove some in etcd first", s.Bytes(), rights.MaxBytes)
	}
	if err := s.Check(); err != nil {
		return nil, fmt.Errorf("users and roles of etcd: %w", err)
	}
	return s, nil
}
