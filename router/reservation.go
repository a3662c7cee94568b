package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/sync/semaphore"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/kverror"
)

// reservation is the memory that one answer under construction holds of the budget of answers.
type reservation struct {
	budget.Share
	// atOnce says that the answer does not wait for memory: others may wait for the locks of its
	// transaction, or it has happened and must get its answer.
	atOnce bool
	// parts has one unit for each part of the answer that may be read at a time. A part takes one from when
	// it reserves a page until the page is there. Near the most that the
	// answer may have it takes all of them. What others reserve too much would count there.
	parts *semaphore.Weighted
}

var (
	// errNotSoon ends a serializable read's wait for leaders.
	errNotSoon = errors.New("router: no leader answers soon")
	// errMemoryNotSoon says that the read has waited for memory, and not for leaders.
	errMemoryNotSoon = errors.New("router: there is no memory soon")
)

// reservation returns one that holds nothing.
func (r *Router) reservation() reservation {
	return reservation{Share: r.cfg.Answers.Share(), parts: semaphore.NewWeighted(maxParallelParts)}
}

// reserve reserves bytes for an answer and waits for them; a nil h is not counted.
func (r *Router) reserve(ctx context.Context, h *reservation, bytes int64) error {
	if h == nil || bytes == 0 {
		return nil
	}
	if h.atOnce {
		return r.tooLarge(h.Add(bytes))
	}
	return waited(ctx, r.tooLarge(h.Take(ctx, bytes)))
}

// acquire waits until the answer may read so many parts more. Whom it waits for may wait for memory.
func (h *reservation) acquire(ctx context.Context, parts int64) error {
	if err := h.parts.Acquire(ctx, parts); err != nil {
		return waited(ctx, kverror.Of(err))
	}
	return nil
}

// waited returns the error of a read that has waited for memory.
func waited(ctx context.Context, err error) error {
	if err != nil && errors.Is(context.Cause(ctx), errNotSoon) {
		return errMemoryNotSoon
	}
	return err
}

// tooLarge returns the client's error for one of the budget.
func (r *Router) tooLarge(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, budget.ErrTooLarge):
		return kverror.New(kverror.AnswerTooLarge, "more than %d bytes", r.cfg.Answers.Reserve())
	}
	return kverror.Of(err)
}

// beginAnew forgets what an earlier attempt has read.
func beginAnew(reserved *reservation, encoded *[][]byte) {
	if reserved != nil {
		reserved.Release()
	}
	if encoded != nil {
		*encoded = nil
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
