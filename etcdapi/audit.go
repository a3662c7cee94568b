package etcdapi

import (
	"context"
	"fmt"
	"net"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/audit"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/kverror"
)

// Auditor keeps the audit log. Its methods wait for nothing.
type Auditor interface {
	Note(e *audit.Entry)
	// Deny is Note for what clients may repeat as often as they like.
	Deny(e *audit.Entry)
}

// unaudited are the methods for root, and those of the Auth service, that only look, or change what clients cannot see.
// Compactions are among them: they come every few minutes, from controllers. So are renewals of a hold, and the steps of
// a load: its begin and end are told.
var unaudited = map[string]bool{
	"/etcdserverpb.KV/Compact":             true,
	"/etcdserverpb.Maintenance/Defragment": true, "/etcdserverpb.Maintenance/Hash": true, "/etcdserverpb.Maintenance/HashKV": true,
	"/etcdserverpb.Auth/AuthStatus": true, "/etcdserverpb.Auth/UserGet": true, "/etcdserverpb.Auth/UserList": true,
	"/etcdserverpb.Auth/RoleGet": true, "/etcdserverpb.Auth/RoleList": true,
	"/skein.admin.v1.Admin/RangeList": true, "/skein.admin.v1.Admin/RangeShow": true, "/skein.admin.v1.Admin/OperationList": true,
	"/skein.admin.v1.Admin/PlacementShow": true, "/skein.admin.v1.Admin/NodeList": true, "/skein.admin.v1.Admin/NodeShow": true,
	"/skein.admin.v1.Admin/ClusterShow": true, "/skein.admin.v1.Admin/Survey": true, "/skein.admin.v1.Admin/Heat": true, "/skein.admin.v1.Admin/Series": true, "/skein.admin.v1.Admin/Slow": true,
	"/skein.admin.v1.Admin/WatcherList": true, "/skein.data.v1.Data/Renew": true,
	"/skein.data.v1.Load/LoadState": true, "/skein.data.v1.Load/LoadSplit": true, "/skein.data.v1.Load/LoadLeases": true,
	"/skein.data.v1.Load/LoadPut": true, "/skein.data.v1.Load/LoadAdvance": true,
}

const (
	alarmMethod = "/etcdserverpb.Maintenance/Alarm"
	watchMethod = "/etcdserverpb.Watch/Watch"
)

// audited says whether calls of a method go into the audit log, whatever comes of them. Of all others only denials do.
func audited(method string, rule auth.Rule) bool {
	if unaudited[method] {
		return false
	}
	return rule == auth.RootOnly || rule.Commands() || method == alarmMethod || strings.HasPrefix(method, "/etcdserverpb.Auth/")
}

// begun is a call that may go into the audit log.
type begun struct {
	s      *Server
	ctx    context.Context
	method string
	entry  *audit.Entry // nil if only a denial is of interest
	// refused says that the call was refused for its user, before it began.
	refused bool
}

// beginAudit begins the entry of a call, or returns nil without an audit log. The user is asked for now: the call may end what the user may do.
func (s *Server) beginAudit(ctx context.Context, method string, m *methodMetrics) *begun {
	if s.opts.Audit == nil {
		return nil
	}
	b := &begun{s: s, ctx: ctx, method: method}
	if m.audited {
		b.entry = s.entry(ctx, method)
	}
	return b
}

// end writes the entry of a call with its request, which is nil for a stream.
func (b *begun) end(req any, err error) {
	if b == nil {
		return
	}
	e, denied := b.entry, isDenial(err) || b.refused
	if r, ok := req.(*pb.AlarmRequest); ok && r.GetAction() == pb.AlarmRequest_GET {
		e = nil
	}
	switch {
	case e == nil && !denied:
		return
	case e == nil:
		e = b.s.entry(b.ctx, b.method)
	}
	e.Outcome = outcome(err)
	if b.entry != nil {
		if m, ok := req.(proto.Message); ok {
			e.What = whatOf(m)
		}
	}
	if r, ok := req.(*pb.AuthenticateRequest); ok {
		e.User = r.GetName()
		denied = err != nil
	}
	if denied {
		b.s.opts.Audit.Deny(e)
	} else {
		b.s.opts.Audit.Note(e)
	}
}

// refuse notes what the check of the user has ended with. Whose certificate names nobody gets an error that others
// get for users whom they ask for.
func (b *begun) refuse(err error) {
	if b == nil {
		return
	}
	b.refused = b.refused || rpctypes.Error(err) == rpctypes.ErrUserNotFound //nolint:errorlint // etcd's values, which Error returns unwrapped
}

// auditDenial writes what was denied within a call that goes on, or without one.
func (s *Server) auditDenial(ctx context.Context, method string, err error) {
	if s.opts.Audit == nil {
		return
	}
	b := &begun{s: s, ctx: ctx, method: method}
	b.refuse(kverror.GRPC(err))
	b.end(nil, kverror.GRPC(err))
}

// entry returns an entry with all that is known of who sends a request.
func (s *Server) entry(ctx context.Context, method string) *audit.Entry {
	e := &audit.Entry{Method: method, From: fromOf(ctx)}
	// Nothing is waited for: the token of a call that is refused may be ahead of this node.
	if c, err := s.identify(noWait{ctx}); err == nil {
		e.User = c.User
	}
	claim, ok := ctx.Value(claimKey{}).(auth.Claim)
	if !ok {
		claim = auth.ReadClaim(ctx, true)
	}
	if cert := claim.Certificate; cert != nil {
		if e.Certificate = cert.Subject.CommonName; e.Certificate == "" && len(cert.URIs) > 0 {
			e.Certificate = cert.URIs[0].String() // a node's
		}
	}
	return e
}

// isDenial says whether a call was refused for its user.
func isDenial(err error) bool {
	switch rpctypes.Error(err) {
	case rpctypes.ErrUserEmpty, rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthFailed: //nolint:errorlint // etcd's values, which Error returns unwrapped
		return true
	}
	return status.Code(err) == codes.PermissionDenied
}

// outcome is the name of what came of a call. Texts of errors may have keys in them.
func outcome(err error) string {
	if err == nil {
		return "ok"
	}
	return status.Code(err).String()
}

// fromOf returns the client's address. The gateway's calls come from within the process, and the gateway says for whom.
func fromOf(ctx context.Context) string {
	if a, ok := ctx.Value(fromKey{}).(string); ok {
		return a
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	if p.Addr.Network() == gatewayNetwork {
		if v := metadata.ValueFromIncomingContext(ctx, "x-forwarded-for"); len(v) > 0 {
			all := strings.Split(v[len(v)-1], ",")
			return strings.TrimSpace(all[len(all)-1]) // the gateway adds what it sees itself at the end
		}
	}
	return p.Addr.String()
}

// fromKey is for the address of a client whose request is no gRPC call.
type fromKey struct{}

// gatewayNetwork is the network of the gateway's own connection.
const gatewayNetwork = "bufconn"

// addressOf returns the client's address without its port, which is another one for each connection.
func addressOf(ctx context.Context) string {
	from := fromOf(ctx)
	if host, _, err := net.SplitHostPort(from); err == nil {
		return host
	}
	return from
}

// told are the texts and bytes of requests that the audit log has: names, and of the keys those of a permission, without
// which its grant would say nothing. Numbers, flags and enumerations are told always.
var told = map[protoreflect.FullName]bool{
	"etcdserverpb.AuthUserAddRequest.name": true, "etcdserverpb.AuthUserDeleteRequest.name": true, "etcdserverpb.AuthUserChangePasswordRequest.name": true,
	"etcdserverpb.AuthUserGrantRoleRequest.user": true, "etcdserverpb.AuthUserGrantRoleRequest.role": true,
	"etcdserverpb.AuthUserRevokeRoleRequest.name": true, "etcdserverpb.AuthUserRevokeRoleRequest.role": true,
	"etcdserverpb.AuthRoleAddRequest.name": true, "etcdserverpb.AuthRoleDeleteRequest.role": true,
	"etcdserverpb.AuthRoleGrantPermissionRequest.name": true, "authpb.Permission.key": true, "authpb.Permission.range_end": true,
	"etcdserverpb.AuthRoleRevokePermissionRequest.role": true, "etcdserverpb.AuthRoleRevokePermissionRequest.key": true, "etcdserverpb.AuthRoleRevokePermissionRequest.range_end": true,
	"etcdserverpb.MemberAddRequest.peerURLs": true, "etcdserverpb.MemberUpdateRequest.peerURLs": true, "etcdserverpb.DowngradeRequest.version": true,
	"skein.admin.v1.NodeChangeRequest.node": true, "skein.admin.v1.HoldReleaseRequest.id": true,
	"skein.data.v1.CutRequest.kind": true, "skein.data.v1.CutRequest.owner": true, "skein.data.v1.LoadBeginRequest.source": true,
	"skein.admin.v1.NodeJoinRequest.name": true, "skein.admin.v1.NodeJoinRequest.peer_urls": true, "skein.admin.v1.NodeJoinRequest.cluster": true, "skein.admin.v1.NodeJoinRequest.node": true,
	"skein.admin.v1.RangeMoveRequest.from": true, "skein.admin.v1.RangeMoveRequest.to": true, "skein.admin.v1.RangeTransferLeaderRequest.to": true,
	"skein.admin.v1.PlacementMoveRequest.from": true, "skein.admin.v1.PlacementMoveRequest.to": true, "skein.admin.v1.PlacementTransferLeaderRequest.to": true,
}

// whatOf writes the fields of a request that are told.
func whatOf(m proto.Message) string {
	var parts []string
	tell(m.ProtoReflect(), "", &parts)
	return strings.Join(parts, " ")
}

func tell(m protoreflect.Message, prefix string, parts *[]string) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if !m.Has(f) {
			continue
		}
		name, v := prefix+string(f.Name()), m.Get(f)
		switch kind := f.Kind(); {
		case f.FullName() == "skein.admin.v1.NodeJoinRequest.instance": // by it a directory proves to be the node's
		case kind == protoreflect.MessageKind && !f.IsList() && !f.IsMap():
			tell(v.Message(), name+".", parts)
		case (kind == protoreflect.StringKind || kind == protoreflect.BytesKind) && !told[f.FullName()]:
		case f.IsList() && kind == protoreflect.StringKind:
			for j := range v.List().Len() {
				*parts = append(*parts, fmt.Sprintf("%s=%q", name, v.List().Get(j).String()))
			}
		case f.IsList() || f.IsMap() || kind == protoreflect.MessageKind:
		case kind == protoreflect.StringKind:
			*parts = append(*parts, fmt.Sprintf("%s=%q", name, v.String()))
		case kind == protoreflect.BytesKind:
			*parts = append(*parts, fmt.Sprintf("%s=%q", name, v.Bytes()))
		case kind == protoreflect.EnumKind:
			*parts = append(*parts, fmt.Sprintf("%s=%s", name, f.Enum().Values().ByNumber(v.Enum()).Name()))
		default:
			*parts = append(*parts, fmt.Sprintf("%s=%v", name, v.Interface()))
		}
	}
}
