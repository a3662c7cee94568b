package router

import (
	"fmt"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

// reservation is what one answer that is being put together holds of the node's memory. The
// zero value holds nothing.
type reservation struct {
	mu sync.Mutex
	// Guarded by mu. shared is the part of bytes that counts in what all answers share, 0
	// once the answer has the one place for a large one.
	bytes, shared int64
	large         bool
}

// hold takes bytes for an answer, which is nil where it is not counted.
func (r *Router) reserve(h *reservation, bytes int64) error {
	if bytes == 0 || h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// What is refused does not count: the parts of an answer are read at the same time, and
	// those that come after a refusal are held like others until the read ends.
	if h.bytes+bytes > r.cfg.AnswerBytes {
		return kverror.New(kverror.AnswerTooLarge, "more than %d bytes", r.cfg.AnswerBytes)
	}
	if h.large {
		h.bytes += bytes
		return nil
	}
	all := r.reserved.Add(bytes)
	if all <= r.cfg.ReadBytes && h.bytes+bytes <= r.cfg.ReadBytes/2 {
		h.bytes += bytes
		h.shared += bytes
		return nil
	}
	r.unreserve(bytes)
	if !r.large.CompareAndSwap(false, true) {
		return kverror.New(kverror.TooManyRequests, "answers of %d bytes are being put together, at most %d, and a large one", all, r.cfg.ReadBytes)
	}
	r.unreserve(h.shared)
	h.bytes += bytes
	h.large, h.shared = true, 0
	return nil
}

// letGo gives back all that an answer holds.
func (r *Router) releaseAll(h *reservation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.unreserve(h.shared)
	if h.large {
		r.large.Store(false)
	}
	h.bytes, h.shared, h.large = 0, 0, false
}

// unreserve returns bytes to what all answers share.
func (r *Router) unreserve(bytes int64) {
	if left := r.reserved.Add(-bytes); left < 0 {
		panic(fmt.Sprintf("router: %d bytes of answers are given back where %d were held", bytes, left+bytes))
	}
}

// keysBytes is about what the keys of an answer take in memory.
func keysBytes(resp *pb.RangeResponse) (bytes int64) {
	for _, kv := range resp.GetKvs() {
		bytes += int64(len(kv.GetKey())+len(kv.GetValue())) + keyOverheadBytes
	}
	return bytes
}

// keyOverheadBytes is about what a key value takes beside its key and value.
const keyOverheadBytes = 160
