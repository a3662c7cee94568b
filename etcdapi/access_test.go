package etcdapi

import (
	"context"
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// records are users and roles in memory, and the gate of one node that hears of them.
type records struct {
	gate *auth.Gate

	mu    sync.Mutex
	state *rights.State
	index uint64
	key   auth.Key
	// deaf keeps the gate from hearing of changes.
	deaf bool
	// asked counts the questions for credentials.
	asked int
}

// everybody are Users of whom nobody is asked who they are.
func everybody(testing.TB) *Users { u, _ := newUsers(); return u }

// newUsers returns Users without any user, and their records.
func newUsers() (*Users, *records) {
	tokens := auth.NewSimple(clock.System(), rand.Reader, 5*time.Minute)
	passwords, err := auth.NewPasswords(auth.MinCost)
	if err != nil {
		panic(err)
	}
	r := &records{gate: auth.NewGate(clock.System(), tokens), state: rights.New()}
	if r.key, err = auth.NewKey(1, make([]byte, auth.MinKeyBytes)); err != nil {
		panic(err)
	}
	r.tellLocked()
	return &Users{Gate: r.gate, Tokens: tokens, Passwords: passwords, Records: r}, r
}

func (r *records) tellLocked() {
	if !r.deaf {
		r.gate.Update(&auth.View{Rights: r.state.Clone(), Index: r.index, Keys: auth.Keys{Current: r.key}, Permits: true})
	}
}

// hear has the gate hear of changes, or not.
func (r *records) hear(yes bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deaf = !yes
	r.tellLocked()
}

func (r *records) Credential(_ context.Context, user string) (rights.Credential, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	return r.state.Credential(user, r.index), nil
}

func (r *records) ChangeAccess(_ context.Context, caller string, c rights.Change) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := r.state.Apply(r.index+1, caller, &c); err != nil {
		return kverror.Of(err)
	}
	r.index++
	r.tellLocked()
	return nil
}
