package loadtest

import (
	"io"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/loadtest/fakekv"
)

// TestWatchers: events that do not come, or come twice, break a promise.
func TestWatchers(t *testing.T) {
	for _, c := range []struct {
		name            string
		copies          func(*mvccpb.Event) int
		lost, duplicate int64 // 0 or above
		broken          string
	}{
		{"all come", func(*mvccpb.Event) int { return 1 }, 0, 0, ""},
		{"none comes", func(*mvccpb.Event) int { return 0 }, 1, 0, "2 promises broken, the first: a watcher did not get "},
		{"each comes twice", func(*mvccpb.Event) int { return 2 }, 0, 1, "than keys were put"},
	} {
		cfg := smallConfig(serve(t, &fakekv.Store{Copies: c.copies}))
		cfg.Verify, cfg.Fill, cfg.Keys, cfg.Total, cfg.Watchers = false, true, 10, 30, 2
		if c.lost > 0 {
			cfg.Timeout = 3 * time.Second // it is waited for what never comes
		}
		r, err := Run(t.Context(), cfg, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if w := r.Watch; (w.Lost > 0) != (c.lost > 0) || (w.Duplicate > 0) != (c.duplicate > 0) || w.Failed != 0 {
			t.Errorf("%s: %+v", c.name, w)
		}
		broken := r.Broken()
		if (broken != nil) != (c.broken != "") || broken != nil && !strings.Contains(broken.Error(), c.broken) {
			t.Errorf("%s: %v", c.name, broken)
		}
		if c.broken == "" && (r.Watch.Events != 80 || r.Watch.Delay.Count != 60) {
			t.Errorf("%s: %+v", c.name, r.Watch)
		}
	}
}
