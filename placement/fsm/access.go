package fsm

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/rights"
)

// ChangeAccess changes users, roles or permissions, or whether they are checked. Caller is the user
// who asks, empty for none: the state refuses who may not.
type ChangeAccess struct {
	Caller string
	Change rights.Change
}

func (ChangeAccess) kind() opKind { return opChangeAccess }

func (o ChangeAccess) append(dst []byte) []byte {
	dst = AppendString(dst, o.Caller)
	return AppendChange(dst, &o.Change)
}

// AppendChange appends a change of users and roles, which requests hold too.
func AppendChange(dst []byte, c *rights.Change) []byte {
	dst = append(dst, byte(c.Kind))
	dst = AppendString(AppendString(dst, c.User), c.Role)
	dst = AppendBytes(AppendBool(dst, c.NoPassword), c.Hash)
	return appendPermission(dst, &c.Permission)
}

// Change reads a change of users and roles.
func (r *Reader) Change() rights.Change {
	c := rights.Change{Kind: rights.Kind(r.Byte())}
	if r.OK() && !c.Kind.Known() {
		r.Failf("unknown change of access %d", c.Kind)
	}
	c.User, c.Role = r.StringUpTo(rights.MaxNameBytes), r.StringUpTo(rights.MaxNameBytes)
	c.NoPassword, c.Hash = r.Bool(), r.CopyUpTo(rights.MaxHashBytes)
	c.Permission = r.permission()
	return c
}

func appendPermission(dst []byte, p *rights.Permission) []byte {
	dst = binary.AppendUvarint(dst, uint64(uint32(p.Type)))
	return AppendBytes(AppendBytes(dst, p.Key), p.RangeEnd)
}

func (r *Reader) permission() rights.Permission {
	n := r.Uvarint()
	if n > 1<<32-1 {
		r.Failf("permission of type %d", n)
	}
	return rights.Permission{Type: rights.Type(int32(uint32(n))), Key: r.CopyUpTo(rights.MaxKeyBytes), RangeEnd: r.CopyUpTo(rights.MaxKeyBytes)}
}

// applyChangeAccess hands the change to package rights, and notes what has to be stored.
func (s *State) applyChangeAccess(index uint64, o ChangeAccess) Result {
	before := s.access.Meta
	touched, err := s.access.Apply(index, o.Caller, &o.Change)
	if err != nil {
		return Result{Err: err}
	}
	if s.access.Meta == before {
		return Result{} // it is so already
	}
	s.accessChanged, s.dirty.access = index, true
	for _, name := range touched.Users {
		s.dirty.users[name] = true
	}
	for _, name := range touched.Roles {
		s.dirty.roles[name] = true
	}
	return Result{}
}

// flushAccess writes the records of users and roles that changed.
func (s *State) flushAccess(w recordWriter) error {
	if !s.dirty.access {
		return nil
	}
	for name := range s.dirty.users {
		u := s.access.User(name)
		if err := put(w, userKey(name), u != nil, func(b []byte) []byte { return appendUser(b, u) }); err != nil {
			return err
		}
	}
	for name := range s.dirty.roles {
		r := s.access.Role(name)
		if err := put(w, roleKey(name), r != nil, func(b []byte) []byte { return appendRole(b, r) }); err != nil {
			return err
		}
	}
	m := accessMeta{Meta: s.access.Meta, Changed: s.accessChanged}
	if err := w.Set([]byte{recordAccess}, appendAccessMeta([]byte{FormatVersion}, &m)); err != nil {
		return err
	}
	clear(s.dirty.users)
	clear(s.dirty.roles)
	s.dirty.access = false
	return nil
}

// loadAccess takes one record of users and roles into the state.
func (s *State) loadAccess(key, value []byte) error {
	switch key[0] {
	case recordUser:
		u, err := decodeUser(value)
		if err == nil && string(key[1:]) != u.Name {
			err = fmt.Errorf("placement: user %q under key %x", u.Name, key)
		}
		if err == nil {
			s.access.PutUser(&u)
		}
		return err
	case recordRole:
		o, err := decodeRole(value)
		if err == nil && string(key[1:]) != o.Name {
			err = fmt.Errorf("placement: role %q under key %x", o.Name, key)
		}
		if err == nil {
			s.access.PutRole(&o)
		}
		return err
	}
	m, err := decodeAccessMeta(value)
	s.access.Meta, s.accessChanged = m.Meta, m.Changed
	return err
}

// accessMeta is what is stored of users and roles beside their own records.
type accessMeta struct {
	rights.Meta
	// Changed is the index of the last change.
	Changed uint64
}

func userKey(name string) []byte { return append([]byte{recordUser}, name...) }
func roleKey(name string) []byte { return append([]byte{recordRole}, name...) }

func appendUser(dst []byte, u *rights.User) []byte {
	dst = appendStrings(AppendString(dst, u.Name), u.Roles)
	return binary.AppendUvarint(AppendBytes(AppendBool(dst, u.NoPassword), u.Hash), u.Since)
}

func decodeUser(b []byte) (rights.User, error) {
	r := NewReader(b)
	r.Version()
	u := rights.User{
		Name: r.StringUpTo(rights.MaxNameBytes), Roles: r.StringsUpTo(rights.MaxBytes, rights.MaxNameBytes),
		NoPassword: r.Bool(), Hash: r.CopyUpTo(rights.MaxHashBytes), Since: r.Uvarint(),
	}
	if !slices.IsSorted(u.Roles) {
		r.Failf("the roles %q are not sorted", u.Roles)
	}
	if err := r.Finish(); err != nil {
		return rights.User{}, fmt.Errorf("decode placement user record: %w", err)
	}
	return u, nil
}

func appendRole(dst []byte, o *rights.Role) []byte {
	dst = binary.AppendUvarint(AppendString(dst, o.Name), uint64(len(o.Permissions)))
	for i := range o.Permissions {
		dst = appendPermission(dst, &o.Permissions[i])
	}
	return dst
}

func decodeRole(b []byte) (rights.Role, error) {
	r := NewReader(b)
	r.Version()
	o := rights.Role{Name: r.StringUpTo(rights.MaxNameBytes)}
	for range r.CountUpTo(rights.MaxBytes, 3) {
		if o.Permissions = append(o.Permissions, r.permission()); !r.OK() {
			break
		}
	}
	if !slices.IsSortedFunc(o.Permissions, rights.ByKey) {
		r.Failf("the permissions of role %q are not sorted", o.Name)
	}
	if err := r.Finish(); err != nil {
		return rights.Role{}, fmt.Errorf("decode placement role record: %w", err)
	}
	return o, nil
}

func appendAccessMeta(dst []byte, m *accessMeta) []byte {
	dst = AppendBool(dst, m.Enabled)
	for _, n := range []uint64{m.Revision, m.EnabledSince, m.Access, m.Changed} {
		dst = binary.AppendUvarint(dst, n)
	}
	return dst
}

func decodeAccessMeta(b []byte) (accessMeta, error) {
	r := NewReader(b)
	r.Version()
	m := accessMeta{Meta: rights.Meta{Enabled: r.Bool(), Revision: r.Uvarint(), EnabledSince: r.Uvarint(), Access: r.Uvarint()}, Changed: r.Uvarint()}
	if err := r.Finish(); err != nil {
		return accessMeta{}, fmt.Errorf("decode placement access record: %w", err)
	}
	return m, nil
}

// Access returns the users and roles, and the index of their last change. They must not be changed.
func (v *View) Access() (*rights.State, uint64) { return v.access, v.accessChanged }
