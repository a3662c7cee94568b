package etcdapi

import (
	"context"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// authServer is etcd's Auth service. The interceptor has checked who calls, but for methods whose rule
// is auth.ByRequest.
type authServer struct {
	s      *Server
	logins *auth.Logins
	pb.UnsafeAuthServer
}

func newAuthServer(s *Server) *authServer {
	u := s.opts.Users
	return &authServer{s: s, logins: auth.NewLogins(s.opts.Clock, u.Passwords, u.Records.Credential)}
}

// change makes a change in the caller's name. Placement checks once more that the caller is root.
func (a *authServer) change(ctx context.Context, c rights.Change) error {
	caller := callerOf(ctx).User
	ctx, cancel, wording := a.s.bounded(ctx)
	defer cancel()
	if err := a.s.opts.Users.Records.ChangeAccess(ctx, caller, c); err != nil {
		return wording(err)
	}
	return nil
}

// header is that of all answers.
func (a *authServer) header() *pb.ResponseHeader { return a.s.own(0) }

// changed is the answer to a change.
func changed[A proto.Message](err error, resp A) (none A, _ error) {
	if err != nil {
		return none, err
	}
	return resp, nil
}

// AuthEnable has requests checked.
func (a *authServer) AuthEnable(ctx context.Context, _ *pb.AuthEnableRequest) (*pb.AuthEnableResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.Enable}), &pb.AuthEnableResponse{Header: a.header()})
}

// AuthDisable lets everybody do everything.
func (a *authServer) AuthDisable(ctx context.Context, _ *pb.AuthDisableRequest) (*pb.AuthDisableResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.Disable}), &pb.AuthDisableResponse{Header: a.header()})
}

// AuthStatus says whether requests are checked.
func (a *authServer) AuthStatus(ctx context.Context, _ *pb.AuthStatusRequest) (*pb.AuthStatusResponse, error) {
	ctx, cancel, wording := a.s.bounded(ctx)
	defer cancel()
	now, err := a.s.opts.Users.Records.Credential(ctx, rights.Root)
	if err != nil {
		return nil, wording(err)
	}
	return &pb.AuthStatusResponse{Header: a.header(), Enabled: now.Enabled, AuthRevision: now.Revision}, nil
}

// Authenticate compares a user's password, and returns a token.
func (a *authServer) Authenticate(ctx context.Context, r *pb.AuthenticateRequest) (*pb.AuthenticateResponse, error) {
	ctx, cancel, wording := a.s.bounded(ctx)
	defer cancel()
	token, err := a.login(ctx, r.GetName(), r.GetPassword())
	if err != nil {
		return nil, wording(err)
	}
	return &pb.AuthenticateResponse{Header: a.header(), Token: token}, nil
}

func (a *authServer) login(ctx context.Context, user, password string) (token string, err error) {
	proof, err := a.logins.Login(ctx, addressOf(ctx), user, password)
	if err != nil {
		return "", err
	}
	// The keys are those of the state of the proof, or later ones.
	if err := a.s.opts.Users.Gate.Reach(ctx, proof.Index); err != nil {
		return "", err
	}
	return a.s.opts.Users.Tokens.Issue(a.s.opts.Users.Gate.View().Keys, proof)
}

// UserAdd adds a user. As in etcd an empty password is a password.
func (a *authServer) UserAdd(ctx context.Context, r *pb.AuthUserAddRequest) (*pb.AuthUserAddResponse, error) {
	c := rights.Change{Kind: rights.AddUser, User: r.GetName(), NoPassword: r.GetOptions().GetNoPassword()}
	if !c.NoPassword {
		var err error
		if c.Hash, err = a.hash(ctx, r.GetPassword(), r.GetHashedPassword()); err != nil {
			return nil, err
		}
	}
	return changed(a.change(ctx, c), &pb.AuthUserAddResponse{Header: a.header()})
}

// hash returns the hash of a password, or the one that the client has computed.
func (a *authServer) hash(ctx context.Context, password, hashed string) (hash []byte, err error) {
	ctx, cancel, wording := a.s.bounded(ctx)
	defer cancel()
	if password == "" && hashed != "" {
		hash, err = auth.ClientHash(hashed)
	} else {
		hash, err = a.s.opts.Users.Passwords.Hash(ctx, password)
	}
	if err != nil {
		return nil, wording(passwordError(err))
	}
	return hash, nil
}

// UserGet returns the roles of a user.
func (a *authServer) UserGet(ctx context.Context, r *pb.AuthUserGetRequest) (*pb.AuthUserGetResponse, error) {
	v, err := a.lookUp(ctx, r)
	if err != nil {
		return nil, err
	}
	u := v.Rights.User(r.GetName())
	if u == nil {
		return nil, kverror.GRPC(kverror.UserNotFound)
	}
	return &pb.AuthUserGetResponse{Header: a.header(), Roles: u.Roles}, nil
}

// lookUp returns the rights of a moment after the call, if the caller may send the message.
func (a *authServer) lookUp(ctx context.Context, r proto.Message) (*auth.View, error) {
	if _, _, err := a.s.permitted(ctx, r); err != nil {
		return nil, err
	}
	return a.now(ctx, func(c *auth.Caller) error { return auth.Check(c, r) })
}

// now returns the rights of a moment after the call. The caller is checked by them once more: they may be the first
// that this node hears of for long.
func (a *authServer) now(ctx context.Context, check func(*auth.Caller) error) (*auth.View, error) {
	v, err := a.s.knowNow(ctx)
	if err == nil {
		_, err = a.s.check(ctx, check)
	}
	return v, kverror.GRPC(err)
}

// UserList lists the users.
func (a *authServer) UserList(ctx context.Context, _ *pb.AuthUserListRequest) (*pb.AuthUserListResponse, error) {
	v, err := a.now(ctx, (*auth.Caller).Root)
	if err != nil {
		return nil, err
	}
	resp := &pb.AuthUserListResponse{Header: a.header()}
	for _, u := range v.Rights.Users() {
		resp.Users = append(resp.Users, u.Name)
	}
	return resp, nil
}

// UserDelete deletes a user.
func (a *authServer) UserDelete(ctx context.Context, r *pb.AuthUserDeleteRequest) (*pb.AuthUserDeleteResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.DeleteUser, User: r.GetName()}), &pb.AuthUserDeleteResponse{Header: a.header()})
}

// UserChangePassword changes a password. Without a password and without a hash nobody can log in as the user any more.
func (a *authServer) UserChangePassword(ctx context.Context, r *pb.AuthUserChangePasswordRequest) (*pb.AuthUserChangePasswordResponse, error) {
	c := rights.Change{Kind: rights.ChangePassword, User: r.GetName()}
	if r.GetPassword() != "" || r.GetHashedPassword() != "" {
		var err error
		if c.Hash, err = a.hash(ctx, r.GetPassword(), r.GetHashedPassword()); err != nil {
			return nil, err
		}
	}
	return changed(a.change(ctx, c), &pb.AuthUserChangePasswordResponse{Header: a.header()})
}

// UserGrantRole gives a user a role.
func (a *authServer) UserGrantRole(ctx context.Context, r *pb.AuthUserGrantRoleRequest) (*pb.AuthUserGrantRoleResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.GrantRole, User: r.GetUser(), Role: r.GetRole()}), &pb.AuthUserGrantRoleResponse{Header: a.header()})
}

// UserRevokeRole takes a role from a user.
func (a *authServer) UserRevokeRole(ctx context.Context, r *pb.AuthUserRevokeRoleRequest) (*pb.AuthUserRevokeRoleResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.RevokeRole, User: r.GetName(), Role: r.GetRole()}), &pb.AuthUserRevokeRoleResponse{Header: a.header()})
}

// RoleAdd adds a role.
func (a *authServer) RoleAdd(ctx context.Context, r *pb.AuthRoleAddRequest) (*pb.AuthRoleAddResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.AddRole, Role: r.GetName()}), &pb.AuthRoleAddResponse{Header: a.header()})
}

// RoleGet returns the permissions of a role. Those of root are all, whatever it was granted.
func (a *authServer) RoleGet(ctx context.Context, r *pb.AuthRoleGetRequest) (*pb.AuthRoleGetResponse, error) {
	v, err := a.lookUp(ctx, r)
	if err != nil {
		return nil, err
	}
	role := v.Rights.Role(r.GetRole())
	if role == nil {
		return nil, kverror.GRPC(kverror.RoleNotFound)
	}
	resp := &pb.AuthRoleGetResponse{Header: a.header()}
	if role.Name == rights.Root {
		resp.Perm = []*authpb.Permission{{PermType: authpb.Permission_READWRITE, Key: []byte{}, RangeEnd: []byte{0}}}
		return resp, nil
	}
	for _, p := range role.Permissions {
		resp.Perm = append(resp.Perm, &authpb.Permission{PermType: authpb.Permission_Type(p.Type), Key: p.Key, RangeEnd: p.RangeEnd})
	}
	return resp, nil
}

// RoleList lists the roles.
func (a *authServer) RoleList(ctx context.Context, _ *pb.AuthRoleListRequest) (*pb.AuthRoleListResponse, error) {
	v, err := a.now(ctx, (*auth.Caller).Root)
	if err != nil {
		return nil, err
	}
	resp := &pb.AuthRoleListResponse{Header: a.header()}
	for _, r := range v.Rights.Roles() {
		resp.Roles = append(resp.Roles, r.Name)
	}
	return resp, nil
}

// RoleDelete deletes a role, and takes it from all users.
func (a *authServer) RoleDelete(ctx context.Context, r *pb.AuthRoleDeleteRequest) (*pb.AuthRoleDeleteResponse, error) {
	return changed(a.change(ctx, rights.Change{Kind: rights.DeleteRole, Role: r.GetRole()}), &pb.AuthRoleDeleteResponse{Header: a.header()})
}

// RoleGrantPermission gives a role a permission.
func (a *authServer) RoleGrantPermission(ctx context.Context, r *pb.AuthRoleGrantPermissionRequest) (*pb.AuthRoleGrantPermissionResponse, error) {
	if r.GetPerm() == nil {
		return nil, kverror.GRPC(kverror.PermissionNotGiven)
	}
	p := rights.Permission{Type: rights.Type(r.GetPerm().GetPermType()), Key: r.GetPerm().GetKey(), RangeEnd: r.GetPerm().GetRangeEnd()}
	return changed(a.change(ctx, rights.Change{Kind: rights.GrantPermission, Role: r.GetName(), Permission: p}), &pb.AuthRoleGrantPermissionResponse{Header: a.header()})
}

// RoleRevokePermission takes a permission from a role.
func (a *authServer) RoleRevokePermission(ctx context.Context, r *pb.AuthRoleRevokePermissionRequest) (*pb.AuthRoleRevokePermissionResponse, error) {
	p := rights.Permission{Key: r.GetKey(), RangeEnd: r.GetRangeEnd()}
	return changed(a.change(ctx, rights.Change{Kind: rights.RevokePermission, Role: r.GetRole(), Permission: p}), &pb.AuthRoleRevokePermissionResponse{Header: a.header()})
}

// passwordError words the error of a password that is too long as etcd does.
func passwordError(err error) error {
	if err == auth.ErrPasswordTooLong { //nolint:errorlint // bcrypt's own, unwrapped
		return status.Error(codes.Unknown, err.Error())
	}
	return err
}
