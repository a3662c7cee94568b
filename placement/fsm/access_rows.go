package fsm

import (
	"fmt"

	"github.com/skeindb/skein/rights"
)

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
