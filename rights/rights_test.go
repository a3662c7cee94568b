package rights

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/kverror"
)

var kinds = map[string]Kind{
	"enable": Enable, "disable": Disable, "add-user": AddUser, "delete-user": DeleteUser, "change-password": ChangePassword,
	"grant-role": GrantRole, "revoke-role": RevokeRole, "add-role": AddRole, "delete-role": DeleteRole,
	"grant": GrantPermission, "revoke": RevokePermission,
}

var types = map[string]Type{"read": Read, "write": Write, "readwrite": ReadWrite}

// keyOf reads a key of a story: \0 is the byte 0, and - is nothing.
func keyOf(s string) []byte {
	if s == "-" {
		return nil
	}
	return []byte(strings.ReplaceAll(s, `\0`, "\x00"))
}

// changeOf reads a change as the stories have it.
func changeOf(t *testing.T, f []string) *Change {
	t.Helper()
	c := &Change{Kind: kinds[f[0]]}
	arg := func(i int) string {
		if i < len(f) {
			return f[i]
		}
		return ""
	}
	switch c.Kind {
	case Enable, Disable:
	case AddUser, ChangePassword:
		c.User, c.NoPassword, c.Hash = arg(1), arg(2) == "no-password", []byte("hash of "+arg(2))
	case DeleteUser:
		c.User = arg(1)
	case GrantRole, RevokeRole:
		c.User, c.Role = arg(1), arg(2)
	case AddRole, DeleteRole:
		c.Role = arg(1)
	case GrantPermission:
		c.Role, c.Permission = arg(1), Permission{Type: types[arg(2)], Key: keyOf(arg(3)), RangeEnd: keyOf(arg(4))}
	case RevokePermission:
		c.Role, c.Permission = arg(1), Permission{Key: keyOf(arg(2)), RangeEnd: keyOf(arg(3))}
	default:
		t.Fatalf("no change %q", f)
	}
	return c
}

// TestStories plays changes and asks who may what. Trap 99 is in the story of what users may.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		s, index := New(), uint64(0)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for line := range strings.SplitSeq(d.Input, "\n") {
				f := strings.Fields(line)
				switch d.Cmd {
				case "apply": // by whom, and what
					index++
					before := s.Meta
					touched, err := s.Apply(index, string(keyOf(f[0])), changeOf(t, f[1:]))
					fmt.Fprintf(&out, "%d: ", index)
					switch {
					case err != nil:
						fmt.Fprintln(&out, err)
						if s.Meta != before {
							t.Errorf("%s: a refused change has changed %+v into %+v", line, before, s.Meta)
						}
						continue
					case s.Revision != before.Revision:
						fmt.Fprintf(&out, "revision %d", s.Revision)
					default:
						out.WriteString("nothing new")
					}
					if s.Access != before.Access {
						out.WriteString(", something is taken away")
					}
					for _, name := range touched.Users {
						fmt.Fprintf(&out, ", user %s", name)
					}
					for _, name := range touched.Roles {
						fmt.Fprintf(&out, ", role %s", name)
					}
					out.WriteByte('\n')
				case "may": // who, what, key, end
					sub, ok := s.Subject(f[0])
					if !ok {
						out.WriteString("nobody\n")
						continue
					}
					end := []byte(nil)
					if len(f) > 3 {
						end = keyOf(f[3])
					}
					fmt.Fprintf(&out, "%s: %t\n", line, sub.May(types[f[1]], keyOf(f[2]), end))
				case "admin":
					fmt.Fprintf(&out, "%v\n", s.Admin(string(keyOf(f[0]))))
				case "show":
				default:
					t.Fatalf("no command %q", d.Cmd)
				}
				if err := s.Check(); err != nil {
					t.Error(err)
				}
			}
			if d.Cmd == "show" {
				return s.String()
			}
			return out.String()
		})
	})
}

// dice makes changes of a few users, roles and keys.
type dice struct{ *rand.Rand }

func (d dice) one(of ...string) string { return of[d.IntN(len(of))] }

func (d dice) change() *Change {
	c := &Change{Kind: Kind(1 + d.IntN(numKinds-1)), User: d.one("root", "a", "b", "c", ""), Role: d.one("root", "r", "s", "u", "")}
	if c.Kind <= Disable && d.IntN(3) > 0 {
		c.Kind = GrantPermission
	}
	c.NoPassword, c.Hash = d.IntN(4) == 0, []byte(d.one("x", "y"))
	c.Permission = Permission{Type: Type(d.IntN(4)), Key: d.key(), RangeEnd: d.key()}
	return c
}

func (d dice) key() []byte {
	return []byte(d.one("", "\x00", "k", "k\x00", "ka", "kb", "kc", "l", "\xff"))
}

// may is what May promises, by looking at each key: point spans of all keys that the dice know, and
// those just behind them.
func (s *State) may(u *User, what Type, key []byte) bool {
	if u.isRoot() {
		return true
	}
	for _, name := range u.Roles {
		r := s.Role(name)
		if r == nil {
			continue
		}
		for _, p := range r.Permissions {
			in := bytes.Equal(key, p.Key)
			if len(p.RangeEnd) > 0 {
				in = bytes.Compare(p.Key, key) <= 0 && (openEnd(p.RangeEnd) || bytes.Compare(key, p.RangeEnd) < 0)
			}
			if in && p.Type.permits(what) {
				return true
			}
		}
	}
	return false
}

// keys are those that can tell spans of the dice's keys apart.
func keys() (out [][]byte) {
	for _, k := range []string{"\x00", "k", "ka", "kb", "kc", "l", "\xff"} {
		for _, behind := range []string{"", "\x00", "\x00\x00", "m"} {
			out = append(out, []byte(k+behind))
		}
	}
	return out
}

// TestAnyChanges: after any changes, a subject may do with a span what it may do with each key of it;
// and without a newer access index nobody may do less than before.
func TestAnyChanges(t *testing.T) {
	for seed := range uint64(200) {
		d := dice{rand.New(rand.NewPCG(seed, 0))}
		s := New()
		for index := uint64(1); index <= 150; index++ {
			before := s.Clone()
			if _, err := s.Apply(index, d.one("root", "root", "a", ""), d.change()); err != nil && s.String() != before.String() {
				t.Fatalf("seed %d: refused with %v, and changed\n%s\ninto\n%s", seed, err, before, s)
			}
			if err := s.Check(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if s.Access == before.Access {
				lessNowhere(t, before, s)
			}
		}
		checkSpans(t, d, s)
	}
}

// lessNowhere checks that nobody lost anything. A user who was created anew counts as another one.
func lessNowhere(t *testing.T, before, after *State) {
	t.Helper()
	for _, u := range before.Users() {
		now, _ := after.Subject(u.Name)
		for _, k := range keys() {
			for _, what := range []Type{Read, Write} {
				if before.may(u, what, k) && (now == nil || !now.May(what, k, nil)) {
					t.Fatalf("user %s may not %s %q any more, and the access index is %d\nbefore: %s\nafter: %s", u.Name, what, k, after.Access, before, after)
				}
			}
		}
	}
	if after.Enabled && !before.Enabled {
		t.Fatalf("checks are on, and the access index is %d", after.Access)
	}
}

// checkSpans checks what may be done with spans against what may be done with their keys.
func checkSpans(t *testing.T, d dice, s *State) {
	t.Helper()
	all := keys()
	slices.SortFunc(all, bytes.Compare)
	for _, u := range s.Users() {
		sub, ok := s.Subject(u.Name)
		if !ok {
			t.Fatalf("no subject of user %q", u.Name)
		}
		for _, k := range all {
			start, end, ok := sub.Readable(k)
			if ok != s.may(u, Read, k) {
				t.Fatalf("user %q reads %q: %t\n%s", u.Name, k, ok, s)
			}
			for _, in := range all {
				if ok && bytes.Compare(start, in) <= 0 && (len(end) == 0 || bytes.Compare(in, end) < 0) && !s.may(u, Read, in) {
					t.Fatalf("user %q reads %q to %q, and not %q\n%s", u.Name, start, end, in, s)
				}
			}
			if ok && len(end) > 0 && sub.May(Read, end, nil) {
				t.Fatalf("user %q reads %q to %q, and further\n%s", u.Name, start, end, s)
			}
		}
		for range 100 {
			key, end, what := d.key(), d.key(), Type(d.IntN(2))
			if len(key) == 0 || len(end) > 0 && !openEnd(end) && bytes.Compare(key, end) >= 0 {
				continue
			}
			want := true
			for _, k := range all {
				in := bytes.Equal(k, key)
				if len(end) > 0 {
					in = bytes.Compare(key, k) <= 0 && (openEnd(end) || bytes.Compare(k, end) < 0)
				}
				want = want && (!in || s.may(u, what, k))
			}
			// An open span reaches behind the last key that the test knows.
			if openEnd(end) {
				want = want && s.may(u, what, []byte("\xff\xff\xff"))
			}
			if got := sub.May(what, key, end); got != want {
				t.Fatalf("user %q %s %q to %q: %t, want %t\n%s", u.Name, what, key, end, got, want, s)
			}
		}
	}
}

// TestRoom: nothing is too large, and the whole is not either.
func TestRoom(t *testing.T) {
	s := New()
	long := strings.Repeat("n", MaxNameBytes+1)
	for _, c := range []*Change{
		{Kind: AddUser, User: long},
		{Kind: AddRole, Role: long},
		{Kind: AddUser, User: "u", Hash: make([]byte, MaxHashBytes+1)},
		{Kind: GrantPermission, Role: "r", Permission: Permission{Key: make([]byte, MaxKeyBytes+1)}},
	} {
		if _, err := s.Apply(1, "", c); kverror.Of(err).Kind != kverror.BadRequest {
			t.Errorf("%+v: %v", c.Kind, err)
		}
	}
	if _, err := s.Apply(2, "", &Change{Kind: AddRole, Role: "r"}); err != nil {
		t.Fatal(err)
	}
	var err error
	for i := 0; err == nil; i++ {
		key := append(bytes.Repeat([]byte("k"), MaxKeyBytes-8), fmt.Sprintf("%08d", i)...)
		_, err = s.Apply(uint64(3+i), "", &Change{Kind: GrantPermission, Role: "r", Permission: Permission{Key: key}})
	}
	if kverror.Of(err).Kind != kverror.TooManyUsers || s.Bytes() > MaxBytes || s.Bytes() < MaxBytes*9/10 {
		t.Errorf("%v at %d bytes", err, s.Bytes())
	}
	if _, err = s.Apply(1e6, "", &Change{Kind: DeleteRole, Role: "r"}); err != nil || s.Bytes() != 0 {
		t.Errorf("%v, %d bytes are left", err, s.Bytes())
	}
}

// TestClone: a copy does not see what happens afterwards.
func TestClone(t *testing.T) {
	s := New()
	for i, f := range []string{"add-user a", "add-role r", "grant-role a r", "grant r read k"} {
		if _, err := s.Apply(uint64(i+1), "", changeOf(t, strings.Fields(f))); err != nil {
			t.Fatal(err)
		}
	}
	was, c := s.String(), s.Clone()
	for i, f := range []string{"grant r write k", "revoke r k", "revoke-role a r", "delete-role r", "change-password a p", "delete-user a"} {
		if _, err := s.Apply(uint64(i+10), "", changeOf(t, strings.Fields(f))); err != nil {
			t.Fatal(err)
		}
	}
	if c.String() != was {
		t.Errorf("the copy is\n%s\nand was\n%s", c, was)
	}
}

func BenchmarkMay(b *testing.B) {
	s := New()
	must := func(c *Change) {
		if _, err := s.Apply(1, "", c); err != nil {
			b.Fatal(err)
		}
	}
	must(&Change{Kind: AddUser, User: "u"})
	for i := range 1000 {
		role := fmt.Sprint("r", i)
		must(&Change{Kind: AddRole, Role: role})
		must(&Change{Kind: GrantPermission, Role: role, Permission: Permission{Type: ReadWrite, Key: fmt.Appendf(nil, "/k/%04d/", i), RangeEnd: fmt.Appendf(nil, "/k/%04d0", i)}})
		must(&Change{Kind: GrantRole, User: "u", Role: role})
	}
	b.Run("subject", func(b *testing.B) {
		for b.Loop() {
			s.Subject("u")
		}
	})
	sub, _ := s.Subject("u")
	b.Run("may", func(b *testing.B) {
		key := []byte("/k/0500/a")
		for b.Loop() {
			if !sub.May(Write, key, nil) {
				b.Fatal("denied")
			}
		}
	})
}
