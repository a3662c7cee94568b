package apiserver

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// fake keeps objects as an API server does: each has a version, and a change needs that of the object.
type fake struct {
	mu       sync.Mutex
	version  int
	versions map[string]string // by path
	renewed  map[string]int
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Header.Get("Authorization") != "Bearer "+token {
		http.Error(w, "who is that", http.StatusUnauthorized)
		return
	}
	text, _ := io.ReadAll(r.Body)
	var o struct {
		Metadata struct{ Name, ResourceVersion string } `json:"metadata"`
	}
	path := r.URL.Path
	if len(text) > 0 {
		if err := json.Unmarshal(text, &o); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
	}
	if r.Method == http.MethodPost {
		path += "/" + o.Metadata.Name
	}
	has, there := f.versions[path]
	switch {
	case there == (r.Method == http.MethodPost), r.Method == http.MethodPut && has != o.Metadata.ResourceVersion:
		http.Error(w, "conflict at "+path, http.StatusConflict)
		return
	case r.Method == http.MethodDelete:
		delete(f.versions, path)
	default:
		f.version++
		f.versions[path] = strconv.Itoa(f.version)
	}
	if r.Method == http.MethodPut {
		f.renewed[path]++
	}
	_, _ = io.WriteString(w, `{"metadata":{"resourceVersion":"`+f.versions[path]+`"}}`)
}

// TestLoad: each kind does what it says, as often as it is asked to, and what the server refuses ends it.
func TestLoad(t *testing.T) {
	f := &fake{versions: map[string]string{}, renewed: map[string]int{}}
	web := httptest.NewUnstartedServer(f)
	web.EnableHTTP2 = true
	web.StartTLS()
	defer web.Close()
	s := &Server{url: web.URL, clients: []*http.Client{web.Client()}}
	for range 2 {
		for _, what := range []string{Create, Renew, Delete} {
			r, err := s.Load(t.Context(), what, 2500, 7)
			if err != nil || r.PerSecond <= 0 || r.P50 <= 0 || r.P99 < r.P50 {
				t.Fatalf("%s: %+v, %v", what, r, err)
			}
			there := 0
			for path := range f.versions {
				there += strings.Count(path, pods+"/")
			}
			if want := map[string]int{Create: 2500, Renew: 2500}[what]; there != want {
				t.Errorf("after %s there are %d pods, want %d", what, there, want)
			}
		}
	}
	renewals, most := 0, 0
	for _, n := range f.renewed {
		renewals, most = renewals+n, max(most, n)
	}
	if renewals != 5000 || most > 6 {
		t.Errorf("%d renewals, of one node %d", renewals, most)
	}
	if _, err := s.Load(t.Context(), Delete, 10, 3); err == nil || !strings.Contains(err.Error(), "409 Conflict: conflict at "+pods+"/pod-") {
		t.Errorf("a delete of what is gone: %v", err)
	}
	for what, workers := range map[string]int{"restart": 1, Renew: heldLeases + 1} {
		if _, err := s.Load(t.Context(), what, 1, workers); err == nil {
			t.Errorf("%s by %d workers", what, workers)
		}
	}
}

// TestServerThatEnds: a server that ends by itself is named with its log, and does not keep its caller waiting.
func TestServerThatEnds(t *testing.T) {
	for _, binary := range []string{"true", "false"} {
		_, err := Start(t.Context(), binary, filepath.Join(t.TempDir(), "s"), 1, "http://127.0.0.1:2")
		if err == nil || !strings.Contains(err.Error(), "kube-apiserver ended by itself (exit status") || !strings.Contains(err.Error(), "/s/log") {
			t.Errorf("%s: %v", binary, err)
		}
	}
}

// TestModule: the module that builds a version takes the published staging modules of that version.
func TestModule(t *testing.T) {
	var m module
	const upstream = `{"Go": "1.26.0", "Replace": [
		{"Old": {"Path": "k8s.io/api"}, "New": {"Path": "./staging/src/k8s.io/api"}},
		{"Old": {"Path": "example.com/fork"}, "New": {"Path": "example.com/other", "Version": "v1.0.0"}}]}`
	if err := json.Unmarshal([]byte(upstream), &m); err != nil {
		t.Fatal(err)
	}
	const want = `module build

go 1.26.0

require k8s.io/kubernetes v1.36.3

replace k8s.io/api => k8s.io/api v0.36.3
`
	if got := m.build("v1.36.3"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if err := Build(t.Context(), "1.36", t.TempDir(), "x"); err == nil || !strings.Contains(err.Error(), "such as v1.36.3") {
		t.Error(err)
	}
}
