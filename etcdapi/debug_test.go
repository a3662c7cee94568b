package etcdapi

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/rights"
)

// getAs asks for a path, with headers as pairs of name and value.
func getAs(t *testing.T, c *http.Client, url string, headers ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	must(t, err)
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := c.Do(req)
	must(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	must(t, err)
	return resp.StatusCode, string(body)
}

// With users checked root alone sees what is under /debug/, whatever there is: profiles show what the process holds in
// memory. What probes ask for stays open. Without, profiles are as open as in etcd.
func TestDebugPagesAreForRoot(t *testing.T) {
	users, rec := newUsers()
	r := newRig(t, "http", func(o *Options) { o.Users, o.EnablePprof = users, true })
	base := "http://" + r.addr()
	if code, _ := getAs(t, http.DefaultClient, base+"/debug/pprof/cmdline"); code != http.StatusOK {
		t.Errorf("checks are off: %d", code)
	}
	addUsers(t, users, rec)
	root, u := tokenOf(t, users, rec, "root"), tokenOf(t, users, rec, "u")
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/symbol", "/debug/pprof/heap?debug=1", "/debug/pprof/trace?seconds=0.01"} {
		for _, c := range []struct {
			who     string
			headers []string
			want    int
		}{
			{"nobody", nil, http.StatusUnauthorized},
			{"a bad token", []string{"Authorization", root + "x"}, http.StatusUnauthorized},
			{"an empty token", []string{"Authorization", ""}, http.StatusUnauthorized},
			{"a user", []string{"Authorization", u}, http.StatusForbidden},
			{"root", []string{"Authorization", root}, http.StatusOK},
			{"root as bearer", []string{"Authorization", "Bearer " + root}, http.StatusOK},
			{"root by another header", []string{"Token", root}, http.StatusUnauthorized},
		} {
			code, body := getAs(t, http.DefaultClient, base+path, c.headers...)
			if code != c.want {
				t.Errorf("%s as %s: %d %.200s", path, c.who, code, body)
			}
			if code != http.StatusOK && strings.Contains(body, root) {
				t.Errorf("%s as %s: the answer has the token: %s", path, c.who, body)
			}
		}
	}
	for path, want := range map[string]int{
		"/debug/": http.StatusUnauthorized, "/debug/vars": http.StatusUnauthorized, "/debug/later": http.StatusUnauthorized,
		"/metrics": http.StatusOK, "/health": http.StatusOK, "/version": http.StatusOK, "/livez": http.StatusOK, "/readyz": http.StatusOK,
	} {
		if code, _ := getAs(t, http.DefaultClient, base+path); code != want {
			t.Errorf("%s: %d", path, code)
		}
	}
	if code, _ := getAs(t, http.DefaultClient, base+"/debug/later", "Authorization", root); code != http.StatusNotFound {
		t.Errorf("a page that is not there: %d", code)
	}
}

// A client's certificate names root only with --client-cert-auth.
func TestDebugPagesByCertificate(t *testing.T) {
	for certAuth, want := range map[bool]int{true: http.StatusOK, false: http.StatusUnauthorized} {
		p := newPKI(t)
		users, rec := newUsers()
		users.ClientCertAuth = certAuth
		addUsers(t, users, rec)
		for _, c := range []rights.Change{{Kind: rights.AddUser, User: "client", NoPassword: true}, {Kind: rights.GrantRole, User: "client", Role: "root"}} {
			must(t, rec.ChangeAccess(t.Context(), "root", c))
		}
		r := newRig(t, "https", func(o *Options) {
			o.Users, o.EnablePprof = users, true
			o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}, ClientCAs: p.pool, ClientAuth: tls.VerifyClientCertIfGiven}
		})
		client := func(certs ...tls.Certificate) *http.Client {
			tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.pool, Certificates: certs}}
			t.Cleanup(tr.CloseIdleConnections)
			return &http.Client{Transport: tr}
		}
		url := "https://" + r.addr() + "/debug/pprof/cmdline"
		if code, body := getAs(t, client(p.client), url); code != want {
			t.Errorf("client-cert-auth %t: %d %s", certAuth, code, body)
		}
		if code, _ := getAs(t, client(), url); code != http.StatusUnauthorized {
			t.Errorf("without a certificate: %d", code)
		}
		// A token wins over the certificate, also a bad one.
		if code, _ := getAs(t, client(p.client), url, "Authorization", "bad"); code != http.StatusUnauthorized {
			t.Errorf("a bad token with a certificate: %d", code)
		}
		if code, _ := getAs(t, client(p.client), url, "Authorization", tokenOf(t, users, rec, "u")); code != http.StatusForbidden {
			t.Errorf("the token of another user with a certificate: %d", code)
		}
		// The common name is of no use for what goes through the gateway (trap 93).
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+r.addr()+"/v3/auth/user/list", strings.NewReader("{}"))
		must(t, err)
		resp, err := client(p.client).Do(req)
		must(t, err)
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("the gateway with root's certificate: %d", resp.StatusCode)
		}
	}
}

// Trap 94 (CVE-2021-28235): etcd kept requests for a debug page, passwords among them. No page has one, nor has the log, to
// which every request is too slow here.
func TestNoPageHasAPassword(t *testing.T) {
	users, rec := newUsers()
	lines, logs := observer.New(zap.DebugLevel)
	r := newRig(t, "http", func(o *Options) {
		o.Users, o.EnablePprof, o.Logger, o.WarnUnaryRequest = users, true, zap.New(lines), 1
	})
	addUsers(t, users, rec)
	root := tokenOf(t, users, rec, "root")
	const password = "correct horse battery"
	c := r.client(t, clientv3.Config{})
	_, err := c.UserAdd(clientContext(t, root), "v", password)
	must(t, err)
	_, err = c.Authenticate(t.Context(), "v", password)
	must(t, err)
	_, err = c.Authenticate(t.Context(), "root", password)
	if err == nil {
		t.Error("a login with a wrong password")
	}
	if n := logs.FilterMessage("request took long").Len(); n < 3 {
		t.Errorf("only %d requests are logged", n)
	}
	for _, l := range logs.All() {
		if text := fmt.Sprint(l.Message, l.ContextMap()); strings.Contains(text, password) || strings.Contains(text, root) {
			t.Errorf("the log has it: %s", text)
		}
	}
	for path, want := range map[string]int{
		"/debug/pprof/": 200, "/debug/pprof/cmdline": 200, "/debug/pprof/goroutine?debug=2": 200, "/debug/pprof/heap?debug=1": 200, "/metrics": 200,
		"/debug/requests": 404, "/debug/events": 404, "/debug/vars": 200,
	} {
		code, body := getAs(t, http.DefaultClient, "http://"+r.addr()+path, "Authorization", root)
		if code != want || strings.Contains(body, password) || strings.Contains(body, root) {
			t.Errorf("%s: %d, with the password: %t", path, code, strings.Contains(body, password))
		}
	}
}
