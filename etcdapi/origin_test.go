package etcdapi

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

// asked sends a request to write as a browser does for a page, and returns the status and the origin that may read
// the answer.
func asked(t *testing.T, r *rig, method, scheme, host, origin string, cfg *tls.Config) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, scheme+"://"+r.addr()+"/v3/kv/put", strings.NewReader(`{"key":"aw==","value":"dg=="}`))
	must(t, err)
	req.Host = host
	if origin != "" {
		req.Header.Set("Origin", origin)
	}
	resp, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}).Do(req)
	must(t, err)
	resp.Body.Close()
	return resp.StatusCode, resp.Header.Get("Access-Control-Allow-Origin")
}

// Trap 97 (CVE-2018-1099): a page whose name leads to this node by now is refused by the name, but for TLS, where the
// certificate would have to bear it.
func TestHostWhitelist(t *testing.T) {
	p := newPKI(t)
	secure := &tls.Config{RootCAs: p.pool, ServerName: "127.0.0.1"}
	for _, test := range []struct {
		list   []string
		scheme string
		host   string
		status int
	}{
		{nil, "http", "evil.example", 200},
		{[]string{"*"}, "http", "evil.example", 200},
		{[]string{"*", "good.example"}, "http", "evil.example", 200},
		{[]string{"good.example", "127.0.0.1"}, "http", "evil.example", 421},
		{[]string{"good.example", "127.0.0.1"}, "http", "evil.example:80", 421},
		{[]string{"good.example", "127.0.0.1"}, "http", "good.example", 200},
		{[]string{"good.example", "127.0.0.1"}, "http", "good.example:2379", 200},
		{[]string{"good.example", "127.0.0.1"}, "http", "", 200},
		{[]string{"good.example"}, "https", "evil.example", 200},
	} {
		r := newRig(t, test.scheme, func(o *Options) {
			o.HostWhitelist, o.TLS = test.list, &tls.Config{Certificates: []tls.Certificate{p.server}}
		})
		status, _ := asked(t, r, http.MethodPost, test.scheme, test.host, "", secure)
		if status != test.status || (r.kv.called() > 0) != (status == 200) {
			t.Errorf("%v, %s, host %q: status %d and %d calls", test.list, test.scheme, test.host, status, r.kv.called())
		}
		// As in etcd, probes of the metrics URLs have whatever host they like.
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("%s://%s/health", test.scheme, r.MetricsAddrs()[0]), nil)
		must(t, err)
		req.Host = "evil.example"
		resp, err := (&http.Client{Transport: &http.Transport{TLSClientConfig: secure, DisableKeepAlives: true}}).Do(req)
		must(t, err)
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Errorf("metrics: status %d", resp.StatusCode)
		}
	}
}

// Trap 97 (CVE-2018-1098): a page of an origin that is not listed may neither read nor write, nor open a websocket.
func TestCORS(t *testing.T) {
	p := newPKI(t)
	for _, scheme := range []string{"http", "https"} {
		for _, test := range []struct {
			list           []string
			origin         string // SELF is the node's own
			status         int
			answer, method string
		}{
			{nil, "http://evil.example", 200, "*", "POST"},
			{[]string{"*"}, "http://evil.example", 200, "*", "POST"},
			{[]string{"*"}, "", 200, "*", "POST"},
			{[]string{"http://good.example:80"}, "http://good.example:80", 200, "http://good.example:80", "POST"},
			{[]string{"http://good.example:80"}, "http://good.example", 200, "http://good.example", "POST"},
			{[]string{"http://good.example:80"}, "https://good.example", 403, "", "POST"},
			{[]string{"http://good.example:80"}, "http://evil.example", 403, "", "POST"},
			{[]string{"http://good.example:80"}, "null", 403, "", "POST"},
			{[]string{"http://good.example:80"}, "SELF", 200, "", "POST"},
			{[]string{"http://good.example:80"}, "", 200, "", "POST"}, // no browser
			// A browser asks before it sends what no form sends.
			{[]string{"http://good.example:80"}, "http://good.example", 200, "http://good.example", "OPTIONS"},
			{[]string{"http://good.example:80"}, "http://evil.example", 200, "", "OPTIONS"},
		} {
			r := newRig(t, scheme, func(o *Options) { o.CORS, o.TLS = test.list, &tls.Config{Certificates: []tls.Certificate{p.server}} })
			origin := strings.ReplaceAll(test.origin, "SELF", scheme+"://"+r.addr())
			cfg := &tls.Config{RootCAs: p.pool}
			status, answer := asked(t, r, test.method, scheme, "", origin, cfg)
			if status != test.status || answer != test.answer || (r.kv.called() > 0) != (status == 200 && test.method == "POST") {
				t.Errorf("%s, %v, origin %q: status %d, %q may read, %d calls", scheme, test.list, origin, status, answer, r.kv.called())
			}
			if test.method != "POST" {
				continue
			}
			header := http.Header{}
			if origin != "" {
				header.Set("Origin", origin)
			}
			client := &http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
			conn, _, err := websocket.Dial(t.Context(), strings.Replace(scheme, "http", "ws", 1)+"://"+r.addr()+"/v3/watch", &websocket.DialOptions{HTTPClient: client, HTTPHeader: header})
			if (err == nil) != (test.status == 200) {
				t.Errorf("%s, %v, origin %q: a socket: %v", scheme, test.list, origin, err)
			}
			if err == nil {
				_ = conn.CloseNow()
			}
		}
	}
}
