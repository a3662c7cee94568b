package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/coder/websocket"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// apis are the files with all services that an etcd registers for users.
var apis = []protoreflect.FileDescriptor{pb.File_rpc_proto, v3lockpb.File_v3lock_proto, v3electionpb.File_v3election_proto}

// allMethods are those of all services.
func allMethods() (all []protoreflect.MethodDescriptor) {
	for _, api := range apis {
		for i := range api.Services().Len() {
			s := api.Services().Get(i)
			for j := range s.Methods().Len() {
				all = append(all, s.Methods().Get(j))
			}
		}
	}
	return all
}

func newMessage(md protoreflect.MessageDescriptor) protoreflect.Message {
	t, err := protoregistry.GlobalTypes.FindMessageByName(md.FullName())
	if err != nil {
		panic(fmt.Sprintf("conformance: %s: %v", md.FullName(), err))
	}
	return t.New()
}

// withBearer returns the context of calls with a token.
func withBearer(ctx context.Context, token string) context.Context {
	return metadata.NewOutgoingContext(ctx, metadata.Pairs(rpctypes.TokenFieldNameGRPC, token))
}

// tokenOf returns the token of a context, if it has one.
func tokenOf(ctx context.Context) (string, bool) {
	md, _ := metadata.FromOutgoingContext(ctx)
	if v := md.Get(rpctypes.TokenFieldNameGRPC); len(v) > 0 {
		return v[0], true
	}
	return "", false
}

// face is a way to call a method.
type face string

// The faces.
const (
	overGRPC    face = "gRPC"
	asJSON      face = "JSON"
	overSockets face = "websocket"
)

// pathOf is the path of a method at the JSON gateway, "" for none.
func pathOf(m protoreflect.MethodDescriptor) string {
	rule, _ := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
	return rule.GetPost()
}

// facesOf are the ways to call a method. By a websocket etcd answers streams of requests alone: it waits for the end of
// all other ones, which a websocket does not tell.
func facesOf(m protoreflect.MethodDescriptor) []face {
	switch path := pathOf(m); {
	case path == "":
		return []face{overGRPC}
	case m.IsStreamingClient():
		return []face{overGRPC, asJSON, overSockets}
	}
	return []face{overGRPC, asJSON}
}

// invoke makes a call of any method and returns its answer, or the first one of a stream.
func invoke(ctx context.Context, conn *grpc.ClientConn, m protoreflect.MethodDescriptor, by face, req proto.Message) answer {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp := newMessage(m.Output()).Interface()
	host := hostOf(conn)
	switch {
	case by == asJSON:
		return post(ctx, host, pathOf(m), req, resp, m.IsStreamingServer())
	case by == overSockets:
		return bySocket(ctx, host, pathOf(m), req, resp)
	case m.Name() == "RangeStream":
		return rangeStream(ctx, conn, req)
	}
	name := fmt.Sprintf("/%s/%s", m.Parent().FullName(), m.Name())
	var err error
	if m.IsStreamingServer() {
		err = first(ctx, conn, name, m.IsStreamingClient(), req, resp)
	} else {
		err = conn.Invoke(ctx, name, req, resp)
	}
	if err != nil {
		return failed(err)
	}
	return answer{response: resp}
}

// first receives the first response of a stream.
func first(ctx context.Context, conn *grpc.ClientConn, name string, both bool, req, resp proto.Message) error {
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: both}, name)
	if err != nil {
		return err
	}
	// Where the stream has ended, RecvMsg says why.
	if s.SendMsg(req) == nil && !both {
		_ = s.CloseSend()
	}
	return s.RecvMsg(resp)
}

// bySocket makes a call by a websocket and returns its first response.
func bySocket(ctx context.Context, host, path string, req, resp proto.Message) answer {
	o := &websocket.DialOptions{HTTPClient: clientOf(host)}
	if token, ok := tokenOf(ctx); ok {
		o.Subprotocols = []string{"Bearer", token}
	}
	c, _, err := websocket.Dial(ctx, "ws://"+host+path, o)
	if err != nil {
		return answer{text: "conformance: " + err.Error()}
	}
	defer func() { _ = c.CloseNow() }()
	c.SetReadLimit(-1)
	body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(req)
	if err == nil {
		err = c.Write(ctx, websocket.MessageText, body)
	}
	if err != nil {
		return answer{text: "conformance: " + err.Error()}
	}
	_, raw, err := c.Read(ctx)
	var closed websocket.CloseError
	if errors.As(err, &closed) {
		return answer{text: "conformance: closed " + closed.Error()}
	}
	if err != nil {
		return answer{text: "conformance: " + err.Error()}
	}
	return heard(bytes.NewReader(raw), http.StatusOK, "", resp)
}
