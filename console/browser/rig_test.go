package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"go.etcd.io/etcd/client/pkg/v3/types"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/leftout"
	"github.com/skeindb/skein/node"
)

// patience bounds every wait. Nothing is measured by it: a machine may be slow.
const patience = time.Minute

// unused returns so many addresses of loopback at which nobody listens.
func unused(t *testing.T, n int) []url.URL {
	t.Helper()
	urls := make([]url.URL, n)
	held := make([]net.Listener, n) // all at once, so that none is given twice
	for i := range urls {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		held[i], urls[i] = l, url.URL{Scheme: "http", Host: l.Addr().String()}
	}
	for _, l := range held {
		l.Close()
	}
	return urls
}

// cluster starts nodes with a console each, and returns a client of them and the addresses of the consoles.
func cluster(t *testing.T, nodes, ranges int, mode config.ConsoleMode) (*clientv3.Client, []string) {
	t.Helper()
	c, consoles, _ := clusterToStop(t, nodes, ranges, mode, node.StartOptions{})
	return c, consoles
}

// clusterToStop is cluster, and what stops all nodes but the first. Each node is started with the options.
func clusterToStop(t *testing.T, nodes, ranges int, mode config.ConsoleMode, o node.StartOptions) (_ *clientv3.Client, consoles []string, stop func()) {
	t.Helper()
	urls := unused(t, 2*nodes)
	all := types.URLsMap{}
	cfgs := make([]*config.Config, nodes)
	var endpoints []string
	running := map[string]*node.Node{} // guarded by mu below
	for i := range cfgs {
		c := config.Default()
		c.Name = fmt.Sprintf("n%d", i+1)
		c.DataDir = filepath.Join(t.TempDir(), c.Name)
		c.WALDir = filepath.Join(c.DataDir, "wal")
		client, peer := urls[2*i:2*i+1], urls[2*i+1:2*i+2]
		c.ListenClientURLs, c.AdvertiseClientURLs = client, client
		c.ListenPeerURLs, c.AdvertisePeerURLs = peer, peer
		c.InitialCluster, c.InitialRanges, c.MemoryBytes = all, ranges, 256<<20
		c.Console, c.BcryptCost = mode, 4
		all[c.Name] = types.URLs(peer)
		cfgs[i] = c
		endpoints = append(endpoints, client[0].Host)
		consoles = append(consoles, client[0].String()+"/console/")
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	var errs []error
	for _, c := range cfgs {
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			n, err := node.StartWith(t.Context(), c, zap.NewNop(), o)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, err)
				return
			}
			running[c.Name] = n
		})
	}
	wg.Wait()
	end := func(last bool) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		var all sync.WaitGroup
		for name, n := range running {
			if !last && name == "n1" {
				continue
			}
			delete(running, name)
			all.Go(func() { _ = n.Stop(ctx) }) // without a quorum not everything ends in order
		}
		all.Wait()
	}
	t.Cleanup(func() { end(true) })
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		if _, err := c.Put(ctx, "first", "1"); err == nil {
			return c, consoles, func() { end(false) }
		}
		if ctx.Err() != nil {
			t.Fatal("the cluster does not serve")
		}
	}
}

// front is what stands before a console: it answers some paths below /console/api/ itself, with what is given as JSON. It returns
// its own address of the console.
func front(t *testing.T, console string, answers map[string]any) string {
	t.Helper()
	target, err := url.Parse(console)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, target.Host
		r.Out.Header.Del("Origin")
		r.Out.Header.Del("Sec-Fetch-Site")
	}})
	for path, v := range answers {
		mux.HandleFunc("/console/api/"+path, func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(v) // the page may be gone
		})
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/console/"
}

// tab is a page of a browser, which notes what the browser complains of.
type tab struct {
	context.Context
	t *testing.T

	mu sync.Mutex
	// complaints are errors of scripts, and what the browser refused. Guarded by mu.
	complaints []string
}

// newTab starts a browser. Where there is none the test is left out.
func newTab(t *testing.T) *tab {
	t.Helper()
	path := leftout.Tool(t, "chromium", "chromium")
	profile, err := os.MkdirTemp("", "console-browser-") //nolint:usetesting // the browser may still write when the test has ended
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(profile) }) // the browser may still write
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.UserDataDir(profile), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true), chromedp.Flag("lang", "en"),
		chromedp.WindowSize(1440, 900))
	allocated, cancel := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(cancel)
	ctx, cancel := chromedp.NewContext(allocated)
	t.Cleanup(cancel)
	b := &tab{Context: ctx, t: t}
	// This first call starts the browser, which lives as long as its context.
	if err := chromedp.Listen(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			b.complain(fmt.Sprintf("exception: %s %+v", e.ExceptionDetails.Text, e.ExceptionDetails.Exception))
		case *runtime.EventConsoleAPICalled:
			if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
				b.complain(fmt.Sprintf("console.%s: %+v", e.Type, e.Args))
			}
		case *log.EventEntryAdded:
			if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
				b.complain(fmt.Sprintf("%s: %s %s", e.Entry.Source, e.Entry.Text, e.Entry.URL))
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *tab) complain(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.complaints = append(b.complaints, what)
}

// clean fails where the browser has complained, but for what is expected.
func (b *tab) clean(expected ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
next:
	for _, c := range b.complaints {
		for _, e := range expected {
			if strings.Contains(c, e) {
				continue next
			}
		}
		b.t.Errorf("the browser complains: %s", c)
	}
}

// do runs actions in the page.
func (b *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.picture("failed")
		b.t.Fatalf("%v\n%s", err, b.text())
	}
}

// script runs JavaScript in the page.
func (b *tab) script(s string) {
	b.t.Helper()
	b.do(chromedp.Evaluate[chromedp.Void](s))
}

// valueOf is the value of an expression in the page.
func valueOf[T any](b *tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.t.Fatal(err)
	}
	return v
}

// text is what the page shows.
func (b *tab) text() (s string) {
	ctx, cancel := context.WithTimeout(b, patience)
	defer cancel()
	s, _ = chromedp.Run(ctx, chromedp.Evaluate[string](`document.body ? document.body.innerText : ""`)) // for the report of a failure
	return s
}

// until waits until an expression of JavaScript is true.
func (b *tab) until(what, expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, patience)
	defer cancel()
	for {
		ok, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("!!("+expression+")"))
		if err == nil && ok {
			return
		}
		if ctx.Err() != nil {
			b.picture("failed")
			b.t.Fatalf("%s: %s does not become true (%v)\n%s", what, expression, err, b.text())
		}
		_ = chromedp.Do(ctx, chromedp.Sleep(50*time.Millisecond)) // ends with ctx
	}
}

// shows waits until the page shows a text.
func (b *tab) shows(texts ...string) {
	b.t.Helper()
	for _, s := range texts {
		b.until("the text", fmt.Sprintf("document.body.innerText.includes(%q)", s))
	}
}

// press types keys at what has the focus.
func (b *tab) press(keys string) {
	b.t.Helper()
	b.do(chromedp.KeyEvent(keys))
}

// write fills in a field, in the place of what it has.
func (b *tab) write(field, text string) {
	b.t.Helper()
	b.until("the field "+field, fmt.Sprintf("document.querySelector(%q)", field))
	b.script(fmt.Sprintf(`(() => { const e = document.querySelector(%q); e.value = %q; e.dispatchEvent(new InputEvent("input", { bubbles: true })); })()`, field, text))
}

// click clicks the first button or link that is seen and whose text, or name, begins so.
func (b *tab) click(name string) {
	b.t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll("dialog[open] button, dialog[open] a")].concat([...document.querySelectorAll("button, a, tr, label")])
		.find((e) => e.offsetParent !== null && ((e.innerText || "").trim().startsWith(%[1]q) || (e.getAttribute("aria-label") || "").startsWith(%[1]q)))`, name)
	b.until("the button "+name, find)
	b.script(find + ".click()")
}

// picture keeps what the page looks like, where pictures are kept.
func (b *tab) picture(name string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b, patience)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Logf("no picture of %s: %v", name, err)
		return
	}
	path := filepath.Join(b.t.ArtifactDir(), name+".png")
	if err := os.WriteFile(path, png, 0o600); err != nil {
		b.t.Error(err)
	}
}
