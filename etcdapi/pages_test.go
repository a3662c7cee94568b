package etcdapi

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/ports"
)

// serveAt serves at client URLs, with settings of TLS where p is not nil, until the test ends.
func serveAt(t *testing.T, p *pki, urls []url.URL, change func(*Options)) *Server {
	t.Helper()
	kv, node := &fakeKV{entered: make(chan struct{}, 16)}, &fakeNode{}
	node.leader.Store(0xb)
	o := Options{Users: everybody(t), KV: kv, Members: node, Node: node, Clock: clock.System()}
	if p != nil {
		o.TLS = &tls.Config{Certificates: []tls.Certificate{p.server}}
	}
	if change != nil {
		change(&o)
	}
	s := New(o)
	kv.answers = s.opts.Answers
	must(t, s.Bind(urls, nil))
	s.Start()
	t.Cleanup(func() { s.Stop(t.Context()) })
	return s
}

// browser is a client of HTTP by one protocol alone.
func browser(t *testing.T, p *pki, set func(*http.Protocols)) *http.Client {
	t.Helper()
	tr := &http.Transport{Protocols: &http.Protocols{}}
	set(tr.Protocols)
	if p != nil {
		tr.TLSClientConfig = &tls.Config{RootCAs: p.pool}
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func mustGet(t *testing.T, c *http.Client, address string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address, http.NoBody)
	must(t, err)
	a, err := c.Do(req)
	must(t, err)
	_, err = io.Copy(io.Discard, a.Body)
	must(t, err)
	must(t, a.Body.Close())
	return a
}

func byHTTP1(p *http.Protocols)      { p.SetHTTP1(true) }
func byHTTP2(p *http.Protocols)      { p.SetHTTP2(true) }
func byPlainHTTP2(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }

// With --listen-client-http-urls those serve HTTP alone, by both of its versions, and the others gRPC alone.
func TestAddressesOfHTTPAlone(t *testing.T) {
	p := newPKI(t)
	s := serveAt(t, p, []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}, func(o *Options) {
		o.HTTPURLs = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}, {Scheme: "https", Host: "127.0.0.1:0"}}
	})
	grpc, page, secure := s.ClientAddrs()[0].String(), s.HTTPAddrs()[0].String(), s.HTTPAddrs()[1].String()
	for _, c := range []struct {
		url   string
		set   func(*http.Protocols)
		major int
	}{
		{"http://" + page, byHTTP1, 1}, {"http://" + page, byPlainHTTP2, 2}, {"https://" + secure, byHTTP1, 1}, {"https://" + secure, byHTTP2, 2},
	} {
		if a := mustGet(t, browser(t, p, c.set), c.url+"/version"); a.StatusCode != http.StatusOK || a.ProtoMajor != c.major {
			t.Errorf("%s by HTTP/%d: %s by %s", c.url, c.major, a.Status, a.Proto)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+page+"/etcdserverpb.KV/Range", http.NoBody)
	must(t, err)
	req.Header.Set("Content-Type", "application/grpc")
	a, err := browser(t, nil, byPlainHTTP2).Do(req)
	must(t, err)
	must(t, a.Body.Close())
	if a.StatusCode != http.StatusNotFound {
		t.Errorf("gRPC at an address of HTTP: %s, want what no client tries again", a.Status)
	}
	req, err = http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+grpc+"/version", http.NoBody)
	must(t, err)
	if a, err := browser(t, nil, byHTTP1).Do(req); err == nil {
		_ = a.Body.Close()
		t.Errorf("the address of gRPC serves HTTP: %s", a.Status)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{grpc}})
	must(t, err)
	defer client.Close()
	if _, err := client.Get(t.Context(), "k"); err != nil {
		t.Errorf("the address of gRPC: %v", err)
	}
}

// http and https URLs may be one address, for gRPC and for HTTP.
func TestAddressWithTLSAndWithout(t *testing.T) {
	p := newPKI(t)
	free, err := ports.Unused(1)
	must(t, err)
	host := fmt.Sprintf("127.0.0.1:%d", free[0])
	s := serveAt(t, p, []url.URL{{Scheme: "https", Host: host}, {Scheme: "http", Host: host}}, nil)
	if a := s.ClientAddrs(); len(a) != 2 || a[0].String() != host || a[1].String() != host {
		t.Errorf("%v", a)
	}
	for _, scheme := range []string{"http", "https"} {
		if a := mustGet(t, browser(t, p, byHTTP1), scheme+"://"+host+"/version"); a.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", scheme, a.Status)
		}
		cfg := clientv3.Config{Endpoints: []string{scheme + "://" + host}}
		if scheme == "https" {
			cfg.TLS = &tls.Config{RootCAs: p.pool}
		}
		client, err := clientv3.New(cfg)
		must(t, err)
		if _, err := client.Get(t.Context(), "k"); err != nil {
			t.Errorf("%s: %v", scheme, err)
		}
		must(t, client.Close())
	}
	other := New(Options{Users: everybody(t), KV: &fakeKV{}, Members: &fakeNode{}, Node: &fakeNode{}, Clock: clock.System()})
	if err := other.Bind([]url.URL{{Scheme: "http", Host: "127.0.0.1:1"}, {Scheme: "https", Host: "127.0.0.1:1"}}, nil); err == nil {
		t.Error("an https URL without a certificate is taken")
	}
}

// Two processes may listen at one address, if both agree.
func TestReusedPort(t *testing.T) {
	reuse := func(o *Options) { o.ReusePort = true }
	one := serveAt(t, nil, []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}, reuse)
	urls := []url.URL{{Scheme: "http", Host: one.ClientAddrs()[0].String()}}
	must(t, CheckPorts(urls, nil, nil, nil, true))
	if err := CheckPorts(urls, nil, nil, nil, false); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("without the option: %v", err)
	}
	two := serveAt(t, nil, urls, reuse)
	if a := two.ClientAddrs()[0].String(); a != urls[0].Host {
		t.Error(a)
	}
}

// The process's variables are where etcd has them.
func TestDebugVars(t *testing.T) {
	r := newRig(t, "http", nil)
	if code, body := getAs(t, http.DefaultClient, "http://"+r.addr()+"/debug/vars"); code != http.StatusOK || !strings.Contains(body, `"memstats"`) {
		t.Errorf("%d %.200s", code, body)
	}
}
