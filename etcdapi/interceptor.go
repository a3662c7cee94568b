package etcdapi

import (
	"context"
	"errors"
	"sync"
	"unicode/utf8"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/gzip" // clients may compress what they send, as with etcd
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
)

// After noLeaderTimeouts election timeouts without a leader, streams that demand one end. One
// timeout would be too few, because reconnecting streams cost more than waiting.
const noLeaderTimeouts = 3

// errNoLeader is the cause of contexts of streams that were ended because there is no leader.
var errNoLeader = errors.New("etcdapi: no leader for three election timeouts")

// admit checks a call's metadata as etcd does, and returns whether the call demands a leader.
func (s *Server) admit(ctx context.Context, kind string) (demandsLeader bool, err error) {
	// gRPC would answer compressed requests with compressed answers, copies that Answers does not
	// count. Other answers do not mention it, as in etcd.
	if c, ok := grpc.ServerTransportStreamFromContext(ctx).(interface{ RecvCompress() string }); ok && c.RecvCompress() != "" {
		_ = grpc.SetSendCompressor(ctx, encoding.Identity)
	}
	version := "unknown"
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataClientAPIVersionKey); len(v) > 0 {
		version = v[0]
		if !utf8.ValidString(version) {
			return false, rpctypes.ErrGRPCInvalidClientAPIVersion
		}
	}
	s.metrics.ClientRequests.WithLabelValues(kind, s.metrics.clientVersion(version)).Inc()
	if v := metadata.ValueFromIncomingContext(ctx, rpctypes.MetadataRequireLeaderKey); len(v) > 0 && v[0] == rpctypes.MetadataHasLeader {
		if s.opts.Node.Leader() == 0 {
			return true, rpctypes.ErrGRPCNoLeader
		}
		return true, nil
	}
	return false, nil
}

// unary wraps every unary call.
func (s *Server) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (resp any, err error) {
	return s.comes(ctx, req, info.FullMethod).serve(handler)
}

// unaryCall is a unary call under way.
type unaryCall struct {
	s      *Server
	ctx    context.Context //nolint:containedctx // it is the call's
	method string
	m      *methodMetrics
	req    any
	watch  clock.Stopwatch
	traced bool
	// refused is why the call was not admitted.
	refused error
	audit   *begun
	// span is where a Range of a span leaves its answer, nil for other calls.
	span *spanAnswer
	call *stages.Call
	// first, if not nil, waits for the answer of what was begun already, by a caller who was checked by the view or a newer one.
	first func() (any, error)
	view  *auth.View
}

// comes begins a unary call. It is served once.
func (s *Server) comes(ctx context.Context, req any, method string) *unaryCall {
	u := &unaryCall{s: s, ctx: ctx, method: method, m: s.methods[method], req: req, watch: clock.StartStopwatch()}
	u.m.started.Inc()
	u.m.received.Inc()
	if r, ok := req.(*pb.RangeRequest); ok && len(r.GetRangeEnd()) > 0 {
		u.span = &spanAnswer{}
		u.ctx = context.WithValue(ctx, spanAnswerKey{}, u.span)
	}
	u.traced = s.opts.Tracing.samples(ctx)
	if _, u.refused = s.admit(ctx, "unary"); u.refused == nil {
		u.audit = s.beginAudit(ctx, method, u.m)
	}
	return u
}

// serve has the handler answer the call.
func (u *unaryCall) serve(handler grpc.UnaryHandler) (resp any, err error) {
	s, begun := u.s, u.first != nil
	if err = u.refused; err == nil {
		if !begun {
			u.view = s.opts.Users.Gate.View()
		}
		err = s.againFrom(u.ctx, u.view, func(ctx context.Context) (err error) {
			if first := u.first; first != nil {
				u.first = nil
				resp, err = first()
			} else {
				resp, err = u.run(ctx, handler)
			}
			return err
		})
		u.audit.end(u.req, err)
	}
	if u.span != nil && err == nil {
		resp = u.span
	}
	if err == nil {
		u.m.sent.Inc()
	}
	took := u.watch.Elapsed()
	u.m.done(status.Code(err), took)
	if took > s.opts.WarnUnaryRequest || took > stages.Threshold || u.traced {
		e := &ended{method: u.method, call: u.call, took: took, req: u.req, resp: resp, err: err, traced: u.traced, begun: begun}
		s.tellSlow(u.ctx, e)
	}
	return resp, err
}

// run checks the call and has the handler answer it.
func (u *unaryCall) run(ctx context.Context, handler grpc.UnaryHandler) (any, error) {
	u.call = stages.NewCall(ctx, u.watch, u.traced)
	ctx, err := u.s.begin(u.call, u.m.rule)
	if err != nil {
		u.audit.refuse(err)
		return nil, err
	}
	if err = u.s.whileLoading(ctx, u.method, u.req); err != nil {
		return nil, err
	}
	return handler(ctx, u.req)
}

// start begins the call, a change, if nothing has to be waited for but its range's answer. answered is called once when
// that is there, see Options.Start. No says that nothing has happened.
func (u *unaryCall) start(answered func(ok bool)) bool {
	s := u.s
	change, ok := u.req.(proto.Message)
	if !ok || s.opts.Start == nil || u.refused != nil || u.traced || u.m.rule != auth.ByRequest || s.isLoading() {
		return false
	}
	u.view = s.opts.Users.Gate.View()
	call := stages.NewCall(u.ctx, u.watch, false)
	ctx := s.permittedNow(call, change)
	if ctx == nil {
		return false
	}
	wait := s.opts.Start(ctx, change, answered)
	if wait == nil {
		return false
	}
	u.call = call
	u.first = func() (any, error) {
		got, err := wait()
		if err != nil {
			return nil, kverror.GRPC(err)
		}
		return s.changed(change, got), nil
	}
	return true
}

// stream wraps every stream.
func (s *Server) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	start := s.opts.Clock.Now()
	m := s.methods[info.FullMethod]
	m.started.Inc()
	b := s.beginAudit(ss.Context(), info.FullMethod, m)
	err := s.whileLoading(ss.Context(), info.FullMethod, nil)
	if err == nil {
		err = s.streamAdmitted(srv, countedStream{ss, m}, m.rule, b, handler)
	}
	b.end(nil, err)
	m.done(status.Code(err), s.opts.Clock.Now().Sub(start))
	return err
}

func (s *Server) streamAdmitted(srv any, ss grpc.ServerStream, rule auth.Rule, b *begun, handler grpc.StreamHandler) error {
	demands, err := s.admit(ss.Context(), "stream")
	if err != nil {
		return err
	}
	permitted, err := s.begin(ss.Context(), rule)
	if err != nil {
		b.refuse(err)
		return err
	}
	if !demands {
		return handler(srv, streamWithContext{ss, permitted})
	}
	ctx, cancel := context.WithCancelCause(permitted)
	defer cancel(nil)
	forget := s.leaderless.add(cancel)
	defer forget()
	err = handler(srv, streamWithContext{ss, ctx})
	if errors.Is(context.Cause(ctx), errNoLeader) {
		return rpctypes.ErrGRPCNoLeader
	}
	return err
}

// streamWithContext is a stream with a context of its own.
type streamWithContext struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements grpc.ServerStream.
func (s streamWithContext) Context() context.Context { return s.ctx }

// countedStream counts the messages of a stream.
type countedStream struct {
	grpc.ServerStream
	m *methodMetrics
}

// SendMsg implements grpc.ServerStream.
func (s countedStream) SendMsg(m any) error {
	err := s.ServerStream.SendMsg(m)
	if err == nil {
		s.m.sent.Inc()
	}
	return err
}

// RecvMsg implements grpc.ServerStream.
func (s countedStream) RecvMsg(m any) error {
	err := s.ServerStream.RecvMsg(m)
	if err == nil {
		s.m.received.Inc()
	}
	return err
}

// leaderWatch ends the streams that demand a leader once there has been none for too long.
type leaderWatch struct {
	mu sync.Mutex
	// streams are the cancel functions of the streams by their numbers. Guarded by mu.
	streams map[uint64]context.CancelCauseFunc
	next    uint64 // guarded by mu
}

// add registers a stream; forget removes it.
func (w *leaderWatch) add(cancel context.CancelCauseFunc) (forget func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.streams == nil {
		w.streams = make(map[uint64]context.CancelCauseFunc)
	}
	id := w.next
	w.next++
	w.streams[id] = cancel
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.streams, id)
	}
}

func (w *leaderWatch) endAll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.streams {
		cancel(errNoLeader)
	}
	clear(w.streams)
}

// watchLeader looks for a leader once per election timeout until ctx is done.
func (s *Server) watchLeader(ctx context.Context) {
	t := s.opts.Clock.NewTimer(s.opts.ElectionTimeout)
	defer t.Stop()
	missing := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C():
		}
		t.Reset(s.opts.ElectionTimeout)
		if s.opts.Node.Leader() != 0 {
			missing = 0
			continue
		}
		if missing++; missing >= noLeaderTimeouts {
			s.leaderless.endAll()
		}
	}
}
