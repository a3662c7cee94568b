package fsm

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rights"
)

// ChangeAccess changes users, roles or permissions, or whether they are checked. Caller is the user
// who asks, empty for none: the state refuses who may not.
type ChangeAccess struct {
	Caller string
	Change rights.Change
	// Key is the secret of the tokens' MAC from now on, if the change switches checks on.
	Key []byte
}

func (ChangeAccess) kind() opKind { return opChangeAccess }

func (o ChangeAccess) append(dst []byte) []byte {
	dst = AppendString(dst, o.Caller)
	return AppendBytes(AppendChange(dst, &o.Change), o.Key)
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
	res := Result{}
	if s.access.Enabled && (s.access.Access != before.Access || o.Change.Kind == rights.Enable) {
		res.Access = keyspace.AccessIndex(s.access.Access)
	}
	if s.access.Meta == before {
		return res // it is so already
	}
	if o.Change.Kind == rights.Enable {
		s.accessKey = o.Key
	}
	s.accessTouched(index, touched)
	return res
}

// accessTouched notes that users and roles have changed.
func (s *State) accessTouched(index uint64, touched rights.Touched) {
	s.accessChanged, s.dirty.access = index, true
	s.accessLog.add(index, touched)
	s.changedMap(index)
	for _, name := range touched.Users {
		s.dirty.users[name] = true
	}
	for _, name := range touched.Roles {
		s.dirty.roles[name] = true
	}
}

// maxAccessLog is how many changes a node may be behind and still be told the changes alone.
const maxAccessLog = 1024

// accessLog says what changes above an index have touched. Entries of the list never
// change, so copies of an accessLog share it.
type accessLog struct {
	floor   uint64
	changes []accessChange
}

type accessChange struct {
	index uint64
	rights.Touched
}

func (l *accessLog) add(index uint64, t rights.Touched) {
	if len(l.changes) == 2*maxAccessLog {
		l.floor = l.changes[maxAccessLog-1].index
		l.changes = slices.Clone(l.changes[maxAccessLog:])
	}
	l.changes = append(l.changes, accessChange{index, t})
}

// since returns the names of the users and roles that changes after the index have touched, ascending.
// Not ok: that is not known.
func (l *accessLog) since(index uint64) (users, roles []string, ok bool) {
	if index < l.floor || index == 0 {
		return nil, nil, false
	}
	for i := len(l.changes) - 1; i >= 0 && l.changes[i].index > index; i-- {
		users, roles = append(users, l.changes[i].Users...), append(roles, l.changes[i].Roles...)
	}
	slices.Sort(users)
	slices.Sort(roles)
	return slices.Compact(users), slices.Compact(roles), true
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
	m := accessMeta{Meta: s.access.Meta, Changed: s.accessChanged, Key: s.accessKey}
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
	s.access.Meta, s.accessChanged, s.accessKey = m.Meta, m.Changed, m.Key
	s.accessLog.floor = m.Changed
	return err
}

// accessMeta is what is stored of users and roles beside their own records.
type accessMeta struct {
	rights.Meta
	// Changed is the index of the last change.
	Changed uint64
	// Key is the secret of the tokens' MAC, empty before checks were switched on.
	Key []byte
}

func userKey(name string) []byte { return append([]byte{recordUser}, name...) }
func roleKey(name string) []byte { return append([]byte{recordRole}, name...) }

// MaxKeyBytes bounds the secret of the tokens' MAC.
const MaxKeyBytes = 64

func appendUser(dst []byte, u *rights.User) []byte {
	dst = appendStrings(AppendString(dst, u.Name), u.Roles)
	return binary.AppendUvarint(AppendBytes(AppendBool(dst, u.NoPassword), u.Hash), u.Since)
}

func (r *Reader) user() rights.User {
	u := rights.User{
		Name: r.StringUpTo(rights.MaxNameBytes), Roles: r.StringsUpTo(rights.MaxBytes, rights.MaxNameBytes),
		NoPassword: r.Bool(), Hash: r.CopyUpTo(rights.MaxHashBytes), Since: r.Uvarint(),
	}
	if !slices.IsSorted(u.Roles) {
		r.Failf("the roles %q are not sorted", u.Roles)
	}
	return u
}

func decodeUser(b []byte) (rights.User, error) {
	r := NewReader(b)
	r.Version()
	u := r.user()
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

func (r *Reader) role() rights.Role {
	o := rights.Role{Name: r.StringUpTo(rights.MaxNameBytes)}
	for range r.CountUpTo(rights.MaxBytes, 3) {
		if o.Permissions = append(o.Permissions, r.permission()); !r.OK() {
			break
		}
	}
	if !slices.IsSortedFunc(o.Permissions, rights.ByKey) {
		r.Failf("the permissions of role %q are not sorted", o.Name)
	}
	return o
}

func decodeRole(b []byte) (rights.Role, error) {
	r := NewReader(b)
	r.Version()
	o := r.role()
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
	return AppendBytes(dst, m.Key)
}

func (r *Reader) accessMeta() accessMeta {
	return accessMeta{
		Meta:    rights.Meta{Enabled: r.Bool(), Revision: r.Uvarint(), EnabledSince: r.Uvarint(), Access: r.Uvarint()},
		Changed: r.Uvarint(), Key: r.CopyUpTo(MaxKeyBytes),
	}
}

func decodeAccessMeta(b []byte) (accessMeta, error) {
	r := NewReader(b)
	r.Version()
	m := r.accessMeta()
	if err := r.Finish(); err != nil {
		return accessMeta{}, fmt.Errorf("decode placement access record: %w", err)
	}
	return m, nil
}

// AccessRow is one record of users and roles, as it is stored: for copies of the whole store. It may have the hash of
// a password.
type AccessRow struct{ Key, Value []byte }

// maxAccessRowBytes bounds a row, which may be a role with all permissions.
const maxAccessRowBytes = 2 * rights.MaxBytes

// AppendAccessRows appends a list of rows.
func AppendAccessRows(dst []byte, rows []AccessRow) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(rows)))
	for i := range rows {
		dst = AppendBytes(AppendBytes(dst, rows[i].Key), rows[i].Value)
	}
	return dst
}

// AccessPieces returns the rows of a state by which a load brings it, in pieces of about MaxAccessPiece. The last piece has
// the row that says whether users are checked, alone. Users and roles that are large are divided: rows of one key add up.
func AccessPieces(s *rights.State) (pieces [][]AccessRow) {
	var piece []AccessRow
	size := 0
	add := func(row AccessRow) {
		if size += len(row.Key) + len(row.Value); size > MaxAccessPiece && len(piece) > 0 {
			pieces, piece, size = append(pieces, piece), nil, len(row.Key)+len(row.Value)
		}
		piece = append(piece, row)
	}
	for _, r := range s.Roles() {
		for rest, first := r.Permissions, true; first || len(rest) > 0; first = false {
			part := rights.Role{Name: r.Name}
			for len(rest) > 0 && (len(part.Permissions) == 0 || part.Bytes() < MaxAccessPiece/2) {
				part.Permissions, rest = append(part.Permissions, rest[0]), rest[1:]
			}
			add(AccessRow{roleKey(r.Name), appendRole([]byte{FormatVersion}, &part)})
		}
	}
	for _, u := range s.Users() {
		for rest, first := u.Roles, true; first || len(rest) > 0; first = false {
			part := rights.User{Name: u.Name, NoPassword: u.NoPassword, Hash: u.Hash}
			for len(rest) > 0 && (len(part.Roles) == 0 || part.Bytes() < MaxAccessPiece/2) {
				part.Roles, rest = append(part.Roles, rest[0]), rest[1:]
			}
			add(AccessRow{userKey(u.Name), appendUser([]byte{FormatVersion}, &part)})
		}
	}
	if len(piece) > 0 {
		pieces = append(pieces, piece)
	}
	meta := accessMeta{Meta: rights.Meta{Enabled: s.Enabled, Revision: s.Revision}}
	return append(pieces, []AccessRow{{[]byte{recordAccess}, appendAccessMeta([]byte{FormatVersion}, &meta)}})
}

// AccessRows reads what AppendAccessRows wrote.
func (r *Reader) AccessRows() []AccessRow {
	var rows []AccessRow
	for range r.CountUpTo(rights.MaxBytes, 4) {
		row := AccessRow{Key: r.CopyUpTo(rights.MaxNameBytes + 1), Value: r.CopyUpTo(maxAccessRowBytes)}
		if !r.OK() {
			return nil
		}
		rows = append(rows, row)
	}
	if !slices.IsSortedFunc(rows, func(a, b AccessRow) int { return cmp.Compare(string(a.Key), string(b.Key)) }) {
		r.Failf("rows of users and roles that are not in order")
	}
	return rows
}
