package auth

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
	"github.com/skeindb/skein/sim/simclock"
)

// countedTokens counts what is verified.
type countedTokens struct {
	Tokens
	verified atomic.Int64
}

func (c *countedTokens) Verify(v *View, token string) (Identity, error) {
	c.verified.Add(1)
	return c.Tokens.Verify(v, token)
}

// gateWorld is a log of changes, and a node's gate, which learns of them when it is told.
type gateWorld struct {
	*tokenWorld
	tokens *countedTokens
	gate   *Gate
}

// newGateWorld begins with checks on, users root and u, and a gate that knows all that.
func newGateWorld(t *testing.T) *gateWorld {
	t.Helper()
	w := &gateWorld{tokenWorld: newTokenWorld(t)}
	w.tokens = &countedTokens{Tokens: w.nodes["a"]}
	w.gate = NewGate(w.clocks["a"], w.tokens)
	for _, c := range []string{"add-user root", "grant-role root root", "add-user u", "enable"} {
		w.change(c)
	}
	w.gate.Update(w.last())
	return w
}

func (w *gateWorld) change(c string) {
	w.t.Helper()
	if got := w.apply(strings.Fields(c)); !strings.HasPrefix(got, "index") {
		w.t.Fatalf("%s: %s", c, got)
	}
}

// changed makes changes, of which the gate learns.
func (w *gateWorld) changed(changes ...string) {
	w.t.Helper()
	for _, c := range changes {
		w.change(c)
	}
	w.gate.Update(w.last())
}

// token issues one of the last index, at another node.
func (w *gateWorld) token(user string) Claim {
	w.t.Helper()
	token, err := w.nodes["b"].Issue(w.last().Keys, Proof{User: user, Index: w.last().Index})
	if err != nil {
		w.t.Fatal(err)
	}
	return Claim{Token: token, HasToken: true}
}

func (w *gateWorld) identify(c Claim) (*Caller, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), 10*time.Second)
	defer cancel()
	return w.gate.Identify(ctx, c)
}

// is checks whom a claim means.
func (w *gateWorld) is(c Claim, user string) *Caller {
	w.t.Helper()
	got, err := w.identify(c)
	if err != nil || got.User != user {
		w.t.Fatalf("user %q is %+v, %v", user, got, err)
	}
	return got
}

// bad checks that a claim is refused at once.
func (w *gateWorld) bad(c Claim) {
	w.t.Helper()
	began := time.Now()
	if got, err := w.identify(c); !errors.Is(err, kverror.InvalidAuthToken) || got != nil {
		w.t.Fatalf("a bad token: %+v, %v", got, err)
	}
	if d := time.Since(began); d != 0 {
		w.t.Errorf("a bad token is refused after %v", d)
	}
}

func inGateWorld(t *testing.T, f func(w *gateWorld)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(newGateWorld(t)) })
}

// TestNobodyPassesBeforeTheFirstView: a node that knows no rights yet does not take them for none.
func TestNobodyPassesBeforeTheFirstView(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		w.gate = NewGate(w.clocks["a"], w.tokens)
		if got, err := w.identify(Claim{}); !errors.Is(err, kverror.NoLeader) || got != nil {
			t.Fatalf("without a view: %+v, %v", got, err)
		}
		go func() {
			time.Sleep(5 * time.Second)
			w.gate.Update(w.last())
		}()
		began := time.Now()
		w.is(w.token("u"), "u")
		if d := time.Since(began); d != 5*time.Second {
			t.Errorf("the view is there after 5s, and the user is known after %v", d)
		}
	})
}

// TestTokenAheadOfTheView is trap 84 at a gate: who has logged in elsewhere is known here once this node has
// the user, and nobody waits for a forged index.
func TestTokenAheadOfTheView(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		w.change("add-user v")
		before := w.last()
		w.change("change-password v")
		claim := w.token("v")
		forged := claim
		forged.Token = w.forgery(claim.Token, "index")
		w.bad(forged)

		began := time.Now()
		if got, err := w.identify(claim); !errors.Is(err, kverror.InvalidAuthToken) || got != nil {
			t.Errorf("a user who has not come: %+v, %v", got, err)
		}
		if d := time.Since(began); d != 10*time.Second {
			t.Errorf("a token ahead is refused after %v, and there were 10s", d)
		}
		go func() {
			time.Sleep(time.Second)
			w.gate.Update(before) // not yet
			time.Sleep(time.Second)
			w.gate.Update(w.last())
		}()
		began = time.Now()
		w.is(claim, "v")
		if d := time.Since(began); d != 2*time.Second {
			t.Errorf("the user is there after 2s, and known after %v", d)
		}
		w.bad(forged)
	})
}

// forgery returns a token changed in a way.
func (w *gateWorld) forgery(token, how string) string {
	w.tokenWorld.tokens["forged"] = token
	return w.forge([]string{"", "forged", how})
}

// TestCachedTokens: what ends a token ends one too that this node has seen: traps 85 and 86.
func TestCachedTokens(t *testing.T) {
	for name, changes := range map[string][]string{
		"the user is deleted":                {"delete-user u"},
		"trap 85, deleted and created again": {"delete-user u", "add-user u"},
		"trap 86, disabled and enabled":      {"disable", "enable"},
		"the password is changed":            {"change-password u"},
		"the key has gone":                   {"new-key", "new-key"},
	} {
		t.Run(name, func(t *testing.T) {
			inGateWorld(t, func(w *gateWorld) {
				claim := w.token("u")
				w.is(claim, "u")
				w.is(claim, "u")
				w.changed(changes...)
				w.bad(claim)
			})
		})
	}
}

// TestVerifiedOnce: a token is verified once for each view of other rights or keys, and its caller has the
// rights of the view.
func TestVerifiedOnce(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		claim := w.token("u")
		verified := func(want int64) {
			t.Helper()
			for range 3 {
				w.is(claim, "u")
			}
			if n := w.tokens.verified.Swap(0); n != want {
				t.Errorf("verified %d times, not %d", n, want)
			}
		}
		verified(1)
		last := *w.last()
		last.Index++
		w.views = append(w.views, &last)
		w.gate.Update(&last) // nothing has changed
		verified(0)
		w.changed("new-key")
		verified(1)
		w.changed("add-role r", "grant-role u r")
		verified(1)
		if c := w.is(claim, "u"); !c.has("r") || c.Index != w.last().Index || c.Access != w.last().Rights.Access {
			t.Errorf("%+v in\n%s", c, w.last().Rights)
		}
		w.gate.Update(w.views[len(w.views)-2]) // an old one
		verified(0)
		if c := w.is(claim, "u"); !c.has("r") {
			t.Errorf("after an old view: %+v", c)
		}
		time.Sleep(2 * useResolution)
		verified(1) // to note the use
	})
}

// TestUsesThroughTheCache: the TTL slides with uses also if the token is not verified for each of them, and
// ends also if it would not be verified again.
func TestUsesThroughTheCache(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		claim := w.token("u")
		for range 10 {
			w.is(claim, "u")
			time.Sleep(testTTL - 10*time.Second)
		}
		for range 10 * int(testTTL/time.Second) {
			w.is(claim, "u")
			time.Sleep(100 * time.Millisecond)
		}
		w.changed("add-user v") // what was verified is forgotten, and uses are not
		time.Sleep(testTTL - 2*useResolution)
		w.is(claim, "u")
		time.Sleep(testTTL + 1)
		w.bad(claim)
	})
}

// expiring are tokens of user u that expire together, as JSON web tokens do.
type expiring struct {
	none
	until time.Time
}

func (e expiring) Verify(*View, string) (Identity, error) {
	return Identity{User: "u", Revision: 1 << 40, Until: e.until}, nil
}

// TestExpiry: a token that expires is verified once, and again from then on.
func TestExpiry(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		w.tokens.Tokens = expiring{until: w.clocks["a"].Wall().Add(time.Minute)}
		claim := Claim{Token: "x", HasToken: true}
		for range 60 {
			w.is(claim, "u")
			time.Sleep(time.Second)
		}
		if n := w.tokens.verified.Swap(0); n != 1 {
			t.Errorf("verified %d times within the minute", n)
		}
		w.is(claim, "u")
		if n := w.tokens.verified.Load(); n != 1 {
			t.Errorf("verified %d times after the minute", n)
		}
	})
}

// TestUntil: a JSON web token is verified again when it expires, a simple one soon, so that its use is noted.
func TestUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clk := simclock.New(time.Hour, 1)
		v := &View{Rights: rights.New(), Keys: Keys{Current: testKey(t, 1)}}
		v.Rights.PutUser(&rights.User{Name: "u"})
		for _, c := range []struct {
			tokens Tokens
			after  time.Duration
		}{
			{open(t, clk, "jwt,sign-method=HS256,ttl=3h,priv-key="+writeKeys(t)["secret"].private), 3 * time.Hour},
			{NewSimple(clk, testRandom(), testTTL), time.Second},
			{NewSimple(clk, testRandom(), 2*time.Second), time.Second / 4},
		} {
			token, err := c.tokens.Issue(v.Keys, Proof{User: "u", Revision: 1})
			if err != nil {
				t.Fatal(err)
			}
			id, err := c.tokens.Verify(v, token)
			if late := clk.Wall().Add(c.after).Sub(id.Until); err != nil || late < 0 || late >= time.Second {
				t.Errorf("%T: %v before %v, %v", c.tokens, late, c.after, err)
			}
		}
	})
}

// TestTheWallClockIsSet: a token does not live longer here because the wall clock goes back.
func TestTheWallClockIsSet(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		claim := w.token("u")
		w.is(claim, "u")
		w.clocks["a"].StepWall(-time.Hour)
		time.Sleep(testTTL + 1)
		w.bad(claim)
	})
}

func certificate(name, uri string) *x509.Certificate {
	c := &x509.Certificate{Subject: pkix.Name{CommonName: name}}
	if uri != "" {
		c.URIs = []*url.URL{{}}
		if u, err := url.Parse(uri); err == nil {
			c.URIs[0] = u
		}
	}
	return c
}

// TestCommonNames: a certificate stands for the user of its common name, unless there is a token, or it is a
// node's.
func TestCommonNames(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		root := Claim{Certificate: certificate("root", "")}
		for range 2 {
			if c := w.is(root, "root"); c.Root() != nil {
				t.Errorf("root by certificate: %v", c.Root())
			}
		}
		both := w.token("u")
		both.Certificate = root.Certificate
		if c := w.is(both, "u"); !errors.Is(c.Root(), kverror.PermissionDenied) {
			t.Errorf("a token of user u wins: %v", c.Root())
		}
		both.Token = ""
		w.bad(both) // and does not lose because it is bad
		both.Token = "root"
		w.bad(both) // a common name is no token, also where one is remembered
		w.is(Claim{}, "")
		for uri, node := range map[string]string{"skein://node/n1": "n1", "skein://node/n1/x": "", "skein://other/n1": "", "skein:root": ""} {
			c := w.is(Claim{Certificate: certificate("root", uri)}, "")
			if c.Node != node || c.Root() == nil || c.AnyUser() == nil {
				t.Errorf("%s: %+v", uri, c)
			}
		}
		two := certificate("root", "skein://node/n1")
		two.URIs = append(two.URIs, certs.NodeURI("n2"))
		if c := w.is(Claim{Certificate: two}, ""); c.Node != "" {
			t.Errorf("two roles: %+v", c)
		}
		// The rights behind a name change with the view.
		other := Claim{Certificate: certificate("u", "")}
		w.changed("grant-role u root")
		if c := w.is(other, "u"); c.Root() != nil {
			t.Errorf("a new root: %v", c.Root())
		}
		w.changed("delete-user u")
		if c := w.is(other, "u"); !errors.Is(c.Root(), kverror.UserNotFound) {
			t.Errorf("a deleted root: %v", c.Root())
		}
	})
}

// TestChecksOff: everybody may do everything, and bad tokens are not looked at.
func TestChecksOff(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		w.changed("disable")
		c := w.is(Claim{Token: "bad", HasToken: true}, "")
		if err := errors.Join(c.AnyUser(), c.Root(), c.May(rights.ReadWrite, []byte("k"), nil)); err != nil || c.Index != w.last().Index {
			t.Errorf("%+v: %v", c, err)
		}
		w.changed("enable")
		w.bad(Claim{Token: "bad", HasToken: true})
		if c := w.is(Claim{}, ""); c.AnyUser() == nil || c.Root() == nil || c.May(rights.Read, []byte("k"), nil) == nil {
			t.Errorf("nobody may: %+v", c)
		}
	})
	if c := new(Caller); c.AnyUser() == nil || c.Root() == nil || c.May(rights.Read, []byte("k"), nil) == nil {
		t.Error("the zero Caller may do something")
	}
}

// named are tokens that are their users' names.
type named struct{ none }

func (named) Verify(v *View, token string) (Identity, error) {
	return Identity{User: token, Revision: v.Rights.Revision, Until: never}, nil
}

func gateOf(tb testing.TB, state *rights.State, tokens Tokens) *Gate {
	tb.Helper()
	state.Enabled, state.Revision = true, 1
	g := NewGate(fixedClock{}, tokens)
	g.Update(&View{Rights: state, Index: 1, Keys: Keys{Current: testKey(tb, 1)}})
	return g
}

// TestCallersAreBounded: however many tokens and names come, so many callers are remembered.
func TestCallersAreBounded(t *testing.T) {
	g := gateOf(t, rights.New(), named{})
	for i := range 3 * maxCallers {
		name := fmt.Sprint(i)
		for _, c := range []Claim{{Token: name, HasToken: true}, {Certificate: certificate(name, "")}} {
			if caller, err := g.Identify(t.Context(), c); err != nil || caller.User != name {
				t.Fatal(caller, err)
			}
		}
	}
	all := g.now.Load().callers
	for what, s := range map[string]*sharded{"tokens": &all.tokens, "names": &all.names} {
		n := 0
		for _, r := range s {
			n += r.len()
		}
		if n > maxCallers || n < maxCallers/4 {
			t.Errorf("the callers of %d %s are remembered, at most %d", n, what, maxCallers)
		}
	}
	if n := len(all.subjects); n != 0 {
		t.Errorf("%d users are remembered who do not exist", n)
	}
}

// TestSpansAreBounded: users with many permissions do not fill the memory, and are known all the same.
func TestSpansAreBounded(t *testing.T) {
	const users, spans = 10, maxSpans / 4
	state := rights.New()
	role := &rights.Role{Name: "r"}
	for i := range spans {
		role.Permissions = append(role.Permissions, rights.Permission{Key: fmt.Appendf(nil, "%08d", i)})
	}
	state.PutRole(role)
	for i := range users {
		state.PutUser(&rights.User{Name: fmt.Sprint(i), Roles: []string{"r"}})
	}
	g := gateOf(t, state, named{})
	for i := range users {
		c, err := g.Identify(t.Context(), Claim{Token: fmt.Sprint(i), HasToken: true})
		if err != nil || c.May(rights.Read, []byte("00000007"), nil) != nil || c.May(rights.Read, []byte("x"), nil) == nil {
			t.Fatal(c, err)
		}
		if all := g.now.Load().callers; all.spans > maxSpans {
			t.Fatalf("%d spans are remembered after %d users, at most %d", all.spans, i+1, maxSpans)
		}
	}
}

// TestNobodyOfAnOldView: who asks after Update has returned gets nobody of an earlier view, also while others
// ask for the same user, and while callers are dropped.
func TestNobodyOfAnOldView(t *testing.T) {
	g := gateOf(t, rights.New(), named{})
	var told atomic.Uint64
	done := make(chan struct{})
	var work sync.WaitGroup
	for i := range 8 {
		work.Go(func() {
			claim := Claim{Token: "u", HasToken: true}
			if i%2 == 0 {
				claim = Claim{Certificate: certificate("u", "")}
			}
			for {
				select {
				case <-done:
					return
				default:
				}
				least := told.Load()
				c, err := g.Identify(context.Background(), claim)
				if err != nil || c.Access < least || c.Subject != nil && c.Subject.Root() != (c.Access%2 == 0) {
					t.Errorf("after the view of index %d: %+v, %v", least, c, err)
					return
				}
			}
		})
	}
	for i := uint64(2); i < 20_000; i++ {
		v := &View{Rights: rights.New(), Index: i}
		v.Rights.Meta = rights.Meta{Enabled: true, Revision: i, Access: i}
		u := &rights.User{Name: "u"}
		if i%2 == 0 {
			u.Roles = []string{rights.Root}
		}
		v.Rights.PutUser(u)
		g.Update(v)
		told.Store(i)
		g.Update(&View{Rights: rights.New(), Index: i - 1}) // an older one changes nothing
	}
	close(done)
	work.Wait()
}

func BenchmarkIdentify(b *testing.B) {
	state := rights.New()
	state.PutUser(&rights.User{Name: "u"})
	clk := clock.System()
	s := NewSimple(clk, testRandom(), testTTL)
	g := gateOf(b, state, s)
	g.clk = clk
	token, err := s.Issue(Keys{Current: testKey(b, 1)}, Proof{User: "u", Index: 1})
	if err != nil {
		b.Fatal(err)
	}
	off := NewGate(clk, s)
	off.Update(&View{Rights: rights.New(), Index: 1})
	for _, c := range []struct {
		name  string
		gate  *Gate
		claim Claim
	}{
		{"token", g, Claim{Token: token, HasToken: true}},
		{"name", g, Claim{Certificate: certificate("u", "")}},
		{"off", off, Claim{Token: token, HasToken: true}},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := c.gate.Identify(b.Context(), c.claim); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// aheadTokens are tokens like those of others than this cluster: NAME@REVISION.
type aheadTokens struct{ Tokens }

func (aheadTokens) Verify(_ *View, token string) (Identity, error) {
	var id Identity
	_, err := fmt.Sscanf(strings.Replace(token, "@", " ", 1), "%s %d", &id.User, &id.Revision)
	return id, err
}

// A token of others may name a user of whom this node has not heard. What was begun with it goes on when the node hears
// of that user, until the token is old. It never goes on for the next user of that name.
func TestAUserWhoIsHeardOfLater(t *testing.T) {
	inGateWorld(t, func(w *gateWorld) {
		w.gate = NewGate(w.clocks["a"], aheadTokens{w.tokens})
		w.gate.Update(w.last())
		revision := w.last().Rights.Revision
		claim := func(rev uint64) Claim { return Claim{Token: fmt.Sprintf("late@%d", rev), HasToken: true} }
		ahead, known := w.is(claim(revision+1), "late"), w.is(claim(revision), "late")
		if c, err := w.gate.Again(ahead); err != nil || c.Subject != nil {
			t.Errorf("before: %+v, %v", c, err)
		}
		w.changed("add-user late")
		if now := w.last().Rights.Revision; now != revision+1 {
			t.Fatalf("revision %d follows %d", now, revision)
		}
		if c, err := w.gate.Again(ahead); err != nil || c.Subject == nil || c.Stale() != nil {
			t.Errorf("heard of: %+v, %v", c, err)
		}
		// This one was there before the user.
		if c, err := w.gate.Again(known); err != nil || !errors.Is(c.Stale(), kverror.AuthOldRevision) {
			t.Errorf("an older token: %+v, %v", c, err)
		}
		w.changed("delete-user late", "add-user late")
		if c, err := w.gate.Again(ahead); err != nil || !errors.Is(c.Stale(), kverror.AuthOldRevision) {
			t.Errorf("made anew: %+v, %v", c, err)
		}
	})
}
