package fsm

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// bootstrapped is the first state of a cluster of one node.
func bootstrapped(t *testing.T) *State {
	t.Helper()
	b := Bootstrap{Cluster: 1, Nodes: []Node{{ID: 1, Name: "n1"}}}
	return b.FirstState(firstIndex)
}

// whole prints users and roles with their hashes.
func whole(s *rights.State) string {
	out := s.String()
	for _, u := range s.Users() {
		out += fmt.Sprintf("%s: %q\n", u.Name, u.Hash)
	}
	return out
}

// accessOf returns the users and roles of a View, and indexOf the index of their last change.
func accessOf(v *View) *rights.State {
	if v.Access == nil {
		return rights.New()
	}
	return v.Access.State
}

func indexOf(v *View) uint64 {
	if v.Access == nil {
		return 0
	}
	return v.Access.Changed
}

// anyChange returns a random change of a few users and roles. Half of them are refused.
func anyChange(rng *rand.Rand) rights.Change {
	one := func(of ...string) string { return of[rng.IntN(len(of))] }
	return rights.Change{
		Kind: rights.Kind(1 + rng.IntN(int(rights.RevokePermission))), User: one("root", "a", "b"), Role: one("root", "r", "s"),
		NoPassword: rng.IntN(3) == 0, Hash: []byte(one("x", "y")),
		Permission: rights.Permission{Type: rights.Type(rng.IntN(3)), Key: []byte(one("k", "l")), RangeEnd: []byte(one("", "m"))},
	}
}

// TestAccessIsTold: the parts for an index bring a node from there to the users and roles of now, however
// far it is behind, and also over the state of a member that has just started. No part has a hash.
func TestAccessIsTold(t *testing.T) {
	for seed := range uint64(3) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s, r := bootstrapped(t), records{}
		if err := s.Flush(r); err != nil {
			t.Fatal(err)
		}
		var far, near *Access
		full := 0
		bring := func(a **Access, v *View) {
			since := uint64(0)
			if *a != nil {
				since = (*a).Changed
			}
			var parts []*AccessPart
			for p := range v.Access.Parts(since) {
				got := NewReader(AppendAccessPart(nil, p))
				read := got.AccessPart()
				if err := got.Finish(); err != nil {
					t.Fatal(err)
				}
				if full++; !read.Full {
					full--
				}
				parts = append(parts, &read)
			}
			next, err := (*a).With(parts)
			if err != nil {
				t.Fatalf("seed %d, from %d to %d: %v", seed, since, indexOf(v), err)
			}
			*a = next
			if (*a == nil) != (v.Access == nil) || *a != nil && ((*a).String() != v.Access.String() || (*a).Changed != v.Access.Changed || string((*a).Key) != string(v.Access.Key)) {
				t.Fatalf("seed %d, from %d: told %v, want %v", seed, since, *a, v.Access)
			}
			for _, u := range accessOf(v).Users() {
				if got := (*a).User(u.Name); len(got.Hash) > 0 {
					t.Fatalf("seed %d: the hash of %q was told", seed, u.Name)
				}
			}
		}
		var view *View
		for index := uint64(firstIndex + 1); index < firstIndex+5*maxAccessLog; index++ {
			s.Apply(index, ChangeAccess{Caller: "root", Change: anyChange(rng), Key: []byte{byte(index)}})
			if rng.IntN(10) == 0 { // it moves the access index and touches nobody
				index++
				s.Apply(index, ChangeAlarm{AlarmActivated, AlarmID{AlarmNoSpace, 1}})
				s.Apply(index, ChangeAlarm{AlarmDeactivated, AlarmID{AlarmNoSpace, 1}})
			}
			if rng.IntN(500) == 0 {
				if err := s.Flush(r); err != nil {
					t.Fatal(err)
				}
				s = r.reload(t) // a member starts, or takes a snapshot
				view = nil
			}
			view = s.View(index, 1, view)
			if rng.IntN(20) == 0 {
				bring(&near, view)
			}
			if rng.IntN(2*maxAccessLog) == 0 {
				bring(&far, view)
			}
		}
		bring(&far, view)
		bring(&near, view)
		if full < 2 || full > 100 {
			t.Errorf("seed %d: %d parts brought everything", seed, full)
		}
	}
}

// TestLargeAccessIsTold in parts of a bounded size.
func TestLargeAccessIsTold(t *testing.T) {
	s := bootstrapped(t)
	index := uint64(firstIndex)
	apply := func(c rights.Change) {
		index++
		if res := s.Apply(index, ChangeAccess{Change: c}); res.Err != nil {
			t.Fatal(res.Err)
		}
	}
	for i := range 40 {
		role := fmt.Sprintf("r%d", i)
		apply(rights.Change{Kind: rights.AddRole, Role: role})
		for k := range 2 {
			key := bytes.Repeat([]byte{byte(k + 1)}, rights.MaxKeyBytes)
			apply(rights.Change{Kind: rights.GrantPermission, Role: role, Permission: rights.Permission{Type: rights.Read, Key: key}})
		}
	}
	v, parts := s.View(index, 1, nil), []*AccessPart(nil)
	for p := range v.Access.Parts(0) {
		if n := len(AppendAccessPart(nil, p)); n > partBytes+1024 {
			t.Errorf("a part of %d bytes", n)
		}
		parts = append(parts, p)
	}
	if len(parts) < 10 {
		t.Errorf("%d parts", len(parts))
	}
	if a, err := (*Access)(nil).With(parts); err != nil || a.String() != v.Access.String() {
		t.Errorf("%v\nwant %v, %v", a, v.Access, err)
	}
}

// TestAccessIsStored: after any changes the records hold what the state does, and a View stays as it is.
func TestAccessIsStored(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 0))
		one := func(of ...string) string { return of[rng.IntN(len(of))] }
		s, r := bootstrapped(t), records{}
		if err := s.Flush(r); err != nil {
			t.Fatal(err)
		}
		var prev *View
		applied := 0
		for index := uint64(firstIndex + 1); index < firstIndex+150; index++ {
			view := s.View(index-1, 1, prev)
			before, changed := whole(accessOf(view)), indexOf(view)
			res := s.Apply(index, ChangeAccess{Caller: one("root", "root", "a"), Change: anyChange(rng), Key: []byte(one("1", "2"))})
			records := maps.Clone(r)
			if err := s.Flush(r); err != nil {
				t.Fatal(err)
			}
			if res.Err != nil && !maps.EqualFunc(r, records, func(a, b []byte) bool { return string(a) == string(b) }) {
				t.Fatalf("seed %d: a refused change (%v) was stored", seed, res.Err)
			}
			again := r.reload(t)
			if got, want := whole(again.access), whole(s.access); got != want || again.accessChanged != s.accessChanged {
				t.Fatalf("seed %d: stored at %d\n%s\nwant at %d\n%s", seed, again.accessChanged, got, s.accessChanged, want)
			}
			if now := whole(accessOf(view)); now != before || indexOf(view) != changed {
				t.Fatalf("seed %d: a view has changed from\n%s\ninto\n%s", seed, before, now)
			}
			next := s.View(index, 1, view)
			if now := whole(accessOf(next)); now != whole(s.access) || indexOf(next) == changed && now != before {
				t.Fatalf("seed %d: the next view has at %d\n%s\nwant\n%s", seed, indexOf(next), now, whole(s.access))
			}
			if changed := indexOf(next) != changed; changed != (next.Version == index) {
				t.Fatalf("seed %d: users and roles have changed: %t, and the map has version %d at index %d", seed, changed, next.Version, index)
			}
			if err := s.Check(); err != nil {
				t.Fatal(err)
			}
			if res.Err == nil {
				applied++
			}
			prev = view
		}
		if applied < 20 {
			t.Errorf("seed %d: %d changes were applied", seed, applied)
		}
	}
}

// TestAccessRecordsUnderTheirNames: a record under another one's key is damage.
func TestAccessRecordsUnderTheirNames(t *testing.T) {
	for key, value := range map[string][]byte{
		"ubob":   appendUser([]byte{FormatVersion}, &rights.User{Name: "alice"}),
		"ps":     appendRole([]byte{FormatVersion}, &rights.Role{Name: "r"}),
		"ualice": appendUser([]byte{FormatVersion}, &rights.User{Name: "alice", Roles: []string{"s", "r"}}),
		"pr":     appendRole([]byte{FormatVersion}, &rights.Role{Name: "r", Permissions: []rights.Permission{{Key: []byte("b")}, {Key: []byte("a")}}}),
	} {
		if err := NewState().Load([]byte(key), value); err == nil {
			t.Errorf("%q was loaded", key)
		}
	}
}

// TestGuarded: a guarded command does nothing once its permit has ended. Grants end none.
func TestGuarded(t *testing.T) {
	s, index := bootstrapped(t), uint64(firstIndex)
	apply := func(op Effect) Result {
		index++
		return s.Apply(index, op)
	}
	change := func(c rights.Change) {
		t.Helper()
		if res := apply(ChangeAccess{Caller: "root", Change: c, Key: []byte("1")}); res.Err != nil {
			t.Fatal(res.Err)
		}
	}
	set := func(p keyspace.Permit, value string, ended bool) {
		t.Helper()
		before := s.Settings
		res := apply(Guarded{Permit: p, Op: PutSetting{Name: "s", Value: []byte(value)}})
		if got := errors.Is(res.Err, kverror.AccessChanged); got != ended || (s.Settings == before) != ended {
			t.Errorf("permit %d, ended %t: %v, and settings %d after %d", p, ended, res.Err, s.Settings, before)
		}
	}
	change(rights.Change{Kind: rights.AddUser, User: "root", NoPassword: true})
	change(rights.Change{Kind: rights.GrantRole, User: "root", Role: "root"})
	set(keyspace.PermitAt(0), "a", false)
	change(rights.Change{Kind: rights.Enable})
	enabled := keyspace.AccessIndex(index)
	set(keyspace.PermitAt(0), "b", true)
	set(keyspace.PermitAt(enabled-1), "b", true)
	set(keyspace.PermitAt(enabled), "b", false)
	change(rights.Change{Kind: rights.AddRole, Role: "r"})
	set(keyspace.PermitAt(enabled), "c", false)
	change(rights.Change{Kind: rights.DeleteRole, Role: "r"})
	set(keyspace.PermitAt(enabled), "d", true)
	set(keyspace.PermitAt(keyspace.AccessIndex(index-1)), "d", false)
	// A result comes through.
	if res := apply(Guarded{Permit: keyspace.PermitAt(enabled + 1000), Op: AllocateRanges{Count: 2}}); res.Err != nil || res.First == 0 {
		t.Errorf("%+v", res)
	}
	for _, b := range [][]byte{
		(&Command{Op: Guarded{Op: Compact{At: 1}}}).Encode(),
		(&Command{Op: Guarded{Permit: 1, Op: Guarded{Permit: 1, Op: Compact{At: 1}}}}).Encode(),
	} {
		if c, err := DecodeCommand(b); err == nil {
			t.Errorf("decoded %+v", c)
		}
	}
}

// TestChangeAccessAwaits: what takes rights tells the index that nodes have to take in, while rights are
// checked. So does what begins the checks, also where they have begun.
func TestChangeAccessAwaits(t *testing.T) {
	s, index := bootstrapped(t), uint64(firstIndex)
	for _, step := range []struct {
		change rights.Change
		awaits bool
	}{
		{rights.Change{Kind: rights.AddUser, User: "root", NoPassword: true}, false},
		{rights.Change{Kind: rights.GrantRole, User: "root", Role: "root"}, false},
		{rights.Change{Kind: rights.AddUser, User: "a", NoPassword: true}, false},
		{rights.Change{Kind: rights.DeleteUser, User: "a"}, false},
		{rights.Change{Kind: rights.Enable}, true},
		{rights.Change{Kind: rights.Enable}, true},
		{rights.Change{Kind: rights.AddUser, User: "a", NoPassword: true}, false},
		{rights.Change{Kind: rights.DeleteUser, User: "a"}, true},
		{rights.Change{Kind: rights.DeleteUser, User: "a"}, false}, // refused
		{rights.Change{Kind: rights.Disable}, false},
	} {
		index++
		res := s.Apply(index, ChangeAccess{Caller: "root", Change: step.change})
		want := keyspace.AccessIndex(0)
		if step.awaits {
			want = keyspace.AccessIndex(s.access.Meta.Access)
		}
		if res.Access != want {
			t.Errorf("index %d, kind %d: awaits index %d, want %d (%v)", index, step.change.Kind, res.Access, want, res.Err)
		}
	}
}
