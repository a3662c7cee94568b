package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// spanReader reads a span page by page, each page from the range that holds its keys by then. After
// a split, a move or a lost leader it asks for the rest again.
type spanReader struct {
	r   *Router
	req *pb.RangeRequest
	at  readPoint
	// rest is the unread part, unless done.
	rest keyspace.Span
	done bool
	// left is how many keys are still wanted; unlimited says that all are.
	left      int64
	unlimited bool
	// seen counts the keys that were passed, and found those that passed the filters.
	seen, found int64
	// last is the newest page. beyond is the part of the span behind that page's range, if there is
	// one.
	last      *rangeapi.PageAnswer
	beyond    keyspace.Span
	hasBeyond bool
	pageBytes int
}

// readPageBytes bounds a page of an answer that is put together.
const readPageBytes = 1 << 20

// newSpanReader returns a reader of the span. A limit of 0 is none.
func (r *Router) newSpanReader(span keyspace.Span, req *pb.RangeRequest, at readPoint, limit int64) *spanReader {
	return &spanReader{r: r, req: req, at: at, rest: span, left: limit, unlimited: limit <= 0, pageBytes: readPageBytes}
}

// enough says whether nothing more is wanted.
func (l *spanReader) enough() bool { return l.done || !l.unlimited && l.left <= 0 }

// next reads a page. It must not be called after enough.
func (l *spanReader) next(ctx context.Context) (*rangeapi.PageAnswer, error) {
	limit := l.r.limited(ctx)
	defer limit.End()
	for {
		rt, err := l.r.holder(limit.LazyDeadline, l.rest.Start)
		if err != nil {
			return nil, limit.outcome(err)
		}
		span, ok := rt.desc.Span.Intersect(l.rest)
		if !ok {
			return nil, kverror.New(kverror.Internal, "range %s with %s holds nothing of %s", rt.desc.Range, rt.desc.Span, l.rest)
		}
		p := &rangeapi.Page{RangeRequest: clip(l.req, span), MaxBytes: l.pageBytes, WithCount: !l.unlimited}
		p.Limit = max(l.left, 0)
		got, err := l.r.readFrom(limit.LazyDeadline, span, l.at, p)
		if errors.Is(err, errMultiRange) {
			continue // the range has split, and its part of the span is smaller now
		}
		if err != nil {
			return nil, limit.outcome(err)
		}
		answer, ok := got.(*rangeapi.PageAnswer)
		if !ok {
			return nil, kverror.New(kverror.Internal, "a range answered a page of a read with %T", got)
		}
		l.advance(span, answer)
		return answer, nil
	}
}

// advance takes in the page of a span, the first unread part.
func (l *spanReader) advance(span keyspace.Span, p *rangeapi.PageAnswer) {
	l.last = p
	l.seen += p.Seen
	l.found += p.N
	l.left -= p.N
	l.hasBeyond = string(span.End) != string(l.rest.End)
	if l.hasBeyond {
		l.beyond = keyspace.Span{Start: span.End, End: l.rest.End}
	}
	switch {
	case len(p.Next) > 0:
		l.rest.Start = p.Next
	case l.hasBeyond:
		l.rest = l.beyond
	default:
		l.done = true
	}
}

// behind returns the number of keys behind those that were passed. The reader must have a limit and
// have read a page.
func (l *spanReader) behind(ctx context.Context) (int64, error) {
	if l.done {
		return 0, nil
	}
	var n int64
	if len(l.last.Next) > 0 {
		n = l.last.GetCount() - l.last.Seen
	}
	if !l.hasBeyond {
		return n, nil
	}
	rest, err := l.r.countBehind(ctx, l.beyond, l.req, l.at)
	return n + rest, err
}

// foundKeys are the keys of a span: encoded if the read point wants that, else as kvs. count is how
// many the span has.
type foundKeys struct {
	encoded [][]byte
	kvs     []*mvccpb.KeyValue
	count   int64
}

// all reads until there is enough.
func (l *spanReader) all(ctx context.Context) (found foundKeys, err error) {
	for !l.enough() {
		p, err := l.nextReserved(ctx)
		if err != nil {
			return found, err
		}
		if l.at.encoded != nil {
			if len(p.Keys) > 0 {
				found.encoded = append(found.encoded, p.Keys)
			}
			continue
		}
		more, err := rangeapi.DecodeKeys(p.Keys, p.N)
		if err != nil {
			return found, kverror.New(kverror.Internal, "%v", err)
		}
		if found.kvs == nil {
			found.kvs = more
		} else {
			found.kvs = append(found.kvs, more...)
		}
	}
	n, err := l.behind(ctx)
	found.count = l.seen + n
	return found, err
}

// nextReserved reads a page and reserves its memory. The first page is reserved once it is there,
// because reads that wait for a range without a leader must not hold up the others. So it is small: any
// number of reads may have one, and each of them one for every range. Later pages are reserved before
// they are read.
func (l *spanReader) nextReserved(ctx context.Context) (p *rangeapi.PageAnswer, err error) {
	h := l.at.reserved
	if h == nil {
		return l.next(ctx)
	}
	if l.last == nil {
		l.pageBytes = smallPageBytes
		if p, err = l.next(ctx); err != nil {
			return nil, err
		}
		l.pageBytes = readPageBytes
	}
	if l.r.cfg.Answers.Reserve()-h.Bytes() >= maxParallelParts*readPageBytes {
		if err = h.acquire(ctx, 1); err != nil {
			return nil, err
		}
		p, err = l.nextWithin(ctx, p)
		h.parts.Release(1)
		if !errors.Is(err, kverror.AnswerTooLarge) {
			return p, err
		}
	}
	if err = h.acquire(ctx, maxParallelParts); err != nil {
		return nil, err
	}
	defer h.parts.Release(maxParallelParts)
	return l.nextWithin(ctx, p)
}

// nextWithin reserves the memory of a page, and reads the page before if it is nil. A page may be larger
// than asked for because of one value. The excess is in memory already, so it does not wait. The page
// is returned also if there is no room for it.
func (l *spanReader) nextWithin(ctx context.Context, p *rangeapi.PageAnswer) (*rangeapi.PageAnswer, error) {
	h, reserved := l.at.reserved, int64(0)
	if p == nil {
		reserved = min(readPageBytes, max(l.r.cfg.Answers.Reserve()-h.Bytes(), 0))
		err := l.r.reserve(ctx, h, reserved)
		if err != nil {
			return nil, err
		}
		if p, err = l.next(ctx); err != nil {
			return nil, err
		}
	}
	size := int64(len(p.Keys))
	if l.at.encoded == nil {
		size += p.N * keyOverheadBytes
	}
	switch {
	case size <= reserved:
		h.Give(reserved - size)
		return p, nil
	case reserved == 0:
		return p, l.r.reserve(ctx, h, size)
	}
	err := l.r.tooLarge(h.Add(size - reserved))
	if err != nil {
		h.Give(reserved)
	}
	return p, err
}
