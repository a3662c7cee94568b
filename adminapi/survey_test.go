package adminapi

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/prototext"

	"github.com/skeindb/skein/api/adminpb"
)

// TestSurveyStories walks testdata: each story is a survey in protobuf's text form, and shows what status or doctor says of it.
//
//	status|doctor [json] [silent=ENDPOINT]
func TestSurveyStories(t *testing.T) {
	datadriven.RunTest(t, "testdata/survey", func(t *testing.T, d *datadriven.TestData) string {
		s := &adminpb.SurveyResponse{}
		if err := prototext.Unmarshal([]byte(d.Input), s); err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		var silent []EndpointError
		var endpoint string
		if d.MaybeScanArgs(t, "silent", &endpoint) {
			silent = append(silent, EndpointError{endpoint, "connection refused"})
		}
		format := Table
		if d.HasArg("json") {
			format = JSON
		}
		found := Diagnose(s, silent)
		var out bytes.Buffer
		var err error
		switch d.Cmd {
		case "status":
			err = WriteStatus(&out, format, s, silent, found)
		case "doctor":
			err = WriteFindings(&out, format, found)
		default:
			t.Fatalf("%s: there is no command %s", d.Pos, d.Cmd)
		}
		if err != nil {
			t.Fatal(err)
		}
		if format == JSON && !json.Valid(out.Bytes()) {
			t.Errorf("%s: no JSON", d.Pos)
		}
		if !Healthy(found) {
			out.WriteString("exit code 1\n")
		}
		return out.String()
	})
}

// stranger is not to be told a password.
type stranger struct {
	etcdserverpb.UnimplementedAuthServer
	t *testing.T
}

func (s stranger) Authenticate(context.Context, *etcdserverpb.AuthenticateRequest) (*etcdserverpb.AuthenticateResponse, error) {
	s.t.Error("a probe logs in")
	return nil, rpctypes.ErrGRPCAuthFailed
}

// listing is a node's answer with its members, or that it has not the right.
type listing struct {
	etcdserverpb.UnimplementedClusterServer
	as  uint64
	err error
}

func (l *listing) MemberList(_ context.Context, q *etcdserverpb.MemberListRequest) (*etcdserverpb.MemberListResponse, error) {
	if q.GetLinearizable() {
		return nil, rpctypes.ErrGRPCTimeout // it hears no others
	}
	return &etcdserverpb.MemberListResponse{
		Header:  &etcdserverpb.ResponseHeader{MemberId: l.as},
		Members: []*etcdserverpb.Member{{ID: 0xa1, Name: "n1"}, {ID: 0xa2, Name: "n2"}},
	}, l.err
}

// A node that the others do not hear is asked at its client URL. Its process has ended, hangs, runs, or has a bad certificate, or
// another process has its address. Whoever has it gets no password.
func TestProbeOfDeadNodes(t *testing.T) {
	listen := func() (net.Listener, string) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l, "http://" + l.Addr().String()
	}
	const ended = "http://127.0.0.1:1" // a port that the kernel gives to nobody
	mute, hangs := listen()
	defer mute.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	bad := httptest.NewUnstartedServer(http.NotFoundHandler())
	bad.EnableHTTP2 = true
	bad.StartTLS()
	defer bad.Close()
	serve := func(as uint64, err error) string {
		l, url := listen()
		s := grpc.NewServer()
		Register(s, &fakeBackend{as: &adminpb.NodeSurvey{Node: &adminpb.Node{Id: "a2"}, CertificateFile: "n2/node.crt"}})
		etcdserverpb.RegisterClusterServer(s, &listing{as: as, err: err})
		etcdserverpb.RegisterAuthServer(s, stranger{t: t})
		done := make(chan struct{})
		go func() { defer close(done); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-done })
		return url
	}
	runs, other, unnamed := serve(0xa2, nil), serve(0xa1, nil), serve(0xb7, nil)
	checked, lost := serve(0, rpctypes.ErrGRPCUserEmpty), serve(0, rpctypes.ErrGRPCNoLeader)
	probe := func(url string, dial time.Duration, at adminpb.AtClientURL, want string) {
		t.Helper()
		c, err := NewClient([]string{url}, nil)
		if err != nil {
			t.Fatal(err)
		}
		c.dial = dial
		c.As("root", "secret")
		n := &adminpb.NodeSurvey{Node: &adminpb.Node{Id: "a2", Name: "n2", State: StateDead, ClientUrls: []string{url}}}
		if c.probe(t.Context(), n); !strings.HasPrefix(n.GetError(), want) || n.GetAtClientUrl() != at {
			t.Errorf("%s: %q, want %s: %q", n.GetAtClientUrl(), n.GetError(), at, want)
		}
		if told := n.GetCertificateFile() != ""; told != (url == runs) {
			t.Errorf("%q: of its certificate it says %q", n.GetError(), n.GetCertificateFile())
		}
	}
	probe(ended, time.Minute, adminpb.AtClientURL_NOTHING_ANSWERS, "nothing listens at "+ended)
	probe(hangs, 100*time.Millisecond, adminpb.AtClientURL_NOTHING_ANSWERS, hangs+" does not answer: ")
	probe(runs, time.Minute, adminpb.AtClientURL_NODE_ANSWERS, "its process runs and answers clients, and the others do not hear it")
	probe(other, time.Minute, adminpb.AtClientURL_ANOTHER_NODE_ANSWERS, "another node (n1) answers at "+other)
	probe(unnamed, time.Minute, adminpb.AtClientURL_ANOTHER_NODE_ANSWERS, "another node (b7) answers at "+unnamed)
	probe(checked, time.Minute, adminpb.AtClientURL_SOMETHING_ANSWERS, "something answers at "+checked+", and does not say which node it is: etcdserver: user name is empty")
	probe(lost, time.Minute, adminpb.AtClientURL_SOMETHING_ANSWERS, "something answers at "+lost+", and does not say which node it is: etcdserver: no leader")
	overTLS := func(url string) string { return strings.Replace(url, "http://", "https://", 1) }
	probe(overTLS(hangs), 100*time.Millisecond, adminpb.AtClientURL_NOTHING_ANSWERS, overTLS(hangs)+" does not answer: ")
	probe(overTLS(plain.URL), time.Minute, adminpb.AtClientURL_SOMETHING_ANSWERS, "something answers at "+overTLS(plain.URL)+", and no TLS connection comes about: tls: ")
	probe(bad.URL, time.Minute, adminpb.AtClientURL_BAD_CERTIFICATE, bad.URL+": its certificate is refused: x509: ")
	// One that is heard is not asked.
	c, err := NewClient([]string{runs}, nil)
	if err != nil {
		t.Fatal(err)
	}
	heard := &adminpb.SurveyResponse{Nodes: []*adminpb.NodeSurvey{{Node: &adminpb.Node{Name: "n3", State: "serving", Alive: true, ClientUrls: []string{ended}}}}}
	if c.Probe(t.Context(), heard); heard.GetNodes()[0].GetError() != "" {
		t.Errorf("%v", heard)
	}
}

// Each finding says what to do, so that a check cannot be forgotten half. TestNextStepsOfFindingsRun has it that its commands run.
func TestFindingsSayWhatToDo(t *testing.T) {
	b, err := os.ReadFile("testdata/troubles.json")
	if err != nil {
		t.Fatal(err)
	}
	s := &adminpb.SurveyResponse{}
	if err := protojson.Unmarshal(b, s); err != nil {
		t.Fatal(err)
	}
	checks := map[string]bool{}
	last := Critical
	for _, f := range Diagnose(s, []EndpointError{{"h:1", "refused"}}) {
		checks[f.Check] = true
		if f.What == "" || f.Next == "" || f.Severity != Critical && f.Severity != Warning && f.Severity != Note || f.Severity == Critical && last != Critical {
			t.Errorf("%+v", f)
		}
		last = f.Severity
	}
	for _, check := range strings.Fields("quorum alarm node fsync network quarantine disk ranges replicas placement names versions clock hold certificates zones endpoint watchers load restarts") {
		if !checks[check] {
			t.Errorf("%s has found nothing", check)
		}
	}
}

// The survey names the endpoints that do not answer, and asks the next one in time: one that is closed, one that takes
// connections and says nothing, and one that answers.
func TestSurveyPassesOverSilentEndpoints(t *testing.T) {
	const closed = "127.0.0.1:1" // a port that the kernel gives to nobody
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	Register(s, &fakeBackend{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	defer func() { s.Stop(); <-done }()
	c, err := NewClient([]string{closed, mute.Addr().String(), l.Addr().String()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	got, silent, err := c.Survey(ctx)
	if err != nil || got.GetAsked() != "n1" || len(silent) != 2 || silent[0].Endpoint != closed || silent[1].Endpoint != mute.Addr().String() || silent[1].Error == "" {
		t.Errorf("%v, %v, %v", got, silent, err)
	}
	c, err = NewClient([]string{closed}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, silent, err = c.Survey(ctx); len(silent) != 1 || err == nil || !strings.Contains(err.Error(), "no endpoint can be reached: "+closed) {
		t.Errorf("%v, %v", silent, err)
	}
}

// Series come in the order of the nodes' names, those after the time that is asked for.
func TestSeriesInOrder(t *testing.T) {
	r, err := (&server{backend: &fakeBackend{}}).Series(t.Context(), &adminpb.SeriesRequest{AfterUnixMs: 7})
	if err != nil || len(r.GetNodes()) != 3 || r.GetNodes()[0].GetNode() != "n1" || r.GetNodes()[0].GetUnixMs()[0] != 8 || r.GetNodes()[2].GetError() == "" {
		t.Errorf("%v, %v", r, err)
	}
	if _, err := (&server{backend: &fakeBackend{err: &Refusal{Reason: "no", NextStep: "wait"}}}).Series(t.Context(), &adminpb.SeriesRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an error of the backend: %v", err)
	}
}
