package fsm

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// takeAccess takes users and roles of a load in, on top of those of the same set; others go. So a piece can come twice,
// and a load that was begun again may bring what the source has by now. It returns the access index that every node has
// to have before the step is acknowledged, 0 for none.
func (s *State) takeAccess(index uint64, o *ChangeLoad) (keyspace.AccessIndex, error) {
	bad := func(format string, args ...any) (keyspace.AccessIndex, error) {
		return 0, kverror.New(kverror.BadRequest, "users and roles of a load: "+format, args...)
	}
	if o.Set == 0 && len(o.Access) > 0 {
		return bad("they belong to no set")
	}
	next, touched := s.access.Clone(), rights.Touched{}
	if o.Set != s.loading.Set {
		next, touched = s.noAccess(index)
	}
	for i := range o.Access {
		if err := addAccess(next, index, &o.Access[i], &touched); err != nil {
			return bad("%v", err)
		}
	}
	if n := next.Bytes(); n > rights.MaxBytes {
		return bad("they have %d bytes, at most %d", n, rights.MaxBytes)
	}
	begins := next.Enabled && !s.access.Enabled
	if begins {
		next.EnabledSince, next.Access = index, index
	}
	if err := next.Check(); err != nil {
		return bad("%v", err)
	}
	if begins {
		s.accessKey = o.Key
	}
	s.access = next
	s.accessTouched(index, touched)
	if next.Enabled {
		return keyspace.AccessIndex(next.Access), nil // also where it was so before: the answer may be lost
	}
	return 0, nil
}

// noAccess returns the state without users and roles, and who is gone.
func (s *State) noAccess(index uint64) (*rights.State, rights.Touched) {
	next, touched := rights.New(), rights.Touched{}
	next.EnabledSince, next.Access = s.access.EnabledSince, s.access.Access
	for _, u := range s.access.Users() {
		touched.Users = append(touched.Users, u.Name)
	}
	for _, r := range s.access.Roles() {
		touched.Roles = append(touched.Roles, r.Name)
	}
	if len(touched.Users)+len(touched.Roles) > 0 {
		next.Access = index
	}
	return next, touched
}

// addAccess adds a row of a load, which may be a part of a user or role. Indexes of the source mean nothing here.
func addAccess(s *rights.State, index uint64, row *AccessRow, touched *rights.Touched) error {
	if len(row.Key) == 0 {
		return fmt.Errorf("a record without a key")
	}
	switch row.Key[0] {
	case recordUser:
		u, err := decodeUser(row.Value)
		if err != nil {
			return err
		}
		u.Since = index
		if old := s.User(u.Name); old != nil {
			u.Since, u.Roles = old.Since, append(u.Roles, old.Roles...)
			slices.Sort(u.Roles)
			u.Roles = slices.Compact(u.Roles)
		}
		s.PutUser(&u)
		touched.Users = append(touched.Users, u.Name)
	case recordRole:
		part, err := decodeRole(row.Value)
		if err != nil {
			return err
		}
		s.PutRole(withPart(s.Role(part.Name), &part))
		touched.Roles = append(touched.Roles, part.Name)
	case recordAccess:
		m, err := decodeAccessMeta(row.Value)
		if err != nil {
			return err
		}
		s.Enabled, s.Revision = m.Enabled, max(m.Revision, 1)
	default:
		return fmt.Errorf("a record under key %x", row.Key)
	}
	return nil
}

// withPart returns a role, nil for none yet, with a part of it, that it may have already.
func withPart(old, part *rights.Role) *rights.Role {
	r, has := &rights.Role{Name: part.Name}, map[string]bool{}
	if old != nil {
		r.Permissions = slices.Clone(old.Permissions)
	}
	for i := range r.Permissions {
		has[string(appendPermission(nil, &r.Permissions[i]))] = true
	}
	for i := range part.Permissions {
		if p := &part.Permissions[i]; !has[string(appendPermission(nil, p))] {
			r.Permissions = append(r.Permissions, *p)
		}
	}
	slices.SortStableFunc(r.Permissions, rights.ByKey)
	return r
}
