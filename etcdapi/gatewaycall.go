package etcdapi

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
)

const (
	// A client must take gatewayChunkBytes of an answer within gatewayChunkTime, or its connection
	// ends.
	gatewayChunkBytes = 64 << 10
	gatewayChunkTime  = 30 * time.Second
	// gatewayUnsentFactor is what an answer takes, in lengths of its JSON: the JSON and the message
	// behind it.
	gatewayUnsentFactor = 2
)

// gatewayWriter writes the answer of one HTTP call. For gRPC the gateway is a client that takes the answer at once. So bytes that a slow HTTP client has not taken count here.
type gatewayWriter struct {
	http.ResponseWriter
	clock   clock.Clock
	answers *budget.Bytes
}

// Write implements io.Writer. It writes in chunks, each with its own deadline.
func (w *gatewayWriter) Write(p []byte) (n int, err error) {
	defer hold(w.answers, int64(len(p))*gatewayUnsentFactor).Release()
	for {
		w.moveDeadline()
		m, err := w.ResponseWriter.Write(p[n:min(n+gatewayChunkBytes, len(p))])
		if n += m; err != nil || n == len(p) {
			return n, err
		}
	}
}

// WriteHeader implements http.ResponseWriter.
func (w *gatewayWriter) WriteHeader(status int) {
	w.moveDeadline()
	w.ResponseWriter.WriteHeader(status)
}

// FlushError is called by http.ResponseController to flush.
func (w *gatewayWriter) FlushError() error {
	w.moveDeadline()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap lets http.ResponseController find the other controls.
func (w *gatewayWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// moveDeadline sets the deadline of the next write. Without deadlines the count of unsent bytes
// bounds a client.
func (w *gatewayWriter) moveDeadline() {
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(w.clock.Wall().Add(gatewayChunkTime))
}

// largeBodyFactor is how much larger than others one body at a time may be. gRPC takes no message
// of that size. But etcd answers with its size, so it has to be read.
const largeBodyFactor = 8

// gatewayBody is the body of one HTTP call.
type gatewayBody struct {
	io.ReadCloser // bounded
	whole         io.ReadCloser
	w             http.ResponseWriter
	// read counts what was read of maxBytes. A larger body has to be the large one: it sets large,
	// and isLarge. Without large it is refused.
	read, maxBytes int64
	large          *atomic.Bool
	isLarge        bool
	// stream says that the body is a stream of messages, each of which has the bound.
	stream bool
	// broken, if not nil, is called at a malformed message, behind which nothing is read.
	broken func()

	mu sync.Mutex
	// lasts says that the call may last for ever. Then the deadline for reading ends when the
	// client's request is complete. Guarded by mu.
	lasts bool
}

func newGatewayBody(w http.ResponseWriter, r *http.Request, maxBytes int64, large *atomic.Bool) *gatewayBody {
	b := &gatewayBody{whole: r.Body, w: w, maxBytes: maxBytes, large: large, stream: mayGoOn(r.URL.Path), lasts: mayLast(r.URL.Path)}
	b.bound()
	return b
}

// bound begins to count bytes.
func (b *gatewayBody) bound() {
	most := b.maxBytes
	if b.large != nil && !b.stream {
		most *= largeBodyFactor
	}
	b.ReadCloser, b.read = http.MaxBytesReader(b.w, b.whole, most), 0
}

// Read implements io.Reader.
func (b *gatewayBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.read += int64(n); b.read > b.maxBytes && b.large != nil && !b.isLarge {
		if b.isLarge = b.large.CompareAndSwap(false, true); !b.isLarge {
			return 0, &http.MaxBytesError{Limit: b.maxBytes}
		}
	}
	if errors.Is(err, io.EOF) {
		b.said()
	}
	return n, err
}

// message notes that a whole message was read.
func (b *gatewayBody) message() {
	if b.stream {
		b.said()
		b.bound()
	}
}

// said lifts the deadline for reading if the answer, or the next message, may come later. If it
// cannot be lifted, it stays.
func (b *gatewayBody) said() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lasts {
		b.lasts = false
		_ = http.NewResponseController(b.w).SetReadDeadline(time.Time{})
	}
}

// end ends the call. The rest of a stream's body is read until the deadline.
func (b *gatewayBody) end(deadline time.Time) {
	if b.isLarge { // no stream
		b.large.Store(false)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lasts = false
	if b.stream {
		_ = http.NewResponseController(b.w).SetReadDeadline(deadline)
	}
}

// gatewayJSON is the gateway's JSON. It tells a body where its messages end.
type gatewayJSON struct{ *runtime.JSONPb }

// NewDecoder implements runtime.Marshaler.
func (j gatewayJSON) NewDecoder(r io.Reader) runtime.Decoder {
	inner := j.JSONPb.NewDecoder(r)
	body, ok := r.(*gatewayBody)
	if !ok {
		return inner
	}
	return runtime.DecoderFunc(func(v any) error {
		err := inner.Decode(v)
		switch {
		case err == nil:
			body.message()
		case !errors.Is(err, io.EOF) && body.broken != nil:
			body.broken()
		}
		return err
	})
}

// mayGoOn says whether calls of a path are streams of requests.
func mayGoOn(path string) bool { return path == "/v3/watch" || path == "/v3/lease/keepalive" }

// mayLast says whether calls of a path may last for ever.
func mayLast(path string) bool {
	switch path {
	case "/v3/kv/compaction", // a physical one
		"/v3/watch", "/v3/lease/keepalive", "/v3/lock/lock", "/v3/election/campaign", "/v3/election/observe", "/v3/maintenance/snapshot":
		return true
	}
	return false
}
