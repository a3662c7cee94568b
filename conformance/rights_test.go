package conformance

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/auth"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.uber.org/zap"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// rightsErrors are etcd's own errors, and ours for the same cases.
var rightsErrors = []struct {
	etcd error
	kind kverror.Kind
}{
	{auth.ErrRootUserNotExist, kverror.RootUserNotExist},
	{auth.ErrRootRoleNotExist, kverror.RootRoleNotExist},
	{auth.ErrUserAlreadyExist, kverror.UserExists},
	{auth.ErrUserEmpty, kverror.UserEmpty},
	{auth.ErrUserNotFound, kverror.UserNotFound},
	{auth.ErrRoleAlreadyExist, kverror.RoleExists},
	{auth.ErrRoleNotFound, kverror.RoleNotFound},
	{auth.ErrRoleEmpty, kverror.RoleEmpty},
	{auth.ErrPermissionDenied, kverror.PermissionDenied},
	{auth.ErrRoleNotGranted, kverror.RoleNotGranted},
	{auth.ErrPermissionNotGranted, kverror.PermissionNotGranted},
	{auth.ErrInvalidAuthMgmt, kverror.InvalidAuthManagement},
}

// sameRefusal says whether two errors are the same one.
func sameRefusal(etcd, ours error) bool {
	if etcd == nil || ours == nil {
		return etcd == nil && ours == nil
	}
	return slices.ContainsFunc(rightsErrors, func(e struct {
		etcd error
		kind kverror.Kind
	},
	) bool {
		return errors.Is(etcd, e.etcd) && errors.Is(ours, e.kind)
	})
}

// rightsPair is etcd's store of users and roles beside ours.
type rightsPair struct {
	*rand.Rand
	etcd  auth.AuthStore
	ours  *rights.State
	index uint64
}

func newRightsPair(t *testing.T, seed uint64) *rightsPair {
	t.Helper()
	b := backend.NewDefaultBackend(zap.NewNop(), filepath.Join(t.TempDir(), "db"))
	tokens, err := auth.NewTokenProvider(zap.NewNop(), "simple", func(uint64) <-chan struct{} { return nil }, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	store := auth.NewAuthStore(zap.NewNop(), schema.NewAuthBackend(zap.NewNop(), b), tokens, 4)
	t.Cleanup(func() {
		if err := errors.Join(store.Close(), b.Close()); err != nil {
			t.Error(err)
		}
	})
	return &rightsPair{Rand: rand.New(rand.NewPCG(seed, 0)), etcd: store, ours: rights.New()}
}

func (p *rightsPair) one(of ...string) string { return of[p.IntN(len(of))] }

func (p *rightsPair) user() string { return p.one("root", "root", "a", "b", "c", "nobody", "") }
func (p *rightsPair) role() string { return p.one("root", "r", "s", "u", "none", "") }
func (p *rightsPair) key() string {
	return p.one("", "\x00", "k", "k\x00", "ka", "kb", "kc", "l", "\xff")
}

// apply makes one change at both, as a replica of etcd does: the caller is checked first.
func (p *rightsPair) apply() (what string, etcd, ours error) {
	c := rights.Change{Kind: rights.Kind(1 + p.IntN(int(rights.RevokePermission)))}
	if c.Kind == rights.Disable && p.IntN(4) > 0 {
		c.Kind = rights.GrantPermission
	}
	caller, user, role := p.one("root", "root", "root", "a", ""), p.user(), p.role()
	perm := &authpb.Permission{PermType: authpb.Permission_Type(p.IntN(4)), Key: []byte(p.key()), RangeEnd: []byte(p.key())}
	if p.IntN(2) == 0 {
		perm.RangeEnd = nil
	}
	hash := p.one("x", "y")
	encoded := base64.StdEncoding.EncodeToString([]byte(hash))
	etcd = p.etcd.IsAdminPermitted(&auth.AuthInfo{Username: caller, Revision: p.etcd.Revision()})
	do := func(f func() error) {
		if etcd == nil {
			etcd = f()
		}
	}
	switch c.Kind {
	case rights.Enable:
		do(p.etcd.AuthEnable)
	case rights.Disable:
		do(func() error { p.etcd.AuthDisable(); return nil })
	case rights.AddUser:
		c.User, c.NoPassword, c.Hash = user, p.IntN(3) == 0, []byte(hash)
		do(func() error {
			_, err := p.etcd.UserAdd(&pb.AuthUserAddRequest{Name: user, HashedPassword: encoded, Options: &authpb.UserAddOptions{NoPassword: c.NoPassword}})
			return err
		})
	case rights.DeleteUser:
		c.User = user
		do(func() error { _, err := p.etcd.UserDelete(&pb.AuthUserDeleteRequest{Name: user}); return err })
	case rights.ChangePassword:
		c.User, c.Hash = user, []byte(hash)
		do(func() error {
			_, err := p.etcd.UserChangePassword(&pb.AuthUserChangePasswordRequest{Name: user, HashedPassword: encoded})
			return err
		})
	case rights.GrantRole:
		c.User, c.Role = user, role
		do(func() error {
			_, err := p.etcd.UserGrantRole(&pb.AuthUserGrantRoleRequest{User: user, Role: role})
			return err
		})
	case rights.RevokeRole:
		c.User, c.Role = user, role
		do(func() error {
			_, err := p.etcd.UserRevokeRole(&pb.AuthUserRevokeRoleRequest{Name: user, Role: role})
			return err
		})
	case rights.AddRole:
		c.Role = role
		do(func() error { _, err := p.etcd.RoleAdd(&pb.AuthRoleAddRequest{Name: role}); return err })
	case rights.DeleteRole:
		c.Role = role
		do(func() error { _, err := p.etcd.RoleDelete(&pb.AuthRoleDeleteRequest{Role: role}); return err })
	case rights.GrantPermission:
		c.Role, c.Permission = role, rights.Permission{Type: rights.Type(perm.GetPermType()), Key: perm.GetKey(), RangeEnd: perm.GetRangeEnd()}
		do(func() error {
			_, err := p.etcd.RoleGrantPermission(&pb.AuthRoleGrantPermissionRequest{Name: role, Perm: perm})
			return err
		})
	case rights.RevokePermission:
		c.Role, c.Permission = role, rights.Permission{Key: perm.GetKey(), RangeEnd: perm.GetRangeEnd()}
		do(func() error {
			_, err := p.etcd.RoleRevokePermission(&pb.AuthRoleRevokePermissionRequest{Role: role, Key: perm.GetKey(), RangeEnd: perm.GetRangeEnd()})
			return err
		})
	}
	p.index++
	_, ours = p.ours.Apply(p.index, caller, &c)
	return fmt.Sprintf("%q: %+v", caller, c), etcd, ours
}

// compare looks at everything that both can show.
func (p *rightsPair) compare(t *testing.T, what string) {
	t.Helper()
	if p.etcd.IsAuthEnabled() != p.ours.Enabled || p.etcd.Revision() != p.ours.Revision {
		t.Fatalf("%s: etcd %t at revision %d, ours\n%s", what, p.etcd.IsAuthEnabled(), p.etcd.Revision(), p.ours)
	}
	users, err := p.etcd.UserList(&pb.AuthUserListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var ours []string
	for _, u := range p.ours.Users() {
		ours = append(ours, u.Name)
		if got, err := p.etcd.UserGet(&pb.AuthUserGetRequest{Name: u.Name}); err != nil || !slices.Equal(got.GetRoles(), u.Roles) {
			t.Fatalf("%s: user %s: %v, %v, ours\n%s", what, u.Name, got, err, p.ours)
		}
	}
	if !slices.Equal(users.GetUsers(), ours) {
		t.Fatalf("%s: users %q, ours %q", what, users.GetUsers(), ours)
	}
	roles, err := p.etcd.RoleList(&pb.AuthRoleListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ours = nil
	for _, r := range p.ours.Roles() {
		ours = append(ours, r.Name)
		got, err := p.etcd.RoleGet(&pb.AuthRoleGetRequest{Role: r.Name})
		if err != nil {
			t.Fatal(err)
		}
		if r.Name == rights.Root {
			continue // etcd shows what it means, and not what was granted
		}
		same := slices.EqualFunc(got.GetPerm(), r.Permissions, func(e *authpb.Permission, o rights.Permission) bool {
			return int32(e.GetPermType()) == int32(o.Type) && string(e.GetKey()) == string(o.Key) && string(e.GetRangeEnd()) == string(o.RangeEnd)
		})
		// Beyond twelve permissions the order of those with one key is that of Go's sort.
		if !same && len(r.Permissions) <= 12 {
			t.Fatalf("%s: role %s: %v, ours\n%s", what, r.Name, got, p.ours)
		}
	}
	if !slices.Equal(roles.GetRoles(), ours) {
		t.Fatalf("%s: roles %q, ours %q", what, roles.GetRoles(), ours)
	}
}

// ask compares what a user may do with any span. With one that ends before it begins, etcd's answer
// depends on the shape of a tree, and is yes only if ours is.
func (p *rightsPair) ask(t *testing.T) {
	t.Helper()
	user, key, end := p.user(), []byte(p.key()), []byte(p.key())
	if user == "" || len(key) == 0 || !p.ours.Enabled {
		return
	}
	who := &auth.AuthInfo{Username: user, Revision: p.etcd.Revision()}
	sub, known := p.ours.Subject(user)
	for what, etcd := range map[rights.Type]error{rights.Read: p.etcd.IsRangePermitted(who, key, end), rights.Write: p.etcd.IsDeleteRangePermitted(who, key, end)} {
		may := known && sub.May(what, key, end)
		vague := may && bytes.Compare(key, end) > 0 && len(end) > 0 && string(end) != "\x00"
		if etcd != nil && !errors.Is(etcd, auth.ErrPermissionDenied) || may != (etcd == nil) && !vague {
			t.Fatalf("user %q %s %q to %q: etcd %v, ours %t\n%s", user, what, key, end, etcd, may, p.ours)
		}
	}
}

// TestRightsMeanWhatEtcdsMean: any changes have the same effects and refusals as with etcd's own store,
// and afterwards any user may do the same.
func TestRightsMeanWhatEtcdsMean(t *testing.T) {
	refused := map[kverror.Kind]int{}
	for seed := range uint64(20) {
		p := newRightsPair(t, seed)
		for range 400 {
			what, etcd, ours := p.apply()
			if !sameRefusal(etcd, ours) {
				t.Fatalf("seed %d: %s: etcd %v, ours %v\n%s", seed, what, etcd, ours, p.ours)
			}
			if ours != nil {
				refused[kverror.Of(ours).Kind]++
			}
			p.compare(t, what)
			for range 5 {
				p.ask(t)
			}
		}
	}
	for _, e := range rightsErrors {
		if refused[e.kind] == 0 {
			t.Errorf("nothing was refused with %v", e.kind)
		}
	}
}
