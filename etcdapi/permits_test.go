package etcdapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// wantError checks that a client's error is etcd's; nil is none.
func wantError(t *testing.T, what string, err, want error) {
	t.Helper()
	if (err == nil) != (want == nil) || err != nil && rpctypes.ErrorDesc(err) != rpctypes.ErrorDesc(want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for range 2000 {
		if cond() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("not within 10 s: %s", what)
}

// Trap 83: a right that was granted counts at a node that has not heard of it, as soon as the grant is acknowledged. What
// is denied all the same stays denied.
func TestADenialIsConfirmed(t *testing.T) {
	r := newAuthRig(t, nil)
	kv := pb.NewKVClient(r.conn)
	ctx := r.users.as(t, "u")
	r.users.hear(false)
	r.users.do(t, "permit own rw new")
	before := r.users.questions()
	put := make(chan error, 1)
	go func() {
		_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("new")})
		put <- err
	}()
	eventually(t, "placement is asked", func() bool { return r.users.questions() > before })
	select {
	case err := <-put:
		t.Errorf("answered before this node has heard of the grant: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	r.users.hear(true)
	wantError(t, "a right of which this node heard late", <-put, nil)
	_, err := kv.Put(ctx, &pb.PutRequest{Key: []byte("other")})
	wantError(t, "a key of others", err, rpctypes.ErrGRPCPermissionDenied)
	asked := r.users.questions()
	_, err = kv.Put(ctx, &pb.PutRequest{Key: []byte("k")})
	wantError(t, "an own key", err, nil)
	if n := r.users.questions() - asked; n != 0 {
		t.Errorf("%d questions to placement for a request that is allowed", n)
	}
}

// virtualServer is a server in virtual time that listens nowhere. Its methods are called as functions.
func virtualServer(t *testing.T, change func(*Options)) (*Server, *records) {
	t.Helper()
	users, records := newUsers()
	records.setUp(t)
	node := &fakeNode{}
	node.leader.Store(0xb)
	o := Options{Users: users, KV: &fakeKV{}, Members: node, Node: node, Cluster: 0xc, Self: 0xb, Clock: clock.Virtual(), RequestTimeout: time.Second}
	if change != nil {
		change(&o)
	}
	return New(o), records
}

// incoming is the context of a request of a user, as a handler has it.
func (r *records) incoming(t testing.TB, user string) context.Context {
	t.Helper()
	return metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpctypes.TokenFieldNameGRPC, r.token(t, user)))
}

// Many denials at once share a question to placement, and those that come meanwhile share the next.
func TestManyDenialsAskOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, users := virtualServer(t, nil)
		defer s.Stop(t.Context())
		ctx := users.incoming(t, "u")
		unstick := users.stick()
		var wg sync.WaitGroup
		var denied atomic.Int32
		deny := func() {
			for range 500 {
				wg.Go(func() {
					if _, _, err := s.permitted(ctx, &pb.PutRequest{Key: []byte("other")}); errors.Is(err, rpctypes.ErrGRPCPermissionDenied) {
						denied.Add(1)
					}
				})
			}
			synctest.Wait()
		}
		deny()
		deny()
		unstick()
		wg.Wait()
		if n := denied.Load(); n != 1000 {
			t.Errorf("%d of 1000 are denied", n)
		}
		if n := users.questions(); n > 2 {
			t.Errorf("%d questions to placement", n)
		}
	})
}

// Without an answer of placement a denial becomes NoLeader within the request timeout, also of a request that comes
// while a question is under way. The server's end does not wait for the answer.
func TestDenialsWithoutPlacement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, users := virtualServer(t, nil)
		ctx := users.incoming(t, "u")
		unstick := users.stick()
		defer unstick()
		begin := time.Now()
		var wg sync.WaitGroup
		for i := range 10 {
			late := time.Duration(i) * 150 * time.Millisecond
			wg.Go(func() {
				time.Sleep(late)
				_, _, err := s.permitted(ctx, &pb.PutRequest{Key: []byte("other")})
				wantError(t, fmt.Sprint("after ", late), err, rpctypes.ErrGRPCNoLeader)
				if took := time.Since(begin) - late; took > time.Second {
					t.Errorf("the request after %v took %v", late, took)
				}
			})
		}
		wg.Wait()
		// At no multiple of 50 ms: then a question may end at the very moment of the deadline.
		const deadline = 110 * time.Millisecond
		short, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		begin = time.Now()
		_, _, err := s.permitted(short, &pb.PutRequest{Key: []byte("other")})
		if took := time.Since(begin); took != deadline || status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("the client's deadline: %v after %v", err, took)
		}
		s.Stop(t.Context())
		synctest.Wait()
		s.confirm.mu.Lock()
		defer s.confirm.mu.Unlock()
		if s.confirm.busy {
			t.Error("after the end of the server placement is still asked")
		}
	})
}

// AuthStatus and logins end within the request timeout, whatever placement does.
func TestAuthIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := virtualAuthRig(t, func(o *Options) { o.RequestTimeout = time.Second })
		unstick := r.users.stick()
		defer unstick()
		a := pb.NewAuthClient(r.conn)
		ctx := t.Context()
		_, err := a.AuthStatus(ctx, &pb.AuthStatusRequest{})
		wantError(t, "AuthStatus", err, rpctypes.ErrGRPCTimeout)
		_, err = a.Authenticate(ctx, &pb.AuthenticateRequest{Name: "u", Password: "u"})
		wantError(t, "Authenticate", err, rpctypes.ErrGRPCTimeout)
		_, err = a.UserList(r.users.as(t, "root"), &pb.AuthUserListRequest{})
		wantError(t, "UserList", err, rpctypes.ErrGRPCNoLeader)
	})
}

// request is a request to keys of user u, by one way.
type request struct {
	name string
	do   func(context.Context, *authRig) error
}

// postAs posts JSON as the user of a client's context.
func postAs(ctx context.Context, r *authRig, path, body string) error {
	md, _ := metadata.FromOutgoingContext(ctx)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr()+path, strings.NewReader(body))
	if err != nil {
		return err
	}
	for _, token := range md.Get(rpctypes.TokenFieldNameGRPC) {
		q.Header.Set("Authorization", token)
	}
	tr := &http.Transport{DisableKeepAlives: true, DialContext: r.dial}
	resp, err := tr.RoundTrip(q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode == http.StatusOK && !strings.Contains(string(text), `"error"`) {
		return err
	}
	for _, e := range []error{rpctypes.ErrGRPCPermissionDenied, rpctypes.ErrGRPCTimeout, rpctypes.ErrGRPCNoLeader, rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCInvalidAuthToken} {
		if strings.Contains(string(text), rpctypes.ErrorDesc(e)) {
			return e
		}
	}
	return fmt.Errorf("%s: %s", resp.Status, text)
}

// streamed reads a RangeStream to its end.
func streamed(ctx context.Context, r *authRig, q *pb.RangeRequest) (parts int, err error) {
	st, err := pb.NewKVClient(r.conn).RangeStream(ctx, q)
	for err == nil {
		if _, err = st.Recv(); err == nil {
			parts++
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return parts, err
}

var requests = []request{
	{"put", func(ctx context.Context, r *authRig) error {
		_, err := pb.NewKVClient(r.conn).Put(ctx, &pb.PutRequest{Key: []byte("k")})
		return err
	}},
	{"delete", func(ctx context.Context, r *authRig) error {
		_, err := pb.NewKVClient(r.conn).DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte("k")})
		return err
	}},
	{"txn", func(ctx context.Context, r *authRig) error {
		put := &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("k")}}
		_, err := pb.NewKVClient(r.conn).Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{{Request: put}}})
		return err
	}},
	{"get", func(ctx context.Context, r *authRig) error {
		_, err := pb.NewKVClient(r.conn).Range(ctx, &pb.RangeRequest{Key: []byte("k")})
		return err
	}},
	{"a span", func(ctx context.Context, r *authRig) error {
		_, err := pb.NewKVClient(r.conn).Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("k\x00")})
		return err
	}},
	{"RangeStream", func(ctx context.Context, r *authRig) error {
		_, err := streamed(ctx, r, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("k\x00")})
		return err
	}},
	{"JSON put", func(ctx context.Context, r *authRig) error { return postAs(ctx, r, "/v3/kv/put", `{"key":"aw=="}`) }},
	{"JSON get", func(ctx context.Context, r *authRig) error { return postAs(ctx, r, "/v3/kv/range", `{"key":"aw=="}`) }},
}

// withSpan lets u do everything to the keys that the requests name.
func (r *authRig) withSpan(t testing.TB) {
	t.Helper()
	r.users.do(t, "role span", "permit span rw k k0", "grant u span", "user other")
}

// Trap 81, as the gateway sees it. A range or the sequencer refuses a request because rights were taken away: the
// request is checked anew, and sent again if it is still allowed, and done once.
func TestRightsAreTakenWhileARequestIsUnderWay(t *testing.T) {
	for _, q := range requests {
		for _, tc := range []struct {
			name    string
			taken   []string
			want    error
			reaches int32
		}{
			{"another user's", []string{"delete-user other"}, nil, 2},
			{"an own one", []string{"revoke u span", "revoke u own"}, rpctypes.ErrGRPCPermissionDenied, 1},
			{"the user", []string{"delete-user u"}, rpctypes.ErrGRPCInvalidAuthToken, 1},
			{"the password", []string{"password u"}, rpctypes.ErrGRPCInvalidAuthToken, 1},
			{"all checks", []string{"delete-user other", "disable"}, nil, 2},
		} {
			t.Run(q.name+"/"+tc.name, func(t *testing.T) {
				r := newAuthRig(t, nil)
				r.withSpan(t)
				ctx := r.users.as(t, "u")
				var reached, served atomic.Int32
				r.kv.ask(func(ctx context.Context) error {
					p, ok := keyspace.PermitOf(ctx)
					if !ok {
						t.Error("a request without a permit")
					}
					if reached.Add(1) == 1 {
						r.users.do(t, tc.taken...)
					}
					r.users.mu.Lock()
					defer r.users.mu.Unlock()
					if p.Ended(keyspace.AccessIndex(r.users.state.Access)) {
						return kverror.New(kverror.AccessChanged, "a test")
					}
					served.Add(1)
					return nil
				})
				wantError(t, "the request", q.do(ctx, r), tc.want)
				want := int32(0)
				if tc.want == nil {
					want = 1
				}
				if n := reached.Load(); n != tc.reaches || served.Load() != want {
					t.Errorf("the keys were asked %d times, and have done %d, want %d and %d", n, served.Load(), tc.reaches, want)
				}
			})
		}
	}
}

// A gateway that does not hear in time what was taken away answers with NoLeader: nothing was done.
func TestWhatWasTakenAwayIsNotHeard(t *testing.T) {
	for _, q := range requests {
		t.Run(q.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := virtualAuthRig(t, func(o *Options) { o.RequestTimeout = time.Second })
				r.withSpan(t)
				ctx := r.users.as(t, "u")
				r.users.hear(false)
				r.users.do(t, "delete-user other")
				var reached atomic.Int32
				r.kv.ask(func(context.Context) error {
					reached.Add(1)
					return kverror.New(kverror.AccessChanged, "a test")
				})
				begin := time.Now()
				wantError(t, "the request", q.do(ctx, r), rpctypes.ErrGRPCNoLeader)
				if n, took := reached.Load(), time.Since(begin); n != 1 || took != time.Second {
					t.Errorf("the keys were asked %d times, and the answer took %v", n, took)
				}
				r.kv.ask(nil)
				r.users.hear(true)
				wantError(t, "once it is heard", q.do(ctx, r), nil)
			})
		})
	}
}

// A serializable read asks no sequencer. With checks on it is refused while this node may not know what was taken away.
// Data are not sent if the right was taken away while they were read.
func TestSerializableReads(t *testing.T) {
	reads := map[string]func(context.Context, *authRig) (int, error){
		"get": func(ctx context.Context, r *authRig) (int, error) {
			resp, err := pb.NewKVClient(r.conn).Range(ctx, &pb.RangeRequest{Key: []byte("k"), Serializable: true})
			return len(resp.GetKvs()), err
		},
		"a span": func(ctx context.Context, r *authRig) (int, error) {
			resp, err := pb.NewKVClient(r.conn).Range(ctx, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("k\x00"), Serializable: true})
			return len(resp.GetKvs()), err
		},
		"RangeStream": func(ctx context.Context, r *authRig) (int, error) {
			return streamed(ctx, r, &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("k\x00"), Serializable: true})
		},
		"JSON": func(ctx context.Context, r *authRig) (int, error) {
			return 0, postAs(ctx, r, "/v3/kv/range", `{"key":"aw==","serializable":true}`)
		},
	}
	for name, read := range reads {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := virtualAuthRig(t, func(o *Options) { o.RequestTimeout = time.Second })
				r.withSpan(t)
				r.kv.value, r.kv.parts = []byte("secret"), 3
				ctx := r.users.as(t, "u")
				refused := func(what string, want error) {
					t.Helper()
					n, err := read(ctx, r)
					wantError(t, what, err, want)
					if err != nil && n != 0 {
						t.Errorf("%s: %d parts of the answer all the same", what, n)
					}
				}
				refused("allowed", nil)
				r.stale.Store(true)
				refused("a stale view", rpctypes.ErrGRPCNoLeader)
				_, err := pb.NewKVClient(r.conn).Range(ctx, &pb.RangeRequest{Key: []byte("k")})
				wantError(t, "a linearizable read with a stale view", err, nil)
				r.users.do(t, "disable")
				refused("a stale view without checks", nil)
				r.users.do(t, "enable")
				ctx = r.users.as(t, "u")
				r.stale.Store(false)
				refused("allowed again", nil)
				answer := func(what string, then func()) int32 {
					var asked atomic.Int32
					r.kv.ask(func(context.Context) error {
						if asked.Add(1) == 1 {
							then()
						}
						return nil
					})
					defer r.kv.ask(nil)
					var want error
					switch what {
					case "own right":
						want = rpctypes.ErrGRPCPermissionDenied
					case "stale meanwhile":
						want = rpctypes.ErrGRPCNoLeader
					}
					refused(what, want)
					return asked.Load()
				}
				if n := answer("another's right", func() { r.users.do(t, "delete-user other") }); n != 2 {
					t.Errorf("read %d times after another's right was taken away meanwhile", n)
				}
				answer("stale meanwhile", func() { r.stale.Store(true) })
				r.stale.Store(false)
				answer("own right", func() { r.users.do(t, "revoke u span", "revoke u own") })
			})
		})
	}
}
