package browser

import (
	"context"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/config"
)

var picture = flag.String("picture", "", "draw the README's picture of the overview into this file, of a cluster that has worked for -for")

var worked = flag.Duration("for", 5*time.Minute, "how long the cluster of -picture works")

// TestPicture draws the picture of the README, if that is asked for: make console ARGS='-run TestPicture -picture FILE'.
func TestPicture(t *testing.T) {
	if *picture == "" {
		t.Skip("without -picture nothing is drawn")
	}
	b := newTab(t)
	c, consoles := cluster(t, 3, 12, config.ConsoleReadOnly)
	fill(t, c)
	ctx, cancel := context.WithTimeout(t.Context(), *worked)
	defer cancel()
	var wg sync.WaitGroup
	for w := range 12 {
		_ = c.Watch(ctx, "/registry/", clientv3.WithPrefix())
		wg.Go(func() {
			// The load swells and falls, so that there is something to see.
			for i := 0; ctx.Err() == nil; i++ {
				key := fmt.Sprintf("%c/load/%02d/%04d", 'A'+(i*7)%58, w, i%500)
				_, _ = c.Put(ctx, key, fmt.Sprintf("%0200d", i)) // it ends with ctx
				for range 3 {
					_, _ = c.Get(ctx, key)
				}
				pause := 5 + 20*((time.Now().Unix()/20)%4)
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(pause) * time.Millisecond):
				}
			}
		})
	}
	wg.Wait()
	b.do(chromedp.EmulateViewport(1440, 1180), chromedp.Navigate(consoles[0]))
	b.shows("3 / 3")
	b.until("charts with points", `[...document.querySelectorAll(".charts .empty.over")].length === 0 && document.querySelectorAll(".charts canvas").length === 8`)
	b.until("light", `document.documentElement.dataset.theme === "light"`)
	b.do(chromedp.Sleep(time.Second)) // it is drawn
	png, err := chromedp.Run(b, chromedp.CaptureScreenshot())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(*picture, png, 0o600); err != nil {
		t.Fatal(err)
	}
}
