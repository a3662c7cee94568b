package etcdapi

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/watch"
)

// everyService has a server serve all services that there are.
func everyService(t testing.TB) func(*Options) {
	t.Helper()
	o := newOneRange()
	hub := watch.New(watch.Config{Self: 1, Clock: clock.System(), Log: o, Ranges: o, Feeds: o})
	t.Cleanup(hub.Stop)
	return func(opts *Options) {
		opts.Watches, opts.Leases = hub, &fakeLeases{}
		opts.Pipe = func(*Operations) pipepb.PipeServer { return pipepb.UnimplementedPipeServer{} }
		opts.Register = func(r grpc.ServiceRegistrar) {
			adminpb.RegisterAdminServer(r, adminpb.UnimplementedAdminServer{})
			datapb.RegisterDataServer(r, datapb.UnimplementedDataServer{})
			datapb.RegisterLoadServer(r, datapb.UnimplementedLoadServer{})
		}
	}
}

// methodsOf returns the methods that a server serves by their full names.
func methodsOf(s *Server) map[string]grpc.MethodInfo {
	all := map[string]grpc.MethodInfo{}
	for service, info := range s.grpc.GetServiceInfo() {
		for _, m := range info.Methods {
			all["/"+service+"/"+m.Name] = m
		}
	}
	return all
}

// Trap 91 (CVE-2026-33413): each method that is served has a rule, whatever registered it. So has what the interceptors know of it.
func TestEveryServedMethodHasARule(t *testing.T) {
	r := newRig(t, "http", everyService(t))
	all := methodsOf(r.Server)
	if len(all) < 70 {
		t.Errorf("only %d methods are served", len(all))
	}
	for name := range all {
		if rule := auth.RuleOf(name); rule == auth.Refused || r.methods[name] == nil || r.methods[name].rule != rule {
			t.Errorf("%s has the rule %d, and the interceptors know %+v", name, rule, r.methods[name])
		}
	}
	if len(r.methods) != len(all) {
		t.Errorf("%d methods are served, and the interceptors know %d", len(all), len(r.methods))
	}
}

// messageOf returns a message of a method that passes all checks of its look.
func messageOf(t *testing.T, method string) (in, out proto.Message) {
	t.Helper()
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(method[1:], "/", ".")))
	if err != nil {
		t.Fatal(err)
	}
	m := d.(protoreflect.MethodDescriptor)
	made := func(name protoreflect.FullName) proto.Message {
		mt, err := protoregistry.GlobalTypes.FindMessageByName(name)
		if err != nil {
			t.Fatal(err)
		}
		return mt.New().Interface()
	}
	in, out = made(m.Input().FullName()), made(m.Output().FullName())
	switch q := in.(type) {
	case *pb.RangeRequest:
		q.Key = []byte("k")
	case *pb.PutRequest:
		q.Key = []byte("k")
	case *pb.DeleteRangeRequest:
		q.Key = []byte("k")
	case *pb.TxnRequest:
		get := &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("k")}}
		q.Success = []*pb.RequestOp{{Request: get}}
	case *pb.AuthUserAddRequest:
		q.Name = "new"
	case *pb.AuthUserGetRequest:
		q.Name = "u"
	case *pb.AuthRoleGetRequest:
		q.Role = "own"
	case *pb.WatchRequest:
		q.RequestUnion = &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("k")}}
	}
	return in, out
}

// callOnce calls a method of any kind, and returns the error of its first answer.
func callOnce(ctx context.Context, t *testing.T, conn *grpc.ClientConn, method string, info grpc.MethodInfo) error {
	t.Helper()
	in, out := messageOf(t, method)
	if !info.IsClientStream && !info.IsServerStream {
		return conn.Invoke(ctx, method, in, out)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	st, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: info.IsClientStream, ServerStreams: info.IsServerStream}, method)
	must(t, err)
	if err := st.SendMsg(in); !errors.Is(err, io.EOF) { // a stream that is refused already: its status comes by RecvMsg
		must(t, err)
	}
	must(t, st.CloseSend())
	if err := st.RecvMsg(out); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if w, ok := out.(*pb.WatchResponse); ok && w.GetCanceled() {
		if i := strings.Index(w.GetCancelReason(), "etcdserver: "); i >= 0 {
			return rpctypes.Error(status.Error(codes.InvalidArgument, w.GetCancelReason()[i:]))
		}
		return errors.New(w.GetCancelReason())
	}
	return nil
}

// refusedForWho says that an error is about who sends a request.
func refusedForWho(err error) string {
	for _, e := range []error{rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCInvalidAuthToken} {
		if err != nil && strings.HasSuffix(rpctypes.ErrorDesc(err), rpctypes.ErrorDesc(e)) {
			return rpctypes.ErrorDesc(e)
		}
	}
	return ""
}

// Each method of each service does what its rule says: to nobody, to a user with few rights, to root, and with a bad
// token. Trap 104: what is open is open to all of them.
func TestEveryMethodObeysItsRule(t *testing.T) {
	r := newAuthRig(t, everyService(t))
	const none, noUser, denied, bad = "", "etcdserver: user name is empty", "etcdserver: permission denied", "etcdserver: invalid auth token"
	type answers struct{ nobody, user, bad string }
	want := map[auth.Rule]answers{
		auth.Open:       {none, none, none},
		auth.AnyUser:    {noUser, none, bad},
		auth.RootOnly:   {noUser, denied, bad},
		auth.RootOrHere: {noUser, denied, bad},
		auth.NodeOrHere: {noUser, denied, bad},
		auth.ByRequest:  {noUser, none, bad},
		auth.ByLease:    {noUser, none, bad},
		auth.ByParts:    {noUser, none, bad},
	}
	forged := metadataToken(t.Context(), "forged.1")
	for method, info := range methodsOf(r.Server) {
		if strings.HasPrefix(method, "/etcdserverpb.Auth/AuthDisable") {
			continue // it would end the test
		}
		w := want[auth.RuleOf(method)]
		for _, tc := range []struct {
			who, want string
			ctx       context.Context
		}{{"nobody", w.nobody, t.Context()}, {"a user", w.user, r.users.as(t, "u")}, {"a bad token", w.bad, forged}, {"root", none, r.users.as(t, "root")}} {
			if strings.Contains(method, "v3lockpb") || strings.Contains(method, "v3electionpb") {
				if tc.want == none {
					continue // they go on and wait; their own tests say what they do
				}
			}
			if err := callOnce(tc.ctx, t, r.conn, method, info); refusedForWho(err) != tc.want {
				t.Errorf("%s by %s: %v, want %q", method, tc.who, err, tc.want)
			}
		}
	}
}

// Trap 92 (CVE-2026-33186): what is not written exactly as the method's name is no method, and harms nobody. A path without its slash
// comes by none of gRPC's clients.
func TestPathsWrittenOtherwise(t *testing.T) {
	r := newAuthRig(t, everyService(t))
	for _, path := range []string{
		"etcdserverpb.KV/Put", "//etcdserverpb.KV/Put", "/etcdserverpb.kv/put", "/etcdserverpb.KV/put", "/etcdserverpb.KV/Put/", "/etcdserverpb.KV//Put",
		"/./etcdserverpb.KV/Put", "/x/etcdserverpb.KV/Put", "/etcdserverpb.KV/Put?", "/etcdserverpb.KV/%50ut", "skein.admin.v1.Admin/NodeDrain", "/", "",
		"/etcdserverpb.KV/", "*",
	} {
		c := newRawClient(t, r.addr())
		if got := c.unary(path, &pb.PutRequest{Key: []byte("k")}); got == "0" || got == "3" {
			t.Errorf("%q has the status %s", path, got)
		}
	}
	if n := r.kv.called(); n != 0 {
		t.Errorf("%d requests have come to the keys", n)
	}
	if got := newRawClient(t, r.addr()).unary("/etcdserverpb.KV/Put", &pb.PutRequest{Key: []byte("k")}); got != "3" {
		t.Errorf("the right path, by nobody: status %s, want InvalidArgument (user name is empty)", got)
	}
}

// unary calls a path, and returns the gRPC status. It is empty where the connection or the stream was ended instead.
func (c *rawClient) unary(path string, m proto.Message) string {
	c.t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":path", path}, {":authority", "h"}, {"content-type", "application/grpc"}, {"te", "trailers"},
	} {
		c.must(enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
	}
	c.must(c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true}))
	body, err := proto.Marshal(m)
	c.must(err)
	c.must(c.framer.WriteData(1, true, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)))
	grpcStatus := ""
	dec := hpack.NewDecoder(4096, func(f hpack.HeaderField) {
		if f.Name == "grpc-status" {
			grpcStatus = f.Value
		}
	})
	c.next(func(f http2.Frame) bool {
		switch f := f.(type) {
		case *http2.HeadersFrame:
			_, err := dec.Write(f.HeaderBlockFragment())
			c.must(err)
			return f.StreamEnded()
		case *http2.RSTStreamFrame, *http2.GoAwayFrame:
			return true
		}
		return false
	})
	return grpcStatus
}
