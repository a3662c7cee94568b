package router

import (
	"fmt"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

// reservation is the memory that one answer under construction holds of the node's budget. The zero
// value holds nothing.
type reservation struct {
	mu sync.Mutex
	// Guarded by mu. shared is the part of bytes in the shared budget. It is 0 once the answer has
	// the one place for a large one.
	bytes, shared int64
	large         bool
}

// reserve reserves bytes for an answer; a nil h is not counted.
func (r *Router) reserve(h *reservation, bytes int64) error {
	if bytes == 0 || h == nil {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// Refused bytes do not count. The parts of an answer are read in parallel, and parts that come
	// after a refusal are held until the read ends.
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
		return kverror.New(kverror.TooManyRequests, "answers of %d bytes are under way, at most %d, and a large one", all, r.cfg.ReadBytes)
	}
	r.unreserve(h.shared)
	h.bytes += bytes
	h.large, h.shared = true, 0
	return nil
}

// releaseAll returns all that an answer holds.
func (r *Router) releaseAll(h *reservation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.unreserve(h.shared)
	if h.large {
		r.large.Store(false)
	}
	h.bytes, h.shared, h.large = 0, 0, false
}

// unreserve returns bytes to the shared budget.
func (r *Router) unreserve(bytes int64) {
	if left := r.reserved.Add(-bytes); left < 0 {
		panic(fmt.Sprintf("router: %d bytes of answers are returned, but only %d were reserved", bytes, left+bytes))
	}
}

// keysBytes returns roughly what the keys of an answer take in memory.
func keysBytes(resp *pb.RangeResponse) (bytes int64) {
	for _, kv := range resp.GetKvs() {
		bytes += int64(len(kv.GetKey())+len(kv.GetValue())) + keyOverheadBytes
	}
	return bytes
}

// keyOverheadBytes is roughly what a key value takes beside its key and value.
const keyOverheadBytes = 160
