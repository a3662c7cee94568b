package etcdapi

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// authCall makes a call of the service Auth through clientv3. A line has the method and its arguments.
func authCall(ctx context.Context, c *clientv3.Client, line string) (string, error) {
	f := append(strings.Fields(line), "", "", "", "", "")
	if f[2] == "-" {
		f[2] = ""
	}
	ok := func(resp any, err error) (string, error) { return "", err }
	hash := func(cost int) string { // of the password "x", with a cost written over its own
		h, err := bcrypt.GenerateFromPassword([]byte("x"), bcrypt.MinCost)
		if err != nil {
			panic(err)
		}
		copy(h[4:6], fmt.Sprintf("%02d", cost))
		return base64.StdEncoding.EncodeToString(h)
	}
	raw := pb.NewAuthClient(c.ActiveConnection())
	switch f[0] {
	case "UserAdd":
		return ok(c.UserAdd(ctx, f[1], f[2]))
	case "UserAddLong":
		return ok(c.UserAdd(ctx, f[1], strings.Repeat("p", 73)))
	case "UserAddHash31":
		return ok(raw.UserAdd(ctx, &pb.AuthUserAddRequest{Name: f[1], HashedPassword: hash(31)}))
	case "UserAddHash4":
		return ok(raw.UserAdd(ctx, &pb.AuthUserAddRequest{Name: f[1], HashedPassword: hash(4)}))
	case "UserAddNoPassword":
		return ok(c.UserAddWithOptions(ctx, f[1], f[2], &clientv3.UserAddOptions{NoPassword: true}))
	case "UserGet":
		r, err := c.UserGet(ctx, f[1])
		if err != nil {
			return "", err
		}
		return fmt.Sprint(r.Roles), nil
	case "UserList":
		r, err := c.UserList(ctx)
		if err != nil {
			return "", err
		}
		return fmt.Sprint(r.Users), nil
	case "UserDelete":
		return ok(c.UserDelete(ctx, f[1]))
	case "UserChangePassword":
		return ok(c.UserChangePassword(ctx, f[1], f[2]))
	case "UserChangePasswordLong":
		return ok(c.UserChangePassword(ctx, f[1], strings.Repeat("p", 73)))
	case "UserChangePasswordHash31":
		return ok(raw.UserChangePassword(ctx, &pb.AuthUserChangePasswordRequest{Name: f[1], HashedPassword: hash(31)}))
	case "UserChangePasswordHash4":
		return ok(raw.UserChangePassword(ctx, &pb.AuthUserChangePasswordRequest{Name: f[1], HashedPassword: hash(4)}))
	case "UserGrantRole":
		return ok(c.UserGrantRole(ctx, f[1], f[2]))
	case "UserRevokeRole":
		return ok(c.UserRevokeRole(ctx, f[1], f[2]))
	case "RoleAdd":
		return ok(c.RoleAdd(ctx, f[1]))
	case "RoleGet":
		r, err := c.RoleGet(ctx, f[1])
		if err != nil {
			return "", err
		}
		var all []string
		for _, p := range r.Perm {
			all = append(all, fmt.Sprintf("%s %q %q", p.PermType, p.Key, p.RangeEnd))
		}
		return strings.Join(all, ", "), nil
	case "RoleList":
		r, err := c.RoleList(ctx)
		if err != nil {
			return "", err
		}
		return fmt.Sprint(r.Roles), nil
	case "RoleDelete":
		return ok(c.RoleDelete(ctx, f[1]))
	case "RoleGrantPermission":
		types := map[string]clientv3.PermissionType{"r": clientv3.PermissionType(clientv3.PermRead), "w": clientv3.PermissionType(clientv3.PermWrite), "rw": clientv3.PermissionType(clientv3.PermReadWrite)}
		return ok(c.RoleGrantPermission(ctx, f[1], f[3], f[4], types[f[2]]))
	case "RoleGrantNothing":
		return ok(raw.RoleGrantPermission(ctx, &pb.AuthRoleGrantPermissionRequest{Name: f[1]}))
	case "RoleRevokePermission":
		return ok(c.RoleRevokePermission(ctx, f[1], f[2], f[3]))
	case "AuthEnable":
		return ok(c.AuthEnable(ctx))
	case "AuthDisable":
		return ok(c.AuthDisable(ctx))
	case "AuthStatus":
		r, err := c.AuthStatus(ctx)
		if err != nil {
			return "", err
		}
		return fmt.Sprint(r.Enabled, " ", r.AuthRevision), nil
	case "Authenticate":
		r, err := c.Authenticate(ctx, f[1], f[2])
		if err == nil && r.Token == "" {
			return "no token", nil
		}
		return "", err
	}
	panic("no call " + line)
}

// All calls of the service Auth, as etcd answers them: first while nothing is checked, then by root, by a user and by
// nobody. A line ends with what the call returns, or etcd's error. Trap 102 is the hash of cost 31.
func TestAuthService(t *testing.T) {
	users, records := newUsers()
	r := newRig(t, "http", func(o *Options) { o.Users = users })
	c := r.client(t, clientv3.Config{})
	// The node has not told any revision yet. JSON leaves a 0 out.
	if s, err := c.AuthStatus(t.Context()); err != nil || s.Header.Revision != 1 {
		t.Fatalf("of the empty store: %v, %v", s, err)
	}
	const (
		empty, denied  = "etcdserver: user name is empty", "etcdserver: permission denied"
		noUser, noRole = "etcdserver: user name not found", "etcdserver: role name not found"
		management     = "etcdserver: invalid auth management"
		long           = "bcrypt: password length exceeds 72 bytes"
	)
	type line struct{ who, call, want string }
	story := []line{
		{"", "AuthStatus", "false 1"},
		{"", "Authenticate root x", "etcdserver: authentication is not enabled"},
		{"", "AuthEnable", "etcdserver: root user does not exist"},
		{"", "AuthDisable", ""},
		{"", "UserAdd", empty},
		{"", "UserGet root", noUser},
		{"", "UserAdd root x", ""},
		{"", "UserAdd root y", "etcdserver: user name already exists"},
		{"", "AuthEnable", "etcdserver: root user does not have root role"},
		{"", "UserGrantRole root root", ""}, // etcd's root role needs no record
		{"", "RoleAdd", "etcdserver: role name is empty"},
		{"", "RoleAdd root", ""},
		{"", "RoleAdd root", "etcdserver: role name already exists"},
		{"", "RoleAdd own", ""},
		{"", "UserAddLong long", long},
		{"", "UserAddHash31 h", "the cost 31, at most 14"},
		{"", "UserAddHash4 h", ""},
		{"", "UserAddNoPassword cert", ""},
		{"", "UserAdd bare -", ""}, // an empty password is one
		{"", "UserAdd u x", ""},
		{"", "UserGrantRole u own", ""},
		{"", "UserGrantRole u none", noRole},
		{"", "UserGrantRole none own", noUser},
		{"", "RoleGrantNothing own", "etcdserver: permission not given"},
		{"", "RoleGrantPermission own rw k", ""},
		{"", "RoleGrantPermission own r b a", management},
		{"", "RoleGrantPermission own r a b", ""},
		{"", "RoleGrantPermission none r a b", noRole},
		{"", "RoleRevokePermission own x", "etcdserver: permission is not granted to the role"},
		{"", "RoleRevokePermission none x", noRole},
		{"", "UserGet u", "[own]"},
		{"", "UserList", "[bare cert h root u]"},
		{"", "RoleGet own", `READ "a" "b", READWRITE "k" ""`},
		{"", "RoleGet none", noRole},
		{"", "RoleList", "[own root]"},
		{"", "UserRevokeRole u root", "etcdserver: role is not granted to the user"},
		{"", "UserRevokeRole none root", noUser},
		{"", "UserChangePassword none x", noUser},
		{"", "UserDelete none", noUser},
		{"", "RoleDelete none", noRole},
		{"", "AuthEnable", ""},

		{"root", "AuthEnable", ""},
		{"root", "Authenticate root x", ""},
		{"", "Authenticate root y", "etcdserver: authentication failed, invalid user ID or password"},
		{"", "Authenticate none y", "etcdserver: authentication failed, invalid user ID or password"},
		{"", "Authenticate h x", ""},
		{"", "Authenticate bare -", ""},
		{"", "Authenticate cert -", "etcdserver: authentication failed, invalid user ID or password"},
		{"root", "UserGet u", "[own]"},
		{"root", "UserGet none", noUser},
		{"root", "UserList", "[bare cert h root u]"},
		{"root", "RoleGet root", `READWRITE "" "\x00"`},
		{"root", "UserDelete root", management},
		{"root", "RoleDelete root", management},
		{"root", "UserRevokeRole root root", management},
		{"root", "UserChangePasswordLong u", long},
		{"root", "UserChangePasswordHash31 u", "the cost 31, at most 14"},
		{"root", "UserChangePassword u -", ""},
		{"", "Authenticate u -", "etcdserver: authentication failed, invalid user ID or password"},
		{"root", "UserChangePasswordHash4 u", ""},
		{"", "Authenticate u x", ""},
		{"root", "UserChangePassword cert x", ""},
		{"", "Authenticate cert x", "etcdserver: authentication failed, invalid user ID or password"},

		{"u", "UserGet u", "[own]"},
		{"u", "UserGet root", denied},
		{"u", "UserGet none", denied},
		{"u", "RoleGet own", `READ "a" "b", READWRITE "k" ""`},
		{"u", "RoleGet root", denied},
		{"u", "RoleGet none", denied},
		{"", "UserGet u", empty},
		{"", "RoleGet own", empty},
	}
	for who, want := range map[string]string{"u": denied, "": empty} {
		for _, call := range []string{
			"AuthEnable", "AuthDisable", "UserAdd x x", "UserAddLong x", "UserAdd root x", "UserList", "UserDelete u", "UserChangePassword u y",
			"UserChangePasswordLong u", "UserGrantRole u root", "UserRevokeRole u own", "RoleAdd x", "RoleList", "RoleDelete own", "RoleGrantNothing own",
			"RoleGrantPermission own rw x", "RoleRevokePermission own k",
		} {
			story = append(story, line{who, call, want})
		}
	}
	story = append(story, []line{
		{"u", "AuthStatus", "true 15"},
		{"", "AuthStatus", "true 15"},
		{"root", "UserRevokeRole u own", ""},
		{"u", "RoleGet own", denied},
		{"root", "RoleRevokePermission own a b", ""},
		{"root", "RoleDelete own", ""},
		{"root", "UserDelete u", ""},
		{"u", "UserGet u", "etcdserver: invalid auth token"},
		{"u", "AuthStatus", "true 19"}, // etcd looks at the token
		{"root", "AuthDisable", ""},
		{"", "UserGet root", "[root]"},
		{"", "AuthStatus", "false 20"},
	}...)
	tokens := map[string]string{}
	for _, l := range story {
		ctx := t.Context()
		if l.who != "" {
			if tokens[l.who] == "" || l.call == "UserGet u" && l.want == "[own]" {
				tokens[l.who] = records.token(t, l.who)
			}
			ctx = metadataToken(ctx, tokens[l.who])
		}
		got, err := authCall(ctx, c, l.call)
		if err != nil {
			got = rpctypes.ErrorDesc(err)
		}
		if got != l.want && (err == nil || l.want == "" || !strings.Contains(got, l.want)) {
			t.Errorf("%q by %q: %q, want %q", l.call, l.who, got, l.want)
		}
		if want := codeOf(l.want); err != nil && want != codes.OK && rpctypes.Error(err).(rpctypes.EtcdError).Code() != want { //nolint:errorlint,forcetypeassert // etcd's
			t.Errorf("%q by %q: %v, want the code %s", l.call, l.who, err, want)
		}
	}
}

// codeOf returns etcd's code for a text, OK where it has none.
func codeOf(text string) codes.Code {
	err := rpctypes.Error(status.Error(codes.Unknown, text))
	if e, ok := err.(rpctypes.EtcdError); ok { //nolint:errorlint // etcd's
		return e.Code()
	}
	return codes.OK
}

// A client with a user and a password logs in by itself. While nothing is checked, etcd's client goes on without a token.
func TestClientLogsIn(t *testing.T) {
	for _, enabled := range []bool{false, true} {
		r := newAuthRig(t, nil)
		if !enabled {
			r.users.do(t, "disable")
		}
		c := r.client(t, clientv3.Config{Username: "u", Password: "u"})
		if _, err := c.Put(t.Context(), "k", "v"); err != nil {
			t.Errorf("checks %v: %v", enabled, err)
		}
		_, err := c.Put(t.Context(), "x", "v")
		if enabled != (rpctypes.ErrorDesc(err) == rpctypes.ErrorDesc(rpctypes.ErrGRPCPermissionDenied)) {
			t.Errorf("checks %v: a key of others: %v", enabled, err)
		}
		if !enabled {
			continue
		}
		_, err = clientv3.New(clientv3.Config{Endpoints: []string{r.addr()}, Username: "u", Password: "wrong"})
		if rpctypes.ErrorDesc(err) != rpctypes.ErrorDesc(rpctypes.ErrGRPCAuthFailed) {
			t.Errorf("a wrong password: %v", err)
		}
	}
}

// Permissions come back as they were granted, whatever bytes their keys have.
func TestRolesComeBack(t *testing.T) {
	r := newAuthRig(t, nil)
	a := pb.NewAuthClient(r.conn)
	root := r.users.as(t, "root")
	want := []*authpb.Permission{
		{PermType: authpb.Permission_READ, Key: []byte{0}, RangeEnd: []byte{0}},
		{PermType: authpb.Permission_WRITE, Key: []byte("\xff\x00"), RangeEnd: []byte("\xff\xff")},
	}
	for _, p := range want {
		if _, err := a.RoleGrantPermission(root, &pb.AuthRoleGrantPermissionRequest{Name: "root", Perm: p}); err != nil {
			t.Fatal(err)
		}
	}
	got, err := a.RoleGet(root, &pb.AuthRoleGetRequest{Role: "root"})
	if err != nil || len(got.Perm) != 1 || got.Perm[0].PermType != authpb.Permission_READWRITE {
		t.Errorf("the role root: %v, %v", got, err)
	}
	r.users.do(t, "role bytes")
	for _, p := range want {
		_, err := a.RoleGrantPermission(root, &pb.AuthRoleGrantPermissionRequest{Name: "bytes", Perm: p})
		must(t, err)
	}
	got, err = a.RoleGet(root, &pb.AuthRoleGetRequest{Role: "bytes"})
	must(t, err)
	if !slices.EqualFunc(got.Perm, want, func(a, b *authpb.Permission) bool { return a.String() == b.String() }) {
		t.Errorf("got %v", got.Perm)
	}
}
