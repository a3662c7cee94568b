package console

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"mime"
	"net/http"
	"path"
	"strings"
	"sync"

	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// Services are the node's services, called in the name of who sent the request of the context.
type Services interface {
	grpc.ClientConnInterface
	// Root returns an error where that is not root, while users are checked.
	Root(ctx context.Context) error
	// Known says whether users are checked, and returns an error as Root does, both by what this node knows: it asks no
	// other node, and answers without a quorum.
	Known(ctx context.Context) (checked bool, err error)
}

// Options are what a console is made of. All but Full and Diagnose are required.
type Options struct {
	Services Services
	Clock    clock.Clock
	// Node is the name of the node, and Version that of the build.
	Node, Version string
	// Full lets commands and edits through.
	Full bool
	// Diagnose says what is wrong with a cluster. Nil says nothing.
	Diagnose func(*adminpb.SurveyResponse) []Finding
}

// Finding is something that is wrong.
type Finding struct {
	// Severity is critical, warning or note.
	Severity string `json:"severity"`
	// Check is the check in a word, as quorum.
	Check string `json:"check"`
	What  string `json:"what"`
	// Next is what to do.
	Next string `json:"next"`
}

// prefix is where the console is served.
const prefix = "/console/"

//go:embed dist
var dist embed.FS

// file is a file of the page.
type file struct {
	plain, packed []byte
	kind, tag     string
}

// files are those of the page by their names. They are packed when the first reader comes: a start does not wait for it.
var files = sync.OnceValue(readFiles)

func readFiles() map[string]file {
	entries, err := dist.ReadDir("dist")
	if err != nil {
		panic(fmt.Sprintf("console: read what is linked in: %v", err))
	}
	all := make(map[string]file, len(entries))
	for _, e := range entries {
		b, err := dist.ReadFile("dist/" + e.Name())
		if err != nil {
			panic(fmt.Sprintf("console: read what is linked in: %v", err))
		}
		sum := sha256.Sum256(b)
		f := file{plain: b, kind: mime.TypeByExtension(path.Ext(e.Name())), tag: `"` + hex.EncodeToString(sum[:8]) + `"`}
		var packed bytes.Buffer
		w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // the level is valid
		_, _ = w.Write(b)                                          // into memory
		_ = w.Close()
		f.packed = packed.Bytes()
		all[e.Name()] = f
	}
	return all
}

// New returns what serves everything below /console/.
func New(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(prefix+"{file...}", func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
			return
		}
		name := r.PathValue("file")
		if name == "" {
			name = "index.html"
		}
		f, ok := files()[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		f.serve(w, r)
	})
	newAPI(o).register(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		mux.ServeHTTP(w, r)
	})
}

// serve sends a file, unless the browser has it.
func (f *file) serve(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("Cache-Control", "no-cache") // it may keep it, and asks whether it is still this one
	h.Set("ETag", f.tag)
	h.Set("Vary", "Accept-Encoding")
	if r.Header.Get("If-None-Match") == f.tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	body := f.plain
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		body = f.packed
	}
	_, _ = w.Write(body) // a reader who is gone
}
