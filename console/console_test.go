package console

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// services are what a test says that they answer.
type services struct {
	mu     sync.Mutex
	calls  []string                                          // guarded by mu
	answer func(method string, q any) (proto.Message, error) // may be called on many goroutines
	root   error
	// users says that users are checked.
	users bool
}

func (s *services) Invoke(_ context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	s.mu.Lock()
	s.calls = append(s.calls, method[strings.LastIndexByte(method, '/')+1:])
	s.mu.Unlock()
	if s.answer == nil {
		return nil
	}
	m, err := s.answer(method, args)
	if m != nil {
		proto.Merge(reply.(proto.Message), m)
	}
	return err
}

func (s *services) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "no streams")
}

func (s *services) Root(context.Context) error { return s.root }

func (s *services) Known(context.Context) (bool, error) { return s.users, s.root }

func (s *services) called() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.calls...)
}

func newConsole(s *services, full bool) http.Handler { return consoleWith(s, clock.System(), full) }

func consoleWith(s *services, c clock.Clock, full bool) http.Handler {
	return New(Options{Services: s, Clock: c, Node: "n1", Version: "1", Full: full, Diagnose: func(s *adminpb.SurveyResponse) []Finding {
		return []Finding{{Severity: "warning", Check: "x", What: s.GetAsked() + " is odd", Next: "look"}}
	}})
}

// ask posts to the API as the page does.
func ask(h http.Handler, path, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, prefix+"api/"+path, strings.NewReader(body))
	r.Header.Set(headerName, "1")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func decode[T any](t *testing.T, w *httptest.ResponseRecorder) (v T) {
	t.Helper()
	if err := json.Unmarshal(w.Body.Bytes(), &v); err != nil {
		t.Fatalf("status %d, %q: %v", w.Code, w.Body, err)
	}
	return v
}

// Whatever is asked for: the answer says what it may load, and that it is what it says it is; no cookie is set, and no
// other origin is let in.
func TestEveryAnswerIsGuarded(t *testing.T) {
	h := newConsole(&services{}, true)
	for _, q := range []struct {
		method, path string
		header       bool
		status       int
	}{
		{http.MethodGet, "", false, 200},
		{http.MethodGet, "index.html", false, 200},
		{http.MethodGet, "app.js", false, 200},
		{http.MethodGet, "app.css", false, 200},
		{http.MethodGet, "icon.svg", false, 200},
		{http.MethodGet, "none.js", false, 404},
		{http.MethodGet, "..%2f..%2fconsole.go", false, 404},
		{http.MethodPost, "api/session", true, 200},
		{http.MethodPost, "api/session", false, 403},
		{http.MethodPost, "api/none", true, 405},
		{http.MethodGet, "api/session", true, 405},
		{http.MethodOptions, "api/session", true, 405},
		{http.MethodPost, "api/call/skein.admin.v1.Admin/NodeRemove", true, 400},
	} {
		r := httptest.NewRequest(q.method, prefix+q.path, nil)
		r.Header.Set("Origin", "http://evil.example")
		if q.header {
			r.Header.Set(headerName, "1")
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != q.status {
			t.Errorf("%s %s: status %d, want %d: %s", q.method, q.path, w.Code, q.status, w.Body)
		}
		got := w.Header()
		if !strings.HasPrefix(got.Get("Content-Security-Policy"), "default-src 'self';") || strings.Contains(got.Get("Content-Security-Policy"), "unsafe") ||
			got.Get("X-Content-Type-Options") != "nosniff" || got.Get("Set-Cookie") != "" || got.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: headers %v", q.method, q.path, got)
		}
	}
}

// Without the header no service is asked: it is what keeps pages of other origins out where nobody logs in.
func TestTheHeaderIsRequired(t *testing.T) {
	s := &services{}
	h := newConsole(s, true)
	for _, path := range []string{"session", "login", "survey", "ranges", "history", "leases", "call/etcdserverpb.KV/Txn", "call/skein.admin.v1.Admin/NodeDrain"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, prefix+"api/"+path, strings.NewReader("{}")))
		if w.Code != http.StatusForbidden {
			t.Errorf("%s: status %d", path, w.Code)
		}
	}
	if got := s.called(); len(got) > 0 {
		t.Errorf("called: %v", got)
	}
}

// The whole page is small, and loads nothing from elsewhere.
func TestThePageIsSmall(t *testing.T) {
	total := 0
	all := files()
	for name, f := range all {
		total += len(f.packed)
		t.Logf("%s: %d bytes, %d packed", name, len(f.plain), len(f.packed))
		if f.kind == "" {
			t.Errorf("%s has no type", name)
		}
	}
	if most := 150 << 10; total > most {
		t.Errorf("%d bytes packed, more than %d", total, most)
	}
	index := string(all["index.html"].plain)
	if strings.Contains(index, "//") || strings.Contains(index, "<style") || strings.Contains(index, "style=") || strings.Count(index, "<script") != strings.Count(index, `src="app.js"`) {
		t.Errorf("the page loads from elsewhere, or has code or style in it:\n%s", index)
	}
	for _, name := range []string{"app.js", "app.css", "index.html", "icon.svg"} {
		if len(all[name].plain) == 0 {
			t.Errorf("there is no %s", name)
		}
	}
}

// A browser that has a file is told so, and one that can unpack gets it packed.
func TestFilesAreKept(t *testing.T) {
	h := newConsole(&services{}, false)
	get := func(header, value string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(http.MethodGet, prefix+"app.js", nil)
		r.Header.Set(header, value)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	plain, packed := get("Accept", "*/*"), get("Accept-Encoding", "gzip, br")
	if packed.Header().Get("Content-Encoding") != "gzip" || packed.Body.Len() >= plain.Body.Len() || plain.Header().Get("Content-Encoding") != "" {
		t.Errorf("packed: %v, %d bytes of %d", packed.Header(), packed.Body.Len(), plain.Body.Len())
	}
	if again := get("If-None-Match", plain.Header().Get("ETag")); again.Code != http.StatusNotModified || again.Body.Len() > 0 {
		t.Errorf("asked again: status %d, %d bytes", again.Code, again.Body.Len())
	}
}

// A console that only looks changes nothing, one that is full does. Each listed method exists.
func TestWhatTheConsoleCalls(t *testing.T) {
	for name, does := range methods {
		if find(name) == nil {
			t.Errorf("there is no method %s", name)
			continue
		}
		for _, full := range []bool{false, true} {
			s := &services{}
			w := ask(newConsole(s, full), "call/"+name, "{}")
			if allowed := full || does == looks; (len(s.called()) == 1) != allowed || (w.Code == 200) != allowed {
				t.Errorf("%s, full %v: status %d, %d calls: %s", name, full, w.Code, len(s.called()), w.Body)
			}
		}
	}
	for _, other := range []string{"skein.admin.v1.Admin/NodeDecommission", "etcdserverpb.KV/Put", "etcdserverpb.Auth/UserList", "etcdserverpb.KV/None", "x", ""} {
		s := &services{}
		if w := ask(newConsole(s, true), "call/"+other, "{}"); w.Code != http.StatusBadRequest || len(s.called()) > 0 {
			t.Errorf("%q: status %d, called %v", other, w.Code, s.called())
		}
	}
}

// An answer with keys is bounded, however much is asked for.
func TestKeysComeByPages(t *testing.T) {
	var asked *pb.RangeRequest
	s := &services{answer: func(_ string, q any) (proto.Message, error) {
		asked = proto.CloneOf(q.(*pb.RangeRequest))
		return nil, nil
	}}
	h := newConsole(s, false)
	for _, q := range []struct {
		body  string
		limit int64
	}{
		{`{"key":"AA==","range_end":"AA==","keys_only":true}`, pageSize},
		{`{"key":"AA==","range_end":"AA==","keys_only":true,"limit":"100000"}`, pageSize},
		{`{"key":"AA==","range_end":"AA==","keys_only":true,"limit":"-1"}`, pageSize},
		{`{"key":"AA==","range_end":"AA==","keys_only":true,"limit":"20"}`, 20},
		{`{"key":"AA==","range_end":"AA==","limit":"20"}`, 1}, // values may be large
	} {
		if w := ask(h, "call/etcdserverpb.KV/Range", q.body); w.Code != 200 || asked.GetLimit() != q.limit {
			t.Errorf("%s: status %d, limit %d, want %d", q.body, w.Code, asked.GetLimit(), q.limit)
		}
	}
	if w := ask(h, "call/etcdserverpb.KV/Range", `{"nonsense":1}`); w.Code != http.StatusBadRequest {
		t.Errorf("an unknown field: status %d", w.Code)
	}
	if w := ask(h, "call/etcdserverpb.KV/Range", `{"key":"`+strings.Repeat("A", maxBodyBytes)+`"}`); w.Code != http.StatusRequestEntityTooLarge {
		t.Errorf("a huge request: status %d", w.Code)
	}
}

// Trap: a key that is HTML, and one that is no UTF-8. They come as base64 in JSON, so no browser takes them for anything else.
func TestKeysThatAreHTML(t *testing.T) {
	keys := [][]byte{[]byte(`<img src=x onerror=alert(1)>`), []byte("</script><script>alert(1)</script>"), {0xff, 0xfe, 0x00}}
	s := &services{answer: func(string, any) (proto.Message, error) {
		r := &pb.RangeResponse{}
		for _, k := range keys {
			r.Kvs = append(r.Kvs, &mvccpb.KeyValue{Key: k, Value: k})
		}
		return r, nil
	}}
	w := ask(newConsole(s, false), "call/etcdserverpb.KV/Range", "{}")
	got := decode[struct{ Kvs []struct{ Key, Value []byte } }](t, w)
	if len(got.Kvs) != len(keys) || w.Header().Get("Content-Type") != "application/json" || bytes.ContainsAny(w.Body.Bytes(), "<>") {
		t.Fatalf("%v: %s", w.Header(), w.Body)
	}
	for i, k := range keys {
		if !bytes.Equal(got.Kvs[i].Key, k) || !bytes.Equal(got.Kvs[i].Value, k) {
			t.Errorf("key %q came as %q", k, got.Kvs[i].Key)
		}
	}
}

// However many pages are open, the cluster is surveyed once a second, in time and where it fails too.
func TestReadersShareASurvey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var failing atomic.Bool
		s := &services{answer: func(string, any) (proto.Message, error) {
			time.Sleep(300 * time.Millisecond)
			if failing.Load() {
				return nil, status.Error(codes.Unavailable, "no quorum")
			}
			return &adminpb.SurveyResponse{Asked: "n1"}, nil
		}}
		h := consoleWith(s, clock.Virtual(), false)
		all := func(want int) {
			var wg sync.WaitGroup
			for range 20 {
				wg.Go(func() {
					if w := ask(h, "survey", ""); w.Code != want {
						t.Errorf("status %d: %s", w.Code, w.Body)
					}
				})
			}
			wg.Wait()
		}
		all(200)
		all(200)
		if n := len(s.called()); n != 1 {
			t.Errorf("%d surveys within a second", n)
		}
		time.Sleep(freshFor)
		failing.Store(true)
		all(503)
		all(503)
		if n := len(s.called()); n != 2 {
			t.Errorf("%d surveys after a failure", n)
		}
		time.Sleep(freshFor)
		failing.Store(false)
		all(200)
		time.Sleep(keptFor + time.Second) // its memory is given back
		synctest.Wait()
	})
}

// Who asks for others goes on though its own page is gone, and leaves nobody waiting where it ends in a panic.
func TestTheOneWhoAsksForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := true
		s := &shared[int]{clock: clock.Virtual(), ask: func(ctx context.Context) (int, error) {
			time.Sleep(time.Second)
			if broken {
				panic("broken")
			}
			return 7, ctx.Err()
		}}
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		func() {
			defer func() { _ = recover() }()
			_, _ = s.get(t.Context(), time.Minute)
		}()
		if _, err := s.get(t.Context(), time.Minute); !errors.Is(err, errGivenUp) {
			t.Errorf("after a panic: %v", err)
		}
		time.Sleep(freshFor)
		broken = false
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = s.get(gone, time.Minute) })
		synctest.Wait()
		if v, err := s.get(t.Context(), time.Minute); v != 7 || err != nil {
			t.Errorf("who waited got %d, %v", v, err)
		}
		wg.Wait()
		time.Sleep(keptFor + time.Second)
		synctest.Wait()
		if s.last != nil {
			t.Error("the answer is kept")
		}
	})
}

// What is shared is for root alone, also while it is fresh; others are told what to do.
func TestRights(t *testing.T) {
	s := &services{users: true}
	h := newConsole(s, true)
	for _, path := range []string{"survey", "ranges"} {
		if w := ask(h, path, ""); w.Code != 200 {
			t.Errorf("root, %s: status %d", path, w.Code)
		}
	}
	before := len(s.called())
	for _, who := range []struct {
		what   string
		err    error
		status int
		login  bool
	}{
		{"a user", rpctypes.ErrGRPCPermissionDenied, http.StatusForbidden, false},
		{"nobody", rpctypes.ErrGRPCUserEmpty, http.StatusUnauthorized, true},
		{"an old token", rpctypes.ErrGRPCInvalidAuthToken, http.StatusUnauthorized, true},
		{"no quorum to ask", status.Error(codes.Unavailable, "x"), http.StatusServiceUnavailable, false},
	} {
		s.root = who.err
		for _, path := range []string{"survey", "ranges"} {
			w := ask(h, path, "")
			if f := decode[failure](t, w); w.Code != who.status || f.Login != who.login || f.Error == "" {
				t.Errorf("%s, %s: status %d, %+v", who.what, path, w.Code, f)
			}
		}
		w := ask(h, "session", "")
		if who.status == http.StatusServiceUnavailable {
			if w.Code != who.status {
				t.Errorf("%s: status %d", who.what, w.Code)
			}
			continue
		}
		if got := decode[struct{ Auth, Login, Root bool }](t, w); !got.Auth || got.Root || got.Login != who.login {
			t.Errorf("%s: %+v", who.what, got)
		}
	}
	for _, c := range s.called()[before:] {
		t.Errorf("%s was called for others than root", c)
	}
	s.root = nil
	if got := decode[struct{ Auth, Login, Root bool }](t, ask(h, "session", "")); !got.Root || got.Login {
		t.Errorf("root: %+v", got)
	}
}

// Trap: without a quorum nothing answers that asks the placement group. The page opens all the same, whether users are
// checked or not: it shows what is wrong.
func TestThePageOpensWithoutAQuorum(t *testing.T) {
	none := func(string, any) (proto.Message, error) { return nil, status.Error(codes.Unavailable, "no leader") }
	for _, test := range []struct {
		users             bool
		root              error
		auth, login, sees bool
	}{
		{false, nil, false, false, true},
		{true, rpctypes.ErrGRPCUserEmpty, true, true, false},
		{true, rpctypes.ErrGRPCPermissionDenied, true, false, false},
		{true, nil, true, false, true},
	} {
		w := ask(newConsole(&services{answer: none, users: test.users, root: test.root}, false), "session", "")
		if got := decode[struct{ Auth, Login, Root bool }](t, w); w.Code != 200 || got.Auth != test.auth || got.Login != test.login || got.Root != test.sees {
			t.Errorf("users checked %v, %v: status %d, %s", test.users, test.root, w.Code, w.Body)
		}
	}
}

// A password is exchanged for a token, which goes into the answer and nowhere else. A wrong one is told as such.
func TestLogin(t *testing.T) {
	s := &services{answer: func(_ string, q any) (proto.Message, error) {
		if a := q.(*pb.AuthenticateRequest); a.GetName() != "root" || a.GetPassword() != "p<>" {
			return nil, rpctypes.ErrGRPCAuthFailed
		}
		return &pb.AuthenticateResponse{Token: "t.1"}, nil
	}}
	h := newConsole(s, false)
	w := ask(h, "login", `{"name":"root","password":"p<>"}`)
	if got := decode[map[string]string](t, w); got["token"] != "t.1" || w.Header().Get("Cache-Control") != "no-store" || w.Header().Get("Set-Cookie") != "" {
		t.Errorf("%v, %v", got, w.Header())
	}
	w = ask(h, "login", `{"name":"root","password":"wrong"}`)
	if f := decode[failure](t, w); w.Code != http.StatusBadRequest || f.Error == "" || f.Login {
		t.Errorf("a wrong password: status %d, %+v", w.Code, f)
	}
}

// A refusal comes in its two halves, as the commands print it.
func TestRefusals(t *testing.T) {
	s := &services{answer: func(string, any) (proto.Message, error) {
		st, err := status.New(codes.FailedPrecondition, "drain node n1: no").WithDetails(&adminpb.Refusal{Reason: "drain node n1: two would be left", NextStep: "add a node"})
		if err != nil {
			return nil, err
		}
		return nil, st.Err()
	}}
	w := ask(newConsole(s, true), "call/skein.admin.v1.Admin/NodeDrain", `{"node":"n1"}`)
	if f := decode[failure](t, w); w.Code != http.StatusBadRequest || f.Error != "drain node n1: two would be left" || f.Next != "add a node" {
		t.Errorf("status %d, %+v", w.Code, f)
	}
}

// Ranges come by pages of 500 at most, in the order that is asked for, and only those that match.
func TestRangesComeByPages(t *testing.T) {
	const n = 1203
	list := &adminpb.RangeListResponse{Stale: true}
	for i := range n {
		r := &adminpb.Range{Id: uint64(i + 1), Start: fmt.Appendf(nil, "Key%05d", i), Leader: "n1", Replicas: []string{"n1", "n2"}, State: "awake", WritesPerSecond: float64(i % 700), Bytes: int64(n - i)}
		if i%100 == 7 {
			r.Leader, r.State, r.Replicas = "", "no quorum", []string{"n2", "n3"}
		}
		list.Ranges = append(list.Ranges, r)
	}
	h := newConsole(&services{answer: func(string, any) (proto.Message, error) { return list, nil }}, false)
	type answer struct {
		List struct {
			Ranges []struct{ ID, Start string }
			Stale  bool
		}
		Total, All int
	}
	get := func(q string) (ids []string, total int) {
		a := decode[answer](t, ask(h, "ranges", q))
		if a.All != n || !a.List.Stale {
			t.Errorf("%s: %d in all, stale %v", q, a.All, a.List.Stale)
		}
		for _, r := range a.List.Ranges {
			ids = append(ids, r.ID)
		}
		return ids, a.Total
	}
	seen := map[string]bool{}
	for skip := 0; skip < n; skip += pageSize {
		ids, total := get(fmt.Sprintf(`{"skip":%d,"limit":100000}`, skip))
		if total != n || len(ids) != min(pageSize, n-skip) {
			t.Errorf("page at %d: %d of %d", skip, len(ids), total)
		}
		for _, id := range ids {
			seen[id] = true
		}
	}
	if len(seen) != n {
		t.Errorf("%d ranges on all pages", len(seen))
	}
	for _, c := range []struct {
		q     string
		first string
		total int
	}{
		{`{"sort":"load"}`, "700", n},
		{`{"sort":"bytes"}`, "1", n},
		{`{"trouble":true}`, "8", 12},
		{`{"node":"n3"}`, "8", 12},
		{`{"node":"n1","leads":true}`, "1", n - 12},
		{`{"text":"key00042"}`, "43", 1},
		{`{"text":"1203"}`, "1203", 1},
		{`{"text":"none"}`, "", 0},
		{`{"skip":999999}`, "", n},
		{`{"skip":-5,"limit":1}`, "1", n},
	} {
		ids, total := get(c.q)
		if first := strings.Join(ids[:min(1, len(ids))], ""); first != c.first || total != c.total {
			t.Errorf("%s: %d match, the first is %q; want %d and %q", c.q, total, first, c.total, c.first)
		}
	}
}

// keyHistory answers gets of one key as a store does that has these versions, and was compacted below a revision.
func keyHistory(versions []*mvccpb.KeyValue, compacted int64) func(string, any) (proto.Message, error) {
	return func(_ string, q any) (proto.Message, error) {
		at := q.(*pb.RangeRequest).GetRevision()
		if at != 0 && at < compacted {
			return nil, rpctypes.ErrGRPCCompacted
		}
		r := &pb.RangeResponse{}
		for _, v := range versions {
			if at == 0 || v.GetModRevision() <= at {
				r.Kvs = []*mvccpb.KeyValue{v}
			}
		}
		return r, nil
	}
}

// The history of a key goes back by pages to its creation, or to the compaction.
func TestHistory(t *testing.T) {
	var versions []*mvccpb.KeyValue
	for i := range int64(45) {
		versions = append(versions, &mvccpb.KeyValue{Key: []byte("k"), CreateRevision: 100, ModRevision: 100 + 3*i, Version: i + 1, Value: bytes.Repeat([]byte("v"), shownBytes+int(i))})
	}
	type answer struct {
		Versions []version
		End      string
		Next     int64
	}
	walk := func(compacted, from int64) (got []version, end string) {
		h := newConsole(&services{answer: keyHistory(versions, compacted)}, false)
		for pages := 1; ; pages++ {
			a := decode[answer](t, ask(h, "history", fmt.Sprintf(`{"key":"aw==","revision":%d}`, from)))
			got, from = append(got, a.Versions...), a.Next
			if a.End != "more" || pages > 10 {
				return got, a.End
			}
		}
	}
	all, end := walk(0, 0)
	if len(all) != 45 || end != "created" || all[0].ModRevision != 232 || all[44].ModRevision != 100 || all[0].Bytes != shownBytes+44 || len(all[0].Value) != shownBytes {
		t.Errorf("%d versions, %s", len(all), end)
	}
	if some, end := walk(200, 0); end != "compacted" || len(some) != 12 || some[11].ModRevision != 199 {
		t.Errorf("with a compaction at 200: %d versions, %s", len(some), end)
	}
	if some, end := walk(0, 130); end != "created" || len(some) != 11 || some[0].ModRevision != 130 {
		t.Errorf("from revision 130 on: %d versions, %s", len(some), end)
	}
	versions = nil
	if none, end := walk(0, 0); end != "absent" || len(none) != 0 {
		t.Errorf("no key: %d versions, %s", len(none), end)
	}
}

// Leases come by pages with their keys. Of one whose keys may not be read there is the id alone, and one that ends
// meanwhile is left out.
func TestLeases(t *testing.T) {
	s := &services{answer: func(_ string, q any) (proto.Message, error) {
		r, ok := q.(*pb.LeaseTimeToLiveRequest)
		if !ok {
			l := &pb.LeaseLeasesResponse{}
			for i := range int64(70) {
				l.Leases = append(l.Leases, &pb.LeaseStatus{ID: 1<<62 + i})
			}
			return l, nil
		}
		switch r.GetID() - 1<<62 {
		case 0:
			return nil, rpctypes.ErrGRPCPermissionDenied
		case 1:
			return &pb.LeaseTimeToLiveResponse{ID: r.GetID(), TTL: -1}, nil
		}
		return &pb.LeaseTimeToLiveResponse{ID: r.GetID(), TTL: 5, GrantedTTL: 10, Keys: make([][]byte, 30)}, nil
	}}
	h := newConsole(s, false)
	type answer struct {
		Leases []leaseRow
		Total  int
	}
	a := decode[answer](t, ask(h, "leases", ""))
	if a.Total != 70 || len(a.Leases) != leasesPage-1 || a.Leases[0].Error == "" || a.Leases[0].ID != 1<<62 || a.Leases[1].TTL != 5 || a.Leases[1].Count != 30 || len(a.Leases[1].Keys) != shownKeys {
		t.Errorf("the first page: %+v", a)
	}
	if a := decode[answer](t, ask(h, "leases", `{"skip":50}`)); len(a.Leases) != 20 {
		t.Errorf("the second page has %d", len(a.Leases))
	}
}
