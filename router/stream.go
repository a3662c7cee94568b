package router

import (
	"context"
	"errors"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

const (
	// A stream's pages are large if the budget of answers has room, and small otherwise. The first
	// one is small, so that something comes soon.
	smallPageBytes = 64 << 10
	largePageBytes = 512 << 10
	// streamPages is the number of pages that a stream has at a time. The range being sent has one
	// at the client, one in the queue and one on its way; the next range has the last two.
	streamPages = 5
)

// RangeStream reads keys at one revision in key order, and passes them to send. keys are key values
// as a RangeResponse encodes them. The last call has the rest of the response in last: a header
// with only the revision, more and count. The request has no order and no filter. The node holds a
// bounded part of the answer, however slow send is.
func (r *Router) RangeStream(ctx context.Context, req *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) error {
	least := r.cfg.Answers.Share()
	defer least.Release()
	if err := r.tooLarge(least.Take(ctx, min(streamPages*smallPageBytes, r.cfg.Answers.Reserve()))); err != nil {
		return err
	}
	least.Complete() // it waits for its client, and nobody has to wait for that
	if !req.GetSerializable() || r.cfg.Local == nil {
		_, err := r.streamNow(ctx, req, send)
		return err
	}
	goesBack, done, err := r.streamHere(ctx, req, send)
	if done {
		return err
	}
	begun, err := r.streamNow(ctx, req, send)
	if goesBack != 0 && err != nil && !begun && ctx.Err() == nil {
		_, err = r.streamLocal(ctx, req, goesBack, send)
	}
	return err
}

// streamNow streams at the current revision. begun says that something was sent.
func (r *Router) streamNow(ctx context.Context, req *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) (begun bool, err error) {
	for {
		now, err := r.presentOf(ctx, req, true)
		if err != nil {
			return false, err
		}
		s := r.newStream(req, readPoint{rev: now.Current, term: now.Term}, now.Current, send)
		err = s.run(ctx)
		switch {
		case err == nil:
			if req.GetSerializable() {
				r.noteServed(req, now.Current)
			}
			return true, nil
		case ctx.Err() != nil:
			return s.begun, kverror.Of(ctx.Err())
		case s.begun && needsNewRevision(err):
			// The revision of the keys that were sent is not readable any more.
			return true, kverror.New(kverror.Compacted, "%v", err)
		case s.begun || !overtaken(req, err):
			return s.begun, err
		}
	}
}

// streamHere streams a serializable read from this node's replicas alone. A stream may take long,
// and must not wait for leaders. It is not done if it has not begun, for
// example because an idle range is resolved only below another's compacted revision. If its revision would be below
// that of an earlier read, goesBack is that revision: leaders come first then, if the sequencer
// answers.
func (r *Router) streamHere(ctx context.Context, req *pb.RangeRequest, send func(keys []byte, last *pb.RangeResponse) error) (goesBack keyspace.Revision, done bool, err error) {
	local, ok := r.resolvedHere(req)
	lowest, explicit := local.lowest, keyspace.Revision(req.GetRevision())
	if !ok || explicit > lowest || explicit <= 0 && lowest < local.from {
		return 0, false, nil
	}
	if explicit <= 0 && lowest < local.served && r.mayBeLed(&local, local.served) {
		soon, cancel := context.WithTimeoutCause(ctx, r.cfg.AttemptTimeout, errNotSoon)
		defer cancel()
		if _, err := r.currentOrWait(soon); err == nil {
			return lowest, false, nil
		}
	}
	done, err = r.streamLocal(ctx, req, lowest, send)
	return 0, done, err
}

// streamLocal is streamHere at a revision.
func (r *Router) streamLocal(ctx context.Context, req *pb.RangeRequest, at keyspace.Revision, send func(keys []byte, last *pb.RangeResponse) error) (done bool, err error) {
	s := r.newStream(req, readPoint{rev: at, where: nearest}, r.headerRevision(req, at), send)
	switch err = s.run(ctx); {
	case err == nil:
		r.noteServed(req, s.head)
	case ctx.Err() != nil:
	case !s.begun && !isFinal(req, err):
		return false, err
	case needsNewRevision(err):
		err = kverror.New(kverror.Compacted, "%v", err)
	}
	return true, err
}

// stream is one RangeStream at a revision.
type stream struct {
	r   *Router
	req *pb.RangeRequest
	// at has the sequencer's term for the first page alone. A stream that has begun goes on at its
	// revision when there is another sequencer.
	at    readPoint
	head  keyspace.Revision // the answer's
	send  func(keys []byte, last *pb.RangeResponse) error
	begun bool
	// seen counts the keys of the finished ranges.
	seen int64
	// large is what its pages hold beside the stream's own reservation. It never waits.
	large budget.Share
}

func (r *Router) newStream(req *pb.RangeRequest, at readPoint, head keyspace.Revision, send func(keys []byte, last *pb.RangeResponse) error) *stream {
	return &stream{r: r, req: req, at: at, head: head, send: send, large: r.cfg.Answers.Share()}
}

// fetched is a page on its way to the client.
type fetched struct {
	page *rangeapi.PageAnswer
	// large is what the page reserves beside the stream's own reservation.
	large int64
	// sent is closed when the client has the page, if the span reader waits for that.
	sent chan struct{}
	// last says that the span reader has ended. count is the number of keys in its span then, and
	// more says that some of them are beyond the limit.
	last, more bool
	count      int64
	err        error
}

func (s *stream) run(ctx context.Context) error {
	span, ok := keyspace.FromEtcd(s.req.GetKey(), s.req.GetRangeEnd())
	if !ok {
		return s.send(nil, &pb.RangeResponse{Header: header(s.head)})
	}
	if s.req.GetCountOnly() {
		n, err := s.r.count(ctx, span, s.req, s.at)
		if err != nil {
			return err
		}
		return s.send(nil, &pb.RangeResponse{Header: header(s.head), Count: n})
	}
	if s.req.GetSortTarget() != pb.RangeRequest_KEY {
		return s.sorted(ctx, span)
	}
	// A limit may end the read in any range. So one span reader reads the ranges one after the
	// other.
	spans := []keyspace.Span{span}
	if s.req.GetLimit() <= 0 {
		var err error
		if spans, err = s.r.divide(ctx, span); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	var queues []chan fetched
	defer func() {
		cancel()
		wg.Wait()
		s.large.Release()
	}()
	for i := range spans {
		for len(queues) < min(i+2, len(spans)) {
			queue := make(chan fetched, 1)
			at := s.at
			if len(queues) > 0 {
				at.term = 0
			}
			l := s.r.newSpanReader(spans[len(queues)], s.req, at, s.req.GetLimit())
			queues = append(queues, queue)
			wg.Go(func() { s.fetch(ctx, l, queue) })
		}
		if err := s.forward(queues[i], i == len(spans)-1); err != nil {
			return err
		}
	}
	return nil
}

// fetch reads pages into a queue, as far ahead as the queue holds, and closes it.
func (s *stream) fetch(ctx context.Context, l *spanReader, queue chan<- fetched) {
	defer close(queue)
	l.pageBytes = smallPageBytes
	for !l.enough() {
		f := fetched{}
		if l.last != nil {
			l.pageBytes = smallPageBytes
			if s.large.Try(largePageBytes) {
				f.large, l.pageBytes = largePageBytes, largePageBytes
			}
		}
		f.page, f.err = l.next(ctx)
		l.at.term = 0
		if f.err == nil {
			s.reserveExcess(&f, l.pageBytes)
		}
		if f.err == nil && l.enough() {
			var behind int64
			behind, f.err = l.behind(ctx)
			f.last, f.more, f.count = true, behind > 0, l.seen+behind
		}
		select {
		case queue <- f:
		case <-ctx.Done():
			return
		}
		if f.err != nil {
			return
		}
		if f.sent != nil {
			select {
			case <-f.sent:
			case <-ctx.Done():
				return
			}
		}
	}
}

// reserveExcess counts what a page has above its bound, because one value may be larger. It is in
// memory already and counts in any case. If it has no room, nothing more is fetched until the
// client has it.
func (s *stream) reserveExcess(f *fetched, asked int) {
	more := int64(len(f.page.Keys) - asked)
	if more <= 0 {
		return
	}
	if !s.large.Try(more) {
		f.sent = make(chan struct{})
		if f.err = s.r.tooLarge(s.large.Add(more)); f.err != nil {
			return
		}
	}
	f.large += more
}

// forward sends the pages of a span reader to the client.
func (s *stream) forward(queue <-chan fetched, lastSpan bool) error {
	for f := range queue {
		err := f.err
		if err == nil {
			err = s.pass(&f, lastSpan)
		}
		s.large.Give(f.large)
		if err != nil {
			return err
		}
		if f.sent != nil {
			close(f.sent)
		}
		if f.last {
			return nil
		}
	}
	return errors.New("router: a stream was cut off") // its context has ended
}

func (s *stream) pass(f *fetched, lastSpan bool) error {
	var last *pb.RangeResponse
	if f.last {
		s.seen += f.count
		if lastSpan {
			last = &pb.RangeResponse{Header: header(s.head), Count: s.seen, More: f.more}
		}
	}
	if last == nil && f.page.N == 0 {
		return nil
	}
	s.begun = true
	return s.send(f.page.Keys, last)
}

// The chunks in which etcd reads a stream: firstChunkKeys at first, then twice or half as many
// keys, to come near max-request-bytes, here its default.
const (
	firstChunkKeys   = 10
	chunkTargetBytes = 3 << 19
)

// sorted answers a request with a sort target and no order. etcd accepts it: it sorts
// each chunk and continues behind that chunk's last key, so keys may come twice. So this uses
// etcd's chunks.
func (s *stream) sorted(ctx context.Context, span keyspace.Span) error {
	reserved := s.r.reservation()
	defer reserved.Release()
	at := s.at
	at.reserved = &reserved
	wanted, keys := s.req.GetLimit(), int64(firstChunkKeys)
	if wanted == 0 {
		wanted = maxLimit
	}
	for count := int64(0); ; {
		resp, err := &pb.RangeResponse{}, error(nil)
		if len(span.End) == 0 || string(span.Start) < string(span.End) {
			q := clip(s.req, span)
			q.Limit = min(keys, wanted-count)
			resp, err = s.r.readAt(ctx, span, q, at)
		}
		if err != nil {
			return err
		}
		encoded, err := proto.Marshal(&pb.RangeResponse{Kvs: resp.GetKvs()})
		if err != nil {
			return kverror.New(kverror.Internal, "encode %d keys: %v", len(resp.GetKvs()), err)
		}
		if err := s.r.tooLarge(reserved.Add(int64(len(encoded)))); err != nil {
			return err
		}
		reserved.Complete()
		count += int64(len(resp.GetKvs()))
		s.begun, s.at.term, at.term = true, 0, 0
		if !resp.GetMore() || count == wanted {
			return s.endSorted(ctx, span, resp, encoded, count)
		}
		if err := s.send(encoded, nil); err != nil {
			return err
		}
		reserved.Release()
		span.Start = keyspace.Next(lastKey(resp))
		switch {
		case len(encoded) < chunkTargetBytes/2:
			keys *= 2
		case len(encoded) > chunkTargetBytes*2:
			keys = max(keys/2, 1)
		}
	}
}

func lastKey(resp *pb.RangeResponse) []byte { return resp.GetKvs()[len(resp.GetKvs())-1].GetKey() }

// endSorted sends the last chunk.
func (s *stream) endSorted(ctx context.Context, span keyspace.Span, resp *pb.RangeResponse, encoded []byte, count int64) error {
	last := &pb.RangeResponse{Header: header(s.head), More: resp.GetMore(), Count: count}
	if !resp.GetMore() {
		return s.send(encoded, last)
	}
	if rest := (keyspace.Span{Start: keyspace.Next(lastKey(resp)), End: span.End}); len(rest.End) == 0 || string(rest.Start) < string(rest.End) {
		n, err := s.r.count(ctx, rest, s.req, s.at)
		if err != nil {
			return err
		}
		last.Count += n
	}
	return s.send(encoded, last)
}
