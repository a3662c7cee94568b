package target

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/minio/minio-go/v7"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/ports"
)

// s3Server is one versitygw of all tests, built from the module in s3server.
type s3Server struct {
	once sync.Once
	dir  string
	addr string
	cmd  *exec.Cmd
	err  error
	log  bytes.Buffer
	// ended is closed when the process has ended.
	ended chan struct{}
}

var server s3Server

func (s *s3Server) start() error {
	var err error
	if s.dir, err = os.MkdirTemp("", "s3server"); err != nil {
		return err
	}
	bin := filepath.Join(s.dir, "versitygw")
	build := exec.Command("go", "build", "-o", bin, "github.com/versity/versitygw/cmd/versitygw")
	build.Dir = "s3server"
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build versitygw: %w\n%s", err, out)
	}
	for _, d := range []string{"data", "sidecar"} {
		if err := os.Mkdir(filepath.Join(s.dir, d), 0o700); err != nil {
			return err
		}
	}
	port, err := ports.Unused(1)
	if err != nil {
		return err
	}
	s.addr = fmt.Sprintf("127.0.0.1:%d", port[0])
	s.cmd = exec.Command(bin, "--access", "backup-test", "--secret", "backup-secret", "--port", s.addr, "posix",
		"--sidecar", filepath.Join(s.dir, "sidecar"), filepath.Join(s.dir, "data"))
	s.cmd.Stdout, s.cmd.Stderr = &s.log, &s.log
	if err := s.cmd.Start(); err != nil {
		return err
	}
	s.ended = make(chan struct{})
	go func() {
		_ = s.cmd.Wait()
		close(s.ended)
	}()
	for {
		if conn, err := net.Dial("tcp", s.addr); err == nil {
			return conn.Close()
		}
		select {
		case <-s.ended:
			return fmt.Errorf("versitygw has ended: %s", s.log.String())
		default:
		}
	}
}

func (s *s3Server) stop() {
	if s.ended != nil {
		_ = s.cmd.Process.Kill()
		<-s.ended
	}
	if s.dir != "" {
		_ = os.RemoveAll(s.dir)
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// openS3Test opens a bucket of its own behind a proxy.
func openS3Test(t *testing.T) (*bucket, *proxy) {
	t.Helper()
	if testing.Short() {
		t.Skip("the S3 server is compiled for it, which takes minutes: make long")
	}
	server.once.Do(func() { server.err = server.start() })
	if server.err != nil {
		t.Fatal(server.err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "backup-test")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "backup-secret")
	p := newProxy(t)
	name := strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(t.Name()))
	tgt, err := Open(fmt.Sprintf("s3://%s/some/prefix?endpoint=%s&region=us-east-1&path-style=1", name, p.url), clock.System())
	if err != nil {
		t.Fatal(err)
	}
	b := tgt.(*bucket)
	if err := b.core.MakeBucket(t.Context(), name, minio.MakeBucketOptions{}); err != nil {
		t.Fatal(err)
	}
	return b, p
}

// A fault of the proxy does something else than to pass the request on, and says whether it
// did.
type fault func(w http.ResponseWriter, r *http.Request, pass http.Handler) bool

// proxy stands between client and server.
type proxy struct {
	url  string
	pass http.Handler

	mu     sync.Mutex
	faults []fault
	seen   []string
}

func newProxy(t *testing.T) *proxy {
	t.Helper()
	transport := &http.Transport{}
	p := &proxy{pass: &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: server.addr})
			r.Out.Host = r.In.Host // it is signed
		},
		Transport: transport,
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) {
			panic(http.ErrAbortHandler)
		},
	}}
	srv := httptest.NewServer(p)
	p.url = srv.URL
	t.Cleanup(func() {
		srv.Close()
		transport.CloseIdleConnections()
	})
	return p
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	op := r.Method
	for _, q := range []string{"uploads", "partNumber", "uploadId", "list-type"} {
		if r.URL.Query().Has(q) {
			op += " " + q
			break
		}
	}
	p.mu.Lock()
	p.seen = append(p.seen, op)
	faults := slices.Clone(p.faults)
	p.mu.Unlock()
	for _, f := range faults {
		if f(w, r, p.pass) {
			return
		}
	}
	p.pass.ServeHTTP(w, r)
}

func (p *proxy) inject(fs ...fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.faults, p.seen = fs, nil
}

// count says how many requests of the kind there were since inject.
func (p *proxy) count(op string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.seen {
		if s == op {
			n++
		}
	}
	return n
}

// times makes a fault happen for n matching requests only.
func times(n int, match func(*http.Request) bool, f fault) fault {
	var mu sync.Mutex
	return func(w http.ResponseWriter, r *http.Request, pass http.Handler) bool {
		if !match(r) {
			return false
		}
		mu.Lock()
		n--
		happens := n >= 0
		mu.Unlock()
		return happens && f(w, r, pass)
	}
}

func method(m, query string) func(*http.Request) bool {
	return func(r *http.Request) bool {
		return r.Method == m && (query == "" || r.URL.Query().Has(query))
	}
}

// unavailable is S3's "slow down".
func unavailable(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
	_, _ = io.Copy(io.Discard, r.Body)
	w.WriteHeader(http.StatusServiceUnavailable)
	fmt.Fprint(w, `<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>`)
	return true
}

// cutRequest ends the connection in the middle of the request's body.
func cutRequest(_ http.ResponseWriter, r *http.Request, _ http.Handler) bool {
	_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
	panic(http.ErrAbortHandler)
}

// loseAnswer passes the request on and ends the connection in the place of an answer.
func loseAnswer(_ http.ResponseWriter, r *http.Request, pass http.Handler) bool {
	pass.ServeHTTP(httptest.NewRecorder(), r)
	panic(http.ErrAbortHandler)
}

// cutAnswer ends the connection in the middle of the answer's body.
func cutAnswer(w http.ResponseWriter, r *http.Request, pass http.Handler) bool {
	rec := httptest.NewRecorder()
	pass.ServeHTTP(rec, r)
	for k, v := range rec.Header() {
		w.Header()[k] = v
	}
	w.WriteHeader(rec.Code)
	_, _ = w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func TestS3(t *testing.T) {
	b, _ := openS3Test(t)
	testTarget(t, b)
}

// Trap 120: an S3 service that answers 503, cuts the upload of a part or loses an answer.
func TestS3PutUnderFaults(t *testing.T) {
	b, p := openS3Test(t)
	large := randomBytes(1, 2*partBytes+1000)
	for i, c := range []struct {
		name  string
		data  []byte
		fault fault
		op    string
		times int // how often the request is seen
	}{
		{"503 for a small file", []byte("small"), times(2, method("PUT", ""), unavailable), "PUT", 3},
		{"small file cut", make([]byte, 1<<20), times(2, method("PUT", ""), cutRequest), "PUT", 3},
		{"answer for a small file lost", []byte("small"), times(1, method("PUT", ""), loseAnswer), "PUT", 2},
		{"503 for the beginning", large, times(2, method("POST", "uploads"), unavailable), "POST uploads", 3},
		{"503 for a part", large, times(2, method("PUT", "partNumber"), unavailable), "PUT partNumber", 5},
		{"part cut", large, times(2, method("PUT", "partNumber"), cutRequest), "PUT partNumber", 5},
		{"answer for a part lost", large, times(1, method("PUT", "partNumber"), loseAnswer), "PUT partNumber", 4},
		{"503 for the end", large, times(2, method("POST", "uploadId"), unavailable), "POST uploadId", 3},
		{"answer for the end lost", large, times(1, method("POST", "uploadId"), loseAnswer), "POST uploadId", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := fmt.Sprintf("faults/%d", i)
			p.inject(c.fault)
			if err := b.Put(t.Context(), name, bytes.NewReader(c.data)); err != nil {
				t.Fatal(err)
			}
			if n := p.count(c.op); n != c.times {
				t.Errorf("%d requests %s, want %d", n, c.op, c.times)
			}
			p.inject()
			if got := read(t, b, name, 0); !bytes.Equal(got, c.data) {
				t.Errorf("%d bytes, or others", len(got))
			}
		})
	}
}

// Trap 120: a download that is cut goes on where it was.
func TestS3GetUnderFaults(t *testing.T) {
	b, p := openS3Test(t)
	data := randomBytes(3, 5<<20)
	if err := b.Put(t.Context(), "a", bytes.NewReader(data)); err != nil {
		t.Fatal(err)
	}
	p.inject(times(2, method("GET", ""), unavailable), times(4, method("GET", ""), cutAnswer))
	if got := read(t, b, "a", 0); !bytes.Equal(got, data) {
		t.Errorf("%d bytes, or others", len(got))
	}
	if n := p.count("GET"); n != 7 {
		t.Errorf("%d requests, want 7", n)
	}
	// A file that was replaced meanwhile is not read on.
	p.inject(times(1, method("GET", ""), cutAnswer))
	r, err := b.Get(t.Context(), "a", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if err := b.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if err := b.Put(t.Context(), "a", bytes.NewReader(randomBytes(4, 5<<20))); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err == nil {
		t.Errorf("%d bytes of two files", len(got))
	}
}

// What a failed upload has sent is removed: a service would keep and bill it.
func TestS3LeavesNoParts(t *testing.T) {
	b, p := openS3Test(t)
	forbid := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>`)
		return true
	}
	second := func(r *http.Request) bool { return r.URL.Query().Get("partNumber") == "2" }
	p.inject(times(1, second, forbid))
	err := b.Put(t.Context(), "x", bytes.NewReader(make([]byte, 2*partBytes)))
	if err == nil || !strings.Contains(err.Error(), "check AWS_ACCESS_KEY_ID") {
		t.Errorf("put: %v", err)
	}
	uploads, err := b.core.ListMultipartUploads(t.Context(), b.o.bucket, "", "", "", "", 100)
	if err != nil || len(uploads.Uploads) > 0 {
		t.Errorf("uploads %v, error %v", uploads.Uploads, err)
	}
}

// A Put holds one part in memory, however large the file is.
func TestS3PutHasBoundedMemory(t *testing.T) {
	b, _ := openS3Test(t)
	const n = 8 * partBytes
	r := &countedReader{}
	if err := b.Put(t.Context(), "x", io.LimitReader(r, n)); err != nil {
		t.Fatal(err)
	}
	if r.largest > partBytes {
		t.Errorf("%d bytes were read at once", r.largest)
	}
	if got := list(t, b, ""); !slices.Equal(got, []string{fmt.Sprintf("x %d", n)}) {
		t.Error(got)
	}
}

type countedReader struct{ largest int }

func (r *countedReader) Read(b []byte) (int, error) {
	r.largest = max(r.largest, len(b))
	return len(b), nil
}
