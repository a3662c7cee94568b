package fsm

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

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
			was, changed := view.Access()
			before := whole(was)
			c := rights.Change{
				Kind: rights.Kind(1 + rng.IntN(int(rights.RevokePermission))), User: one("root", "a", "b"), Role: one("root", "r", "s"),
				NoPassword: rng.IntN(3) == 0, Hash: []byte(one("x", "y")),
				Permission: rights.Permission{Type: rights.Type(rng.IntN(3)), Key: []byte(one("k", "l")), RangeEnd: []byte(one("", "m"))},
			}
			res := s.Apply(index, ChangeAccess{Caller: one("root", "root", "a"), Change: c})
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
			if now, at := view.Access(); whole(now) != before || at != changed {
				t.Fatalf("seed %d: a view has changed from\n%s\ninto\n%s", seed, before, whole(now))
			}
			if next, at := s.View(index, 1, view).Access(); whole(next) != whole(s.access) || res.Err == nil && at == changed && whole(next) != before {
				t.Fatalf("seed %d: the next view has at %d\n%s\nwant\n%s", seed, at, whole(next), whole(s.access))
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
