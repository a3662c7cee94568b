package conformance

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/mirror"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// userClients opens clients of one store.
type userClients struct {
	t     *testing.T
	store *store
}

// as returns a client of a user, "" for early.
func (c *userClients) as(user, password string) *clientv3.Client {
	c.t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"http://" + hostOf(c.store.conns[0])}, Username: user, Password: password, Logger: zap.NewNop(), DialTimeout: startTimeout,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { client.Close() })
	return client
}

// TestClientsOfUsers: what the cases of etcd's integration/v3_auth_test.go ask for that no single call shows. etcd
// itself answers the same way. docs/CONFORMANCE.md names the case of ours for each of etcd's.
func TestClientsOfUsers(t *testing.T) {
	t.Parallel()
	for name, jwt := range map[string]bool{"simple tokens": false, "JWT": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, _, err := startPair(t, 1, tokenOption(t, jwt))
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range p.stores() {
				t.Run(s.name, func(t *testing.T) { clientsOfUsers(t, s) })
			}
		})
	}
}

func clientsOfUsers(t *testing.T, s *store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	clients := &userClients{t, s}
	early := clients.as("root", "p") // it connects, although nobody checks passwords yet
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put, err := early.Put(ctx, "k1", "before")
	must(put, err)
	added, err := early.UserAdd(ctx, "root", "p")
	must(added, err)
	if got, want := added.Header.Revision, put.Header.Revision; got != want {
		t.Errorf("a new user at revision %d, after a put at %d", got, want)
	}
	must(early.RoleAdd(ctx, "root"))
	must(early.UserGrantRole(ctx, "root", "root"))
	must(early.RoleAdd(ctx, "k"))
	must(early.RoleGrantPermission(ctx, "k", "k1", "k3", clientv3.PermissionType(clientv3.PermReadWrite)))
	must(early.UserAdd(ctx, "alice", "p"))
	must(early.UserGrantRole(ctx, "alice", "k"))
	must(early.AuthEnable(ctx))
	root, alice := clients.as("root", "p"), clients.as("alice", "p")

	// A watch that is refused leaves one alone that has the id 0.
	watched := alice.Watch(ctx, "k1", clientv3.WithRev(1))
	if r := <-watched; len(r.Events) != 1 || r.Err() != nil {
		t.Errorf("watch k1: %+v", r)
	}
	if r := <-alice.Watch(ctx, "secret", clientv3.WithRev(1)); r.Err() == nil {
		t.Errorf("watch secret: %+v", r)
	}
	must(alice.Put(ctx, "k1", "after"))
	if r := <-watched; len(r.Events) != 1 || r.Err() != nil {
		t.Errorf("watch k1 goes on: %+v", r)
	}

	// A user mirrors what it may read.
	mirrored := mirror.NewSyncer(alice, "k1", 0)
	base, errs := mirrored.SyncBase(ctx)
	keys := 0
	for r := range base {
		keys += len(r.Kvs)
	}
	if err := <-errs; err != nil || keys != 1 {
		t.Errorf("mirror: %d keys, %v", keys, err)
	}
	updates := mirrored.SyncUpdates(ctx)
	must(alice.Put(ctx, "k1", "mirrored"))
	if r := <-updates; len(r.Events) != 1 || string(r.Events[0].Kv.Value) != "mirrored" {
		t.Errorf("mirror: %+v", r)
	}

	// The server's own end of a lease needs no user.
	lease, err := root.Grant(ctx, 2)
	must(lease, err)
	must(root.Put(ctx, "leased", "v", clientv3.WithLease(lease.ID)))
	for {
		r, err := root.Get(ctx, "leased")
		must(r, err)
		if r.Count == 0 {
			break
		}
		must(nil, clock.Sleep(ctx, clock.System(), readyPause))
	}
	if r, err := root.TimeToLive(ctx, lease.ID, clientv3.WithAttachedKeys()); err != nil || r.TTL != -1 || len(r.Keys) > 0 {
		t.Errorf("a lease after its end: %+v, %v", r, err)
	}

	// Writes and logins go on while rights are granted: a token of an old auth revision is renewed.
	must(nil, each(2, func(i int) error {
		name := fmt.Sprint("role", i)
		_, err1 := root.RoleAdd(ctx, name)
		_, err2 := root.RoleGrantPermission(ctx, name, "\x00", "\x00", clientv3.PermissionType(clientv3.PermReadWrite))
		_, err3 := root.UserAdd(ctx, name, "p")
		_, err4 := root.Put(ctx, "a", "b")
		return errors.Join(err1, err2, err3, err4)
	}))

	// A user who is made again logs in with the new password alone.
	must(root.UserAdd(ctx, "bob", "old"))
	must(early.Authenticate(ctx, "bob", "old"))
	must(root.UserDelete(ctx, "bob"))
	if _, err := early.Authenticate(ctx, "bob", "old"); !errors.Is(err, rpctypes.ErrAuthFailed) {
		t.Errorf("a deleted user logs in: %v", err)
	}
	must(root.UserAdd(ctx, "bob", "old"))
	must(root.UserChangePassword(ctx, "bob", "new"))
	if _, err := early.Authenticate(ctx, "bob", "old"); !errors.Is(err, rpctypes.ErrAuthFailed) {
		t.Errorf("an old password: %v", err)
	}
	must(early.Authenticate(ctx, "bob", "new"))

	// Puts with a token go on while checks go off.
	putting, stop := context.WithCancel(ctx)
	puts, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		for putting.Err() == nil {
			if _, err := root.Put(putting, "a", "b"); err != nil && putting.Err() == nil {
				ended <- err
				return
			}
			select {
			case puts <- struct{}{}:
			default:
			}
		}
		ended <- nil
	}()
	<-puts
	must(root.AuthDisable(ctx))
	<-puts // of before, it may be
	<-puts
	stop()
	if err := <-ended; err != nil {
		t.Errorf("a put beside AuthDisable: %v", err)
	}
}
