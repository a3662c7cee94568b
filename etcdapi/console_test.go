package etcdapi

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// tellConsole is a console that says what the services say: /console/api/METHOD calls one.
func tellConsole(s *Services) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var err error
		var answer any
		switch method := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]; method {
		case "peer":
			p, _ := peer.FromContext(r.Context())
			answer = p.Addr
		case "range":
			var a *pb.RangeResponse
			a, err = pb.NewKVClient(s).Range(r.Context(), &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z")})
			answer = a.GetCount()
		case "put":
			answer, err = pb.NewKVClient(s).Put(r.Context(), &pb.PutRequest{Key: []byte("k"), Value: []byte("v")})
		case "survey":
			_, err = adminpb.NewAdminClient(s).Survey(r.Context(), &adminpb.SurveyRequest{})
		case "drain":
			_, err = adminpb.NewAdminClient(s).NodeDrain(r.Context(), &adminpb.NodeChangeRequest{})
		case "root":
			err = s.Root(r.Context())
		case "known":
			answer, err = s.Known(r.Context())
		case "none":
			err = s.Invoke(r.Context(), "/x/None", &pb.RangeRequest{}, &pb.RangeResponse{})
		case "stream":
			_, err = s.NewStream(r.Context(), &grpc.StreamDesc{}, "/etcdserverpb.Watch/Watch")
		}
		fmt.Fprintf(w, "%v %v %v", status.Code(err), answer, status.Convert(err).Message())
	})
}

// askConsole posts to a path as a browser's page does, and returns status and body.
func askConsole(t *testing.T, addr, path string, cfg *tls.Config, change func(*http.Request)) (int, string) {
	t.Helper()
	scheme := "http"
	if cfg != nil {
		scheme = "https"
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, scheme+"://"+addr+path, http.NoBody)
	must(t, err)
	if change != nil {
		change(req)
	}
	c := &http.Client{
		Transport:     &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	resp, err := c.Do(req)
	must(t, err)
	defer resp.Body.Close()
	if got := resp.Header.Get("Access-Control-Allow-Origin"); got != "" && resp.StatusCode != http.StatusNotFound && strings.HasPrefix(path, consolePath) {
		t.Errorf("%s lets the origin %q in", path, got)
	}
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp.StatusCode, string(body)
}

// Trap: a page whose name leads to this node by now is of the console's own origin. The console is served by names alone that
// are this node's for sure, also where --host-whitelist has none.
func TestConsoleHosts(t *testing.T) {
	p := newPKI(t)
	for _, test := range []struct {
		scheme string
		list   []string
		host   string
		status int
	}{
		{"http", nil, "evil.example", 421},
		{"http", []string{"*"}, "evil.example:2379", 421},
		{"http", nil, "127.0.0.1.evil.example", 421},
		{"http", nil, "localhost.evil.example", 421},
		{"http", nil, "127.0.0.1:2379", 200},
		{"http", nil, "[::1]:2379", 200},
		{"http", nil, "LOCALHOST:1", 200},
		{"http", nil, "n1.example:2379", 200}, // its own
		{"http", []string{"*", "good.example"}, "good.example", 200},
		{"http", []string{"good.example"}, "good.example:1", 200},
		{"http", []string{"good.example"}, "n1.example", 421}, // the list refuses it everywhere
		{"https", nil, "evil.example", 200},                   // its certificate would have to say so
	} {
		r := newRig(t, test.scheme, func(o *Options) {
			o.HostWhitelist, o.Console, o.ConsoleHosts = test.list, tellConsole, []string{"n1.example"}
			o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}}
		})
		var secure *tls.Config
		if test.scheme == "https" {
			secure = &tls.Config{RootCAs: p.pool, ServerName: "127.0.0.1"}
		}
		for _, path := range []string{"/console/", "/console/api/put"} {
			if code, body := askConsole(t, r.addr(), path, secure, func(q *http.Request) { q.Host = test.host }); code != test.status {
				t.Errorf("%s, %v, host %q, %s: status %d, want %d: %s", test.scheme, test.list, test.host, path, code, test.status, body)
			} else if open := len(test.list) == 0 || test.list[0] == "*"; code == 421 && strings.Contains(body, "'*,NAME'") != open {
				t.Errorf("%v, host %q: %s", test.list, test.host, body) // a list without * would refuse those who ask by address
			}
		}
		if called := r.kv.called() > 0; called != (test.status == 200) {
			t.Errorf("%s, %v, host %q: called %v", test.scheme, test.list, test.host, called)
		}
	}
}

// Trap: a page of another origin calls nothing, whatever --cors says. A link of such a page may lead to the console.
func TestConsoleOrigins(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.Console, o.CORS = tellConsole, []string{"*", "http://evil.example"} })
	own := "http://" + r.addr()
	for _, test := range []struct {
		path, header, value string
		status              int
	}{
		{"/console/api/put", "Origin", "http://evil.example", 403},
		{"/console/api/put", "Origin", "null", 403},
		{"/console/api/put", "Origin", "https://" + r.addr(), 403},
		{"/console/api/put", "Sec-Fetch-Site", "cross-site", 403},
		{"/console/api/put", "Sec-Fetch-Site", "same-site", 403},
		{"/console/api/put", "Origin", own, 200},
		{"/console/api/put", "Sec-Fetch-Site", "same-origin", 200},
		{"/console/api/put", "X-Anything", "x", 200},
		{"/console/", "Sec-Fetch-Site", "cross-site", 200},
	} {
		before := r.kv.called()
		code, body := askConsole(t, r.addr(), test.path, nil, func(q *http.Request) { q.Header.Set(test.header, test.value) })
		if code != test.status || (r.kv.called() > before) != (test.status == 200 && test.path != "/console/") {
			t.Errorf("%s with %s %q: status %d, want %d: %s", test.path, test.header, test.value, code, test.status, body)
		}
	}
	if code, _ := askConsole(t, r.addr(), "/console", nil, nil); code != http.StatusFound {
		t.Errorf("without the slash: status %d", code)
	}
}

// While users are checked, each reader may do in the console what they may do by gRPC. The audit log says who it was, and
// from where.
func TestConsoleActsForItsReader(t *testing.T) {
	users, rec := newUsers()
	log := &entries{}
	r := newRig(t, "http", func(o *Options) { o.Console, o.Users, o.Register, o.Audit = tellConsole, users, registerAdmin, log })
	rec.setUp(t)
	for _, test := range []struct{ who, method, want string }{
		{"", "range", "InvalidArgument"},
		{"", "put", "InvalidArgument"},
		{"", "survey", "InvalidArgument"},
		{"", "drain", "InvalidArgument"},
		{"", "root", "InvalidArgument"},
		{"u", "range", "PermissionDenied"},
		{"u", "put", "OK"},
		{"u", "survey", "PermissionDenied"},
		{"u", "drain", "PermissionDenied"},
		{"u", "root", "PermissionDenied"},
		{"root", "range", "OK"},
		{"root", "put", "OK"},
		{"root", "survey", "OK"},
		{"root", "drain", "OK"},
		{"root", "root", "OK"},
		{"bad", "put", "Unauthenticated"},
		{"root", "none", "Unimplemented"},
		{"root", "stream", "Unimplemented"},
	} {
		_, got := askConsole(t, r.addr(), "/console/api/"+test.method, nil, func(q *http.Request) {
			switch test.who {
			case "":
			case "bad":
				q.Header.Set("Authorization", "Bearer x.1")
			default:
				q.Header.Set("Authorization", "Bearer "+rec.token(t, test.who))
			}
		})
		if !strings.HasPrefix(got, test.want+" ") {
			t.Errorf("%q calls %s: %s; want %s", test.who, test.method, got, test.want)
		}
	}
	all := log.take()
	for _, want := range []string{`note NodeDrain by "root" from 127.0.0.1: ok`, `deny NodeDrain by "u" from 127.0.0.1: PermissionDenied`} {
		if !slices.Contains(all, want) {
			t.Errorf("the audit log lacks %q: %q", want, all)
		}
	}
}

// Trap: whether users are checked is asked of the placement group by AuthStatus. The console opens without: it goes by what
// its node knows.
func TestTheConsoleKnowsWithoutAQuorum(t *testing.T) {
	users, rec := newUsers()
	r := newRig(t, "http", func(o *Options) { o.Console, o.Users = tellConsole, users })
	known := func(token, want string) {
		t.Helper()
		if _, got := askConsole(t, r.addr(), "/console/api/known", nil, func(q *http.Request) {
			if token != "" {
				q.Header.Set("Authorization", "Bearer "+token)
			}
		}); !strings.HasPrefix(got, want+" ") {
			t.Errorf("with the token %q: %s, want %s", token, got, want)
		}
	}
	free := rec.stick()
	known("", "OK false")
	free()
	rec.setUp(t)
	root, u := rec.token(t, "root"), rec.token(t, "u")
	free = rec.stick()
	defer free()
	known("", "InvalidArgument true")
	known("x.1", "Unauthenticated true")
	known(u, "PermissionDenied true")
	known(root, "OK true")
}

// While users are not checked, whoever is here commands the cluster by the console too, and others look.
func TestConsoleCommandsComeFromHere(t *testing.T) {
	for _, test := range []struct {
		from   net.Addr
		anyhow bool
		want   string
	}{{loopback, false, "OK"}, {faraway, false, "PermissionDenied"}, {faraway, true, "OK"}} {
		users := everybody(t)
		users.InsecureAdmin = test.anyhow
		node := &fakeNode{}
		node.leader.Store(0xb)
		s := New(Options{Users: users, KV: &fakeKV{}, Members: node, Node: node, Clock: clock.System(), Metrics: NewMetrics(nil), Register: registerAdmin, Console: tellConsole})
		must(t, s.Bind([]url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}, nil))
		s.clients[0].Listener = fromListener{s.clients[0].Listener, test.from}
		s.Start()
		addr := s.ClientAddrs()[0].String()
		if _, got := askConsole(t, addr, "/console/api/drain", nil, nil); !strings.HasPrefix(got, test.want+" ") {
			t.Errorf("from %s, anyhow %v: %s, want %s", test.from, test.anyhow, got, test.want)
		}
		if _, got := askConsole(t, addr, "/console/api/survey", nil, nil); !strings.HasPrefix(got, "OK ") {
			t.Errorf("from %s: %s", test.from, got)
		}
		s.Stop(t.Context())
	}
}

// Trap: over TLS a name that --host-whitelist lacks is served at the console's own URLs too, where net/http does the handshake.
func TestConsoleHostsAtItsOwnURLs(t *testing.T) {
	p := newPKI(t)
	r := newRig(t, "http", func(o *Options) {
		o.Console, o.ConsoleURLs, o.HostWhitelist = tellConsole, []url.URL{{Scheme: "https", Host: "127.0.0.1:0"}, {Scheme: "http", Host: "127.0.0.1:0"}}, []string{"good.example"}
		o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}}
	})
	secure, plain := r.ConsoleAddrs()[0].String(), r.ConsoleAddrs()[1].String()
	named := func(q *http.Request) { q.Host = "n1.example" }
	if code, body := askConsole(t, secure, "/console/", &tls.Config{RootCAs: p.pool}, named); code != http.StatusOK {
		t.Errorf("https: status %d: %s", code, body)
	}
	if code, body := askConsole(t, plain, "/console/", nil, named); code != http.StatusMisdirectedRequest {
		t.Errorf("http: status %d: %s", code, body)
	}
}

// Trap: a console's question that others share outlives its request. Stop ends it, and waits for it: what is beneath the
// services is closed after that.
func TestStopEndsTheConsolesCalls(t *testing.T) {
	var services *Services
	put := func(ctx context.Context) error {
		_, err := pb.NewKVClient(services).Put(ctx, &pb.PutRequest{Key: []byte("k")})
		return err
	}
	r := newRig(t, "http", func(o *Options) {
		o.Console = func(s *Services) http.Handler {
			services = s
			return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { _ = put(context.WithoutCancel(r.Context())) }) // nobody reads the answer
		}
	})
	begun := make(chan struct{})
	var over atomic.Bool
	r.kv.ask(func(ctx context.Context) error {
		close(begun)
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond) // what a Stop that does not wait outruns
		over.Store(true)
		return ctx.Err()
	})
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Post("http://"+r.addr()+"/console/", "", http.NoBody) //nolint:noctx // Stop ends it
		if err == nil {
			resp.Body.Close()
		}
	})
	<-begun
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	r.Stop(gone)
	if !over.Load() {
		t.Error("Stop has left a call under way")
	}
	if err := put(t.Context()); status.Code(err) != codes.Unavailable {
		t.Errorf("after Stop: %v", err)
	}
}

// With URLs of its own the console is there alone, over TLS too, where a certificate names its user.
func TestConsoleAtItsOwnURLs(t *testing.T) {
	p := newPKI(t)
	users, rec := newUsers()
	users.ClientCertAuth = true
	r := newRig(t, "http", func(o *Options) {
		o.Users, o.Register, o.Console, o.ConsoleURLs = users, registerAdmin, tellConsole, []url.URL{{Scheme: "https", Host: "127.0.0.1:0"}, {Scheme: "http", Host: "127.0.0.1:0"}}
		o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: tls.VerifyClientCertIfGiven}
	})
	rec.setUp(t)
	rec.do(t, "user client", "grant client root")
	if code, _ := askConsole(t, r.addr(), "/console/", nil, nil); code != http.StatusNotFound {
		t.Errorf("at the client URL: status %d", code)
	}
	secure, plain := r.ConsoleAddrs()[0].String(), r.ConsoleAddrs()[1].String()
	if code, _ := askConsole(t, plain, "/console/", nil, nil); code != http.StatusOK {
		t.Errorf("at its own URL: status %d", code)
	}
	for _, path := range []string{"/v3/kv/range", "/metrics", "/debug/pprof/"} {
		if code, _ := askConsole(t, plain, path, nil, nil); code != http.StatusNotFound {
			t.Errorf("%s at the console's URL: status %d", path, code)
		}
	}
	without := &tls.Config{RootCAs: p.pool}
	with := &tls.Config{RootCAs: p.pool, Certificates: []tls.Certificate{p.client}}
	if _, got := askConsole(t, secure, "/console/api/drain", without, nil); !strings.HasPrefix(got, "InvalidArgument ") {
		t.Errorf("without a certificate: %s", got)
	}
	if _, got := askConsole(t, secure, "/console/api/drain", with, nil); !strings.HasPrefix(got, "OK ") {
		t.Errorf("with root's certificate: %s", got)
	}
	if code, got := askConsole(t, secure, "/console/api/drain", with, func(q *http.Request) { q.Header.Set("Origin", "https://evil.example") }); code != http.StatusForbidden {
		t.Errorf("a page of another origin with root's certificate: status %d, %s", code, got)
	}
}
