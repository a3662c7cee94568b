package fsm

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/internal/testkit"
	"github.com/skeindb/skein/rights"
)

// holdEffect reads the commands about holds of TestState's stories. Times are in milliseconds.
func holdEffect(t *testing.T, d *datadriven.TestData) Effect {
	t.Helper()
	number := func(name string) (n uint64) {
		if d.HasArg(name) {
			n = testkit.Arg(t, d, name)
		}
		return n
	}
	switch d.Cmd {
	case "hold", "renew":
		return PutHold{
			Create: d.Cmd == "hold", ID: HoldID(number("id")), Owner: "backup", Revision: keyspace.Revision(number("at")), Now: UnixMillis(number("now")),
			Life: time.Duration(number("life")) * time.Millisecond,
		}
	case "release":
		return EndHold{ID: HoldID(number("id")), Expires: UnixMillis(number("expires"))}
	}
	return nil
}

func printHold(h Hold) string {
	return fmt.Sprintf("hold %d of %q from revision %d on, made at %d ms, expires at %d ms", uint64(h.ID), h.Owner, h.Revision, h.Made, h.Expires)
}

func (h *stateStory) printHolds() string {
	var b strings.Builder
	v := h.s.View(0, 0, nil)
	if v.Holds != nil {
		for _, one := range v.Holds.All {
			fmt.Fprintln(&b, printHold(one))
			if found, ok := v.Holds.Find(one.ID); !ok || found != one {
				fmt.Fprintf(&b, "not found: %v\n", found)
			}
		}
	}
	low := "nothing"
	if r := v.Holds.Lowest(); r != keyspace.MaxRevision {
		low = fmt.Sprint(r)
	}
	fmt.Fprintf(&b, "held from: %s\n", low)
	return b.String()
}

// TestHoldsAreBounded: each hold may cost disk space on all nodes, so there are few.
func TestHoldsAreBounded(t *testing.T) {
	s, index := bootstrapped(t), uint64(firstIndex)
	put := func(id HoldID) error {
		index++
		return s.Apply(index, PutHold{Create: true, ID: id, Now: 1, Life: time.Hour}).Err
	}
	for id := range HoldID(MaxHolds) {
		if err := put(id + 1); err != nil {
			t.Fatal(id, err)
		}
	}
	if err := put(MaxHolds + 1); kverror.Of(err).Kind != kverror.TooManyRequests || len(s.standing) != MaxHolds {
		t.Errorf("%v, %d holds", err, len(s.standing))
	}
	if err := put(1); err != nil {
		t.Errorf("one that is there: %v", err)
	}
}

// TestHoldRecordUnderItsName: a record under another one's key is damage.
func TestHoldRecordUnderItsName(t *testing.T) {
	s := NewState()
	if err := s.Load(holdKey(8), appendHold([]byte{FormatVersion}, Hold{ID: 7})); err == nil || len(s.standing) > 0 {
		t.Errorf("loaded %v: %v", s.standing, err)
	}
}

// TestAccessRows: users and roles as rows, page by page, give the same users and roles. The tokens' secret stays.
func TestAccessRows(t *testing.T) {
	s, index := bootstrapped(t), uint64(firstIndex)
	if rows, more := s.View(index, 1, nil).Access.Rows(nil, 1); len(rows) > 0 || more {
		t.Errorf("%v before the first change", rows)
	}
	for _, c := range []rights.Change{
		{Kind: rights.AddUser, User: "root", Hash: []byte("$2a$10$hash")},
		{Kind: rights.AddUser, User: "bob", NoPassword: true},
		{Kind: rights.AddRole, Role: "root"},
		{Kind: rights.AddRole, Role: "r"},
		{Kind: rights.GrantPermission, Role: "r", Permission: rights.Permission{Type: rights.Read, Key: []byte("a")}},
		{Kind: rights.GrantRole, User: "root", Role: "root"},
		{Kind: rights.Enable},
	} {
		index++
		if r := s.Apply(index, ChangeAccess{Change: c, Key: []byte("secret")}); r.Err != nil {
			t.Fatal(c, r.Err)
		}
	}
	view := s.View(index, 1, nil).Access
	var all []AccessRow
	var after []byte
	for more := true; more; {
		var rows []AccessRow
		rows, more = view.Rows(after, 1)
		if len(rows) != 1 {
			t.Fatalf("%d rows in 1 byte", len(rows))
		}
		all, after = append(all, rows...), rows[0].Key
	}
	if whole, more := view.Rows(nil, 1<<20); more || !reflect.DeepEqual(whole, all) || len(all) != 5 {
		t.Errorf("%d rows at once, %d one by one", len(whole), len(all))
	}
	r := NewReader(AppendAccessRows(nil, all))
	got := r.AccessRows()
	if err := r.Finish(); err != nil || !reflect.DeepEqual(got, all) {
		t.Fatalf("%v, %v", got, err)
	}
	a, err := AccessOf(got)
	if err != nil || !reflect.DeepEqual(a.Users(), view.Users()) || !reflect.DeepEqual(a.Roles(), view.Roles()) || a.Meta != view.Meta {
		t.Errorf("%+v, %v, want %+v", a, err, view.State)
	}
	for _, row := range all {
		if strings.Contains(string(row.Value), "secret") {
			t.Errorf("row %q has the tokens' secret", row.Key)
		}
	}
	if _, err := AccessOf([]AccessRow{{Key: []byte{recordMeta}, Value: []byte{FormatVersion}}}); err == nil {
		t.Error("another record is taken for one of users")
	}
}
