package auth

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
	"github.com/skeindb/skein/sim/simclock"
)

const testTTL = 5 * time.Minute

func testKey(t testing.TB, id KeyID) Key {
	t.Helper()
	k, err := NewKey(id, bytes.Repeat([]byte{byte(id)}, MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func testRandom() *rand.ChaCha8 { return rand.NewChaCha8([32]byte{}) }

// tokenWorld is a log of changes, the states behind each of them, and nodes with their own clocks.
type tokenWorld struct {
	t      *testing.T
	views  []*View // by index
	clocks map[string]*simclock.Clock
	nodes  map[string]*Simple
	tokens map[string]string
}

func newTokenWorld(t *testing.T) *tokenWorld {
	t.Helper()
	w := &tokenWorld{t: t, clocks: map[string]*simclock.Clock{}, nodes: map[string]*Simple{}, tokens: map[string]string{}}
	w.views = []*View{{Rights: rights.New(), Keys: Keys{Current: testKey(t, 1)}}}
	for _, name := range []string{"a", "b"} {
		w.clocks[name] = simclock.New(time.Hour, 1)
		w.start(name)
	}
	return w
}

// start gives a node an empty memory.
func (w *tokenWorld) start(name string) {
	w.nodes[name] = NewSimple(w.clocks[name], testRandom(), testTTL)
}

func (w *tokenWorld) last() *View { return w.views[len(w.views)-1] }

var changeKinds = map[string]rights.Kind{
	"enable": rights.Enable, "disable": rights.Disable, "add-user": rights.AddUser, "delete-user": rights.DeleteUser,
	"change-password": rights.ChangePassword, "add-role": rights.AddRole, "grant-role": rights.GrantRole,
}

// apply makes a change, or changes the keys.
func (w *tokenWorld) apply(f []string) string {
	last := w.last()
	v := &View{Rights: last.Rights.Clone(), Index: last.Index + 1, Keys: last.Keys}
	if f[0] == "new-key" {
		v.Keys = Keys{Current: testKey(w.t, last.Keys.Current.id+1), Before: last.Keys.Current}
	} else {
		c := &rights.Change{Kind: changeKinds[f[0]]}
		if len(f) > 1 {
			c.User, c.Role, c.Hash = f[1], f[1], []byte("hash")
		}
		if len(f) > 2 {
			c.Role = f[2]
		}
		if _, err := v.Rights.Apply(v.Index, rights.Root, c); err != nil {
			return err.Error()
		}
	}
	w.views = append(w.views, v)
	return fmt.Sprint("index ", v.Index)
}

// forge changes a token in a way that needs no key.
func (w *tokenWorld) forge(f []string) string {
	token := w.tokens[f[1]]
	text, index, _ := strings.Cut(token, ".")
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		w.t.Fatal(err)
	}
	switch f[2] {
	case "index":
		b[atIndex+7] += 10
		return simpleText(b)
	case "user":
		b[atUser] ^= 1
	case "key":
		b[atKeyID+3]++
	case "no-key": // whose secret is empty, as the one of the zero Key
		clear(b[atKeyID:atIndex])
		copy(b[len(b)-macBytes:], Key{}.mac(b[:len(b)-macBytes]))
	case "mac":
		b[len(b)-1] ^= 1
	case "suffix":
		return text + "." + index + "0"
	case "sign":
		return text + ".+" + index
	case "newline":
		return text[:8] + "\n" + text[8:] + "." + index
	case "padding":
		return text + "=." + index
	case "cut":
		return base64.RawURLEncoding.EncodeToString(b[:atUser]) + "." + index
	case "no-dot":
		return text
	default:
		w.t.Fatalf("no forgery %q", f[2])
	}
	return simpleText(b)
}

func (w *tokenWorld) verify(node, token string, v *View) string {
	id, err := w.nodes[node].Verify(v, token)
	var ahead AheadOf
	switch {
	case errors.As(err, &ahead):
		return fmt.Sprintf("ahead of index %d, to wait for %d", v.Index, ahead.Index)
	case errors.Is(err, kverror.InvalidAuthToken):
		if strings.Contains(err.Error(), token) {
			w.t.Errorf("the error %q has the token", err)
		}
		return strings.TrimPrefix(err.Error(), kverror.InvalidAuthToken.Error()+": ")
	case err != nil:
		w.t.Fatalf("verify %q: %v", token, err)
	}
	return fmt.Sprintf("user %s, revision %d", id.User, id.Revision)
}

func (w *tokenWorld) run(d *datadriven.TestData, line string) string {
	f := strings.Fields(line)
	switch d.Cmd {
	case "apply":
		return w.apply(f)
	case "issue": // at which node, as what, for whom, and of which index
		v := w.last()
		if len(f) > 3 {
			v = w.views[atoi(w.t, f[3])]
		}
		token, err := w.nodes[f[0]].Issue(v.Keys, Proof{User: f[2], Index: v.Index, Revision: v.Rights.Revision})
		if err != nil {
			return err.Error()
		}
		if b, _, ok := strings.Cut(token, "."); !ok || strings.ContainsAny(b, "+/=") {
			w.t.Errorf("token %q", token)
		}
		w.tokens[f[1]] = token
		return "ok"
	case "verify": // at which node, what, and at which index the node is
		v := w.last()
		if len(f) > 2 {
			v = w.views[atoi(w.t, f[2])]
		}
		return w.verify(f[0], w.tokens[f[1]], v)
	case "forge": // at which node, what, how
		return w.verify(f[0], w.forge(f), w.last())
	case "restart":
		w.start(f[0])
	case "step": // the wall clock of a node
		w.clocks[f[0]].StepWall(duration(w.t, f[1]))
	case "sleep":
		time.Sleep(duration(w.t, f[0]))
	default:
		w.t.Fatalf("no command %q", d.Cmd)
	}
	return "ok"
}

func atoi(t *testing.T, s string) (n int) {
	t.Helper()
	if _, err := fmt.Sscan(s, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

func duration(t *testing.T, s string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestStories issues tokens at one node and shows them to others, while users change and time passes.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		synctest.Test(t, func(t *testing.T) {
			w := newTokenWorld(t)
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				var out strings.Builder
				for line := range strings.SplitSeq(d.Input, "\n") {
					fmt.Fprintf(&out, "%s: %s\n", line, w.run(d, line))
				}
				return out.String()
			})
		})
	})
}

// TestFormat holds the bytes of a token still.
func TestFormat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		token, err := NewSimple(simclock.New(0, 1), testRandom(), testTTL).
			Issue(Keys{Current: testKey(t, 7)}, Proof{User: "alice", Index: 258, Revision: 9})
		if err != nil {
			t.Fatal(err)
		}
		golden.Formats(t, map[string][]byte{"simple": []byte(token)})
	})
}

// TestNoBitOfATokenIsFree: whatever bit of a token somebody changes, it is refused.
func TestNoBitOfATokenIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTokenWorld(t)
		w.apply([]string{"add-user", "u"})
		token, err := w.nodes["a"].Issue(w.last().Keys, Proof{User: "u", Index: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.nodes["b"].Verify(w.last(), token); err != nil {
			t.Fatal(err)
		}
		for i := range len(token) * 8 {
			b := []byte(token)
			b[i/8] ^= 1 << (i % 8)
			if _, err := w.nodes["a"].Verify(w.last(), string(b)); !errors.Is(err, kverror.InvalidAuthToken) || errors.As(err, new(AheadOf)) {
				t.Errorf("bit %d: %v", i, err)
			}
		}
	})
}

// TestLongNames: the longest name has a token, and a longer one has none, also with a true MAC.
func TestLongNames(t *testing.T) {
	s, key := NewSimple(fixedClock{}, testRandom(), testTTL), testKey(t, 1)
	name := strings.Repeat("n", rights.MaxNameBytes)
	v := &View{Rights: rights.New(), Index: 1<<64 - 1, Keys: Keys{Current: key}}
	v.Rights.PutUser(&rights.User{Name: name})
	v.Rights.PutUser(&rights.User{Name: name + "n"})
	token, err := s.Issue(v.Keys, Proof{User: name, Index: v.Index})
	if err != nil {
		t.Fatal(err)
	}
	if id, err := s.Verify(v, token); err != nil || id.User != name {
		t.Errorf("the longest name's token: %v", err)
	}
	p, err := parseSimple(token)
	if err != nil {
		t.Fatal(err)
	}
	for _, index := range []uint64{1, v.Index} {
		b := append(bytes.Clone(p.signed), 'n')
		binary.BigEndian.PutUint64(b[atIndex:], index)
		if _, err := s.Verify(v, simpleText(append(b, key.mac(b)...))); err == nil || !strings.Contains(err.Error(), "long") {
			t.Errorf("a longer name's token: %v", err)
		}
	}
	if _, err := s.Verify(v, strings.Repeat("A", 1<<20)); err == nil || !strings.Contains(err.Error(), "longer than any") {
		t.Errorf("a text of 1 MiB: %v", err)
	}
}

// TestKeys: a key that is none, or a weak one, is refused, and no verb shows a secret.
func TestKeys(t *testing.T) {
	for _, c := range []struct {
		id    KeyID
		bytes int
	}{{0, MinKeyBytes}, {1, MinKeyBytes - 1}, {1, 0}} {
		if k, err := NewKey(c.id, make([]byte, c.bytes)); err == nil {
			t.Errorf("key %d of %d bytes is accepted as %v", c.id, c.bytes, k)
		}
	}
	k := testKey(t, 0xab)
	for _, verb := range []string{"%v", "%+v", "%#v", "%d", "%x", "%s", "%q"} {
		if got := fmt.Sprintf(verb, k); got != "key 171" {
			t.Errorf("%s: %s", verb, got)
		}
		if got := fmt.Sprintf(verb, Keys{Current: k}); strings.Contains(got, "abab") || strings.Contains(got, "171 171") {
			t.Errorf("%s: %s", verb, got)
		}
	}
	if _, err := (&Simple{}).Issue(Keys{Before: k}, Proof{User: "u"}); err == nil {
		t.Error("a token is made without a current key")
	}
}

// FuzzSimple: any text is refused or has one meaning, which only this text has.
func FuzzSimple(f *testing.F) {
	f.Add("")
	f.Add("AQ.1")
	f.Add(simpleText(append([]byte{simpleVersion}, make([]byte, atUser+macBytes)...)))
	view := &View{Rights: rights.New(), Index: 1, Keys: Keys{Current: testKey(f, 1)}}
	s := NewSimple(fixedClock{}, testRandom(), testTTL)
	f.Fuzz(func(t *testing.T, token string) {
		p, err := parseSimple(token)
		if err == nil && simpleText(append(p.signed, p.mac...)) != token {
			t.Errorf("%q is read as %+v", token, p)
		}
		if err == nil && (len(p.user) == 0 || len(p.user) > rights.MaxNameBytes) {
			t.Errorf("%q has a user of %d bytes", token, len(p.user))
		}
		if id, err := s.Verify(view, token); !errors.Is(err, kverror.InvalidAuthToken) || errors.As(err, new(AheadOf)) {
			t.Errorf("%q is the token of %q: %v", token, id.User, err)
		}
	})
}

func BenchmarkSimple(b *testing.B) {
	v := &View{Rights: rights.New(), Index: 1, Keys: Keys{Current: testKey(b, 1)}}
	v.Rights.PutUser(&rights.User{Name: "u", Since: 1})
	s := NewSimple(fixedClock{}, testRandom(), testTTL)
	token, err := s.Issue(v.Keys, Proof{User: "u", Index: 1})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.Verify(v, token); err != nil {
			b.Fatal(err)
		}
	}
}
