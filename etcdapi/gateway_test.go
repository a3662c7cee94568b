package etcdapi

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/kverror"
)

// post posts JSON and returns the status and the body.
func post(t *testing.T, r *rig, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.addr()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("post %s: %v", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("post %s: %v", path, err)
	}
	return resp.StatusCode, unspaced(string(b))
}

// unspaced removes the spaces, which protojson inserts at random.
func unspaced(s string) string { return strings.Join(strings.Fields(s), "") }

// The gateway answers like etcd's: 64-bit numbers are strings, bytes are base64, unknown fields are
// no error, errors have gRPC's code, and missing methods are 501.
func TestGateway(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	r := newRig(t, "http", func(o *Options) { o.MaxRequestBytes = 1 << 10 }) // few bytes are too many
	header := `{"header":{"cluster_id":"12", "member_id":"11", "revision":"7", "raft_term":"5"}`
	for _, c := range []struct {
		path, body string
		err        error
		status     int
		want       string
	}{
		{"/v3/kv/put", `{"key":"Zm9v","value":"YmFy"}`, nil, 200, header},
		{"/v3beta/kv/range", `{"key":"Zm9v","news":1}`, nil, 200, header},
		{"/v3/kv/compaction", `{"revision":"3","physical":true}`, nil, 200, header},
		{
			"/v3/kv/compaction", `{"revision":3}`, kverror.New(kverror.Compacted, ""), 400,
			`{"code":11, "message":"etcdserver: mvcc: required revision has been compacted"}`,
		},
		{"/v3/kv/put", `{}`, nil, 400, `{"code":3, "message":"etcdserver: key is not provided"}`},
		{"/v3/kv/put", `{"key":`, nil, 400, `"code":3`},
		{"/v3/kv/put", `{"key":"Zm9v","value":"` + strings.Repeat("YmFy", 256<<10) + `"}`, nil, 429, `{"code":8,"message":"grpc: received message larger than max (786441 vs. 525312)"`},
		{"/v3/kv/put", `{"key":"Zm9v","value":"` + strings.Repeat("YmFy", 3<<20) + `"}`, nil, 400, `http:request body too large`},
		{"/v3/auth/authenticate", `{}`, nil, 400, `{"code":9, "message":"etcdserver: authentication is not enabled"}`},
		{"/v3/lock/lock", `{"name":"Zm9v"}`, nil, 501, `"code":12`},
		{"/v3/nothing", `{}`, nil, 404, `"code":5`},
	} {
		r.kv.set(c.err, false)
		if status, got := post(t, r, c.path, c.body); status != c.status || !strings.Contains(got, unspaced(c.want)) {
			t.Errorf("%s %.40s: %d %s, want %d %s", c.path, c.body, status, got, c.status, c.want)
		}
	}
	without := newRig(t, "http", func(o *Options) { o.NoGateway = true })
	if status, _ := post(t, without, "/v3/kv/range", `{"key":"Zm9v"}`); status != http.StatusNotFound {
		t.Errorf("without a gateway: %d", status)
	}
}

// Locks and elections by JSON.
func TestGatewayLocks(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	m := newMemory(7)
	l := NewLocks(m, m, m, nil)
	r := newRig(t, "http", func(o *Options) { o.Register = l.Register })
	t.Cleanup(func() { l.Close(context.Background()) })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr()+"/v3/election/observe", strings.NewReader(`{"name":"ZQ=="}`))
	if err != nil {
		t.Fatal(err)
	}
	lines := make(chan string, 1)
	go func() {
		defer close(lines)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Errorf("observe: %v", err)
			return
		}
		defer resp.Body.Close()
		for s := bufio.NewScanner(resp.Body); s.Scan(); {
			lines <- s.Text()
		}
	}()
	m.await(t, "the observer is there", func() bool { return m.watchers == 1 })
	if status, got := post(t, r, "/v3/lock/lock", `{"name":"bA==","lease":"7"}`); status != 200 || !strings.Contains(got, `"key":"bC83"`) {
		t.Errorf("lock: %d %s", status, got)
	}
	if status, got := post(t, r, "/v3/lock/unlock", `{"key":"bC83"}`); status != 200 {
		t.Errorf("unlock: %d %s", status, got)
	}
	status, got := post(t, r, "/v3/election/campaign", `{"name":"ZQ==","lease":7,"value":"YQ=="}`)
	if status != 200 || !strings.Contains(got, `"leader":{"name":"ZQ==","key":"ZS83","rev":"4","lease":"7"}`) {
		t.Errorf("campaign: %d %s", status, got)
	}
	if line := unspaced(<-lines); !strings.Contains(line, `"value":"YQ=="`) {
		t.Errorf("observed %q", line)
	}
	if status, got = post(t, r, "/v3/election/leader", `{"name":"eA=="}`); status != 500 || !strings.Contains(got, "election:noleader") {
		t.Errorf("no leader: %d %s", status, got)
	}
	cancel()
	for range lines {
		t.Error("observed something more")
	}
}

// A stop ends the gateway's calls like all others.
func TestGatewayStop(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	r := newRig(t, "http", nil)
	r.kv.set(nil, true)
	done := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+r.addr()+"/v3/kv/range", strings.NewReader(`{"key":"Zm9v"}`))
		if err == nil {
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(req); err == nil {
				err = fmt.Errorf("%s", resp.Status)
				resp.Body.Close()
			}
		}
		done <- err
	}()
	<-r.kv.entered
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r.Stop(ctx)
	t.Logf("a call at the stop: %v", <-done)
}
