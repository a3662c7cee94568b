package fsm

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/skeindb/skein/rights"
)

// AccessRow is one record of users and roles, as it is stored: for copies of the whole store. It may have the hash of
// a password.
type AccessRow struct{ Key, Value []byte }

// maxAccessRowBytes bounds a row, which may be a role with all permissions.
const maxAccessRowBytes = 2 * rights.MaxBytes

// Rows returns the rows behind a key, in the order of their keys: as many as fit into maxBytes, but one at least. more
// says that there are others. The secret of the tokens' MAC is left out. There are none before the first change.
func (a *Access) Rows(after []byte, maxBytes int) (rows []AccessRow, more bool) {
	if a == nil {
		return nil, false
	}
	size := 0
	add := func(key []byte, value func([]byte) []byte) {
		if more || len(after) > 0 && string(key) <= string(after) {
			return
		}
		row := AccessRow{Key: key, Value: value([]byte{FormatVersion})}
		if size += len(row.Key) + len(row.Value); size > maxBytes && len(rows) > 0 {
			more = true
			return
		}
		rows = append(rows, row)
	}
	add([]byte{recordAccess}, func(b []byte) []byte { return appendAccessMeta(b, &accessMeta{Meta: a.Meta, Changed: a.Changed}) })
	for _, r := range a.State.Roles() {
		add(roleKey(r.Name), func(b []byte) []byte { return appendRole(b, r) })
	}
	for _, u := range a.State.Users() {
		add(userKey(u.Name), func(b []byte) []byte { return appendUser(b, u) })
	}
	return rows, more
}

// AccessOf returns the users and roles of rows.
func AccessOf(rows []AccessRow) (*rights.State, error) {
	s := NewState()
	for _, r := range rows {
		switch {
		case len(r.Key) == 0, r.Key[0] != recordAccess && r.Key[0] != recordRole && r.Key[0] != recordUser:
			return nil, fmt.Errorf("placement: a record of users and roles under key %x", r.Key)
		}
		if err := s.loadAccess(r.Key, r.Value); err != nil {
			return nil, err
		}
	}
	return s.access, s.access.Check()
}

// MaxAccessPiece is about how many bytes of rows one step of a load has.
const MaxAccessPiece = 256 << 10

// CheckAccessPiece says why a step of a load cannot have the rows.
func CheckAccessPiece(rows []AccessRow) error {
	r := NewReader(AppendAccessRows(nil, rows))
	r.AccessRows()
	return r.Finish()
}

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
