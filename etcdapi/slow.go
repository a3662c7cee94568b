package etcdapi

import (
	"context"
	"strings"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/rangeapi/stages"
)

// slowLinesPerSecond bounds the lines about slow requests: where all are slow, each line would make them slower.
const slowLinesPerSecond = 100

// ended is a unary call that has ended.
type ended struct {
	method string
	// call is nil if the call was refused before it began.
	call      *stages.Call
	took      time.Duration
	req, resp any
	err       error
	traced    bool
	// begun says that it ends with whoever brings the answer of what was begun.
	begun bool
}

// takesLong says that calls of the method take long by design: an operator waits for a command, and sees that it takes long;
// a lock waits for its holder; a password is compared slowly.
func takesLong(method string) bool {
	switch method {
	case "/v3lockpb.Lock/Lock", "/v3electionpb.Election/Campaign", "/etcdserverpb.Auth/Authenticate":
		return true
	}
	return isCommand(method)
}

func isCommand(method string) bool { return strings.HasPrefix(method, "/skein.") }

// tellSlow says where the time of a call went: to the log, to the list of slow requests, and to its trace. It has
// the sizes of a request, because keys and values may be secrets. Beyond the limits it costs next to nothing.
func (s *Server) tellSlow(ctx context.Context, e *ended) {
	now := s.opts.Clock.Now()
	list := e.took > stages.Threshold && s.opts.Slow != nil && !takesLong(e.method)
	if list && !e.traced {
		list, _ = s.slowCalls.Take(now, stages.PerSecond)
	}
	line, left := e.took > s.opts.WarnUnaryRequest, 0
	if line {
		s.metrics.SlowRequests.Inc()
		line, left = s.slowLines.Take(now, slowLinesPerSecond)
	}
	if !list && !line && !e.traced {
		return
	}
	if e.begun {
		// The log may be slow, and who brings an answer has others to bring.
		s.wg.Go(func() { s.writeDown(ctx, e, list, line, left) })
		return
	}
	s.writeDown(ctx, e, list, line, left)
}

// writeDown puts a call into the list and the log, if it is to be there, and into its trace. left lines were left out before it.
func (s *Server) writeDown(ctx context.Context, e *ended, list, line bool, left int) {
	slow, records := e.call.Slow(s.opts.Self, e.took)
	slow.Method, slow.Unix = e.method, s.opts.Clock.Wall().UnixNano()
	slow.RequestBytes, slow.ResponseBytes = sizeOf(e.req), sizeOf(e.resp)
	slow.Cause = s.opts.Names(slow.Cause)
	if e.traced {
		s.opts.Tracing.tell(ctx, &slow, records)
	}
	if list {
		s.opts.Slow(slow)
	}
	if line {
		s.writeSlow(ctx, e, &slow, left)
	}
}

// writeSlow writes the line about a call. left were left out before it.
func (s *Server) writeSlow(ctx context.Context, e *ended, slow *stages.Slow, left int) {
	level := zap.WarnLevel
	if isCommand(e.method) {
		level = zap.InfoLevel
	}
	remote := ""
	if p, ok := peer.FromContext(ctx); ok {
		remote = p.Addr.String()
	}
	fields := []zap.Field{
		zap.String("method", e.method), zap.Duration("took", e.took), zap.String("cause", slow.Cause), zap.String("remote", remote),
		zap.Int("request-bytes", slow.RequestBytes), zap.Int("response-bytes", slow.ResponseBytes), zap.Error(e.err),
	}
	if slow.Range != 0 {
		fields = append(fields, zap.Stringer("range", slow.Range))
	}
	if slow.Retries > 0 {
		fields = append(fields, zap.Uint32("retries", slow.Retries))
	}
	if left > 0 {
		fields = append(fields, zap.Int("left-out", left))
	}
	s.log.Log(level, "request took long", fields...)
}

func sizeOf(m any) int {
	switch m := m.(type) {
	case proto.Message:
		return proto.Size(m)
	case *spanAnswer:
		return m.size()
	}
	return 0
}
