package follow

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	clientsnapshot "go.etcd.io/etcd/client/v3/snapshot"
	"go.uber.org/zap"

	"github.com/skeindb/skein/backup"
	backups "github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/transfer"
)

// passwords are those of the users of fillUsers.
var passwords = map[string]string{"root": "old secret", "writer": "w", "reader": "r", "idle": "i"}

// userConfig is that of a client with a user's name.
func userConfig(endpoints []string, user string) clientv3.Config {
	cfg := clientConfig(endpoints)
	cfg.Username, cfg.Password = user, passwords[user]
	// It bounds the login too, and Skein computes with bcrypt on threads that have the processors last.
	cfg.DialTimeout = time.Minute
	return cfg
}

// dialAs returns a client with a user's name, or without one.
func dialAs(t *testing.T, endpoints []string, user string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(userConfig(endpoints, user))
	if err != nil {
		t.Fatalf("user %q: %v", user, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// fillUsers writes keys, makes users and roles, and has them checked.
func fillUsers(ctx context.Context, t *testing.T, c *clientv3.Client) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, k := range []string{"a/1", "a/2", "b/1"} {
		_, err := c.Put(ctx, k, "of the source")
		must(err)
	}
	l, err := c.Grant(ctx, 3000)
	must(err)
	_, err = c.Put(ctx, "a/leased", "", clientv3.WithLease(l.ID))
	must(err)
	for role, kind := range map[string]authpb.Permission_Type{"writes": clientv3.PermReadWrite, "reads": clientv3.PermRead} {
		_, err = c.RoleAdd(ctx, role)
		must(err)
		_, err = c.RoleGrantPermission(ctx, role, "a/", clientv3.GetPrefixRangeEnd("a/"), clientv3.PermissionType(kind))
		must(err)
	}
	for user, password := range passwords {
		_, err = c.UserAdd(ctx, user, password)
		must(err)
	}
	_, err = c.UserAddWithOptions(ctx, "certificate", "", &clientv3.UserAddOptions{NoPassword: true})
	must(err)
	for user, role := range map[string]string{"root": "root", "writer": "writes", "reader": "reads", "certificate": "reads"} {
		_, err = c.UserGrantRole(ctx, user, role)
		must(err)
	}
	_, err = c.AuthEnable(ctx)
	must(err)
}

// accounts lists users, their roles and these roles' permissions.
func accounts(ctx context.Context, t *testing.T, root *clientv3.Client) (texts []string) {
	t.Helper()
	users, err := root.UserList(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range users.Users {
		got, err := root.UserGet(ctx, u)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, fmt.Sprintf("user %s: %q", u, got.Roles))
	}
	roles, err := root.RoleList(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range roles.Roles {
		got, err := root.RoleGet(ctx, r)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, fmt.Sprintf("role %s: %v", r, got.Perm))
	}
	return texts
}

// neverServed has somebody without a name ask each node all the time, until stop: none may answer.
func neverServed(ctx context.Context, t *testing.T, endpoints []string, ask func(context.Context, *clientv3.Client) (served bool)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	for _, endpoint := range endpoints {
		c := dialAs(t, []string{endpoint}, "")
		all.Go(func() {
			for asked := 0; ctx.Err() == nil; asked++ {
				call, end := context.WithTimeout(ctx, time.Second)
				served := ask(call, c)
				end()
				if served {
					t.Errorf("%s has served somebody without a name, at the question %d", endpoint, asked)
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// readKeys and writeKey are what somebody asks.
func readKeys(ctx context.Context, c *clientv3.Client) bool {
	r, err := c.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithSerializable())
	return err == nil && len(r.Kvs) > 0
}

func writeKey(ctx context.Context, c *clientv3.Client) bool {
	_, err := c.Put(ctx, "a/1", "anybody's")
	return err == nil
}

// sameRights checks a cluster that has just been opened: from the first request on users may do what they might at the
// source, and nothing else.
func sameRights(ctx context.Context, t *testing.T, endpoints, want []string) {
	t.Helper()
	for _, endpoint := range endpoints {
		nobody := dialAs(t, []string{endpoint}, "")
		if writeKey(ctx, nobody) || readKeys(ctx, nobody) {
			t.Errorf("%s has served somebody without a name after the load", endpoint)
		}
		for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			_, err := nobody.Put(ctx, "a/1", "anybody's")
			if errors.Is(err, rpctypes.ErrUserEmpty) {
				break
			}
			if time.Since(began) > 30*time.Second || err == nil {
				t.Fatalf("%s tells somebody without a name: %v", endpoint, err)
			}
		}
	}
	for user, password := range map[string]string{"root": "another", "writer": passwords["root"], "certificate": "x", "nobody": "x"} {
		cfg := userConfig(endpoints, user)
		cfg.Password = password
		if c, err := clientv3.New(cfg); err == nil {
			c.Close()
			t.Errorf("user %s logs in with the password %q", user, password)
		}
	}
	as := map[string]*clientv3.Client{}
	for user := range passwords {
		as[user] = dialAs(t, endpoints, user)
	}
	got := accounts(ctx, t, as["root"])
	if !slices.Equal(got, want) {
		t.Errorf("users and roles:\n%s\nwant\n%s", got, want)
	}
	write := func(key string) func(*clientv3.Client) error {
		return func(c *clientv3.Client) error { _, err := c.Put(ctx, key, "v"); return err }
	}
	read := func(key string, opts ...clientv3.OpOption) func(*clientv3.Client) error {
		return func(c *clientv3.Client) error {
			r, err := c.Get(ctx, key, opts...)
			if err == nil && len(r.Kvs) == 0 {
				err = errors.New("no key")
			}
			return err
		}
	}
	remove := func(c *clientv3.Client) error { _, err := c.Delete(ctx, "", clientv3.WithPrefix()); return err }
	addUser := func(c *clientv3.Client) error { _, err := c.UserAdd(ctx, "mallory", "m"); return err }
	disable := func(c *clientv3.Client) error { _, err := c.AuthDisable(ctx); return err }
	for _, x := range []struct {
		user string
		what string
		do   func(*clientv3.Client) error
		may  bool
	}{
		{"root", "reads all", read("", clientv3.WithPrefix()), true},
		{"root", "writes elsewhere", write("b/2"), true},
		{"writer", "writes", write("a/3"), true},
		{"writer", "reads", read("a/", clientv3.WithPrefix()), true},
		{"writer", "reads elsewhere", read("b/1"), false},
		{"writer", "reads elsewhere, from any node", read("b/1", clientv3.WithSerializable()), false},
		{"writer", "writes elsewhere", write("b/1"), false},
		{"writer", "writes behind its keys", write("a0"), false},
		{"writer", "deletes all", remove, false},
		{"writer", "adds a user", addUser, false},
		{"writer", "ends the checks", disable, false},
		{"reader", "reads", read("a/1"), true},
		{"reader", "writes", write("a/1"), false},
		{"reader", "reads elsewhere", read("b/1"), false},
		{"idle", "reads", read("a/1"), false},
		{"idle", "writes", write("a/1"), false},
	} {
		err := x.do(as[x.user])
		if x.may && err != nil || !x.may && !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Errorf("%s %s: %v", x.user, x.what, err)
		}
	}
}

// TestUsersOfEachWayIn: an etcd whose users are checked becomes a cluster by its snapshot, by a backup of that cluster and by
// a mirror. Nobody without a name is answered by any node at any moment, and then each user has the password and the
// rights of before, and no others.
func TestUsersOfEachWayIn(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	fillUsers(ctx, t, dialAs(t, endpoints, ""))
	want := accounts(ctx, t, dialAs(t, endpoints, "root"))
	dir := t.TempDir()
	file := filepath.Join(dir, "a.db")
	if _, err := clientsnapshot.SaveWithVersion(ctx, zap.NewNop(), userConfig(endpoints[:1], "root"), file); err != nil {
		t.Fatal(err)
	}
	place, err := backups.Open("file://"+filepath.Join(dir, "backups"), clock.System())
	if err != nil {
		t.Fatal(err)
	}
	repository := backup.NewRepository(place, backup.Keys{}, clock.System())
	of := func(c *clientv3.Client) *transfer.Cluster {
		return &transfer.Cluster{Client: c, Clock: clock.System(), Report: t.Logf}
	}
	t.Run("import", func(t *testing.T) {
		c := startSkein(ctx, t)
		stop := neverServed(ctx, t, c.Endpoints(), readKeys)
		err := transfer.Import(ctx, of(c), transfer.ImportOptions{Path: file, TempDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		sameRights(ctx, t, c.Endpoints(), want)
		stop()
		m, err := transfer.Backup(ctx, of(dialAs(t, c.Endpoints(), "root")), repository, transfer.BackupOptions{})
		if err != nil {
			t.Fatal(m, err)
		}
		if _, err := transfer.Backup(ctx, of(dialAs(t, c.Endpoints(), "writer")), repository, transfer.BackupOptions{}); err == nil {
			t.Error("a user without the role root has made a backup")
		}
	})
	t.Run("restore", func(t *testing.T) {
		c := startSkein(ctx, t)
		stop := neverServed(ctx, t, c.Endpoints(), readKeys)
		if err := transfer.Restore(ctx, of(c), repository, transfer.RestoreOptions{Bump: transfer.DefaultBump, TempDir: t.TempDir()}); err != nil {
			t.Fatal(err)
		}
		sameRights(ctx, t, c.Endpoints(), want)
		stop()
	})
	t.Run("mirror", func(t *testing.T) {
		c := startSkein(ctx, t)
		spool := filepath.Join(t.TempDir(), "mirror")
		ended := make(chan error, 1)
		go func() {
			ended <- transfer.Mirror(ctx, of(c), transfer.MirrorOptions{Source: userConfig(endpoints, "root"), Dir: spool, Number: 7})
		}()
		stepped(ctx, t, spool, ended)
		stop := neverServed(ctx, t, c.Endpoints(), writeKey) // who is on this machine may read meanwhile
		// The newest users are those of the cut-over.
		if _, err := dialAs(t, endpoints, "root").UserRevokeRole(ctx, "certificate", "reads"); err != nil {
			t.Fatal(err)
		}
		want := accounts(ctx, t, dialAs(t, endpoints, "root"))
		if err := mirror.RequestCutover(vfs.Default, spool); err != nil {
			t.Fatal(err)
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		sameRights(ctx, t, c.Endpoints(), want)
		stop()
	})
}
