package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rights"
)

// Users, roles and passwords of the calls are few, so that calls meet. Root keeps its password: who changes users
// needs it.
var (
	someUsers     = []string{"u", "v", "w"}
	someRoles     = []string{"r", "s", "t"}
	somePasswords = []string{"p", "q"}
)

// changeKinds are the calls about users. They are in no table of their own: runs without users have none of them.
var changeKinds = []*kind{
	changeKind("RoleGrantPermission", 12, func(s *source) proto.Message {
		return &pb.AuthRoleGrantPermissionRequest{Name: s.roleName(), Perm: s.permission()}
	}),
	changeKind("RoleRevokePermission", 8, func(s *source) proto.Message {
		p := s.permission()
		if len(s.granted) > 0 && !s.chance(4) {
			p = pick(s, s.granted)
		}
		return &pb.AuthRoleRevokePermissionRequest{Role: s.roleName(), Key: p.GetKey(), RangeEnd: p.GetRangeEnd()}
	}),
	changeKind("RoleAdd", 4, func(s *source) proto.Message { return &pb.AuthRoleAddRequest{Name: s.roleName()} }),
	changeKind("RoleDelete", 1, func(s *source) proto.Message { return &pb.AuthRoleDeleteRequest{Role: s.roleName()} }),
	changeKind("RoleGet", 2, func(s *source) proto.Message { return &pb.AuthRoleGetRequest{Role: s.roleName()} }),
	changeKind("RoleList", 1, func(*source) proto.Message { return &pb.AuthRoleListRequest{} }),
	changeKind("UserAdd", 4, func(s *source) proto.Message {
		return &pb.AuthUserAddRequest{Name: s.userName(), Password: pick(s, somePasswords), Options: &authpb.UserAddOptions{NoPassword: s.chance(12)}}
	}),
	changeKind("UserDelete", 1, func(s *source) proto.Message {
		r := &pb.AuthUserDeleteRequest{Name: s.userName()}
		if r.Name == rights.Root {
			r.Name = "u" // root stays, also while nobody checks that
		}
		return r
	}),
	changeKind("UserChangePassword", 2, func(s *source) proto.Message {
		r := &pb.AuthUserChangePasswordRequest{Name: s.userName(), Password: pick(s, somePasswords)}
		if r.Name == rights.Root {
			r.Password = passwordOfRoot
		}
		return r
	}),
	changeKind("UserGrantRole", 10, func(s *source) proto.Message {
		return &pb.AuthUserGrantRoleRequest{User: s.userName(), Role: s.roleName()}
	}),
	changeKind("UserRevokeRole", 3, func(s *source) proto.Message {
		r := &pb.AuthUserRevokeRoleRequest{Name: s.userName(), Role: s.roleName()}
		if r.Name == rights.Root {
			r.Name = "u"
		}
		return r
	}),
	changeKind("UserGet", 2, func(s *source) proto.Message { return &pb.AuthUserGetRequest{Name: s.userName()} }),
	changeKind("UserList", 1, func(*source) proto.Message { return &pb.AuthUserListRequest{} }),
	changeKind("AuthEnable", 2, func(*source) proto.Message { return &pb.AuthEnableRequest{} }),
	changeKind("AuthDisable", 1, func(*source) proto.Message { return &pb.AuthDisableRequest{} }),
	changeKind("AuthStatus", 2, func(*source) proto.Message { return &pb.AuthStatusRequest{} }),
	{
		name: logInName, method: pb.Auth_Authenticate_FullMethodName, weight: 12, alone: true,
		generate: func(s *source) proto.Message { return s.logIn() },
		response: func() proto.Message { return &pb.AuthenticateResponse{} },
	},
}

const (
	passwordOfRoot = "root's"
	logInName      = "Authenticate"
)

// changeKind is a call of the Auth service.
func changeKind(name protoreflect.Name, weight int, generate func(*source) proto.Message) *kind {
	m := methodNamed(name)
	return &kind{name: string(name), weight: weight, alone: true, generate: generate, do: func(ctx context.Context, conn *grpc.ClientConn, req proto.Message) answer {
		return anyRevision(invoke(ctx, conn, m, overGRPC, req))
	}}
}

// anyRevision replaces the revision in an answer's header by 1. The Auth service tells one that the node has heard of,
// and there may be a later one.
func anyRevision(a answer) answer {
	if r, ok := a.response.(interface{ GetHeader() *pb.ResponseHeader }); ok && a.response != nil {
		r.GetHeader().Revision = 1
	}
	a.text = headerRevision.ReplaceAllString(a.text, `"revision":"1"`)
	return a
}

var headerRevision = regexp.MustCompile(`"revision":"[0-9]+"`)

func (s *source) userName() string {
	switch s.IntN(24) {
	case 0:
		return ""
	case 1, 2:
		return rights.Root
	}
	return pick(s, someUsers)
}

func (s *source) roleName() string {
	switch s.IntN(24) {
	case 0:
		return ""
	case 1:
		return rights.Root
	}
	return pick(s, someRoles)
}

// permission is one over keys that calls use.
func (s *source) permission() *authpb.Permission {
	p := &authpb.Permission{PermType: authpb.Permission_Type(pick(s, []int32{0, 1, 2, 2, 2}))}
	switch s.IntN(4) {
	case 0:
		p.Key, p.RangeEnd = s.writeSpan(s.group())
	case 1:
		p.Key, p.RangeEnd = s.anySpan(s.group())
	default:
		g := s.IntN(len(groups))
		p.Key, p.RangeEnd = []byte(groups[g].prefix), []byte(pick(s, groups[g:]).end)
		if len(p.RangeEnd) == 0 {
			p.RangeEnd = []byte{0}
		}
	}
	return p
}

// maxFailures is how many logins of a user may fail: after four in a row at one node, Skein holds the next one back
// (docs/CONFORMANCE.md).
const maxFailures = 3

// logIn is a login, mostly with the right password.
func (s *source) logIn() *pb.AuthenticateRequest {
	r := &pb.AuthenticateRequest{Name: pick(s, someUsers), Password: pick(s, somePasswords)}
	password, known := s.passwords[r.Name]
	if known && (!s.chance(4) || s.failures[r.Name] >= maxFailures) {
		r.Password = password
	}
	if s.failures[r.Name] >= maxFailures && !known || s.chance(8) {
		r.Name, r.Password = rights.Root, passwordOfRoot
	}
	return r
}

// ownerOf is the user whose leases those of the same place are: only they attach keys to them, and root renews them
// too. Skein remembers for a moment that a user may write all keys of a lease. What others attach meanwhile would
// then be seen by etcd alone.
func ownerOf(lease int64) string {
	all := append([]string{rights.Root}, someUsers...)
	return all[max(0, slices.Index(leaseIDs, lease))%len(all)]
}

// owned returns the leases to which a call attaches keys. It leaves only those of the first one's owner.
func owned(m proto.Message) (first int64) {
	keep := func(lease *int64) {
		if *lease != 0 && first == 0 {
			first = *lease
		}
		if ownerOf(*lease) != ownerOf(first) {
			*lease = 0
		}
	}
	var walk func(m proto.Message)
	walk = func(m proto.Message) {
		switch r := m.(type) {
		case *pb.PutRequest:
			keep(&r.Lease)
		case *pb.TxnRequest:
			for _, op := range slices.Concat(r.GetSuccess(), r.GetFailure()) {
				switch {
				case op.GetRequestPut() != nil:
					walk(op.GetRequestPut())
				case op.GetRequestTxn() != nil:
					walk(op.GetRequestTxn())
				}
			}
		case *v3lockpb.LockRequest:
			first = r.GetLease()
		case *v3electionpb.CampaignRequest:
			first = r.GetLease()
		case *v3electionpb.ProclaimRequest:
			first = r.GetLeader().GetLease()
		case *pb.LeaseKeepAliveRequest:
			first = r.GetID()
		}
	}
	walk(m)
	return first
}

// straight has no span of a message end before it begins. There etcd's verdict depends on the shape of a
// tree.
func straight(m protoreflect.Message) {
	key, end := m.Descriptor().Fields().ByName("key"), m.Descriptor().Fields().ByName("range_end")
	if key != nil && end != nil {
		if e := m.Get(end).Bytes(); len(e) > 0 && string(e) != "\x00" && bytes.Compare(m.Get(key).Bytes(), e) >= 0 {
			m.Clear(end)
		}
	}
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.Message() == nil:
		case fd.IsList():
			for i := range v.List().Len() {
				straight(v.List().Get(i).Message())
			}
		default:
			straight(v.Message())
		}
		return true
	})
}

// who says as whom a call is made: "" is nobody. Who changes users is root mostly.
func (s *source) who(c *call) string {
	straight(c.request.ProtoReflect())
	if lease := owned(c.request); lease != 0 {
		return ownerOf(lease)
	}
	switch root := slices.Contains(changeKinds, c.kind); {
	case c.kind.name == "AuthStatus", s.chance(30):
		return "" // Skein reads no token of AuthStatus
	case root && !s.chance(6), s.chance(8):
		return rights.Root
	}
	return pick(s, someUsers)
}

// users are the tokens of a run.
type users struct {
	// jwt says that the tokens are JWTs: they are mostly of the present auth revision.
	jwt bool
	// tokens are those of the last login, by user and store.
	tokens map[string][2]string
}

// on says whether requests are checked.
func (p *pair) on() bool { return p.etcd.etcd.AuthStore().IsAuthEnabled() }

// ofRoot returns root's tokens, nil while requests are not checked.
func (u *users) ofRoot(p *pair) []string {
	if !p.on() {
		return nil
	}
	t := u.of(p, rights.Root, false)
	return t[:]
}

// of returns a user's tokens. A JWT is at times that of the last login, which may be of an old auth revision.
func (u *users) of(p *pair, user string, old bool) [2]string {
	if u.jwt && !old {
		token := signed(secretOfAll, "HS256", user, p.etcd.etcd.AuthStore().Revision(), clock.System().Wall().Add(time.Hour))
		return [2]string{token, token}
	}
	return u.tokens[user]
}

// inOrder is how many permissions of a role etcd keeps in order. With more, the order of those with one key is that of
// Go's sort, and so is whether a grant replaces one of them or adds another.
const inOrder = 12

// identify says as whom the call is made, and returns the contexts for that at etcd and at Skein.
func (p *pair) identify(ctx context.Context, c *call, gateway int) (etcd, skein context.Context, err error) {
	if name := c.kind.name; name == "AuthEnable" || name == "AuthDisable" || name == "UserChangePassword" {
		p.splits.wg.Wait() // its token is root's of now
	}
	if name, ok := c.request.(interface{ GetRole() string }); ok && c.kind.name == "RoleDelete" && name.GetRole() == rights.Root && !p.on() {
		c.request = &pb.AuthRoleDeleteRequest{Role: "r"} // users would never be checked again
	}
	if r, ok := c.request.(*pb.AuthRoleGrantPermissionRequest); ok {
		role, err := p.etcd.etcd.AuthStore().RoleGet(&pb.AuthRoleGetRequest{Role: r.GetName()})
		if err == nil && len(role.GetPerm()) >= inOrder {
			r.Name = "none"
		}
	}
	c.user = p.source.who(c)
	old := p.users.jwt && c.user != rights.Root && p.source.chance(16)
	if (old || p.users.jwt && slices.Contains(lockKinds, c.kind)) && p.on() {
		// A node takes it until it has heard of the new revision, unless somebody may do less since. And a call about
		// locks fails if its user is created while the node works on it.
		root := p.users.ofRoot(p)
		if _, err := pb.NewAuthClient(p.skein.conns[gateway]).RoleList(withBearer(ctx, root[1]), &pb.AuthRoleListRequest{}); err != nil {
			return nil, nil, fmt.Errorf("list roles: %w", err)
		}
	}
	t := p.users.of(p, c.user, old)
	if c.user == "" || t[0] == "" {
		c.user = ""
		return ctx, ctx, nil
	}
	return withBearer(ctx, t[0]), withBearer(ctx, t[1]), nil
}

// learn notes tokens and passwords, and has answers of logins be alike. Root is always logged in.
func (p *pair) learn(ctx context.Context, c *call, etcd, skein answer) error {
	s := p.source
	if r, ok := c.request.(*pb.AuthenticateRequest); ok {
		if etcd.response == nil || skein.response == nil {
			if strings.Contains(etcd.text, "authentication failed") {
				s.failures[r.GetName()]++
			}
			return nil
		}
		theirs, ours := etcd.response.(*pb.AuthenticateResponse), skein.response.(*pb.AuthenticateResponse)
		p.users.tokens[r.GetName()] = [2]string{theirs.GetToken(), ours.GetToken()}
		for _, r := range []*pb.AuthenticateResponse{theirs, ours} {
			r.Token, r.Header.Revision = "a token", 1
		}
		return nil
	}
	if etcd.response == nil || skein.response == nil {
		return nil
	}
	switch r := c.request.(type) {
	case *pb.AuthUserAddRequest:
		if delete(s.passwords, r.GetName()); !r.GetOptions().GetNoPassword() {
			s.passwords[r.GetName()] = r.GetPassword()
		}
	case *pb.AuthUserDeleteRequest:
		delete(s.passwords, r.GetName())
	case *pb.AuthUserChangePasswordRequest:
		if _, has := s.passwords[r.GetName()]; has { // who has none still logs in with none
			s.passwords[r.GetName()] = r.GetPassword()
		}
		if r.GetName() == rights.Root {
			return p.logRootIn(ctx)
		}
	case *pb.AuthEnableRequest:
		return errors.Join(p.logRootIn(ctx), p.logUsersIn(ctx))
	}
	return nil
}

// logUsersIn logs most users in again. Those of old tokens, from before checks were off, are refused by both stores until
// they log in.
func (p *pair) logUsersIn(ctx context.Context) (err error) {
	for _, user := range someUsers {
		password, ok := p.source.passwords[user]
		if ok && err == nil && p.on() && !p.source.chance(4) {
			p.users.tokens[user], err = p.login(ctx, user, password)
		}
	}
	return err
}

// logRootIn logs root in while requests are checked.
func (p *pair) logRootIn(ctx context.Context) (err error) {
	if p.on() {
		p.users.tokens[rights.Root], err = p.login(ctx, rights.Root, passwordOfRoot)
	}
	return err
}

// refusedOtherwise says that both refuse a call, and Skein in another way than etcd. It refuses a call about locks
// because of its user. And it does not tell who logs in that the user has no password.
func refusedOtherwise(c *call, etcd, skein answer) bool {
	return slices.Contains(lockKinds, c.kind) && skein.says(refusals...) && etcd.says(beforeUser...) ||
		c.kind.name == logInName && skein.says("authentication failed") && etcd.says("password was given for no password user")
}

// refusals are the errors of who may not make a call, and beforeUser those that etcd's locks and elections have first.
var (
	refusals   = []string{"user name is empty", "invalid auth token", "permission denied", "revision of auth store is old"}
	beforeUser = []string{"field must be provided", "key is not provided", "requested lease not found"}
)

// says says whether the answer is an error with one of the texts.
func (a answer) says(texts ...string) bool {
	return a.response == nil && slices.ContainsFunc(texts, func(t string) bool { return strings.Contains(a.text, t) })
}

// beginUsers makes users and roles, and has requests checked.
func (p *pair) beginUsers(ctx context.Context, jwt bool) error {
	p.users = &users{jwt: jwt, tokens: map[string][2]string{}}
	s := p.source
	s.kinds, s.passwords, s.failures = slices.Concat(kinds, changeKinds), map[string]string{}, map[string]int{}
	requests := []proto.Message{
		&pb.AuthRoleAddRequest{Name: rights.Root},
		&pb.AuthUserAddRequest{Name: rights.Root, Password: passwordOfRoot}, &pb.AuthUserGrantRoleRequest{User: rights.Root, Role: rights.Root},
	}
	for i, user := range someUsers {
		role := someRoles[i]
		requests = append(requests,
			&pb.AuthUserAddRequest{Name: user, Password: "p"}, &pb.AuthRoleAddRequest{Name: role}, &pb.AuthUserGrantRoleRequest{User: user, Role: role},
			&pb.AuthRoleGrantPermissionRequest{Name: role, Perm: &authpb.Permission{PermType: authpb.READWRITE, Key: []byte(groups[i*3].prefix), RangeEnd: []byte(groups[i*3+3].prefix)}})
		s.passwords[user] = "p"
	}
	for _, r := range append(requests, &pb.AuthEnableRequest{}) {
		name := strings.TrimPrefix(strings.TrimSuffix(string(r.ProtoReflect().Descriptor().Name()), "Request"), "Auth")
		if name == "Enable" {
			name = "AuthEnable"
		}
		if err := p.both(ctx, nil, true, protoreflect.Name(name), r); err != nil {
			return err
		}
	}
	for _, user := range someUsers {
		var err error
		if p.users.tokens[user], err = p.login(ctx, user, "p"); err != nil {
			return err
		}
	}
	return p.logRootIn(ctx)
}
