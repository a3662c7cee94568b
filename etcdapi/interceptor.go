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

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
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
	watch := clock.StartStopwatch()
	m := s.methods[info.FullMethod]
	m.started.Inc()
	m.received.Inc()
	var span *spanAnswer
	if r, ok := req.(*pb.RangeRequest); ok && len(r.GetRangeEnd()) > 0 {
		span = &spanAnswer{}
		ctx = context.WithValue(ctx, spanAnswerKey{}, span)
	}
	var call *stages.Call
	traced := s.opts.Tracing.samples(ctx)
	if _, err = s.admit(ctx, "unary"); err == nil {
		b := s.beginAudit(ctx, info.FullMethod, m)
		err = s.again(ctx, func(ctx context.Context) (err error) {
			call = stages.NewCall(ctx, watch, traced)
			if ctx, err = s.begin(call, m.rule); err != nil {
				b.refuse(err)
				return err
			}
			if err = s.whileLoading(ctx, info.FullMethod, req); err == nil {
				resp, err = handler(ctx, req)
			}
			return err
		})
		b.end(req, err)
	}
	if span != nil && err == nil {
		resp = span
	}
	if err == nil {
		m.sent.Inc()
	}
	took := watch.Elapsed()
	m.done(status.Code(err), took)
	if took > s.opts.WarnUnaryRequest || took > stages.Threshold || traced {
		s.tellSlow(ctx, &ended{method: info.FullMethod, call: call, took: took, req: req, resp: resp, err: err, traced: traced})
	}
	return resp, err
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
