package loadtest

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest/fakekv"
)

// Connections are opened and the server's memory is read before and after. A server that tells no memory
// is an error.
func TestIdle(t *testing.T) {
	endpoint := serve(t, &fakekv.Store{})
	var asked atomic.Int64
	metrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprintf(w, "process_resident_memory_bytes %d\ngo_memstats_heap_alloc_bytes 5\n", asked.Add(1)*3000)
		}
	}))
	defer metrics.Close()
	cfg := IdleConfig{Endpoint: endpoint, MetricsURL: metrics.URL, Connections: 30, Streams: 1, Clock: clock.System()}
	r, err := Idle(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := r.Write(&out); err != nil || r.Connections != 30 || !strings.Contains(out.String(), " 100 bytes each") {
		t.Errorf("%v, %s", err, out.String())
	}
	cfg.MetricsURL = endpoint
	if _, err := Idle(t.Context(), cfg); err == nil {
		t.Error("a server without metrics is measured")
	}
}
