package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/skeindb/skein/api/adminpb"
)

const (
	// headerName is the header that no page of another origin can send.
	headerName = "X-Skein-Console"
	// lookTime bounds a question, and changeTime a command: without a quorum they take as long.
	lookTime   = 5 * time.Second
	changeTime = 30 * time.Second
	// maxBodyBytes bounds a request: an edit of the largest value by default, in base64 and with its key.
	maxBodyBytes = 4 << 20
	// pageSize bounds the ranges, and the keys, of one answer.
	pageSize = 500
)

// effect is what a method does.
type effect bool

const (
	looks   effect = false
	changes effect = true
)

// methods are those that the page may call. A build whose services lack one tells the page so, which then has no page for it.
var methods = map[string]effect{
	"skein.admin.v1.Admin/RangeShow":           looks,
	"skein.admin.v1.Admin/OperationList":       looks,
	"skein.admin.v1.Admin/PlacementShow":       looks,
	"skein.admin.v1.Admin/NodeShow":            looks,
	"skein.admin.v1.Admin/Series":              looks,
	"skein.admin.v1.Admin/Heat":                looks,
	"skein.admin.v1.Admin/Slow":                looks,
	"skein.admin.v1.Admin/RangeSplit":          changes,
	"skein.admin.v1.Admin/RangeMove":           changes,
	"skein.admin.v1.Admin/RangeMerge":          changes,
	"skein.admin.v1.Admin/RangeTransferLeader": changes,
	"skein.admin.v1.Admin/NodeDrain":           changes,
	"skein.admin.v1.Admin/NodeUndrain":         changes,
	"etcdserverpb.KV/Range":                    looks,
	"etcdserverpb.KV/Txn":                      changes,
}

type api struct {
	o      Options
	survey *shared[*adminpb.SurveyResponse]
	ranges *shared[*adminpb.RangeListResponse]
	kv     pb.KVClient
	leases pb.LeaseClient
	auth   pb.AuthClient
}

func newAPI(o Options) *api {
	admin := adminpb.NewAdminClient(o.Services)
	return &api{
		o: o, kv: pb.NewKVClient(o.Services), leases: pb.NewLeaseClient(o.Services), auth: pb.NewAuthClient(o.Services),
		survey: &shared[*adminpb.SurveyResponse]{clock: o.Clock, ask: func(ctx context.Context) (*adminpb.SurveyResponse, error) {
			return admin.Survey(ctx, &adminpb.SurveyRequest{})
		}},
		ranges: &shared[*adminpb.RangeListResponse]{clock: o.Clock, ask: func(ctx context.Context) (*adminpb.RangeListResponse, error) {
			return admin.RangeList(ctx, &adminpb.RangeListRequest{})
		}},
	}
}

func (a *api) register(mux *http.ServeMux) {
	for name, answer := range map[string]func(*http.Request, []byte) (any, error){
		"session": a.session,
		"login":   a.login,
		"survey":  a.serveSurvey,
		"ranges":  a.serveRanges,
		"history": a.serveHistory,
		"leases":  a.serveLeases,
		"call/":   a.call,
	} {
		mux.HandleFunc(prefix+"api/"+name, func(w http.ResponseWriter, r *http.Request) { a.serve(w, r, answer) })
	}
}

// serve answers one request.
func (a *api) serve(w http.ResponseWriter, r *http.Request, answer func(*http.Request, []byte) (any, error)) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	switch {
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		fail(w, http.StatusMethodNotAllowed, failure{Error: "the console's API is called by POST"})
		return
	case r.Header.Get(headerName) == "":
		fail(w, http.StatusForbidden, failure{Error: "the header " + headerName + " is missing: only the console's own page may call its API"})
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBodyBytes))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		fail(w, http.StatusRequestEntityTooLarge, failure{Error: fmt.Sprintf("the request has more than %d bytes", tooLarge.Limit), Next: "use etcdctl for values of that size"})
		return
	}
	if err != nil {
		return // the reader is gone
	}
	out, err := answer(r, body)
	if err != nil {
		code, f := failureOf(err)
		fail(w, code, f)
		return
	}
	if m, ok := out.(proto.Message); ok {
		out = messageJSON(m)
	}
	b, err := json.Marshal(out)
	if err != nil {
		panic(fmt.Sprintf("console: an answer that is no JSON: %v", err))
	}
	send(w, r, b)
}

// session says who is here, and what there is for them.
func (a *api) session(r *http.Request, _ []byte) (any, error) {
	ctx, cancel := context.WithTimeout(r.Context(), lookTime)
	defer cancel()
	out := struct {
		Node    string `json:"node"`
		Version string `json:"version"`
		Full    bool   `json:"full"`
		// Auth says that users are checked, Login that this one has to log in, Root that it may see the cluster.
		Auth  bool `json:"auth"`
		Login bool `json:"login"`
		Root  bool `json:"root"`
		Heat  bool `json:"heat"`
		Slow  bool `json:"slow"`
	}{
		Node: a.o.Node, Version: a.o.Version, Full: a.o.Full,
		Heat: find("skein.admin.v1.Admin/Heat") != nil, Slow: find("skein.admin.v1.Admin/Slow") != nil,
	}
	// The page opens without a quorum too, to show what is wrong.
	checked, err := a.o.Services.Known(ctx)
	out.Auth = checked
	switch {
	case err == nil:
		out.Root = true
	case needsLogin(err):
		out.Login = true
	case status.Code(err) != codes.PermissionDenied:
		return nil, err
	}
	return out, nil
}

// login returns a token, which the page keeps in memory and sends as the header Authorization.
func (a *api) login(r *http.Request, body []byte) (any, error) {
	var q struct{ Name, Password string }
	if err := read(body, &q); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), lookTime)
	defer cancel()
	resp, err := a.auth.Authenticate(ctx, &pb.AuthenticateRequest{Name: q.Name, Password: q.Password})
	if err != nil {
		return nil, err
	}
	return map[string]string{"token": resp.GetToken()}, nil
}

// serveSurvey answers with the survey, and with what is wrong.
func (a *api) serveSurvey(r *http.Request, _ []byte) (any, error) {
	if err := a.o.Services.Root(r.Context()); err != nil {
		return nil, err // before it has a part in what others have asked for
	}
	s, err := a.survey.get(r.Context(), lookTime)
	if err != nil {
		return nil, err
	}
	out := struct {
		Survey   json.RawMessage `json:"survey"`
		Findings []Finding       `json:"findings"`
	}{messageJSON(s), []Finding{}}
	if a.o.Diagnose != nil {
		out.Findings = append(out.Findings, a.o.Diagnose(s)...)
	}
	return out, nil
}

// call calls a method of a service, with its request and its answer as JSON.
func (a *api) call(r *http.Request, body []byte) (any, error) {
	name := strings.TrimPrefix(r.URL.Path, prefix+"api/call/")
	does, listed := methods[name]
	method := find(name)
	switch {
	case !listed || method == nil:
		return nil, badRequest{fmt.Sprintf("the console does not call %q", name)}
	case does == changes && !a.o.Full:
		return nil, status.Error(codes.PermissionDenied, "this console only looks: start the node with --console=full for commands and edits")
	}
	request, answer := newMessage(method.Input()), newMessage(method.Output())
	if err := protojson.Unmarshal(orEmpty(body), request); err != nil {
		return nil, badRequest{err.Error()}
	}
	if q, ok := request.(*pb.RangeRequest); ok {
		boundRange(q)
	}
	limit := lookTime
	if does == changes {
		limit = changeTime
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	return answer, a.o.Services.Invoke(ctx, "/"+name, request, answer)
}

// boundRange keeps an answer small: a page of keys, or one key with its value.
func boundRange(q *pb.RangeRequest) {
	most := int64(pageSize)
	if !q.GetKeysOnly() && !q.GetCountOnly() {
		most = 1
	}
	if q.GetLimit() <= 0 || q.GetLimit() > most {
		q.Limit = most
	}
}

// find returns a method by its name SERVICE/METHOD, nil if this build has none.
func find(name string) protoreflect.MethodDescriptor {
	service, method, _ := strings.Cut(name, "/")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		return nil
	}
	s, ok := d.(protoreflect.ServiceDescriptor)
	if !ok {
		return nil
	}
	if m := s.Methods().ByName(protoreflect.Name(method)); m != nil {
		return m
	}
	return nil
}

func newMessage(d protoreflect.MessageDescriptor) proto.Message {
	t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		panic(fmt.Sprintf("console: a service has a message that is not linked in: %v", err))
	}
	return t.New().Interface()
}
