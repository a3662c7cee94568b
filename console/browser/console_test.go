package browser

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node"
)

// html is a key that would run a script in a page that took it for HTML.
const html = `<img src=x onerror="window.hacked=1">`

// fill puts some keys.
func fill(t *testing.T, c *clientv3.Client) {
	t.Helper()
	put := func(key, value string, opts ...clientv3.OpOption) {
		if _, err := c.Put(t.Context(), key, value, opts...); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 250 {
		put(fmt.Sprintf("/registry/pods/default/web-%03d", i), fmt.Sprintf(`{"kind":"Pod","metadata":{"name":"web-%03d"},"phase":"Running"}`, i))
	}
	for i := range 5 {
		put("/config/limits", fmt.Sprintf(`{"most":%d}`, 100*(i+1)))
	}
	put(html, html)
	put("bin\xff\x00key", "\x00\x01\xfe\xff")
	l, err := c.Grant(t.Context(), 3600)
	if err != nil {
		t.Fatal(err)
	}
	put("/locks/leader", "n1", clientv3.WithLease(l.ID))
}

// Each page shows what there is, in light and in dark, without an error of a script or a thing that the policy refuses. A key
// that is HTML is text. What somebody puts is seen without a reload.
func TestPages(t *testing.T) {
	b := newTab(t)
	c, consoles := cluster(t, 3, 8, config.ConsoleReadOnly)
	fill(t, c)
	_ = c.Watch(t.Context(), "/registry/", clientv3.WithPrefix()) // somebody watches
	b.do(chromedp.Navigate(consoles[0]))
	b.shows("Nodes alive", "3 / 3", "Writes a second", "n3")
	for _, r := range valueOf[[]string](b, `performance.getEntriesByType("resource").slice(0, 8).map((r) => r.name.split("/console/")[1] + ": " + Math.round(r.startTime) + " to " + Math.round(r.responseEnd) + " ms")`) {
		t.Log(r)
	}
	t.Logf("the first page was there after %.0f ms", valueOf[float64](b, `performance.getEntriesByName("shown")[0].startTime`))
	b.until("charts with points", `[...document.querySelectorAll(".charts .empty.over")].length === 0 && document.querySelectorAll(".charts canvas").length === 8`)
	b.until("the keys are counted in a tile", `[...document.querySelectorAll(".tile")].some((e) => e.innerText.includes("Keys") && e.querySelector(".figure").innerText === "255")`)
	b.both("overview")

	b.press("3")
	b.shows("Leader", "Writes/s", "8 in all")
	b.both("ranges")
	b.script(`document.querySelector("tbody tr").focus()`)
	b.press(kb.ArrowDown + kb.Enter)
	b.shows("Replicas", "Generation", "leads", "follows")
	b.until("no commands", `![...document.querySelectorAll("button")].some((e) => e.innerText.startsWith("Split"))`)
	b.both("range")
	b.press(kb.Escape)
	b.until("the drawer is closed", `!document.querySelector(".drawer")`)
	b.press("/")
	b.until("the search has the focus", `document.activeElement.type === "search"`)
	b.write(`input[type=search]`, "no such range")
	b.shows("No range matches.")

	b.script(`document.activeElement.blur()`)
	b.press("4")
	b.shows("Fsync p99", "Build", "serving")
	b.both("nodes")
	b.click("n2")
	b.shows("Decommission", "Peers")
	b.both("node")
	b.press(kb.Escape)

	b.press("5")
	b.shows("Nothing is being moved", "Voters of each range", "There is no alarm.")
	b.both("operations")

	b.press("7")
	b.shows("Watchers behind", "/locks/leader", "Granted")
	b.both("watchers")

	b.press("8")
	b.shows("/registry/pods/default/web-100", "/config/limits", "255 in all")
	b.both("keys")
	if _, err := c.Put(t.Context(), "/a/live/key", "1"); err != nil {
		t.Fatal(err)
	}
	b.shows("/a/live/key")
	b.click("Next")
	b.shows("page 2", html, `bin\xff\x00key`)
	b.write(`input[type=search]`, `bin\xff`)
	b.shows(`bin\xff\x00key`, "1 in all")
	b.click(`bin\xff\x00key`)
	b.shows("no UTF-8: hex", "00 01 fe ff")
	b.picture("key-binary")
	b.press(kb.Escape)
	b.write(`input[type=search]`, "/config")
	b.shows("1 in all")
	b.click("/config/limits")
	b.shows("version 5", "version 1", `"most": 500`, "created the key")
	b.script(`[...document.querySelectorAll(".version")].at(-1).click()`)
	b.shows(`"most": 100`)
	b.both("key")
	if valueOf[bool](b, `!!window.hacked`) {
		t.Error("a key was taken for HTML")
	}
	b.clean()
}

// both takes a picture in light and in dark.
func (b *tab) both(name string) {
	b.t.Helper()
	for _, theme := range []string{"light", "dark"} {
		b.until("a switch", `document.documentElement.dataset.theme`)
		b.script(fmt.Sprintf(`document.documentElement.dataset.theme === %q || dispatchEvent(new KeyboardEvent("keydown", {key: "t"}))`, theme))
		b.until(theme, fmt.Sprintf(`document.documentElement.dataset.theme === %q`, theme))
		b.do(chromedp.Sleep(200 * time.Millisecond)) // for the picture alone: it is drawn
		b.picture(name + "-" + theme)
	}
}

// A full console commands the cluster and edits keys, after a question, and a refusal is shown in its two halves.
func TestCommands(t *testing.T) {
	b := newTab(t)
	c, consoles := cluster(t, 3, 4, config.ConsoleFull)
	b.do(chromedp.Navigate(consoles[0] + "#/keys"))
	b.click("New key")
	b.write(`dialog[open] input[name=key]`, `/new\x01`)
	b.write(`dialog[open] textarea`, "one")
	b.picture("dialog")
	b.click("New key")
	b.shows(`/new\x01`)
	value := func(want string) {
		t.Helper()
		resp, err := c.Get(t.Context(), "/new\x01")
		if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != want {
			t.Fatalf("%v, %v; want %q", resp, err, want)
		}
	}
	value("one")
	b.click(`/new\x01`)
	b.click("Edit")
	if _, err := c.Put(t.Context(), "/new\x01", "two"); err != nil { // meanwhile
		t.Fatal(err)
	}
	b.until("the page has seen the change", `[...document.querySelectorAll(".version")].length === 2`)
	b.write(`dialog[open] textarea`, "one more")
	b.click("Edit")
	b.shows("the key has changed meanwhile: nothing was done")
	value("two")
	b.click("Cancel")
	b.click("Edit")
	b.write(`dialog[open] textarea`, "two more")
	b.click("Edit")
	b.until("the dialog is closed", `!document.querySelector("dialog[open]")`)
	b.shows("version 3")
	value("two more")
	b.click("Delete")
	b.until("the question", `document.querySelector("dialog[open]")`)
	b.click("Delete")
	b.shows("The key is not there")
	if resp, err := c.Get(t.Context(), "/new\x01"); err != nil || resp.Count != 0 {
		t.Errorf("the key is there: %v, %v", resp, err)
	}
	b.press(kb.Escape)

	b.do(chromedp.Navigate(consoles[1] + "#/ranges"))
	b.shows("4 in all")
	b.until("the nodes to choose from", `document.querySelectorAll("select[aria-label=node] option").length === 4`)
	b.script(`document.querySelector("tbody tr").click()`)
	b.click("Split")
	b.write(`dialog[open] input[name=key]`, "/m")
	b.click("Split")
	b.shows("5 in all")
	b.click("Split")
	b.write(`dialog[open] input[name=key]`, "/m")
	b.click("Split")
	b.until("a refusal in two halves", `document.querySelector("dialog[open] .problem span")`)
	b.both("refusal")
	b.click("Cancel")

	b.do(chromedp.Navigate(consoles[1] + "#/nodes"))
	b.click("n3")
	b.click("Drain")
	b.shows("hands over the")
	b.click("Drain")
	b.until("it drains", `[...document.querySelectorAll(".badge")].some((e) => e.innerText === "draining")`)
	b.both("draining")
	b.click("Undrain")
	b.until("the question", `document.querySelector("dialog[open]")`)
	b.click("Undrain")
	b.until("it serves again", `![...document.querySelectorAll(".badge")].some((e) => e.innerText === "draining")`)
	b.clean("status of 400") // what is refused
}

// With users one logs in: root sees all, others the keys that they may read, and a reload logs out.
func TestLogin(t *testing.T) {
	b := newTab(t)
	c, consoles := cluster(t, 1, 2, config.ConsoleReadOnly)
	fill(t, c)
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(c.UserAdd(ctx, "root", "r"))
	must(c.RoleAdd(ctx, "root"))
	must(c.UserGrantRole(ctx, "root", "root"))
	must(c.UserAdd(ctx, "ann", "a"))
	must(c.RoleAdd(ctx, "pods"))
	must(c.RoleGrantPermission(ctx, "pods", "/registry/pods/", clientv3.GetPrefixRangeEnd("/registry/pods/"), clientv3.PermissionType(clientv3.PermRead)))
	must(c.UserGrantRole(ctx, "ann", "pods"))
	must(c.AuthEnable(ctx))

	b.do(chromedp.Navigate(consoles[0]))
	logIn := func(name, password string) {
		t.Helper()
		b.write(`input[name=name]`, name)
		b.write(`input[name=password]`, password)
		b.click("Log in")
	}
	b.shows("This cluster checks users.")
	b.both("login")
	logIn("ann", "wrong")
	b.shows("authentication failed")
	logIn("ann", "a")
	b.shows("Log out ann", "permission denied")
	b.until("only the keys", `document.querySelectorAll("nav.side > a:not(.brand)").length === 1`)
	b.write(`input[type=search]`, "/registry/pods/")
	b.shows("web-007", "250 in all")
	b.both("keys-of-ann")
	b.click("Log out")
	logIn("root", "r")
	b.shows("Nodes alive", "1 / 1")
	b.do(chromedp.Reload())
	b.shows("This cluster checks users.")
	b.until("no cookie", `document.cookie === "" && sessionStorage.length === 0`)
	b.clean("status of 400", "status of 401", "status of 403") // what is refused
}

// Slow requests show where their time went, on an answer made by hand. TestWithoutAQuorum has a real one.
func TestSlow(t *testing.T) {
	b := newTab(t)
	_, consoles := cluster(t, 1, 1, config.ConsoleReadOnly)
	b.do(chromedp.Navigate(front(t, consoles[0], map[string]any{"call/skein.admin.v1.Admin/Slow": slow()}) + "#/slow"))
	b.shows("waited 412 ms for the lock", "Where the time went", "lock")
	b.both("slow")
	b.clean()
}

func slow() map[string]any {
	var calls []any
	for i := range 12 {
		calls = append(calls, map[string]any{
			"node": "1", "at_unix_nanos": fmt.Sprint(time.Now().Add(-time.Duration(i) * 7 * time.Second).UnixNano()), "method": "/etcdserverpb.KV/Txn", "range_id": "7",
			"micros": fmt.Sprint(430_000 - 20_000*i), "cause": "waited 412 ms for the lock of a transaction on range 9", "request_bytes": "310", "response_bytes": "28",
			"stages": []any{map[string]any{"name": "queue", "micros": "8000"}, map[string]any{"name": "lock", "micros": fmt.Sprint(380_000 - 20_000*i)}, map[string]any{"name": "log", "micros": "21000"}},
		})
	}
	return map[string]any{"calls": calls}
}

// What the page shows of a cluster without a quorum is marked as such.
func TestWithoutAQuorum(t *testing.T) {
	b := newTab(t)
	c, consoles, stop := clusterToStop(t, 3, 4, config.ConsoleReadOnly, node.StartOptions{})
	fill(t, c)
	b.do(chromedp.Navigate(consoles[0]))
	b.shows("3 / 3")
	stop()
	b.shows("1 / 3", "dead")
	b.until("a finding that is critical", `document.querySelector(".finding.critical")`)
	b.both("no-quorum")
	b.press("3")
	b.script(`document.querySelector("input[type=checkbox]").click()`)
	b.shows("no quorum")
	b.both("ranges-no-quorum")
	// A request that has waited in vain is a slow one.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	c.SetEndpoints(strings.TrimSuffix(consoles[0], "/console/"))
	if _, err := c.Delete(ctx, "/config/limits"); err == nil {
		t.Error("a delete needs no quorum")
	}
	b.press("6")
	b.until("the delete", `[...document.querySelectorAll("tbody tr")].some((r) => /n1\s+DeleteRange\s/.test(r.innerText) && r.querySelector(".stages i"))`)
	b.picture("slow-no-quorum")
	// Whoever comes now sees it too.
	b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(consoles[0]))
	b.shows("1 / 3", "dead")
	b.clean("status of 503") // of the questions that need a quorum
}

// Trap: a text area knows line feeds alone, and a decoder drops the mark of the byte order. An edit changes nothing that nobody
// has edited: a value that would not come back as it was is not offered for one.
func TestEditsKeepTheBytes(t *testing.T) {
	b := newTab(t)
	c, consoles := cluster(t, 1, 1, config.ConsoleFull)
	for i, test := range []struct{ value, want string }{
		{"a\nb\n", "a\nb\n+"},
		{"\na", "\na+"},
		{"a\r\nb\r\n", "a\r\nb\r\n+"},
		{"\ufeffa", "\ufeffa+"},
		{"a\r\nb\n", ""},
		{"a\rb", ""},
		{"a\r\r\nb", ""},
	} {
		key := fmt.Sprintf("/edit/%d", i)
		if _, err := c.Put(t.Context(), key, test.value); err != nil {
			t.Fatal(err)
		}
		b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(consoles[0]+"#/keys"))
		b.click(key)
		b.until("the key is open", `[...document.querySelectorAll("button")].some((e) => e.innerText.startsWith("Delete"))`)
		if offered := valueOf[bool](b, `[...document.querySelectorAll("button")].some((e) => e.innerText.startsWith("Edit"))`); offered != (test.want != "") {
			t.Errorf("%q: an edit is offered: %v", test.value, offered)
		}
		if test.want == "" {
			continue
		}
		b.click("Edit")
		b.until("the question", `document.querySelector("dialog[open] textarea")`)
		b.script(`document.querySelector("dialog[open] textarea").value += "+"`)
		b.click("Edit")
		b.until("the dialog is closed", `!document.querySelector("dialog[open]")`)
		if resp, err := c.Get(t.Context(), key); err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != test.want {
			t.Errorf("%q: %v, %v; want %q", test.value, resp, err, test.want)
		}
	}
	b.clean()
}

// The clock of the reader's machine does not matter to what the nodes have measured.
func TestTheReadersClockIsWrong(t *testing.T) {
	b := newTab(t)
	c, consoles := cluster(t, 1, 1, config.ConsoleReadOnly)
	fill(t, c)
	for _, minutes := range []int{2, 120, -120} {
		b.do(chromedp.Navigate("about:blank"), chromedp.Navigate(consoles[0]))
		b.shows("Nodes alive") // the clock is read after that too
		b.readersClock(time.Duration(minutes) * time.Minute)
		b.press("8")
		b.shows("in all")
		b.press("1")
		b.until("the number of keys", `[...document.querySelectorAll(".tile")].some((e) => e.querySelector(".label").innerText === "Keys" && e.querySelector(".figure").innerText !== "0")`)
		b.press("2")
		b.until("the map", `document.querySelector(".heat canvas")`)
		b.do(chromedp.Focus(".heat canvas"))
		b.press(kb.ArrowRight)
		b.until("the last column is of the node's time", `Math.abs(new Date(document.querySelector(".readout time").innerText.split(",")[0]) - new Date()) < 180000`)
	}
	b.clean()
}

// readersClock has scripts of the page read a clock that is ahead by so much. new Date() is as before.
func (b *tab) readersClock(ahead time.Duration) {
	b.t.Helper()
	b.script(fmt.Sprintf(`(() => { const real = Date.now; Date.now = () => real() + %d; })()`, ahead.Milliseconds()))
}

// A page whose node does not say yet who is here asks again.
func TestThePageOpensLater(t *testing.T) {
	b := newTab(t)
	_, consoles := cluster(t, 1, 1, config.ConsoleReadOnly)
	target, err := url.Parse(consoles[0])
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int64
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = target.Scheme, target.Host, target.Host
		r.Out.Header.Del("Origin")
		r.Out.Header.Del("Sec-Fetch-Site")
	}}
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/console/api/session" && asked.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	b.do(chromedp.Navigate(front.URL + "/console/"))
	b.shows("1 / 1")
	if n := asked.Load(); n != 2 {
		t.Errorf("asked %d times who is here", n)
	}
	b.clean("status of 503")
}
