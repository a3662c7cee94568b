package browser

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node"
)

// setAhead is the machine's clock, but for the wall clock, which somebody sets ahead.
type setAhead struct {
	clock.Clock
	by atomic.Int64 // a time.Duration
}

func (c *setAhead) Wall() time.Time { return c.Clock.Wall().Add(time.Duration(c.by.Load())) }

// nextMinute sets the wall clock to where the next minute begins.
func (c *setAhead) nextMinute() {
	now := c.Wall()
	c.by.Add(int64(now.Truncate(time.Minute).Add(time.Minute).Sub(now)))
}

const (
	// heatMinutes is how long the load of the heat map lasts, by the node's wall clock.
	heatMinutes = 16
	// Each minute has so many puts of the few keys of a hot prefix, of keys that nobody has used before, and of others.
	hotPuts, newPuts, otherPuts = 320, 40, 24
)

// heatLoad puts what the heat map shows: the same keys again and again, new ones in their order, and some others.
type heatLoad struct {
	t *testing.T
	c *clientv3.Client
	// puts are those so far.
	puts uint64
}

// minute does a minute's puts, and waits until the node has counted them: then its clock may be set to the next one.
func (l *heatLoad) minute(n int) {
	l.t.Helper()
	var keys []string
	for i := range hotPuts {
		keys = append(keys, fmt.Sprintf("/leader/%d", i%4))
	}
	for i := range newPuts {
		keys = append(keys, fmt.Sprintf("/events/%05d", n*newPuts+i))
	}
	for i := range otherPuts {
		keys = append(keys, fmt.Sprintf("/registry/pods/web-%03d", (37*n+53*i)%200))
	}
	const clients = 16
	var wg sync.WaitGroup
	for w := range clients {
		wg.Go(func() {
			for i := w; i < len(keys); i += clients {
				if _, err := l.c.Put(l.t.Context(), keys[i], "value"); err != nil {
					l.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	l.puts += uint64(len(keys))
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	for counted := uint64(0); counted < l.puts; {
		m, err := adminpb.NewAdminClient(l.c.ActiveConnection()).Heat(ctx, &adminpb.HeatRequest{LastSeconds: 3600, Start: []byte("/"), End: []byte("0")})
		if err != nil {
			l.t.Fatalf("%d of %d puts are counted: %v", counted, l.puts, err)
		}
		counted = 0
		for _, w := range m.GetWrites() {
			counted += w
		}
		_ = clock.Sleep(ctx, clock.System(), 50*time.Millisecond) // ends with ctx
	}
}

// brightest has the pixels of the map that differ most from where nothing was, one for each column in which there was anything:
// [x, y] in the page. Of several that are as bright and lie together it is the middle one, as two rows may share a pixel.
const brightest = `(() => {
	const c = document.querySelector(".heat canvas"), at = c.getBoundingClientRect(), r = c.height / at.height, columns = 61;
	const left = Math.round(190 * r), wide = c.width - left, high = Math.floor((at.height - 26) * r);
	const p = c.getContext("2d").getImageData(left, 0, wide, high).data;
	const far = (x, y) => [0, 1, 2].reduce((sum, k) => sum + Math.abs(p[4 * (y * wide + x) + k] - p[4 * (wide + 1) + k]), 0);
	const out = [];
	for (let i = 0; i < columns; i++) {
		const x = Math.floor(((i + 0.5) / columns) * wide);
		let best = 0, from = 0, to = 0;
		for (let y = 0; y < high; y++) {
			const d = far(x, y);
			if (d > best) { best = d; from = to = y; } else if (d === best && y === to + 1) { to = y; }
		}
		if (best > 0) out.push([at.left + (left + x + 0.5) / r, at.top + (Math.floor((from + to) / 2) + 0.5) / r]);
	}
	return out;
})()`

// pointed points at each of the places, and returns what the map says of them.
func (b *tab) pointed(at [][2]float64) (said []string) {
	b.t.Helper()
	for _, p := range at {
		b.script(pointAt(p))
		b.until("what is there", `document.querySelector(".readout time")`)
		said = append(said, valueOf[string](b, `document.querySelector(".readout").innerText`))
		b.pointNowhere()
	}
	return said
}

func (b *tab) pointNowhere() {
	b.t.Helper()
	b.script(`document.querySelector(".heat canvas").dispatchEvent(new MouseEvent("mouseleave"))`)
	b.until("nothing", `!document.querySelector(".readout time")`)
}

func pointAt(p [2]float64) string {
	return fmt.Sprintf(`document.querySelector(".heat canvas").dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: %f, clientY: %f}))`, p[0], p[1])
}

// The heat map of a real load: a hot prefix is the brightest row at all times, and keys that are put in their order are a
// diagonal. Both are found by the pixels, and the map says of these which keys they are. The reader's clock is as far behind the
// node's as the load has lasted.
func TestHeat(t *testing.T) {
	b := newTab(t)
	wall := &setAhead{Clock: clock.System()}
	c, consoles, _ := clusterToStop(t, 1, 1, config.ConsoleReadOnly, node.StartOptions{Clock: wall})
	l := &heatLoad{t: t, c: c}
	for i := range heatMinutes {
		wall.nextMinute()
		l.minute(i)
	}
	wall.nextMinute() // none of their columns is short

	b.do(chromedp.Navigate(consoles[0] + "#/heat"))
	b.until("the map", `document.querySelector(".heat canvas")?.width > 300`)
	at := valueOf[[][2]float64](b, brightest)
	if len(at) != heatMinutes {
		t.Errorf("there is something in %d columns, want %d", len(at), heatMinutes)
	}
	for _, said := range b.pointed(at) {
		if !strings.HasPrefix(said, "/leader/") {
			t.Errorf("the brightest row of a column: %s", said)
		}
	}
	b.do(chromedp.Focus(".heat canvas"))
	b.press(kb.ArrowUp + kb.ArrowLeft)
	b.shows("writes", "reads", "written", " to ")
	b.both("heat")
	b.do(chromedp.Blur(".heat canvas"))
	b.pointNowhere()

	b.write(`input[type=search]`, "/events/")
	b.until("the new keys alone", `(() => {
		const c = document.querySelector(".heat canvas"), at = c.getBoundingClientRect();
		c.dispatchEvent(new MouseEvent("mousemove", {bubbles: true, clientX: at.left + 200, clientY: at.top + 1}));
		return document.querySelector(".readout").innerText.startsWith("/events/");
	})()`)
	b.pointNowhere()
	at = valueOf[[][2]float64](b, brightest)
	if len(at) != heatMinutes {
		t.Errorf("there is something in %d columns, want %d", len(at), heatMinutes)
	}
	for i, said := range b.pointed(at) {
		number, _, _ := strings.Cut(strings.TrimPrefix(said, "/events/"), " ")
		if n, err := strconv.Atoi(number); err != nil || n/newPuts != i {
			t.Errorf("the brightest row of column %d is not of the keys from %d on: %s", i, i*newPuts, said)
		}
		if i > 0 && at[i][1] >= at[i-1][1] {
			t.Errorf("column %d is brightest at %.0f, that before it at %.0f: it does not rise", i, at[i][1], at[i-1][1])
		}
	}
	b.both("heat-diagonal")
	b.click("reads")
	b.shows("Nothing was read or written")
	b.clean("willReadFrequently") // the test reads the pixels twice
}

// The last column is not over. It counts for the time that it has lasted by the node's clock.
func TestTheLastColumn(t *testing.T) {
	b := newTab(t)
	_, consoles := cluster(t, 1, 1, config.ConsoleReadOnly)
	begun := time.Now().Add(-40 * time.Second).Unix()
	column := func(start int64) any {
		return map[string]any{"start_unix_seconds": strconv.FormatInt(start, 10), "seconds": 60}
	}
	b.do(chromedp.Navigate(front(t, consoles[0], map[string]any{"call/skein.admin.v1.Admin/Heat": map[string]any{
		"starts": []string{base64.StdEncoding.EncodeToString([]byte("/a"))}, "columns": []any{column(begun - 60), column(begun)},
		"writes": []string{"300", "150"}, "reads": []string{"0", "0"}, "bytes": []string{"0", "0"}, "unix_ms": strconv.FormatInt((begun+15)*1000, 10),
	}}) + "#/heat"))
	b.shows("10.0/s")
	b.clean()
}
