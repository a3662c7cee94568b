package router

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// maxParallelParts bounds how many ranges one read asks at the same time.
const maxParallelParts = 8

// Range reads keys at one revision, from as many ranges as they lie in. The
// response's header holds the revision only.
func (r *Router) Range(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	if req.GetSerializable() && r.cfg.Local != nil {
		if resp, done, err := r.rangeHere(ctx, req); done {
			return resp, err
		}
	}
	resp, err := r.rangeNow(ctx, req)
	if err == nil && req.GetSerializable() {
		r.tell(req, keyspace.Revision(resp.GetHeader().GetRevision()))
	}
	return resp, err
}

// rangeNow is Range at the current revision.
func (r *Router) rangeNow(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	if len(req.GetRangeEnd()) > 0 {
		return r.rangeOver(ctx, req)
	}
	limit := r.limited(ctx)
	defer limit.End()
	resp, err := r.read(limit.Patience, req, nil)
	return resp, limit.outcome(err)
}

// rangeOver is Range of a span: the router's patience is for each of its steps, since
// there may be many.
func (r *Router) rangeOver(ctx context.Context, req *pb.RangeRequest) (*pb.RangeResponse, error) {
	var held holding
	defer r.letGo(&held)
	resp, err := r.read(ctx, req, &held)
	if err != nil && ctx.Err() != nil {
		err = kverror.Of(ctx.Err())
	}
	return resp, err
}

// moment is when a read is made.
type moment struct {
	// at is the current revision, which the read may not exceed, and reads where it names
	// none.
	at keyspace.Revision
	// txn is the committed transaction for which it is made, nil for none.
	txn *rangeapi.TxnName
	// held counts the bytes of the answer, nil where there are few.
	held *holding
	// where says who may be asked.
	where where
}

// revision is that of the state which a request reads.
func (m *moment) revision(req *pb.RangeRequest) keyspace.Revision {
	if rev := keyspace.Revision(req.GetRevision()); rev > 0 {
		return rev
	}
	return m.at
}

// read asks for a revision and reads at it, and does so again where the revision
// was overtaken by a compaction before it was read: a read that named no revision
// never learns of that.
func (r *Router) read(ctx context.Context, req *pb.RangeRequest, held *holding) (*pb.RangeResponse, error) {
	for {
		now, err := r.presentOf(ctx, req, held != nil)
		if err != nil {
			return nil, err
		}
		span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
		if !ok {
			return &pb.RangeResponse{Header: header(now)}, nil
		}
		resp, err := r.readAt(ctx, span, req, moment{at: now, held: held})
		if err == nil {
			resp.Header = header(now)
			return resp, nil
		}
		if !overtaken(req, err) || ctx.Err() != nil {
			return nil, err
		}
		if held != nil {
			r.letGo(held)
		}
	}
}

// presentOf is present, within the router's own patience if asked for that.
func (r *Router) presentOf(ctx context.Context, req *pb.RangeRequest, patiently bool) (keyspace.Revision, error) {
	if !patiently {
		return r.present(ctx, req)
	}
	limit := r.limited(ctx)
	defer limit.End()
	now, err := r.present(limit.Patience, req)
	return now, limit.outcome(err)
}

// present asks for the current revision and checks the one that a request names by it.
func (r *Router) present(ctx context.Context, req *pb.RangeRequest) (keyspace.Revision, error) {
	now, err := r.currentOrWait(ctx)
	if err != nil {
		return 0, err
	}
	switch explicit := keyspace.Revision(req.GetRevision()); {
	case explicit > now.Current:
		return 0, &kverror.Error{Kind: kverror.FutureRevision}
	case explicit > 0 && explicit < now.Compacted:
		return 0, &kverror.Error{Kind: kverror.Compacted, CompactRevision: now.Compacted}
	}
	return now.Current, nil
}

// overtaken says whether a read is made again at another revision.
func overtaken(req *pb.RangeRequest, err error) bool {
	return errors.Is(err, kverror.Compacted) && req.GetRevision() <= 0 || lookAgain(err)
}

// readAt reads a span at a moment.
func (r *Router) readAt(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	if len(req.GetRangeEnd()) == 0 {
		return r.part(ctx, span, req, at)
	}
	if req.GetCountOnly() {
		n, err := r.count(ctx, span, req, at)
		return &pb.RangeResponse{Count: n}, err
	}
	if !byKeyUp(req) {
		// Of a range that holds them all, only what is asked for comes here.
		resp, err := r.whole(ctx, span, req, at)
		if err == nil || !errors.Is(err, kverror.ReadInPieces) && !errors.Is(err, errSeveral) {
			return resp, err
		}
		if errors.Is(err, errSeveral) && byKeyDown(req) && req.GetLimit() > 0 && !filtered(req) {
			return r.lastKeys(ctx, span, req, at)
		}
	}
	// The ranges are asked for their keys in the order of their bytes: only all of
	// them together can be sorted.
	resp, err := r.gather(ctx, span, unsorted(req), at)
	if err == nil && !byKeyUp(req) {
		finish(req, resp)
	}
	return resp, err
}

// whole has a request answered by the one range that holds its span: errSeveral where
// there is none. It has the router's patience.
func (r *Router) whole(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	limit := r.limited(ctx)
	defer limit.End()
	resp, err := r.part(limit.Patience, span, req, at)
	if errors.Is(err, errSeveral) {
		return nil, err
	}
	return resp, limit.outcome(err)
}

// part is whole within the caller's patience.
func (r *Router) part(ctx context.Context, span keyspace.Span, req *pb.RangeRequest, at moment) (*pb.RangeResponse, error) {
	got, err := r.readFrom(ctx, span, at, req)
	if err != nil {
		return nil, err
	}
	resp, ok := got.(*pb.RangeResponse)
	if !ok {
		return nil, kverror.New(kverror.Internal, "a range answered a read with %T", got)
	}
	return resp, r.hold(at.held, keysBytes(resp))
}

// holding is what one answer that is being put together holds of the node's memory. The
// zero value holds nothing.
type holding struct {
	mu sync.Mutex
	// Guarded by mu. shared is the part of bytes that counts in what all answers share, 0
	// once the answer has the one place for a large one.
	bytes, shared int64
	large         bool
}

// hold takes bytes for an answer, which is nil where it is not counted.
func (r *Router) hold(h *holding, bytes int64) error {
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
	all := r.joined.Add(bytes)
	if all <= r.cfg.ReadBytes && h.bytes+bytes <= r.cfg.ReadBytes/2 {
		h.bytes += bytes
		h.shared += bytes
		return nil
	}
	r.giveBack(bytes)
	if !r.large.CompareAndSwap(false, true) {
		return kverror.New(kverror.TooManyRequests, "answers of %d bytes are being put together, at most %d, and a large one", all, r.cfg.ReadBytes)
	}
	r.giveBack(h.shared)
	h.bytes += bytes
	h.large, h.shared = true, 0
	return nil
}

// letGo gives back all that an answer holds.
func (r *Router) letGo(h *holding) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.giveBack(h.shared)
	if h.large {
		r.large.Store(false)
	}
	h.bytes, h.shared, h.large = 0, 0, false
}

// giveBack returns bytes to what all answers share.
func (r *Router) giveBack(bytes int64) {
	if left := r.joined.Add(-bytes); left < 0 {
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

// clip returns the request for a part of its span.
func clip(req *pb.RangeRequest, span keyspace.Span) *pb.RangeRequest {
	c := &pb.RangeRequest{
		Key: span.Start, RangeEnd: span.End,
		Limit: req.GetLimit(), Revision: req.GetRevision(),
		SortOrder: req.GetSortOrder(), SortTarget: req.GetSortTarget(),
		Serializable: req.GetSerializable(), KeysOnly: req.GetKeysOnly(), CountOnly: req.GetCountOnly(),
		MinModRevision: req.GetMinModRevision(), MaxModRevision: req.GetMaxModRevision(),
		MinCreateRevision: req.GetMinCreateRevision(), MaxCreateRevision: req.GetMaxCreateRevision(),
	}
	if len(c.Key) == 0 {
		c.Key = []byte{0}
	}
	if len(c.RangeEnd) == 0 {
		c.RangeEnd = []byte{0}
	} else if bytes.Equal(keyspace.Next(c.Key), c.RangeEnd) {
		c.RangeEnd = nil
	}
	return c
}

// maxLimit is a limit that cannot be one higher.
const maxLimit = math.MaxInt64

// byKeyUp says whether the answer is in the order in which ranges hold keys.
func byKeyUp(req *pb.RangeRequest) bool {
	return req.GetSortTarget() == pb.RangeRequest_KEY && req.GetSortOrder() != pb.RangeRequest_DESCEND
}

// byKeyDown says whether the answer has the last keys first.
func byKeyDown(req *pb.RangeRequest) bool {
	return req.GetSortTarget() == pb.RangeRequest_KEY && req.GetSortOrder() == pb.RangeRequest_DESCEND
}

func filtered(req *pb.RangeRequest) bool {
	return req.GetMinModRevision() != 0 || req.GetMaxModRevision() != 0 ||
		req.GetMinCreateRevision() != 0 || req.GetMaxCreateRevision() != 0
}

// unsorted returns what the ranges are asked for so that [finish] can make the
// answer of it.
func unsorted(req *pb.RangeRequest) *pb.RangeRequest {
	if byKeyUp(req) {
		return req
	}
	scan := clip(req, keyspace.Span{})
	scan.SortTarget, scan.SortOrder = pb.RangeRequest_KEY, pb.RangeRequest_NONE
	scan.KeysOnly = req.GetKeysOnly() && req.GetSortTarget() != pb.RangeRequest_VALUE
	switch {
	case req.GetSortOrder() != pb.RangeRequest_NONE || filtered(req):
		scan.Limit = 0
	case scan.Limit > 0 && scan.Limit < maxLimit:
		// A target without an order sorts no more than what etcd's scan has found: the
		// limit's number of keys and the one that says that there are more.
		scan.Limit++
	}
	return scan
}

// finish applies to the keys of all ranges what [unsorted] has held back.
func finish(req *pb.RangeRequest, resp *pb.RangeResponse) {
	rangeapi.SortKeys(req, resp.Kvs)
	resp.More = false
	if l := req.GetLimit(); l > 0 && int64(len(resp.Kvs)) > l {
		clear(resp.Kvs[l:])
		resp.Kvs, resp.More = resp.Kvs[:l], true
	}
	if req.GetKeysOnly() {
		for _, kv := range resp.Kvs {
			kv.Value = nil
		}
	}
}
