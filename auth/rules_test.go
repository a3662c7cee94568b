package auth

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	reflectionv1alpha "google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// served are the files whose services clients may call.
var served = []protoreflect.FileDescriptor{
	pb.File_rpc_proto, v3lockpb.File_v3lock_proto, v3electionpb.File_v3election_proto, adminpb.File_adminpb_admin_proto, datapb.File_datapb_data_proto, datapb.File_datapb_load_proto, pipepb.File_pipepb_pipe_proto,
	grpc_health_v1.File_grpc_health_v1_health_proto,
	reflectionv1.File_grpc_reflection_v1_reflection_proto, reflectionv1alpha.File_grpc_reflection_v1alpha_reflection_proto,
}

// allMethods returns the full names of all methods that there are, and what they take.
func allMethods() map[string]protoreflect.MethodDescriptor {
	all := map[string]protoreflect.MethodDescriptor{}
	for _, file := range served {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				m := service.Methods().Get(j)
				all[fmt.Sprintf("/%s/%s", service.FullName(), m.Name())] = m
			}
		}
	}
	return all
}

// TestEveryMethodHasARule is trap 91 (CVE-2026-33413): a method without a row is refused, so none may be forgotten, and no
// row is for a method that is not there.
func TestEveryMethodHasARule(t *testing.T) {
	all := allMethods()
	for name := range all {
		if _, ok := rules[name]; !ok {
			t.Errorf("%s has no rule", name)
		}
	}
	for name := range rules {
		if all[name] == nil {
			t.Errorf("there is no method %s", name)
		}
	}
	if len(all) < 70 {
		t.Errorf("there are only %d methods", len(all))
	}
}

// TestMessagesOfByRequest: Check knows what the methods take that have the rule, and refuses everything else,
// also to root.
func TestMessagesOfByRequest(t *testing.T) {
	root := testCallers(t)["root"]
	takes := map[protoreflect.FullName]bool{}
	for name, m := range allMethods() {
		if RuleOf(name) == ByRequest {
			takes[m.Input().FullName()] = true
		}
	}
	for name, m := range allMethods() {
		message, err := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
		if err != nil {
			t.Fatal(err)
		}
		if err := Check(root, message.New().Interface()); (err == nil) != takes[m.Input().FullName()] {
			t.Errorf("%s takes %s: %v", name, m.Input().FullName(), err)
		}
	}
}

// TestNamesWrittenOtherwise is trap 92 (CVE-2026-33186), and its kin: what is not written as a method's name is refused, also to
// root.
func TestNamesWrittenOtherwise(t *testing.T) {
	root := testCallers(t)["root"]
	for name := range allMethods() {
		if rule := RuleOf(name); rule.Begin(root) != nil && rule != Refused {
			t.Errorf("root may not call %s", name)
		}
		for _, other := range []string{
			name[1:], "/" + name, name + "/", name + " ", " " + name, strings.ToLower(name), strings.ReplaceAll(name, "/", "//"),
			name + "?", "/./" + name[1:], name + "\x00", strings.Replace(name[1:], "/", "", 1),
		} {
			if err := RuleOf(other).Begin(root); !errors.Is(err, kverror.PermissionDenied) {
				t.Errorf("%q: %v", other, err)
			}
		}
	}
	for _, other := range []string{"", "/", "*", "/*/*", "/etcdserverpb.KV/", "/etcdserverpb.KV/*", "/etcdserverpb.New/Range"} {
		if err := RuleOf(other).Begin(root); !errors.Is(err, kverror.PermissionDenied) {
			t.Errorf("%q: %v", other, err)
		}
	}
}

// testCallers are those who differ before the rules. User u may read and write k, read r to s, write w, and has
// role own.
func testCallers(t *testing.T) map[string]*Caller {
	t.Helper()
	state := rights.New()
	state.PutRole(&rights.Role{Name: "own", Permissions: []rights.Permission{
		{Type: rights.ReadWrite, Key: []byte("k")},
		{Type: rights.Read, Key: []byte("r"), RangeEnd: []byte("s")},
		{Type: rights.Read, Key: []byte("s"), RangeEnd: []byte("t")},
		{Type: rights.Write, Key: []byte("w"), RangeEnd: []byte("x")},
	}})
	state.PutUser(&rights.User{Name: "u", Roles: []string{"own"}})
	state.PutUser(&rights.User{Name: "root", Roles: []string{"root"}})
	g := gateOf(t, state, named{})
	claims := map[string]Claim{
		"nobody": {}, "node": {Certificate: certificate("root", "skein://node/n")}, "no-name": {Certificate: certificate("", "")},
		"gone": {Certificate: certificate("gone", "")}, "u": {Token: "u", HasToken: true}, "root": {Token: "root", HasToken: true},
	}
	all := map[string]*Caller{}
	for name, claim := range claims {
		c, err := g.Identify(t.Context(), claim)
		if err != nil {
			t.Fatal(err)
		}
		all[name] = c
	}
	v := g.now.Load().view
	for name, id := range map[string]Identity{"old": {User: "u"}, "old-root": {User: "root"}} {
		subject, _ := state.Subject(id.User)
		later := *v
		later.Rights = state.Clone()
		later.Rights.Revision = 9
		id.Revision = 8
		all[name] = later.caller(id, subject)
	}
	return all
}

// kinds names the errors of all callers, those with the same one together.
func kinds(all map[string]*Caller, f func(c *Caller) error) string {
	by := map[string][]string{}
	for name, c := range all {
		err := f(c)
		text := "may"
		if err != nil {
			text = kverror.Of(err).Kind.Error()
		}
		by[text] = append(by[text], name)
	}
	var out []string
	for text, names := range by {
		slices.Sort(names)
		out = append(out, fmt.Sprintf("%s: %s", text, strings.Join(names, " ")))
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// TestRules: who may begin a call by each rule. Nobody but root may what only root may, whatever the revision
// of the token; all others get etcd's error for their case.
func TestRules(t *testing.T) {
	all := testCallers(t)
	const (
		everybody = "may: gone no-name nobody node old old-root root u"
		anyUser   = "may: gone no-name old old-root root u; user name is empty: nobody node"
	)
	for rule, want := range map[Rule]string{
		Refused: "permission denied: gone no-name nobody node old old-root root u", 99: "permission denied: gone no-name nobody node old old-root root u",
		Open: everybody, ByRequest: everybody, AnyUser: anyUser, ByLease: anyUser,
		ByParts:    "auth revision is old: old old-root; may: gone no-name root u; user name is empty: nobody node",
		RootOnly:   "may: old-root root; permission denied: old u; user name is empty: no-name nobody node; user not found: gone",
		RootOrHere: "may: old-root root; permission denied: old u; user name is empty: no-name nobody node; user not found: gone",
		NodeOrHere: "may: node old-root root; permission denied: old u; user name is empty: no-name nobody; user not found: gone",
	} {
		if got := kinds(all, rule.Begin); got != want {
			t.Errorf("rule %d:\n got %s\nwant %s", rule, got, want)
		}
	}
	for name, want := range map[string]Rule{
		"/etcdserverpb.KV/Compact": RootOnly, "/etcdserverpb.KV/Put": ByRequest, "/etcdserverpb.Maintenance/Snapshot": RootOnly,
		"/etcdserverpb.Auth/Authenticate": Open, "/etcdserverpb.Auth/UserChangePassword": RootOnly, "/skein.admin.v1.Admin/NodeDrain": RootOrHere, "/skein.admin.v1.Admin/NodeShow": RootOnly, "/skein.admin.v1.Admin/Bundle": RootOrHere,
		"/skein.admin.v1.Admin/NodeJoin": NodeOrHere, "/etcdserverpb.Cluster/MemberList": AnyUser, "/etcdserverpb.Lease/LeaseLeases": ByLease,
	} {
		if got := RuleOf(name); got != want {
			t.Errorf("%s has rule %d, not %d", name, got, want)
		}
	}
}

func ops(of ...proto.Message) (all []*pb.RequestOp) {
	for _, m := range of {
		op := &pb.RequestOp{}
		switch m := m.(type) {
		case *pb.RangeRequest:
			op.Request = &pb.RequestOp_RequestRange{RequestRange: m}
		case *pb.PutRequest:
			op.Request = &pb.RequestOp_RequestPut{RequestPut: m}
		case *pb.DeleteRangeRequest:
			op.Request = &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: m}
		case *pb.TxnRequest:
			op.Request = &pb.RequestOp_RequestTxn{RequestTxn: m}
		}
		all = append(all, op)
	}
	return all
}

// nested puts operations into a transaction within others.
func nested(depth int, of ...proto.Message) *pb.TxnRequest {
	t := &pb.TxnRequest{Success: ops(of...)}
	for i := range depth {
		if i%2 == 0 {
			t = &pb.TxnRequest{Failure: ops(t)}
		} else {
			t = &pb.TxnRequest{Success: ops(t)}
		}
	}
	return t
}

// TestCheck: what a user's request asks for. Wherever user u is denied nobody else but root may. Traps 87
// (GHSA-xg4h-6gfc-h4m8), 88 (CVE-2026-33343) and 89 (CVE-2026-44283) are among the requests.
func TestCheck(t *testing.T) {
	all := testCallers(t)
	key := func(s string) []byte { return []byte(s) }
	get := func(k, end string) *pb.RangeRequest { return &pb.RangeRequest{Key: key(k), RangeEnd: key(end)} }
	put := func(k string, prev bool) *pb.PutRequest { return &pb.PutRequest{Key: key(k), PrevKv: prev} }
	del := func(k, end string, prev bool) *pb.DeleteRangeRequest {
		return &pb.DeleteRangeRequest{Key: key(k), RangeEnd: key(end), PrevKv: prev}
	}
	watch := func(k, end string) *pb.WatchRequest {
		return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: key(k), RangeEnd: key(end)}}}
	}
	compare := func(k, end string) *pb.TxnRequest {
		return &pb.TxnRequest{Compare: []*pb.Compare{{Key: key(k), RangeEnd: key(end)}}}
	}
	const may, denied = true, false
	for _, c := range []struct {
		what string
		req  proto.Message
		u    bool
	}{
		{"read", get("k", ""), may},
		{"read of another key", get("l", ""), denied},
		{"read of more", get("k", "l"), denied},
		{"read over two permissions", get("r", "t"), may},
		{"read beyond them", get("r", "t\x00"), denied},
		{"read to the end (87)", get("r", "\x00"), denied},
		{"read of what may be written", get("w", ""), denied},
		{"put", put("w", false), may},
		{"put where it may read", put("r", false), denied},
		{"put that reads (89)", put("w", true), denied},
		{"put that reads", put("k", true), may},
		{"delete", del("w", "x", false), may},
		{"delete to the end", del("w", "\x00", false), denied},
		{"delete that reads (89)", del("w", "x", true), denied},
		{"watch", watch("r", "s"), may},
		{"watch of another key", watch("a", ""), denied},
		{"watch to the end (87)", watch("r", "\x00"), denied},
		{"watch of all", watch("", "\x00"), denied},
		{"watch of no key", watch("", ""), denied},
		{"create request", watch("w", "").GetCreateRequest(), denied},
		{"compare", compare("r", "s"), may},
		{"compare of what may be written", compare("w", ""), denied},
		{"compare to the end", compare("r", "\x00"), denied},
		{"txn", &pb.TxnRequest{Success: ops(get("k", ""), put("k", true)), Failure: ops(del("w", "x", false))}, may},
		{"first branch", &pb.TxnRequest{Success: ops(put("k", false), put("x", false))}, denied},
		{"second branch", &pb.TxnRequest{Success: ops(put("k", false)), Failure: ops(get("w", ""))}, denied},
		{"put in a txn that reads (89)", nested(0, put("w", true)), denied},
		{"delete in a txn that reads (89)", nested(0, del("w", "x", true)), denied},
		{"nested (88)", nested(1, put("x", false)), denied},
		{"nested deep (88)", nested(20, get("w", "")), denied},
		{"nested compare (88)", nested(3, compare("w", "")), denied},
		{"nested, allowed", nested(20, get("r", "s"), put("w", false)), may},
	} {
		want := "auth revision is old: old old-root; may: root; permission denied: gone no-name u; user name is empty: nobody node"
		if c.u {
			want = "auth revision is old: old old-root; may: root u; permission denied: gone no-name; user name is empty: nobody node"
		}
		before := proto.Clone(c.req)
		if got := kinds(all, func(caller *Caller) error { return Check(caller, c.req) }); got != want {
			t.Errorf("%s:\n got %s\nwant %s", c.what, got, want)
		}
		if !proto.Equal(before, c.req) {
			t.Errorf("%s: the request is now %v", c.what, c.req)
		}
	}
	const (
		anyUser  = "may: gone no-name old old-root root u; user name is empty: nobody node"
		rootOnly = "may: old-root root; permission denied: old u; user name is empty: no-name nobody node; user not found: gone"
		ownOnly  = "may: old old-root root u; user name is empty: no-name nobody node; user not found: gone"
	)
	for _, c := range []struct {
		what string
		req  proto.Message
		want string
	}{
		{"alarms", &pb.AlarmRequest{Action: pb.AlarmRequest_GET}, anyUser},
		{"a new alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE}, rootOnly},
		{"no alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE}, rootOnly},
		{"an unknown alarm request", &pb.AlarmRequest{Action: 9}, rootOnly},
		{"oneself", &pb.AuthUserGetRequest{Name: "u"}, ownOnly},
		{"another", &pb.AuthUserGetRequest{Name: "root2"}, rootOnly},
		{"an own role", &pb.AuthRoleGetRequest{Role: "own"}, ownOnly},
		{"another role", &pb.AuthRoleGetRequest{Role: "other"}, rootOnly},
		{"empty txn", &pb.TxnRequest{}, "auth revision is old: old old-root; may: gone no-name nobody node root u"},
		{"progress", &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{}}, "may: gone no-name nobody node old old-root root u"},
	} {
		if got := kinds(all, func(caller *Caller) error { return Check(caller, c.req) }); got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.what, got, c.want)
		}
	}
}

// TestReadable: the span around a key that a caller may read, of most callers the key alone.
func TestReadable(t *testing.T) {
	all := testCallers(t)
	alone := keyspace.Single([]byte("r1")).String()
	for name, want := range map[string]string{
		"u": `["r", "t")`, "root": `["", ∞)`, "nobody": alone, "node": alone, "no-name": alone, "gone": alone, "old": alone, "old-root": alone,
	} {
		if got := all[name].Readable([]byte("r1")).String(); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if got := all["u"].Readable([]byte("w")); !got.IsSingle() {
		t.Errorf("what may be written: %s", got)
	}
}
