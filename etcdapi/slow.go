package etcdapi

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
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
}

// tellSlow says where the time of a call went: to the log, to the list of slow requests, and to its trace. It has
// the sizes of a request, because keys and values may be secrets.
func (s *Server) tellSlow(ctx context.Context, e *ended) {
	slow, records := e.call.Slow(s.opts.Self, e.took)
	slow.Method, slow.Unix = e.method, s.opts.Clock.Wall().UnixNano()
	slow.RequestBytes, slow.ResponseBytes = sizeOf(e.req), sizeOf(e.resp)
	slow.Cause = s.opts.Names(slow.Cause)
	if e.traced {
		s.opts.Tracing.tell(ctx, &slow, records)
	}
	// An operator waits for a command, and sees that it takes long.
	command := strings.HasPrefix(e.method, "/skein.")
	if e.took > stages.Threshold && !command && s.opts.Slow != nil {
		s.opts.Slow(slow)
	}
	if e.took <= s.opts.WarnUnaryRequest {
		return
	}
	s.metrics.SlowRequests.Inc()
	ok, left := s.slowLines.take(s.opts.Clock.Now())
	if !ok {
		return
	}
	level := zap.WarnLevel
	if command {
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

// lineLimit lets slowLinesPerSecond lines through in each second of a clock.
type lineLimit struct {
	mu sync.Mutex
	// Guarded by mu. second is the present one, which has so many lines; left are those left out since the last line.
	second      int64
	lines, left int
}

// take says whether a line may be written, and how many were left out since the last one.
func (l *lineLimit) take(now clock.Time) (ok bool, left int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if second := int64(now) / int64(time.Second); second != l.second {
		l.second, l.lines = second, 0
	}
	if l.lines >= slowLinesPerSecond {
		l.left++
		return false, 0
	}
	l.lines++
	left, l.left = l.left, 0
	return true, left
}
