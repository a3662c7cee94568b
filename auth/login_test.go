package auth

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
	"github.com/skeindb/skein/sim/simclock"
)

// loginWorld is a node's logins beside the credentials of all users.
type loginWorld struct {
	*Logins
	t  *testing.T
	mu sync.Mutex
	// All guarded by mu.
	users    map[string]rights.Credential
	index    uint64
	enabled  bool
	compared int   // how often bcrypt has compared
	costs    []int // of the hashes it compared with
	atOnce   int   // comparisons that run
	most     int   // at a time
	// during is called while bcrypt compares.
	during func()
}

func newLoginWorld(t *testing.T) *loginWorld {
	t.Helper()
	p, err := NewPasswords(MinCost)
	if err != nil {
		t.Fatal(err)
	}
	w := &loginWorld{t: t, users: map[string]rights.Credential{}, enabled: true}
	matches := p.matches
	p.matches = func(hash, password []byte) error {
		cost, err := bcrypt.Cost(hash)
		if err != nil {
			t.Error(err)
		}
		w.mu.Lock()
		w.compared++
		w.costs = append(w.costs, cost)
		w.atOnce++
		w.most = max(w.most, w.atOnce)
		during := w.during
		w.mu.Unlock()
		if during != nil {
			during()
		}
		w.mu.Lock()
		w.atOnce--
		w.mu.Unlock()
		return matches(hash, password)
	}
	w.Logins = NewLogins(simclock.New(time.Hour, 1), p, func(_ context.Context, user string) (rights.Credential, error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		c := w.users[user]
		c.Enabled, c.Index, c.Revision = w.enabled, w.index, w.index+1
		return c, nil
	})
	return w
}

// set gives a user a password; an empty one is none.
func (w *loginWorld) set(user, password string) {
	w.t.Helper()
	var hash []byte
	if password != "" {
		var err error
		if hash, err = w.passwords.Hash(w.t.Context(), password); err != nil {
			w.t.Fatal(err)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.index++
	w.users[user] = rights.Credential{Hash: hash, Since: w.index}
}

// login checks that a login ends so, and how often bcrypt was asked.
func (w *loginWorld) login(user, password string, want error, compares int) Proof {
	w.t.Helper()
	before := w.compares()
	proof, err := w.Login(w.t.Context(), "10.0.0.1", user, password)
	if !errors.Is(err, want) || want == nil && err != nil {
		w.t.Errorf("user %q: %v, want %v", user, err, want)
	}
	if err != nil && len(password) > 2 && strings.Contains(err.Error(), password) {
		w.t.Errorf("the error %q has the password", err)
	}
	if n := w.compares() - before; n != compares {
		w.t.Errorf("user %q: bcrypt compares %d times, want %d", user, n, compares)
	}
	return proof
}

func (w *loginWorld) compares() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.compared
}

// TestLogin: who is there and who is not costs the same, with a hash of the same cost. Trap 103.
func TestLogin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoginWorld(t)
		w.set("u", "secret")
		w.set("certificate", "")
		if p := w.login("u", "secret", nil, 1); p != (Proof{User: "u", Index: 2, Revision: 3}) {
			t.Errorf("%+v", p)
		}
		w.login("u", "wrong-one", kverror.AuthFailed, 1)
		w.login("u", "", kverror.AuthFailed, 1)
		w.login("nobody", "secret", kverror.AuthFailed, 1)
		w.login("nobody", "", kverror.AuthFailed, 1)
		w.login("certificate", "secret", kverror.AuthFailed, 1)
		w.login("certificate", "", kverror.AuthFailed, 1)
		for _, cost := range w.costs {
			if cost != MinCost {
				t.Errorf("costs %v, want %d each", w.costs, MinCost)
			}
		}
		// A hash that would take a day is not computed with, however it came there.
		dear := []byte(strings.Replace(string(w.users["u"].Hash), "$04$", "$31$", 1))
		w.users["dear"] = rights.Credential{Hash: dear, Since: 1}
		w.users["junk"] = rights.Credential{Hash: []byte("junk"), Since: 1}
		w.login("dear", "secret", kverror.AuthFailed, 1)
		w.login("junk", "secret", kverror.AuthFailed, 1)
		w.enabled = false
		w.login("u", "secret", kverror.AuthNotEnabled, 0)
	})
}

// TestLoginBesideAChange: what changes while bcrypt compares counts.
func TestLoginBesideAChange(t *testing.T) {
	for _, c := range []struct {
		what     string
		password string
		want     error
		compares int
		change   func(w *loginWorld)
	}{
		{"another user", "old", nil, 1, func(w *loginWorld) { w.set("v", "x") }},
		{"the same password again", "old", nil, 2, func(w *loginWorld) { w.set("u", "old") }},
		{"another password", "old", kverror.AuthFailed, 2, func(w *loginWorld) { w.set("u", "new") }},
		{"the user is gone", "old", kverror.AuthFailed, 2, func(w *loginWorld) {
			w.mu.Lock()
			delete(w.users, "u")
			w.mu.Unlock()
		}},
		{"no password", "old", kverror.AuthFailed, 2, func(w *loginWorld) { w.set("u", "") }},
		{"checks are off", "old", kverror.AuthNotEnabled, 1, func(w *loginWorld) {
			w.mu.Lock()
			w.enabled = false
			w.mu.Unlock()
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newLoginWorld(t)
				w.set("u", "old")
				var once sync.Once
				w.during = func() { once.Do(func() { c.change(w) }) }
				p := w.login("u", c.password, c.want, c.compares)
				if c.want == nil && (p.Index != w.index || p.Index < w.users["u"].Since) {
					t.Errorf("the proof is of index %d, the user of %d, now is %d", p.Index, w.users["u"].Since, w.index)
				}
			})
		})
	}
}

// TestDelays: from the fifth failure on the next login is refused for a time that doubles, without bcrypt.
// It concerns one user from one address, and ends with a login, or after ten minutes.
func TestDelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoginWorld(t)
		for _, user := range []string{"u", "v"} {
			w.set(user, "secret")
		}
		for range 4 {
			w.login("u", "wrong-one", kverror.AuthFailed, 1)
		}
		for _, d := range []int{1, 2, 4, 8, 16, 30, 30} {
			w.login("u", "wrong-one", kverror.AuthFailed, 1)
			w.login("u", "secret", kverror.TooManyRequests, 0)
			time.Sleep(time.Duration(d)*time.Second - 1)
			w.login("u", "secret", kverror.TooManyRequests, 0)
			time.Sleep(time.Nanosecond)
		}
		w.login("u", "wrong-one", kverror.AuthFailed, 1)
		w.login("v", "secret", nil, 1)
		if _, err := w.Login(t.Context(), "10.0.0.2", "u", "secret"); err != nil {
			t.Errorf("from another address: %v", err)
		}
		time.Sleep(30 * time.Second)
		w.login("u", "secret", nil, 1)
		for range 5 {
			w.login("u", "wrong-one", kverror.AuthFailed, 1)
		}
		w.login("u", "secret", kverror.TooManyRequests, 0)
		time.Sleep(failuresKept + 1)
		for range 4 {
			w.login("u", "wrong-one", kverror.AuthFailed, 1)
		}
		w.login("u", "secret", nil, 1)
		// Users who are not there have the same delays.
		for range 5 {
			w.login("nobody", "wrong-one", kverror.AuthFailed, 1)
		}
		w.login("nobody", "wrong-one", kverror.TooManyRequests, 0)
	})
}

// TestQueue: two compare at a time, 64 wait, and one more is refused. Guesses that are sent together get
// no further than those sent one after the other.
func TestQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoginWorld(t)
		w.set("u", "secret")
		release := make(chan struct{})
		w.during = func() { <-release }
		var refused, failed, early atomic.Int32
		var all sync.WaitGroup
		login := func(ctx context.Context, address string) {
			all.Go(func() {
				switch _, err := w.Login(ctx, address, "u", "wrong-one"); {
				case errors.Is(err, kverror.AuthFailed):
					failed.Add(1)
				case errors.Is(err, kverror.TooManyRequests):
					refused.Add(1)
				case errors.Is(err, context.Canceled):
					early.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		ctx, cancel := context.WithCancel(t.Context())
		for range atATime {
			login(t.Context(), "a")
		}
		synctest.Wait()
		login(ctx, "a")
		for range maxQueued - 1 {
			login(t.Context(), "a")
		}
		synctest.Wait()
		if n := refused.Load(); n != 0 {
			t.Errorf("%d are refused with room in the queue", n)
		}
		login(t.Context(), "b")
		synctest.Wait()
		if n := refused.Load(); n != 1 {
			t.Errorf("%d are refused, want 1", n)
		}
		cancel()
		synctest.Wait()
		if n := early.Load(); n != 1 {
			t.Errorf("%d have left the queue, want 1", n)
		}
		close(release)
		all.Wait()
		// Two compare when the fifth failure is counted, so there may be one more.
		if n := failed.Load(); n < freeFailures+1 || n > freeFailures+atATime {
			t.Errorf("%d guesses were compared", n)
		}
		if w.most != atATime {
			t.Errorf("%d compare at a time, want %d", w.most, atATime)
		}
		if n := w.passwords.inUse.Load(); n != 0 {
			t.Errorf("%d places are taken at the end", n)
		}
	})
}

// TestFailuresAreBounded: the names that attackers make up take no more room than the table has.
func TestFailuresAreBounded(t *testing.T) {
	l := NewLogins(fixedClock{}, nil, nil)
	for i := range 3 * maxFailures {
		l.fail(failuresID("a", fmt.Sprint(i)))
		if n := l.failed.len(); n > maxFailures {
			t.Fatalf("%d failures are remembered", n)
		}
	}
	if failuresID("a", "b c") == failuresID("a b", "c") {
		t.Error("two pairs of address and user count as one")
	}
}

// TestHash: a new hash has the cost and is the password's; a password over 72 bytes has etcd's error.
func TestHash(t *testing.T) {
	p, err := NewPasswords(5)
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int]error{0: nil, 72: nil, 73: ErrPasswordTooLong} {
		password := strings.Repeat("p", n)
		hash, err := p.Hash(t.Context(), password)
		if !errors.Is(err, want) {
			t.Errorf("%d bytes: %v, want %v", n, err, want)
		}
		if want != nil {
			if err.Error() != "bcrypt: password length exceeds 72 bytes" {
				t.Errorf("the error %q is not etcd's", err)
			}
			continue
		}
		if cost, err := bcrypt.Cost(hash); cost != 5 || err != nil || len(hash) > rights.MaxHashBytes {
			t.Errorf("cost %d, %v, %d bytes", cost, err, len(hash))
		}
		if err := bcrypt.CompareHashAndPassword(hash, []byte(password)); err != nil {
			t.Error(err)
		}
	}
	for _, cost := range []int{MinCost - 1, MaxCost + 1, 31} {
		if _, err := NewPasswords(cost); err == nil || !strings.Contains(err.Error(), fmt.Sprint(cost)) {
			t.Errorf("cost %d: %v", cost, err)
		}
	}
	c := rights.Credential{Hash: []byte("$2a$hash")}
	if s := fmt.Sprintf("%v %+v %#v %s", c, c, c, c); strings.Contains(s, "2a") || strings.Contains(s, "36") {
		t.Errorf("a credential shows its hash: %s", s)
	}
}

// TestClientHash: a hash that a client has computed is bcrypt's and not too dear, or refused unused.
func TestClientHash(t *testing.T) {
	good, err := bcrypt.GenerateFromPassword([]byte("p"), MinCost)
	if err != nil {
		t.Fatal(err)
	}
	with := func(cost string) string {
		return base64.StdEncoding.EncodeToString([]byte(strings.Replace(string(good), "$04$", cost, 1)))
	}
	for text, want := range map[string]string{
		with("$04$"): "", with("$14$"): "", with("$15$"): "cost 15", with("$31$"): "cost 31", with("$32$"): "not bcrypt's", with("$03$"): "not bcrypt's",
		with("$04$") + "!": "not base64", string(good): "not base64", "": "not bcrypt's", base64.StdEncoding.EncodeToString(append(good, 'x')): "not bcrypt's",
		base64.StdEncoding.EncodeToString(good[:59]): "not bcrypt's",
	} {
		hash, err := ClientHash(text)
		if want == "" && (err != nil || len(hash) != bcryptBytes) || want != "" && (err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, kverror.BadRequest)) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
