package etcdapi

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/audit"
	"github.com/skeindb/skein/auth"
)

// entries is an Auditor that keeps what it gets.
type entries struct {
	mu   sync.Mutex
	all  []string
	last audit.Entry
}

func (e *entries) add(kind string, a *audit.Entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last = *a
	from, _, _ := strings.Cut(a.From, ":")
	method := a.Method[strings.LastIndexByte(a.Method, '/')+1:]
	e.all = append(e.all, strings.Join(strings.Fields(fmt.Sprintf("%s %s by %q from %s: %s %s", kind, method, a.User, from, a.What, a.Outcome)), " "))
}

func (e *entries) Note(a *audit.Entry) { e.add("note", a) }
func (e *entries) Deny(a *audit.Entry) { e.add("deny", a) }

// take returns what has come since the last call.
func (e *entries) take() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	defer func() { e.all = nil }()
	return e.all
}

// The audit log has logins, denials and changes, with names. It never has a password, a value or the key of a
// request.
func TestAudit(t *testing.T) {
	users, rec := newUsers()
	log := &entries{}
	r := newRig(t, "http", func(o *Options) { o.Users, o.Audit, o.Register, o.EnablePprof = users, log, registerAdmin, true })
	addUsers(t, users, rec)
	c := r.client(t, clientv3.Config{})
	as := func(user string) context.Context {
		if user == "" {
			return t.Context()
		}
		return clientContext(t, tokenOf(t, users, rec, user))
	}
	var everything []string
	expect := func(what string, want ...string) {
		t.Helper()
		got := log.take()
		everything = append(everything, got...)
		if !slices.Equal(got, want) {
			t.Errorf("%s:\n got %q\nwant %q", what, got, want)
		}
	}
	unary := func(user, method string, q, a proto.Message) {
		t.Helper()
		_ = c.ActiveConnection().Invoke(as(user), method, q, a)
	}
	const a = "/etcdserverpb.Auth/"
	unary("", a+"Authenticate", &pb.AuthenticateRequest{Name: "u", Password: "secret"}, &pb.AuthenticateResponse{})
	expect("login", `note Authenticate by "u" from 127.0.0.1: ok`)
	unary("", a+"Authenticate", &pb.AuthenticateRequest{Name: "u", Password: "secret-2"}, &pb.AuthenticateResponse{})
	expect("failed login", `deny Authenticate by "u" from 127.0.0.1: InvalidArgument`)
	unary("root", a+"UserAdd", &pb.AuthUserAddRequest{Name: "v", Password: "secret"}, &pb.AuthUserAddResponse{})
	unary("root", a+"UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: "v", HashedPassword: "secret"}, &pb.AuthUserChangePasswordResponse{})
	expect("users", `note UserAdd by "root" from 127.0.0.1: name="v" ok`, `note UserChangePassword by "root" from 127.0.0.1: name="v" InvalidArgument`)
	unary("root", a+"RoleAdd", &pb.AuthRoleAddRequest{Name: "r"}, &pb.AuthRoleAddResponse{})
	_, err := c.RoleGrantPermission(as("root"), "r", "a", "b", clientv3.PermissionType(clientv3.PermReadWrite))
	must(t, err)
	expect("roles", `note RoleAdd by "root" from 127.0.0.1: name="r" ok`,
		`note RoleGrantPermission by "root" from 127.0.0.1: name="r" perm.permType=READWRITE perm.key="a" perm.range_end="b" ok`)
	unary("root", a+"UserList", &pb.AuthUserListRequest{}, &pb.AuthUserListResponse{})
	expect("a look")
	_, err = c.Put(as("u"), "secret-key", "secret-value")
	if err == nil {
		t.Error("a put is not denied")
	}
	_, err = c.Put(as(""), "secret-key", "secret-value")
	if err == nil {
		t.Error("a put is not denied")
	}
	unary("u", a+"UserAdd", &pb.AuthUserAddRequest{Name: "w", Password: "secret"}, &pb.AuthUserAddResponse{})
	_ = c.ActiveConnection().Invoke(clientContext(t, "secret-token"), "/etcdserverpb.KV/Range", &pb.RangeRequest{Key: []byte("secret-key")}, &pb.RangeResponse{})
	expect("denials", `deny Put by "u" from 127.0.0.1: PermissionDenied`, `deny Put by "" from 127.0.0.1: InvalidArgument`,
		`deny UserAdd by "u" from 127.0.0.1: name="w" PermissionDenied`, `deny Range by "" from 127.0.0.1: Unauthenticated`)
	_, err = c.MemberRemove(as("root"), 0xb)
	must(t, err)
	_, err = c.MemberList(as("root"))
	must(t, err)
	unary("root", alarmMethod, &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: pb.AlarmType_NOSPACE, MemberID: 11}, &pb.AlarmResponse{})
	unary("root", alarmMethod, &pb.AlarmRequest{}, &pb.AlarmResponse{})
	expect("members, alarms", `note MemberRemove by "root" from 127.0.0.1: ID=11 ok`,
		`note Alarm by "root" from 127.0.0.1: action=ACTIVATE memberID=11 alarm=NOSPACE ok`)
	if rc, err := c.Snapshot(as("root")); err == nil {
		_, _ = rc.Read(make([]byte, 1))
		rc.Close()
	}
	if got := log.take(); len(got) != 1 || !strings.HasPrefix(got[0], `note Snapshot by "root" from 127.0.0.1:`) {
		t.Errorf("snapshot: %q", got)
	}
	must(t, command(t, r.addr(), insecure.NewCredentials(), "NodeDrain", "token", tokenOf(t, users, rec, "root")))
	must(t, command(t, r.addr(), insecure.NewCredentials(), "NodeList", "token", tokenOf(t, users, rec, "root")))
	expect("commands", `note NodeDrain by "root" from 127.0.0.1: ok`)
	getAs(t, http.DefaultClient, "http://"+r.addr()+"/debug/pprof/heap", "Authorization", tokenOf(t, users, rec, "u"))
	post(t, r, "/v3/kv/put", `{"key": "c2VjcmV0", "value": "c2VjcmV0"}`)
	expect("HTTP", `deny heap by "u" from 127.0.0.1: PermissionDenied`, `deny Put by "" from 127.0.0.1: InvalidArgument`)
	// The address is what the gateway sees itself, whatever the client says of it.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.addr()+"/v3/auth/authenticate", strings.NewReader(`{"name": "u", "password": "no"}`))
	must(t, err)
	req.Header.Set("X-Forwarded-For", "192.0.2.1")
	req.Header.Set("Grpc-Metadata-X-Forwarded-For", "192.0.2.2")
	resp, err := http.DefaultClient.Do(req)
	must(t, err)
	resp.Body.Close()
	expect("login by the gateway", `deny Authenticate by "u" from 127.0.0.1: InvalidArgument`)
	unary("root", a+"AuthDisable", &pb.AuthDisableRequest{}, &pb.AuthDisableResponse{})
	expect("who ends the checks", `note AuthDisable by "root" from 127.0.0.1: ok`)
	for _, text := range everything {
		if strings.Contains(text, "secret") {
			t.Errorf("a secret is in %s", text)
		}
	}
}

func clientContext(t *testing.T, token string) context.Context {
	t.Helper()
	return metadata.AppendToOutgoingContext(t.Context(), rpctypes.TokenFieldNameGRPC, token)
}

// Every method that changes something goes into the log, and of each text and each key in a request somebody has decided
// whether it is told.
func TestAuditOfEveryMethod(t *testing.T) {
	withheld := map[protoreflect.FullName]string{
		"etcdserverpb.AuthenticateRequest.name":                     "it is the entry's user",
		"etcdserverpb.AuthenticateRequest.password":                 "a password",
		"etcdserverpb.AuthUserAddRequest.password":                  "a password",
		"etcdserverpb.AuthUserAddRequest.hashedPassword":            "the hash of one",
		"etcdserverpb.AuthUserChangePasswordRequest.password":       "a password",
		"etcdserverpb.AuthUserChangePasswordRequest.hashedPassword": "the hash of one",
		"skein.admin.v1.RangeSplitRequest.key":                      "a key",
		"skein.admin.v1.BundleRequest.salt":                         "with it guesses of keys could be tried",
		"skein.data.v1.AccessRow.key":                               "it is told that users and roles come",
		"skein.data.v1.AccessRow.value":                             "hashes of passwords",
		"skein.data.v1.ReadRequest.start":                           "a key",
		"skein.data.v1.ReadRequest.end":                             "a key",
	}
	seen := map[protoreflect.FullName]bool{}
	methods := map[string]bool{}
	var walk func(m protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			switch f.Kind() {
			case protoreflect.MessageKind:
				walk(f.Message())
			case protoreflect.StringKind, protoreflect.BytesKind:
				seen[f.FullName()] = true
				if told[f.FullName()] == (withheld[f.FullName()] != "") {
					t.Errorf("%s: is it told, or withheld?", f.FullName())
				}
			default:
			}
		}
	}
	count := 0
	for _, file := range []protoreflect.FileDescriptor{pb.File_rpc_proto, adminpb.File_adminpb_admin_proto, datapb.File_datapb_data_proto, datapb.File_datapb_load_proto} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				m := service.Methods().Get(j)
				name := fmt.Sprintf("/%s/%s", service.FullName(), m.Name())
				methods[name] = true
				if audited(name, auth.RuleOf(name)) {
					count++
					walk(m.Input())
				}
			}
		}
	}
	if count < 36 {
		t.Errorf("only %d methods go into the log", count)
	}
	for name := range unaudited {
		if !methods[name] {
			t.Errorf("there is no method %s", name)
		}
	}
	for name := range told {
		if !seen[name] {
			t.Errorf("there is no field %s in what goes into the log", name)
		}
	}
}

// A watch that is denied ends no stream, and is in the log all the same.
func TestAuditOfAWatch(t *testing.T) {
	users, rec := newUsers()
	log := &entries{}
	_, _, st := watchRig(t, func(o *Options) { o.Users, o.Audit = users, log })
	addUsers(t, users, rec)
	must(t, st.Send(createWatch(&pb.WatchCreateRequest{Key: []byte("secret")})))
	if resp := recv(t, st); !resp.GetCanceled() {
		t.Errorf("got %v", resp)
	}
	if got := log.take(); !slices.Equal(got, []string{`deny Watch by "" from 127.0.0.1: InvalidArgument`}) {
		t.Errorf("got %q", got)
	}
}

// A certificate that names no user is denied as others are, so few of its denials are written. The entry has its
// name.
func TestAuditOfUnknownCertificates(t *testing.T) {
	p := newPKI(t)
	users, rec := newUsers()
	users.ClientCertAuth = true
	log := &entries{}
	r := newRig(t, "https", func(o *Options) {
		o.Users, o.Audit, o.Register = users, log, registerAdmin
		o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: tls.RequireAndVerifyClientCert}
	})
	addUsers(t, users, rec)
	creds := credentials.NewTLS(&tls.Config{RootCAs: p.pool, Certificates: []tls.Certificate{p.client}})
	for _, m := range []string{"NodeDrain", "NodeList"} {
		if err := command(t, r.addr(), creds, m); err == nil {
			t.Errorf("%s is not denied", m)
		}
	}
	want := []string{`deny NodeDrain by "client" from 127.0.0.1: FailedPrecondition`, `deny NodeList by "client" from 127.0.0.1: FailedPrecondition`}
	if got := log.take(); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	if e := log.last; e.Certificate != "client" {
		t.Errorf("got %+v", e)
	}
}
